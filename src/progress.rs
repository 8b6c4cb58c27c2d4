//! How does a person see that long work goes on?
//!
//! A bar or a line on standard error, only where that is a terminal: quiet in pipes.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// A bar over a number of bytes.
pub fn bytes(what: &str, total: u64) -> ProgressBar {
    bar(total, "{msg} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} {eta}")
        .with_message(what.to_string())
}

/// A bar over seconds of patience.
pub fn seconds(what: &str, total: u64) -> ProgressBar {
    bar(total, "{msg} [{wide_bar}] {pos}/{len} s").with_message(what.to_string())
}

/// A bar over a number of things.
pub fn count(what: &str, total: u64) -> ProgressBar {
    bar(total, "{msg} [{wide_bar}] {pos}/{len} {eta}").with_message(what.to_string())
}

/// A line that says what is being done now.
pub fn line() -> ProgressBar {
    let line = bar(0, "{spinner} {msg} {elapsed}");
    if !line.is_hidden() {
        line.enable_steady_tick(Duration::from_millis(120));
    }
    line
}

fn bar(total: u64, template: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(template).expect("a template of known keys");
    ProgressBar::new(total).with_style(style)
}
