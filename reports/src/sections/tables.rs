//! Tables of the quantities of a comparison.
//!
//! The HTML page, the Markdown and the CSV file use the same rounding, with different numbers of digits. The terms of
//! a run are rounded together, so that they sum to the printed time per token. An error is the difference of two
//! printed numbers, so that errors add up too.

use hearth_core::metrics::DeviceMetrics;

use crate::comparison::{
    Comparison, PublishedCell, Quantity, QuantityComparison, QuantityRole, Run, RunComparison, Unit, terms,
};
use crate::document::{RowStyle, Table, Text};
use crate::text::numbers::{self, FixedPoint, decimal_places_for, round_to_total};

const MIB: f64 = 1024.0 * 1024.0;

/// How a table prints numbers: the digits after the decimal point of times, rates and bytes, and the unit of bytes.
#[derive(Debug, Clone, Copy)]
pub struct NumberFormat {
    pub time_decimal_places: u32,
    pub rate_decimal_places: u32,
    pub byte_decimal_places: u32,
    /// Number of bytes in the unit in which bytes are printed.
    pub bytes_per_unit: f64,
}

impl NumberFormat {
    /// Returns a format with enough digits to show the values of each run with four significant digits.
    fn of(runs: &[&Run]) -> Self {
        let max = |value: fn(&Run) -> Option<f64>| {
            let values = runs.iter().filter_map(|run| value(run)).filter(|value| *value > 0.0);
            values.map(decimal_places_for).max().unwrap_or(2)
        };
        Self {
            time_decimal_places: max(|run| run.metrics.tpot_ms.map(|tpot| tpot.mean_ms)),
            rate_decimal_places: max(|run| run.metrics.tokens_per_s),
            byte_decimal_places: max(|run| Some(run.metrics.bytes_read_per_token()? / MIB)).min(3),
            bytes_per_unit: MIB,
        }
    }
}

/// Rounds the quantities of a run such that the printed terms sum to the printed total.
pub fn round_quantities(quantities: &[Quantity], digits: NumberFormat) -> Vec<Option<FixedPoint>> {
    let values =
        |role| quantities.iter().filter(move |quantity| quantity.role == role).filter_map(|it| it.value);
    let terms: Vec<f64> = values(QuantityRole::Term).collect();
    let total = values(QuantityRole::Total).next().unwrap_or_else(|| terms.iter().sum());
    let mut terms = round_to_total(&terms, total, digits.time_decimal_places).into_iter();
    quantities
        .iter()
        .map(|quantity| {
            let value = quantity.value?;
            match (quantity.role, quantity.unit) {
                (QuantityRole::Term, _) => terms.next(),
                (_, Unit::Milliseconds) => Some(FixedPoint::new(value, digits.time_decimal_places)),
                (_, Unit::TokensPerSecond) => Some(FixedPoint::new(value, digits.rate_decimal_places)),
                (_, Unit::Bytes) => {
                    Some(FixedPoint::new(value / digits.bytes_per_unit, digits.byte_decimal_places))
                }
            }
        })
        .collect()
}

fn label(quantity: &Quantity) -> String {
    let known = terms::SUMMED_TERMS.iter().find(|term| term.key == quantity.key);
    match (known, quantity.key) {
        (Some(term), _) => format!("{}, ms", term.label),
        (None, "tpot") => "TPOT (sum), ms".into(),
        (None, "hidden_disk") => "Hidden disk (not in the sum), ms".into(),
        (None, "tpot_p50") => "TPOT, median, ms".into(),
        (None, "tpot_p95") => "TPOT, 95th percentile, ms".into(),
        (None, "ttft") => "TTFT, ms".into(),
        (None, "tokens_per_s") => "Tokens per second".into(),
        (None, "bytes_read_per_token") => "Read from disk per token, MiB".into(),
        (None, other) => other.into(),
    }
}

fn style(quantity: &Quantity) -> RowStyle {
    match (quantity.role, quantity.key) {
        (QuantityRole::Total, _) => RowStyle::Total,
        (QuantityRole::Other, "hidden_disk" | "tpot_p50") => RowStyle::Group,
        _ => RowStyle::Plain,
    }
}

/// Returns a table of the quantities of a pair of runs, with columns for predicted, published and measured values.
pub fn run_comparison_table(comparison: &Comparison, pair: &RunComparison) -> Table {
    let [left, right] = pair.run_indices().map(|index| &comparison.runs[index]);
    let published = comparison.published_cell(pair.measured_run_index);
    let digits = NumberFormat::of(&[left, right]);
    let ms = |ms: f64| FixedPoint::new(ms, digits.time_decimal_places);
    let quantities = left.quantities();
    let rounded =
        round_quantities(&quantities, digits).into_iter().zip(round_quantities(&right.quantities(), digits));
    let number = |value: Option<FixedPoint>| Text::from_option(value.map(FixedPoint::to_text));
    let signed = |value: Option<FixedPoint>| Text::from_option(value.map(FixedPoint::to_signed_text));
    let row = |((quantity, row), (predicted, measured)): ((&Quantity, &QuantityComparison), _)| {
        let [error, percent] = error_and_percent(predicted, measured);
        let mut cells = vec![Text::from(label(quantity)), number(predicted)];
        cells.extend(published.map(|cell| number(published_value(cell, quantity).map(ms))));
        let interval = number(row.interval_half_width.map(ms));
        cells.extend([number(measured), signed(error), interval, signed(percent)]);
        (style(quantity), cells)
    };
    let mut caption = Text::from(format!(
        "{} and {}. The error is the predicted value less the measured one. The terms sum to TPOT.",
        left.heading(),
        right.label
    ));
    if let Some(cell) = published {
        caption = caption
            .append_words(" Published: ")
            .append_name(&cell.system)
            .append_words(", ")
            .append_name(&cell.row)
            .append_words(".");
    }
    let mut headings = vec!["Quantity", "Predicted"];
    headings.extend(published.map(|_| "Published"));
    headings.extend(["Measured", "Error", "\u{b1}", "Error, %"]);
    let rows = quantities.iter().zip(&pair.quantity_comparisons).zip(rounded).map(row);
    Table::with_row_styles(caption, headings, rows)
}

/// Returns the published value of a quantity; only TPOT and TTFT have published values.
pub fn published_value(cell: &PublishedCell, quantity: &Quantity) -> Option<f64> {
    match quantity.key {
        "tpot" => cell.tpot_ms,
        "ttft" => cell.ttft_ms,
        _ => None,
    }
}

/// Returns the error (predicted minus measured) of rounded numbers, in their unit and in percent of `measured`.
pub fn error_and_percent(
    predicted: Option<FixedPoint>,
    measured: Option<FixedPoint>,
) -> [Option<FixedPoint>; 2] {
    let error = predicted.zip(measured).map(|(predicted, measured)| predicted.minus(measured));
    let base = measured.filter(|measured| measured.mantissa != 0);
    let percent = error.zip(base).map(|(error, base)| {
        FixedPoint::new(100.0 * error.mantissa as f64 / base.mantissa.unsigned_abs() as f64, 1)
    });
    [error, percent]
}

/// Returns a table with columns for the values, the confidence intervals and the published numbers of each run.
pub fn side_by_side_table(comparison: &Comparison, indices: &[usize]) -> Table {
    let runs: Vec<&Run> = indices.iter().map(|index| &comparison.runs[*index]).collect();
    let digits = NumberFormat::of(&runs);
    let ms = |ms: f64| FixedPoint::new(ms, digits.time_decimal_places);
    let columns: Vec<Vec<Option<FixedPoint>>> =
        runs.iter().map(|run| round_quantities(&run.quantities(), digits)).collect();
    let mut headings = vec!["Quantity".to_owned()];
    for (run, index) in runs.iter().zip(indices) {
        headings.push(run.heading());
        headings.extend(run.confidence_intervals.map(|_| "\u{b1}".to_owned()));
        headings.extend(comparison.published_cell(*index).map(|cell| format!("Published, {}", cell.system)));
    }
    let quantities = runs.first().map(|run| run.quantities()).unwrap_or_default();
    let number = |value: Option<FixedPoint>| Text::from_option(value.map(FixedPoint::to_text));
    let row = |(row, quantity): (usize, &Quantity)| {
        let mut cells = vec![Text::from(label(quantity))];
        for ((run, index), column) in runs.iter().zip(indices).zip(&columns) {
            cells.push(number(column[row]));
            let interval = run.quantities()[row].interval_half_width.map(ms);
            cells.extend(run.confidence_intervals.map(|_| number(interval)));
            let published = comparison.published_cell(*index);
            cells.extend(published.map(|cell| number(published_value(cell, quantity).map(ms))));
        }
        (style(quantity), cells)
    };
    Table::with_row_styles("The terms sum to TPOT.", headings, quantities.iter().enumerate().map(row))
}

/// Returns a table of the devices of a run: mean times and bytes read per token, and memory.
pub fn device_table(run: &Run) -> Table {
    let digits = NumberFormat::of(&[run]);
    let row = |device: &DeviceMetrics| {
        let if_known = |known: bool, text: String| Text::from_option(known.then_some(text));
        let in_trace = !device.trace_lost;
        let per_token = in_trace && run.metrics.tpot_ms.is_some();
        let time =
            |value: f64| if_known(per_token, FixedPoint::new(value, digits.time_decimal_places).to_text());
        vec![
            Text::default().append_name(&device.name),
            time(device.busy_ms),
            time(device.demand_disk_ms),
            time(device.hidden_disk_ms),
            if_known(per_token, numbers::format_bytes(device.bytes_read_per_token)),
            if_known(in_trace, numbers::format_bytes(device.resident_bytes as f64)),
            if_known(in_trace, numbers::format_percent(device.memory_pressure)),
        ]
    };
    let caption = format!("{}: times and bytes per token; memory at the end of the run.", run.heading());
    let headings = [
        "Device",
        "Busy, ms",
        "Demand disk, ms",
        "Hidden disk, ms",
        "Read from disk",
        "Weights in memory",
        "Memory pressure",
    ];
    Table::new(caption, headings, run.metrics.devices.iter().map(row))
}
