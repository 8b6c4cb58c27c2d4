//! How do all processors make rows, and what is kept when they are stopped?
//!
//! Each thread takes the next row until none is left or Ctrl-C asks to stop; a row under way is finished. The rows
//! are put in order, so their number and speed change nothing. Whoever waits is shown them now and then, so that a
//! machine that is switched off loses little.
//!
//! Not here: what a row is ([`crate::sweep`]).

#![allow(clippy::disallowed_methods)] // the clock says when to save; it decides nothing about the rows

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::{Row, Sweep};
use crate::diagnostics::Failure;
use crate::interruption::Stoppable;
use crate::progress;

/// Rows are shown to whoever saves them no more often.
const SAVE_EVERY: Duration = Duration::from_secs(10);

/// So many threads as are asked for, or as there are cores.
pub fn threads(jobs: Option<u32>) -> usize {
    jobs.map_or_else(|| std::thread::available_parallelism().map_or(1, usize::from), |jobs| jobs as usize)
}

/// Makes things by their number on so many threads, in order; fewer if Ctrl-C asked to stop.
pub fn each<T: Send>(
    what: &str,
    count: usize,
    threads: usize,
    make: impl Fn(usize) -> T + Sync,
) -> Vec<(usize, T)> {
    let numbered = |index| (index, make(index));
    gather(what, count, threads, numbered, |(index, _)| *index, |_| Ok(()))
        .expect("nothing is saved, so that nothing fails")
}

/// Makes rows on so many threads; fewer than asked for if it was stopped. `save` is shown what there is.
pub fn make(
    sweep: &Sweep,
    indices: &[usize],
    threads: usize,
    save: impl FnMut(&[Row]) -> Result<(), Failure>,
) -> Result<Vec<Row>, Failure> {
    let row = |place: usize| sweep.row(indices[place]);
    gather("simulating", indices.len(), threads, row, |row| row.index, save)
}

/// Makes so many things on so many threads and puts them in order; now and then `save` is shown those that are made.
fn gather<T: Send>(
    what: &str,
    count: usize,
    threads: usize,
    make: impl Fn(usize) -> T + Sync,
    order: impl Fn(&T) -> usize,
    mut save: impl FnMut(&[T]) -> Result<(), Failure>,
) -> Result<Vec<T>, Failure> {
    let bar = progress::count(what, count as u64);
    let _until_the_end = Stoppable::begin();
    let (sender, receiver) = mpsc::channel();
    let next = AtomicUsize::new(0);
    let mut made: Vec<T> = Vec::with_capacity(count);
    let saved = std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, count.max(1)) {
            let (sender, next, make) = (sender.clone(), &next, &make);
            scope.spawn(move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= count || Stoppable::asked() || sender.send(make(index)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        let mut saved = Instant::now();
        for one in receiver {
            made.push(one);
            bar.inc(1);
            if saved.elapsed() >= SAVE_EVERY {
                made.sort_by_key(&order);
                // An error ends the loop; without a receiver the threads end as well.
                save(&made)?;
                saved = Instant::now();
            }
        }
        Ok(())
    });
    bar.finish_and_clear();
    made.sort_by_key(&order);
    saved.map(|()| made)
}
