//! Progress of long work, shown as a bar or a spinner on standard error if standard error is a terminal.

use std::io::IsTerminal;
use std::sync::OnceLock;
use std::time::Duration;

use hearth_workflow::Progress;
use indicatif::{ProgressBar, ProgressStyle};

use crate::interruption::CancellationGuard;
use crate::output::escape_line;

const SPINNER_TEMPLATE: &str = "{spinner} {msg} {elapsed}";
/// Template of a progress bar that counts items.
pub const ITEMS_TEMPLATE: &str = "{msg} [{wide_bar}] {pos}/{len} {eta}";
/// Template of a progress bar that counts bytes.
pub const BYTES_TEMPLATE: &str = "{msg} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} {eta}";

/// Shows the progress of a workflow on the terminal. Ctrl-C cancels a workflow that can end early.
pub struct TerminalProgress {
    bar: ProgressBar,
    /// Set by the first call of `is_cancelled`; from then on, Ctrl-C cancels the work instead of exiting the program.
    cancellation: OnceLock<CancellationGuard>,
}

impl TerminalProgress {
    pub fn new() -> Self {
        Self { bar: spinner(), cancellation: OnceLock::new() }
    }
}

impl Progress for TerminalProgress {
    fn report(&self, what: &str, done: u64, total: u64) {
        if self.bar.is_hidden() {
            return;
        }
        if self.bar.length() != Some(total) {
            self.bar.set_style(style(if total == 0 { SPINNER_TEMPLATE } else { ITEMS_TEMPLATE }));
            self.bar.set_length(total);
        }
        self.bar.set_position(done);
        self.bar.set_message(escape_line(what).into_owned());
    }

    fn is_cancelled(&self) -> bool {
        self.cancellation.get_or_init(CancellationGuard::begin);
        CancellationGuard::is_cancelled()
    }
}

impl Drop for TerminalProgress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Shows that `work` is going on, and for how long.
pub fn during<T>(what: &'static str, work: impl FnOnce() -> T) -> T {
    let spinner = spinner().with_message(what);
    let result = work();
    spinner.finish_and_clear();
    result
}

/// Returns a spinner with a message and the elapsed time, for work of unknown length.
pub fn spinner() -> ProgressBar {
    let spinner = progress_bar("", 0, SPINNER_TEMPLATE);
    if !spinner.is_hidden() {
        spinner.enable_steady_tick(Duration::from_millis(120));
    }
    spinner
}

/// Returns a progress bar with a message. The bar is hidden if standard error is not a terminal.
pub fn progress_bar(what: &'static str, total: u64, template: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    ProgressBar::new(total).with_style(style(template)).with_message(what)
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("a template of known keys")
}
