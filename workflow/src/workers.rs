//! Runs independent jobs on several threads, in order, until they are done or the caller cancels them.
//!
//! Each thread takes the next job until none is left; a job under way is finished. The results are put in order, so
//! that the number and speed of threads change nothing. They are passed to the caller now and then, so that a machine
//! that is switched off loses little.

#![allow(clippy::disallowed_methods)] // the clock says when to save; it decides nothing about the results

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::{Error, Progress};

/// Results are passed on no more often than this.
const SAVE_EVERY: Duration = Duration::from_secs(10);

/// The number of threads asked for, or one for each core.
pub fn threads(jobs: Option<u32>) -> usize {
    jobs.map_or_else(|| std::thread::available_parallelism().map_or(1, usize::from), |jobs| jobs as usize)
}

/// Runs `job` for each index below `count` and returns the results with their indices, in order; fewer if it was
/// cancelled. `save` is called with the results so far now and then, but not at the end.
pub fn run<T: Send>(
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
                    if index >= count || progress.is_cancelled() || sender.send((index, job(index))).is_err()
                    {
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
            if saved.elapsed() >= SAVE_EVERY {
                done.sort_by_key(|(index, _)| *index);
                // An error ends the loop; without a receiver the threads end as well.
                save(&done)?;
                saved = Instant::now();
            }
        }
        Ok(())
    });
    done.sort_by_key(|(index, _)| *index);
    result.map(|()| done)
}
