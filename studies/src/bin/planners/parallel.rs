//! Parallel evaluation of independent instances, with the same results as a sequential evaluation.

use std::sync::atomic::{AtomicUsize, Ordering};

use hearth_studies::StudyError;
use indicatif::{ProgressBar, ProgressStyle};
use rayon::iter::{IntoParallelIterator, ParallelIterator};

/// Runs `work` for each number below `count`, on all CPUs. Returns the results in order, or one of the errors.
///
/// Shows a progress bar on a terminal; elsewhere, prints a line after each tenth of the work.
pub fn map<T: Send>(
    what: &str,
    count: usize,
    work: impl Fn(usize) -> Result<T, StudyError> + Sync,
) -> Result<Vec<T>, StudyError> {
    let style = ProgressStyle::with_template("{msg} [{wide_bar}] {pos}/{len} {eta}").expect("a template");
    let bar = ProgressBar::new(count as u64).with_style(style).with_message(what.to_owned());
    let finished = AtomicUsize::new(0);
    let run = |number| {
        let result = work(number).map_err(|error| format!("{what} {number}: {error}"))?;
        let done = finished.fetch_add(1, Ordering::Relaxed) + 1;
        bar.inc(1);
        if bar.is_hidden() && 10 * done / count > 10 * (done - 1) / count {
            eprintln!("{what}: {done} of {count}");
        }
        Ok(result)
    };
    let results = (0..count).into_par_iter().map(run).collect();
    bar.finish_and_clear();
    results
}
