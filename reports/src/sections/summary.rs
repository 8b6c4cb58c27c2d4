//! The summary of a report in one paragraph.
//!
//! The summary states the setup, the speed, the error of the prediction, the largest terms of the time per token, the
//! bottleneck and the memory pressure.

use std::fmt::Write;

use hearth_core::metrics::{DeviceMetrics, READING_SPEED};
use hearth_schema::trace::Origin;

use crate::comparison::{Comparison, QuantityRole, Run, RunComparison, terms};
use crate::document::Text;
use crate::text::numbers::{
    FixedPoint, format_bytes, format_milliseconds, format_percent, format_three_digits,
};

/// Maximum number of devices that the summary lists by name. For a larger ring, the summary states only the number.
const MAX_NAMED: usize = 6;

pub fn summarise(comparison: &Comparison) -> Text {
    let run = &comparison.runs[comparison.main_run_index()];
    let mut text = setup(run).append(speed(run));
    for pair in &comparison.run_comparisons {
        text = text.append(prediction(comparison, pair));
    }
    text = text.append(published(comparison, run));
    if run.metrics.tpot_ms.is_some() {
        text = text.append(largest_terms(run)).append(bottleneck(run));
    }
    text = text.append(memory(run));
    for index in comparison.unpaired_run_indices() {
        if index != comparison.main_run_index() {
            text = text.append(other(&comparison.runs[index], run));
        }
    }
    text
}

fn setup(run: &Run) -> Text {
    let devices = &run.metrics.devices;
    let mut text = Text::default().append_name(&run.model).append_words(match devices.len() {
        0 => " ran on no device".to_owned(),
        1 => " ran on one device, ".to_owned(),
        count => format!(" ran on a ring of {count} devices"),
    });
    if devices.len() > 1 && devices.len() <= MAX_NAMED {
        text = text
            .append_words(" (")
            .append(list(devices.iter().map(|device| Text::default().append_name(&device.name))))
            .append_words(")");
    } else if let [only] = devices.as_slice() {
        text = text.append_name(&only.name);
    }
    text.append_words(", in scenario ")
        .append_name(&run.scenario)
        .append_words(" with plan ")
        .append_code(&run.plan_digest)
        .append_words(". ")
}

fn list(items: impl ExactSizeIterator<Item = Text>) -> Text {
    let count = items.len();
    items.enumerate().fold(Text::default(), |text, (index, item)| {
        let gap = match index {
            0 => "",
            index if index + 1 == count => " and ",
            _ => ", ",
        };
        text.append_words(gap).append(item)
    })
}

fn speed(run: &Run) -> Text {
    let context = match run.origin {
        Origin::Simulated => "In the simulation",
        Origin::Measured => "In the measurement",
    };
    let metrics = &run.metrics;
    let first = metrics.ttft_ms.map(|ttft| format!("the first token takes {}", format_milliseconds(ttft)));
    let text = match (metrics.tpot_ms, first) {
        (Some(tpot), first) => {
            let rate = metrics.tokens_per_s.map_or_else(String::new, |speed| {
                let than = if speed < READING_SPEED.0 { "slower" } else { "faster" };
                format!(", or {} tokens per second, {than} than people read", format_three_digits(speed))
            });
            let first = first.map_or_else(String::new, |first| format!("; {first}"));
            let [mean, median, p95] = [tpot.mean_ms, tpot.p50_ms, tpot.p95_ms].map(format_milliseconds);
            format!(
                "{context}, a token after the first takes {mean} on average (median {median}, 95th percentile {p95})\
                 {rate}{first}. "
            )
        }
        (None, Some(first)) => format!("{context}, {first}, and no token follows. "),
        (None, None) => format!("{context}, no token is generated. "),
    };
    Text::from(text)
}

fn largest_terms(run: &Run) -> Text {
    let tpot = run.metrics.tpot_ms.map_or(0.0, |tpot| tpot.mean_ms);
    let values = run.metrics.terms_ms.named_terms().map(|(_, value)| value);
    let terms = terms::SUMMED_TERMS.iter().map(|term| term.phrase).zip(values);
    let mut parts: Vec<(&str, f64)> =
        terms.filter(|(_, value)| tpot > 0.0 && *value >= 0.005 * tpot).collect();
    parts.sort_by(|left, right| right.1.total_cmp(&left.1));
    let name = |&(phrase, value): &(&str, f64)| {
        format!("{phrase} ({}, {})", format_milliseconds(value), format_percent(value / tpot))
    };
    let named: Vec<String> = parts.iter().take(3).map(name).collect();
    Text::from(match named.as_slice() {
        [] => String::new(),
        [only] => format!("The time per token consists of {only}. "),
        [first, second] => format!("The largest terms of the time per token are {first} and {second}. "),
        [first, rest @ ..] => {
            format!("The largest terms of the time per token are {first}, {}. ", rest.join(" and "))
        }
    })
}

fn bottleneck(run: &Run) -> Text {
    let devices = &run.metrics.devices;
    let busiest = max_device(devices, |device| device.busy_ms);
    let Some(device) = busiest.filter(|device| devices.len() > 1 && device.busy_ms > 0.0) else {
        return hidden(run);
    };
    let tpot = run.metrics.tpot_ms.map_or(0.0, |tpot| tpot.mean_ms);
    let network = run.metrics.terms_ms.network;
    let busy = format_milliseconds(device.busy_ms);
    let share = format_percent(if tpot > 0.0 { device.busy_ms / tpot } else { 0.0 });
    let mut text = if network > device.busy_ms {
        Text::from(format!(
            "The network is the bottleneck: messages take {} per token, longer than any device. Of the devices, ",
            format_milliseconds(network)
        ))
        .append_name(&device.name)
        .append_words(format!(" is busiest: {busy} of each token ({share})"))
    } else {
        Text::from("The bottleneck is ")
            .append_name(&device.name)
            .append_words(format!(", busy for {busy} of each token ({share})"))
    };
    if device.demand_disk_ms >= 0.005 * device.busy_ms {
        let wait = format_milliseconds(device.demand_disk_ms);
        text = text.append_words(format!(", {wait} of it waiting for its disk"));
    }
    text.append_words(". ").append(hidden(run))
}

/// Returns the device with the maximum `value`; the first device if several devices have the maximum.
fn max_device(devices: &[DeviceMetrics], value: fn(&DeviceMetrics) -> f64) -> Option<&DeviceMetrics> {
    devices.iter().reduce(|max, device| if value(device) > value(max) { device } else { max })
}

fn hidden(run: &Run) -> Text {
    let hidden = run.metrics.terms_ms.hidden_disk;
    let read = run.metrics.bytes_read_per_token().unwrap_or(0.0);
    Text::from(match (read > 0.0, hidden > 0.0) {
        (false, _) => String::new(),
        (true, false) => format!("The ring reads {} per token from disk. ", format_bytes(read)),
        (true, true) => format!(
            "The ring reads {} per token from disk; {} of it, summed over the devices, is hidden behind other work. ",
            format_bytes(read),
            format_milliseconds(hidden)
        ),
    })
}

fn memory(run: &Run) -> Text {
    let devices = &run.metrics.devices;
    let Some(highest) = max_device(devices, |device| device.memory_pressure) else { return Text::default() };
    let pressure = |device: &DeviceMetrics| {
        if device.trace_lost {
            "unknown (its trace is lost)".to_owned()
        } else {
            format_percent(device.memory_pressure)
        }
    };
    if devices.len() > MAX_NAMED {
        return Text::from("Memory pressure is highest on ")
            .append_name(&highest.name)
            .append_words(format!(", at {}. ", pressure(highest)));
    }
    let each = devices
        .iter()
        .map(|device| Text::from(format!("{} on ", pressure(device))).append_name(&device.name));
    Text::from("Memory pressure is ").append(list(each)).append_words(". ")
}

fn prediction(comparison: &Comparison, pair: &RunComparison) -> Text {
    let run = &comparison.runs[pair.predicted_run_index];
    let tpot = pair.quantity_comparisons.iter().find(|row| row.key == "tpot");
    let Some((predicted, measured)) = tpot.and_then(|row| row.predicted_value.zip(row.measured_value)) else {
        return Text::default();
    };
    let who = if comparison.run_comparisons.len() == 1 {
        "The simulator".to_owned()
    } else {
        format!("For {}, {}", comparison.runs[pair.measured_run_index].label, run.label)
    };
    let verdict = if measured > 0.0 {
        direction((predicted - measured) / measured)
    } else {
        "which cannot be compared with the measurement".into()
    };
    let worst = pair
        .quantity_comparisons
        .iter()
        .filter(|row| row.role == QuantityRole::Term)
        .filter_map(|row| Some((row, row.error?)))
        .reduce(|best, next| if next.1.abs() > best.1.abs() { next } else { best })
        .filter(|(_, error)| error.abs() > 0.005 * measured);
    let mut text = format!("{who} predicts {}, {verdict}", format_milliseconds(predicted));
    if let Some((row, error)) = worst {
        let label =
            terms::SUMMED_TERMS.iter().find(|term| term.key == row.key).map_or("", |term| term.phrase);
        let way = if error > 0.0 { "too high" } else { "too low" };
        let difference = format_milliseconds(error.abs());
        let _ = write!(text, "; the largest difference is in {label}, {difference} {way}");
    }
    text.push_str(". ");
    Text::from(text)
}

/// Compares the time per token of a run with the published time, if exactly one published system is selected.
fn published(comparison: &Comparison, run: &Run) -> Text {
    let cell = comparison.published_cell(comparison.main_run_index());
    let times = cell.and_then(|cell| Some((cell, cell.tpot_ms?, run.metrics.tpot_ms?.mean_ms)));
    let Some((cell, theirs, ours)) = times.filter(|(_, theirs, _)| *theirs > 0.0) else {
        return Text::default();
    };
    let difference = match ours / theirs {
        ratio if ratio >= 2.0 => format!("{} times as long", FixedPoint::new(ratio, 1).to_text()),
        ratio if ratio >= 1.0 => format!("{} longer", format_percent(ratio - 1.0)),
        ratio => format!("{} shorter", format_percent(1.0 - ratio)),
    };
    Text::from("Published for ")
        .append_name(&cell.system)
        .append_words(", ")
        .append_name(&cell.row)
        .append_words(format!(": {} per token; this run takes {difference}. ", format_milliseconds(theirs)))
}

fn direction(error: f64) -> String {
    match error {
        error if error.abs() < 0.0005 => "which agrees with the measurement within 0.05 %".into(),
        error if error > 0.0 => format!("{} too high", format_percent(error)),
        error => format!("{} too low", format_percent(-error)),
    }
}

/// Describes a run that is not compared with the main run.
fn other(run: &Run, main: &Run) -> Text {
    let speed = run.metrics.tpot_ms.map_or_else(
        || "has no time per token".to_owned(),
        |tpot| format!("takes {} per token", format_milliseconds(tpot.mean_ms)),
    );
    let text = Text::from(format!("{} {speed}", run.heading()));
    if run.plan_digest == main.plan_digest {
        text.append_words(". ")
    } else {
        text.append_words(", with plan ").append_code(&run.plan_digest).append_words(". ")
    }
}
