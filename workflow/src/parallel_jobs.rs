//! Runs independent jobs on several threads until all are done or the caller cancels them.
//!
//! Each thread runs the next job until none remains. After a cancellation, running jobs are completed. The results are
//! sorted by index, so that they do not depend on the number and the speed of threads. The caller can save the results
//! at regular intervals, so that little is lost if the machine is switched off. Long work reports to a [`Progress`].

#![allow(clippy::disallowed_methods)] // the clock determines when to save; results do not depend on it

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::Error;

/// Receives the progress of long work and can cancel it.
pub trait Progress: Sync {
    /// Reports that `done` of `total` units of the work `what` are done. A `total` of 0 means that it is unknown.
    fn report(&self, what: &str, done: u64, total: u64);

    /// Returns whether the work is cancelled. Work that supports cancellation calls this method regularly, and then
    /// ends with the results so far.
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// A [`Progress`] that ignores all reports and never cancels.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn report(&self, _: &str, _: u64, _: u64) {}
}

/// Minimum time between two calls of the `save` function of [`run_jobs`].
const SAVE_INTERVAL: Duration = Duration::from_secs(10);

/// Returns the number of threads for `jobs` concurrent jobs: `jobs` if given, otherwise the number of CPU cores.
pub fn thread_count(jobs: Option<u32>) -> usize {
    jobs.map_or_else(|| std::thread::available_parallelism().map_or(1, usize::from), |jobs| jobs as usize)
}

/// Runs `job` for each index below `count`, and returns the index and the result of each job in ascending order. After
/// a cancellation some results are missing. `save` is called with the results so far at regular intervals, but not at
/// the end.
pub fn run_jobs<T: Send>(
    count: usize,
    threads: usize,
    progress: &dyn Progress,
    job: impl Fn(usize) -> T + Sync,
    mut save: impl FnMut(&[(usize, T)]) -> Result<(), Error>,
) -> Result<Vec<(usize, T)>, Error> {
    let report = |done: usize| progress.report("simulating", done as u64, count as u64);
    report(0);
    let (sender, receiver) = mpsc::channel();
    let next = AtomicUsize::new(0);
    let mut done: Vec<(usize, T)> = Vec::with_capacity(count);
    let result = std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, count.max(1)) {
            let (sender, next, job) = (sender.clone(), &next, &job);
            scope.spawn(move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let ends = index >= count || progress.is_cancelled();
                    if ends || sender.send((index, job(index))).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        let mut saved = Instant::now();
        for one in receiver {
            done.push(one);
            report(done.len());
            if saved.elapsed() >= SAVE_INTERVAL {
                done.sort_by_key(|(index, _)| *index);
                // An error ends the loop and drops the receiver, which ends the threads.
                save(&done)?;
                saved = Instant::now();
            }
        }
        Ok(())
    });
    done.sort_by_key(|(index, _)| *index);
    result.map(|()| done)
}
