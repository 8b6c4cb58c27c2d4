//! Formats the verdict on a plan, with which the output of a prediction opens.

use std::fmt::Write;

use hearth_profiles::Seconds;
use hearth_reports::published_results::results::PredictionInterval;
use hearth_schema::plan::DroppedDevice;
use hearth_workflow::verdict::{FirstToken, SingleDeviceSpeed, Verdict};

use super::{escape_line, short_speed};

/// Ratio of two speeds up to which they are called equal. source: assumed, about the error of a prediction
const EQUAL_UP_TO: f64 = 1.05;

/// Formats a verdict. `unknown` says how to estimate the uncertainty if there is no interval.
pub fn format_verdict(verdict: &Verdict, interval: Option<&PredictionInterval>, unknown: &str) -> String {
    let mut text = String::new();
    if let Some(speed) = verdict.speed {
        let (speed, token) = (speed.tokens_per_second, Seconds(speed.tpot_ms / 1e3));
        // How many sequences are decoded at the same time.
        let together = Some(speed * token.0).filter(|&together| together >= EQUAL_UP_TO);
        let comparison = match 1.0 / token.0 / verdict.reading_speed {
            ratio if ratio >= EQUAL_UP_TO => "faster than people read",
            ratio if ratio > 1.0 / EQUAL_UP_TO => "as fast as people read",
            _ => "slower than people read",
        };
        let range = interval.map_or_else(String::new, |interval| {
            format!(" ({})", speed_range(interval, together.unwrap_or(1.0)))
        });
        let of_all = if together.is_some() { " for all requests together" } else { "" };
        let devices: Vec<String> =
            verdict.devices.iter().map(|name| format!("`{}`", escape_line(name))).collect();
        let _ = writeln!(
            text,
            "{} tokens/s{of_all}{range}: {comparison}, {token} per token with {}",
            short_speed(speed),
            devices.join(", ")
        );
        let uncertainty = interval.map_or_else(|| unknown.to_owned(), uncertainty);
        let _ = writeln!(text, "  uncertain: {uncertainty}");
        if let Some(alone) = &verdict.best_single_device {
            let _ = writeln!(text, "  {}", beside_single_device(speed, alone));
        }
    }
    if !verdict.first_tokens.is_empty() {
        let each = |first: &FirstToken| {
            let time =
                first.seconds.map_or_else(|| "does not run".to_owned(), |time| Seconds(time).in_words());
            let longer = if first.needs_longer_context { " (in a longer context)" } else { "" };
            format!("{time} for {} tokens{longer}", first.prompt_tokens)
        };
        let all: Vec<String> = verdict.first_tokens.iter().map(each).collect();
        let _ = writeln!(text, "  first token after a prompt: {}", all.join(", "));
    }
    for obstacle in &verdict.obstacles {
        let _ = writeln!(text, "  cannot run yet: {obstacle}");
    }
    for assumption in &verdict.assumptions {
        let _ = writeln!(text, "  assumes: {assumption}");
    }
    for DroppedDevice { name, reason } in &verdict.left_out {
        let _ = writeln!(text, "  `{name}` is left out: {reason}");
    }
    text
}

fn beside_single_device(speed: f64, alone: &SingleDeviceSpeed) -> String {
    let single = alone.speed.tokens_per_second;
    let ratio = speed / single;
    let times = |ratio: f64| if ratio < 10.0 { format!("{ratio:.1}") } else { format!("{ratio:.0}") };
    let comparison = if ratio >= EQUAL_UP_TO {
        format!("together {} times as fast", times(ratio))
    } else if ratio > 1.0 / EQUAL_UP_TO {
        "together as fast".to_owned()
    } else {
        format!("alone {} times as fast", times(1.0 / ratio))
    };
    format!(
        "`{}` alone, the best single device: {} tokens/s; {comparison}",
        alone.device,
        short_speed(single)
    )
}

/// Returns the range of speeds of `together` sequences that contains 80 % of the draws, and how many of them do not run.
fn speed_range(interval: &PredictionInterval, together: f64) -> String {
    let PredictionInterval { p10_ms, p90_ms, failed_draw_count, draw_count, .. } = *interval;
    let speed = |tpot_ms: f64| short_speed(together * 1e3 / tpot_ms);
    let fast = speed(p10_ms);
    let range = if p90_ms.is_finite() {
        format!("{} to {fast} in 80 %", speed(p90_ms))
    } else {
        format!("at most {fast} in 90 %")
    };
    let failed = match failed_draw_count {
        0 => String::new(),
        failed => format!(", out of memory in {failed}"),
    };
    format!("{range} of {draw_count} variations of the devices{failed}")
}

/// Returns the values on which the prediction depends most, and how to know them better.
fn uncertainty(interval: &PredictionInterval) -> String {
    let each = |(name, change): &(String, f64)| {
        let percent = (change * 100.0).abs();
        let change = match *change {
            change if change.is_infinite() => "it may run out of memory".to_owned(),
            change if change < 0.0 => format!("up to {percent:.0} % less"),
            _ => format!("up to {percent:.0} % more"),
        };
        format!("{} ({change})", parameter_words(name))
    };
    let all: Vec<String> = interval.sensitive_parameters.iter().map(each).collect();
    if all.is_empty() {
        return "no value changes the time by as much as 0.5 %".to_owned();
    }
    format!("the time depends most on {}; `hearth profile` on a device measures it", all.join(", "))
}

/// Returns a description of the value of a device or link, which is named as in its document: `desktop
/// cpu.read_bandwidth`.
fn parameter_words(name: &str) -> String {
    let Some((owner, key)) = name.rsplit_once(' ') else { return name.to_owned() };
    let what = match key {
        "cpu.read_bandwidth" => "how fast the CPU of `{}` reads weights",
        "gpu.read_bandwidth" => "how fast the GPU of `{}` reads weights",
        "gpu.layer_overhead" => "the fixed time of a layer on the GPU of `{}`",
        "cpu.layer_overhead" => "the fixed time of a layer on the CPU of `{}`",
        "cpu.token_overhead" => "the fixed time of a token on `{}`",
        "memory.available" => "the free memory of `{}`",
        "memory.can_swap" => "the memory that other programs on `{}` release",
        "disk.sequential" | "disk.fault" | "disk.random" => "the speed of the disk of `{}`",
        _ if owner == "links" && key.ends_with("latency") => "the delay of the links",
        _ if owner == "links" && key.ends_with("bandwidth") => "the speed of the links",
        _ => return format!("`{key}` of `{owner}`"),
    };
    what.replace("{}", owner)
}
