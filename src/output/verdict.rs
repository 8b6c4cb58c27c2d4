//! Formats the verdict on a plan, with which the output of a prediction opens.

use std::fmt::Write;

use hearth_reports::published_results::results::PredictionInterval;
use hearth_workflow::verdict::{FirstToken, SingleDeviceTime, Verdict, spoken_time};

/// Ratio of two speeds up to which they are called equal. source: assumed, about the error of a prediction
const EQUAL_UP_TO: f64 = 1.05;

pub fn format_verdict(verdict: &Verdict, interval: Option<&PredictionInterval>) -> String {
    let mut text = String::new();
    if let Some(speed) = verdict.tokens_per_second {
        let pace = match speed / verdict.reading_speed {
            ratio if ratio >= EQUAL_UP_TO => "faster than people read",
            ratio if ratio > 1.0 / EQUAL_UP_TO => "as fast as people read",
            _ => "slower than people read",
        };
        let range = interval.and_then(speed_range).map_or_else(String::new, |range| format!(" ({range})"));
        let _ =
            writeln!(text, "{} tokens/s{range}: {pace}, {} a token", short(speed), spoken_time(1.0 / speed));
        if let Some(alone) = &verdict.best_single_device {
            let _ = writeln!(text, "  {}", beside_single_device(speed, alone));
        }
    }
    if !verdict.first_tokens.is_empty() {
        let each = |first: &FirstToken| {
            let time = first.seconds.map_or_else(|| "does not run".to_owned(), spoken_time);
            format!("{time} for {} tokens", first.prompt_tokens)
        };
        let all: Vec<String> = verdict.first_tokens.iter().map(each).collect();
        let _ = writeln!(text, "  first token after a prompt: {}", all.join(", "));
    }
    for reliance in &verdict.relies_on {
        let _ = writeln!(text, "  relies on {reliance}");
    }
    for (device, reason) in &verdict.left_out {
        let _ = writeln!(text, "  `{device}` is left out: {reason}");
    }
    text
}

fn beside_single_device(speed: f64, alone: &SingleDeviceTime) -> String {
    let single = 1.0 / alone.seconds_per_token;
    let ratio = speed / single;
    let times = |ratio: f64| if ratio < 10.0 { format!("{ratio:.1}") } else { format!("{ratio:.0}") };
    let comparison = if ratio >= EQUAL_UP_TO {
        format!("together {} times as fast", times(ratio))
    } else if ratio > 1.0 / EQUAL_UP_TO {
        "together as fast".to_owned()
    } else {
        format!("alone {} times as fast", times(1.0 / ratio))
    };
    format!("`{}` alone, the best single device: {} tokens/s; {comparison}", alone.device, short(single))
}

/// Returns the range of speeds of 80 % of the draws.
fn speed_range(interval: &PredictionInterval) -> Option<String> {
    let [slow, fast] = [interval.p90_ms, interval.p10_ms].map(|ms| 1e3 / ms);
    let range = format!("{} to {} in 80 % of {} draws", short(slow), short(fast), interval.draw_count);
    fast.is_finite().then_some(range)
}

/// Formats a speed with two or three digits.
fn short(speed: f64) -> String {
    match speed {
        speed if speed >= 99.95 => format!("{speed:.0}"),
        speed if speed >= 9.995 => format!("{speed:.1}"),
        speed if speed >= 0.0995 => format!("{speed:.2}"),
        speed => format!("{speed:.3}"),
    }
}
