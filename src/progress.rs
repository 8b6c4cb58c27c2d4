//! Shows the progress of long work on standard error as a bar or a line, only if it is a terminal.

use std::io::IsTerminal;
use std::sync::OnceLock;
use std::time::Duration;

use hearth_workflow::Progress;
use indicatif::{ProgressBar, ProgressStyle};

use crate::interruption::Cancellation;

const LINE: &str = "{spinner} {msg} {elapsed}";
const BAR: &str = "{msg} [{wide_bar}] {pos}/{len} {eta}";

/// Shows the progress of a workflow; Ctrl-C cancels work that can end early.
pub struct Terminal {
    bar: ProgressBar,
    /// Set by the first call of `is_cancelled`; from then on Ctrl-C cancels the work instead of exiting.
    cancellation: OnceLock<Cancellation>,
}

impl Terminal {
    pub fn new() -> Self {
        Self { bar: line(), cancellation: OnceLock::new() }
    }
}

impl Progress for Terminal {
    fn report(&self, what: &str, done: u64, total: u64) {
        if self.bar.is_hidden() {
            return;
        }
        if self.bar.length() != Some(total) {
            self.bar.set_style(style(if total == 0 { LINE } else { BAR }));
            self.bar.set_length(total);
        }
        self.bar.set_position(done);
        self.bar.set_message(what.to_owned());
    }

    fn is_cancelled(&self) -> bool {
        self.cancellation.get_or_init(Cancellation::begin);
        Cancellation::is_requested()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Returns a bar that counts bytes.
pub fn bytes(what: &str, total: u64) -> ProgressBar {
    bar(total, "{msg} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} {eta}")
        .with_message(what.to_string())
}

/// Returns a bar that counts items.
pub fn count(what: &str, total: u64) -> ProgressBar {
    bar(total, BAR).with_message(what.to_string())
}

/// Returns a line that shows the current step.
pub fn line() -> ProgressBar {
    let line = bar(0, LINE);
    if !line.is_hidden() {
        line.enable_steady_tick(Duration::from_millis(120));
    }
    line
}

fn bar(total: u64, template: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    ProgressBar::new(total).with_style(style(template))
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("a template of known keys")
}
