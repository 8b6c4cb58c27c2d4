//! Runs independent instances on all processors, with the same result as on one.
//!
//! Each thread takes the next number until none is left; results are put in the order of their numbers.
//!
//! Not here: what is done for a number.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use indicatif::{ProgressBar, ProgressStyle};

/// Runs `work` for each number below `count`; returns the results in order, or the first error.
pub fn each<T: Send>(
    what: &str,
    count: usize,
    work: impl Fn(usize) -> Result<T, String> + Sync,
) -> Result<Vec<T>, String> {
    let progress = Progress::new(what, count);
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<(usize, Result<T, String>)>> = Mutex::new(Vec::with_capacity(count));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        break;
                    }
                    let result = work(number).map_err(|error| format!("{what} {number}: {error}"));
                    if result.is_err() {
                        next.store(count, Ordering::Relaxed);
                    }
                    let mut results = results.lock().expect("no thread panics while it holds the results");
                    results.push((number, result));
                    progress.done(results.len());
                }
            });
        }
    });
    progress.bar.finish_and_clear();
    let mut results = results.into_inner().expect("no thread panics while it holds the results");
    results.sort_by_key(|(number, _)| *number);
    results.into_iter().map(|(_, result)| result).collect()
}

/// A bar on a terminal, a line for each tenth elsewhere.
struct Progress {
    what: String,
    count: usize,
    bar: ProgressBar,
}

impl Progress {
    fn new(what: &str, count: usize) -> Self {
        let bar = if std::io::stderr().is_terminal() {
            let style = ProgressStyle::with_template("{msg} [{wide_bar}] {pos}/{len} {eta}");
            let bar = ProgressBar::new(count as u64).with_message(what.to_owned());
            style.map(|style| bar.clone().with_style(style)).unwrap_or(bar)
        } else {
            ProgressBar::hidden()
        };
        Self { what: what.to_owned(), count, bar }
    }

    fn done(&self, done: usize) {
        self.bar.set_position(done as u64);
        let tenth = |done: usize| 10 * done / self.count;
        if self.bar.is_hidden() && tenth(done) > tenth(done - 1) {
            eprintln!("{}: {done} of {}", self.what, self.count);
        }
    }
}
