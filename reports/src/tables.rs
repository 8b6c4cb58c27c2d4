//! How do the numbers of a comparison stand in tables?
//!
//! One list of printed numbers serves the page, the Markdown and the CSV file; they differ in digits.
//! The terms of a run are rounded together, so that they sum to the printed time per token; an error is
//! the difference of two printed numbers, so errors add up too.
//!
//! Not here: where the numbers come from ([`crate::comparison`]).

use crate::comparison::{Comparison, Pair, Place, Quantity, Run, Unit};
use crate::document::{Table, Text, Weight};
use crate::escape;
use crate::published::beside::Printed;
use crate::rounding::{self, Fixed, column, digits_for};
use crate::terms;

/// What a table shows where a run has no number.
const NOTHING: &str = "\u{2013}";
/// Digits of a CSV file: a nanosecond in milliseconds.
const CSV_DIGITS: u32 = 6;
const MIB: f64 = 1024.0 * 1024.0;

/// The digits of one table's columns.
#[derive(Debug, Clone, Copy)]
struct Digits {
    time: u32,
    rate: u32,
    bytes: u32,
    /// What bytes are divided by.
    byte_unit: f64,
}

impl Digits {
    /// Enough to tell the runs apart.
    fn of(runs: &[&Run]) -> Self {
        let most = |values: &mut dyn Iterator<Item = Option<f64>>| {
            values.flatten().filter(|value| *value > 0.0).map(digits_for).max().unwrap_or(2)
        };
        Self {
            time: most(&mut runs.iter().map(|run| run.metrics.tpot_ms.map(|tpot| tpot.mean))),
            rate: most(&mut runs.iter().map(|run| run.metrics.tokens_per_s)),
            bytes: most(&mut runs.iter().map(|run| Some(run.metrics.bytes_read_per_token()? / MIB))).min(3),
            byte_unit: MIB,
        }
    }

    fn csv() -> Self {
        Self { time: CSV_DIGITS, rate: CSV_DIGITS, bytes: 1, byte_unit: 1.0 }
    }
}

/// A run's quantities as they are printed.
fn printed(quantities: &[Quantity], digits: Digits) -> Vec<Option<Fixed>> {
    let total =
        quantities.iter().find(|quantity| quantity.place == Place::Total).and_then(|total| total.value);
    let parts: Vec<f64> = quantities
        .iter()
        .filter(|quantity| quantity.place == Place::Part)
        .filter_map(|quantity| quantity.value)
        .collect();
    let mut parts = column(&parts, total.unwrap_or_else(|| parts.iter().sum()), digits.time).into_iter();
    quantities
        .iter()
        .map(|quantity| {
            let value = quantity.value?;
            match (quantity.place, quantity.unit) {
                (Place::Part, _) => parts.next(),
                (_, Unit::Milliseconds) => Some(Fixed::new(value, digits.time)),
                (_, Unit::TokensPerSecond) => Some(Fixed::new(value, digits.rate)),
                (_, Unit::Bytes) => Some(Fixed::new(value / digits.byte_unit, digits.bytes)),
            }
        })
        .collect()
}

/// What a row is called.
fn label(quantity: &Quantity) -> String {
    let known = terms::SUMMED.iter().find(|term| term.key == quantity.key);
    match (known, quantity.key.as_str()) {
        (Some(term), _) => format!("{}, ms", term.label),
        (None, "tpot") => "TPOT (sum), ms".into(),
        (None, "hidden_disk") => "Hidden disk (not in the sum), ms".into(),
        (None, "tpot_p50") => "TPOT, median, ms".into(),
        (None, "tpot_p95") => "TPOT, 95th percentile, ms".into(),
        (None, "ttft") => "TTFT, ms".into(),
        (None, "tokens_per_s") => "Tokens a second".into(),
        (None, "bytes_read_per_token") => "Read from disk a token, MiB".into(),
        (None, other) => other.into(),
    }
}

fn weight(quantity: &Quantity) -> Weight {
    match (quantity.place, quantity.key.as_str()) {
        (Place::Total, _) => Weight::Total,
        (Place::Beside, "hidden_disk" | "tpot_p50") => Weight::Group,
        _ => Weight::Plain,
    }
}

/// Predicted against measured, and what was published between them.
pub fn pair(comparison: &Comparison, pair: &Pair) -> Table {
    let (left, right) = (&comparison.runs[pair.predicted], &comparison.runs[pair.measured]);
    let printed_of = comparison.printed(pair.measured);
    let digits = Digits::of(&[left, right]);
    let ms = |ms: f64| Fixed::new(ms, digits.time);
    let quantities = left.quantities();
    let (predicted, measured) = (printed(&quantities, digits), printed(&right.quantities(), digits));
    let cell = |value: Option<Fixed>, show: fn(Fixed) -> String| {
        Text::from(value.map_or_else(|| NOTHING.into(), show))
    };
    let mut rows = Vec::new();
    for ((quantity, row), (predicted, measured)) in
        quantities.iter().zip(&pair.rows).zip(predicted.into_iter().zip(measured))
    {
        let (error, percent) = errors(predicted, measured);
        let sure = row.interval.map(ms);
        let mut cells = vec![Text::from(label(quantity)), cell(predicted, Fixed::text)];
        cells.extend(printed_of.map(|printed| cell(theirs(printed, quantity).map(ms), Fixed::text)));
        cells.extend([
            cell(measured, Fixed::text),
            cell(error, Fixed::signed),
            cell(sure, Fixed::text),
            cell(percent, Fixed::signed),
        ]);
        rows.push((weight(quantity), cells));
    }
    let mut caption = Text::from(format!(
        "{} against {}. The error is predicted less measured. The terms sum to TPOT.",
        left.heading(),
        right.label
    ));
    if let Some(printed) = printed_of {
        caption =
            caption.words(" Published: ").name(&printed.system).words(", ").name(&printed.row).words(".");
    }
    let mut head = vec!["", "Predicted"];
    head.extend(printed_of.map(|_| "Published"));
    head.extend(["Measured", "Error", "\u{b1}", "Error, %"]);
    Table { caption, head: head.into_iter().map(String::from).collect(), rows, wordy: false }
}

/// A published number of a quantity: times per token and to the first token are printed, terms are not.
fn theirs(printed: &Printed, quantity: &Quantity) -> Option<f64> {
    match quantity.key.as_str() {
        "tpot" => printed.tpot_ms,
        "ttft" => printed.ttft_ms,
        _ => None,
    }
}

/// The error of printed numbers, and its share of the measured one in percent.
fn errors(predicted: Option<Fixed>, measured: Option<Fixed>) -> (Option<Fixed>, Option<Fixed>) {
    let error = predicted.zip(measured).map(|(predicted, measured)| predicted.minus(measured));
    let base = measured.filter(|measured| measured.units != 0);
    let percent = error
        .zip(base)
        .map(|(error, base)| Fixed::new(100.0 * error.units as f64 / base.units.unsigned_abs() as f64, 1));
    (error, percent)
}

/// Runs side by side, without errors; with the interval of each, and what was published of it.
pub fn side_by_side(comparison: &Comparison, indices: &[usize]) -> Table {
    let runs: Vec<&Run> = indices.iter().map(|index| &comparison.runs[*index]).collect();
    let digits = Digits::of(&runs);
    let ms = |ms: f64| Fixed::new(ms, digits.time);
    let columns: Vec<Vec<Option<Fixed>>> =
        runs.iter().map(|run| printed(&run.quantities(), digits)).collect();
    let mut head = vec![String::new()];
    for (run, index) in runs.iter().zip(indices) {
        head.push(run.heading());
        head.extend(run.intervals.map(|_| "\u{b1}".to_owned()));
        head.extend(comparison.printed(*index).map(|printed| format!("Published, {}", printed.system)));
    }
    let quantities = runs.first().map(|run| run.quantities()).unwrap_or_default();
    let show = |value: Option<Fixed>| Text::from(value.map_or(NOTHING.into(), Fixed::text));
    let rows = quantities
        .iter()
        .enumerate()
        .map(|(place, quantity)| {
            let mut cells = vec![Text::from(label(quantity))];
            for ((run, index), column) in runs.iter().zip(indices).zip(&columns) {
                cells.push(show(column[place]));
                let sure = run.quantities()[place].interval.map(ms);
                cells.extend(run.intervals.map(|_| show(sure)));
                let printed = comparison.printed(*index);
                cells.extend(printed.map(|printed| show(theirs(printed, quantity).map(ms))));
            }
            (weight(quantity), cells)
        })
        .collect();
    Table { caption: Text::from("The terms sum to TPOT."), head, rows, wordy: false }
}

/// What each device of a run did for the mean token.
pub fn devices(run: &Run) -> Table {
    let digits = Digits::of(&[run]);
    // Without tokens nothing is known for each token.
    let any = run.metrics.tpot_ms.is_some();
    let rows = run
        .metrics
        .devices
        .iter()
        .map(|device| {
            let told = |known: bool, text: String| Text::from(if known { text } else { NOTHING.into() });
            let (each, whole) = (any && !device.trace_lost, !device.trace_lost);
            let time = |value: f64| told(each, Fixed::new(value, digits.time).text());
            let cells = vec![
                Text::default().name(&device.name),
                time(device.busy_ms),
                time(device.demand_disk_ms),
                time(device.hidden_disk_ms),
                told(each, rounding::bytes(device.bytes_read_per_token)),
                told(whole, rounding::bytes(device.resident_bytes as f64)),
                told(whole, rounding::percent(device.memory_pressure)),
            ];
            (Weight::Plain, cells)
        })
        .collect();
    Table {
        caption: Text::from(format!("{}: for each token, and at the end of the run.", run.heading())),
        head: [
            "Device",
            "Busy, ms",
            "of it demand disk, ms",
            "Hidden disk, ms",
            "Read from disk",
            "Weights in memory",
            "Memory pressure",
        ]
        .map(String::from)
        .to_vec(),
        rows,
        wordy: false,
    }
}

/// All numbers for a spreadsheet: a line a quantity, of the whole ring and of each device.
pub fn csv(comparison: &Comparison) -> String {
    let runs: Vec<&Run> = comparison.runs.iter().collect();
    let mut head = vec!["device".to_owned(), "quantity".into(), "unit".into()];
    head.extend(runs.iter().map(|run| run.label.clone()));
    for pair in &comparison.pairs {
        let (left, right) = (&comparison.runs[pair.predicted].label, &comparison.runs[pair.measured].label);
        head.push(format!("error {left} less {right}"));
        head.push(format!("error % {left} less {right}"));
    }
    head.extend(runs.iter().map(|run| format!("\u{b1} {}", run.label)));
    head.extend(
        chosen(comparison)
            .map(|(run, printed)| escape::csv(&format!("published {} for {run}", printed.system))),
    );
    let mut lines = vec![head];
    let columns: Vec<Vec<Option<Fixed>>> =
        runs.iter().map(|run| printed(&run.quantities(), Digits::csv())).collect();
    for (index, quantity) in runs.first().map(|run| run.quantities()).unwrap_or_default().iter().enumerate() {
        let values: Vec<Option<Fixed>> = columns.iter().map(|column| column[index]).collect();
        let unit = match quantity.unit {
            Unit::Milliseconds => "ms",
            Unit::TokensPerSecond => "tokens/s",
            Unit::Bytes => "bytes",
        };
        let mut fields = line(comparison, ["", &quantity.key, unit], &values);
        let sure = runs.iter().map(|run| run.quantities()[index].interval);
        let theirs = chosen(comparison).map(|(_, printed)| theirs(printed, quantity));
        let more = sure.chain(theirs);
        fields.extend(
            more.map(|value| value.map_or_else(String::new, |ms| Fixed::new(ms, CSV_DIGITS).plain())),
        );
        lines.push(fields);
    }
    let width = lines.first().map_or(0, Vec::len);
    for name in device_names(&runs) {
        for (key, unit, digits) in DEVICE_COLUMNS {
            let value = |run: &&Run| {
                let device = run.metrics.devices.iter().find(|device| device.name == name)?;
                let for_each_token = !matches!(key, "resident" | "memory_pressure");
                if device.trace_lost || for_each_token && run.metrics.tpot_ms.is_none() {
                    return None;
                }
                let value = match key {
                    "busy" => device.busy_ms,
                    "demand_disk" => device.demand_disk_ms,
                    "hidden_disk" => device.hidden_disk_ms,
                    "bytes_read_per_token" => device.bytes_read_per_token,
                    "resident" => device.resident_bytes as f64,
                    _ => device.memory_pressure,
                };
                Some(Fixed::new(value, digits))
            };
            let values: Vec<Option<Fixed>> = runs.iter().map(value).collect();
            let mut fields = line(comparison, [&name, key, unit], &values);
            fields.resize(width, String::new());
            lines.push(fields);
        }
    }
    let mut out = String::new();
    for line in lines {
        out.push_str(&line.join(","));
        out.push('\n');
    }
    out
}

/// The runs that stand for one published cell, by label.
fn chosen(comparison: &Comparison) -> impl Iterator<Item = (&String, &Printed)> {
    let runs = comparison.runs.iter().enumerate();
    runs.filter_map(|(index, run)| Some((&run.label, comparison.printed(index)?)))
}

const DEVICE_COLUMNS: [(&str, &str, u32); 6] = [
    ("busy", "ms", CSV_DIGITS),
    ("demand_disk", "ms", CSV_DIGITS),
    ("hidden_disk", "ms", CSV_DIGITS),
    ("bytes_read_per_token", "bytes", 1),
    ("resident", "bytes", 0),
    ("memory_pressure", "share", 6),
];

/// The names of all runs' devices, in ring order.
fn device_names(runs: &[&Run]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for device in runs.iter().flat_map(|run| &run.metrics.devices) {
        if !names.contains(&device.name) {
            names.push(device.name.clone());
        }
    }
    names
}

fn line(comparison: &Comparison, keys: [&str; 3], values: &[Option<Fixed>]) -> Vec<String> {
    let mut fields: Vec<String> = keys.map(escape::csv).to_vec();
    fields.extend(values.iter().map(|value| value.map_or_else(String::new, Fixed::plain)));
    for pair in &comparison.pairs {
        let (error, percent) = errors(values[pair.predicted], values[pair.measured]);
        fields.push(error.map_or_else(String::new, Fixed::plain));
        fields.push(percent.map_or_else(String::new, Fixed::plain));
    }
    fields
}
