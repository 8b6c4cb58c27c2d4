//! Exports a comparison as CSV: a line for each quantity of the ring and of each device.

use hearth_core::metrics::DeviceMetrics;

use crate::comparison::{Comparison, PublishedCell, Run, Unit};
use crate::sections::tables::{NumberFormat, error_and_percent, published_value, round_quantities};
use crate::text::numbers::FixedPoint;
use crate::text::{distinct_names, escape};

/// Digits after the decimal point of a time in milliseconds: nanosecond resolution.
const DIGITS: u32 = 6;
const ALL_DIGITS: NumberFormat = NumberFormat {
    time_decimal_places: DIGITS,
    rate_decimal_places: DIGITS,
    byte_decimal_places: 1,
    bytes_per_unit: 1.0,
};

/// A quantity of a device: key, unit, decimal places, whether it is a mean per token, and a function for its value.
type DeviceQuantity = (&'static str, &'static str, u32, bool, fn(&DeviceMetrics) -> f64);

const DEVICE_QUANTITIES: [DeviceQuantity; 6] = [
    ("busy", "ms", DIGITS, true, |device| device.busy_ms),
    ("demand_disk", "ms", DIGITS, true, |device| device.demand_disk_ms),
    ("hidden_disk", "ms", DIGITS, true, |device| device.hidden_disk_ms),
    ("bytes_read_per_token", "bytes", 1, true, |device| device.bytes_read_per_token),
    ("resident", "bytes", 0, false, |device| device.resident_bytes as f64),
    ("memory_pressure", "share", 6, false, |device| device.memory_pressure),
];

/// Writes rows of fields as CSV. Names in the fields must already be escaped with [`escape::csv_field`].
pub fn write_rows(rows: impl IntoIterator<Item = Vec<String>>) -> Vec<u8> {
    let mut writer = csv::WriterBuilder::new().flexible(true).from_writer(Vec::new());
    for row in rows {
        writer.write_record(row).expect("writing to memory cannot fail");
    }
    writer.into_inner().expect("writing to memory cannot fail")
}

/// Splits a line of CSV into its fields; the result is empty if the line is not valid CSV.
pub fn split_fields(line: &str) -> Vec<String> {
    let mut reader = csv::ReaderBuilder::new().has_headers(false).from_reader(line.as_bytes());
    let record = reader.records().next().and_then(Result::ok).unwrap_or_default();
    record.iter().map(str::to_owned).collect()
}

/// Returns the contents of the file `comparison.csv` of a report.
pub fn export_comparison(comparison: &Comparison) -> Vec<u8> {
    let runs = &comparison.runs;
    let mut rows = vec![head(comparison)];
    let columns: Vec<Vec<Option<FixedPoint>>> =
        runs.iter().map(|run| round_quantities(&run.quantities(), ALL_DIGITS)).collect();
    for (index, quantity) in runs.first().map(Run::quantities).unwrap_or_default().iter().enumerate() {
        let values: Vec<Option<FixedPoint>> = columns.iter().map(|column| column[index]).collect();
        let unit = match quantity.unit {
            Unit::Milliseconds => "ms",
            Unit::TokensPerSecond => "tokens/s",
            Unit::Bytes => "bytes",
        };
        let mut fields = row(comparison, ["", quantity.key, unit], &values);
        let intervals = runs.iter().map(|run| run.quantities()[index].interval_half_width);
        let published = selected(comparison).map(|(_, cell)| published_value(cell, quantity));
        let rounded = intervals.chain(published).map(|value| value.map(|ms| FixedPoint::new(ms, DIGITS)));
        fields.extend(rounded.map(field));
        rows.push(fields);
    }
    let width = rows[0].len();
    let devices = runs.iter().flat_map(|run| &run.metrics.devices);
    for name in distinct_names(devices.map(|device| device.name.as_str())) {
        for (key, unit, digits, per_token, value) in DEVICE_QUANTITIES {
            let value = |run: &Run| {
                let device = run.metrics.devices.iter().find(|device| device.name == name)?;
                let known = !device.trace_lost && (!per_token || run.metrics.tpot_ms.is_some());
                known.then(|| FixedPoint::new(value(device), digits))
            };
            let values: Vec<Option<FixedPoint>> = runs.iter().map(value).collect();
            let mut fields = row(comparison, [name, key, unit], &values);
            fields.resize(width, String::new());
            rows.push(fields);
        }
    }
    write_rows(rows)
}

fn head(comparison: &Comparison) -> Vec<String> {
    let runs = &comparison.runs;
    let mut head = ["device", "quantity", "unit"].map(str::to_owned).to_vec();
    head.extend(runs.iter().map(|run| run.label.clone()));
    for pair in &comparison.run_comparisons {
        let [left, right] = pair.run_indices().map(|index| &runs[index].label);
        head.extend([format!("error {left} less {right}"), format!("error % {left} less {right}")]);
    }
    head.extend(runs.iter().map(|run| format!("\u{b1} {}", run.label)));
    let published = selected(comparison).map(|(run, cell)| format!("published {} for {run}", cell.system));
    head.extend(published.map(|heading| escape::csv_field(&heading)));
    head
}

/// Returns the label and the published cell of each run that has exactly one selected cell.
fn selected(comparison: &Comparison) -> impl Iterator<Item = (&String, &PublishedCell)> {
    let runs = comparison.runs.iter().enumerate();
    runs.filter_map(|(index, run)| Some((&run.label, comparison.published_cell(index)?)))
}

fn row(comparison: &Comparison, keys: [&str; 3], values: &[Option<FixedPoint>]) -> Vec<String> {
    let mut fields: Vec<String> = keys.map(escape::csv_field).to_vec();
    fields.extend(values.iter().copied().map(field));
    for pair in &comparison.run_comparisons {
        let [predicted, measured] = pair.run_indices().map(|index| values[index]);
        fields.extend(error_and_percent(predicted, measured).map(field));
    }
    fields
}

fn field(value: Option<FixedPoint>) -> String {
    value.map_or_else(String::new, FixedPoint::to_ascii_text)
}
