//! The persistent thread pool that computes the layers of a model.
//!
//! A pool of n threads consists of the calling thread and n - 1 worker threads. A job is a closure that every
//! participant (the calling thread and the workers) runs; participants take chunks of work from shared counters. After
//! a job, workers spin for a short time, because the next job of a token follows within microseconds, and then park.
//! The calling thread does not wait for a worker that has not started the job (its CPU may be busy): when its own work
//! is done, it closes the job and waits only for the workers that have started it.
//!
//! Only one job runs at a time; a job that is started inside another job deadlocks.
//!
//! Not here: what a job computes, and its cost ([`crate::cost`]).

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};

use hearth_profiles::measure::topology::Topology;

use crate::clock::{Stopwatch, ThreadTimes, monotonic_nanos};
use crate::cost::{CriticalPathCost, JobTimes, WorkerReport};

#[derive(Debug, Clone, Copy)]
pub struct ThreadPoolOptions {
    /// Number of threads, including the calling thread; at least 1. By default one for each core.
    pub threads: usize,
    /// Whether to pin each worker thread to one CPU (Linux only). The calling thread is not pinned.
    pub pin_workers: bool,
    /// Time for which an idle worker thread spins before it parks, in nanoseconds.
    pub spin_ns: u64,
}

impl Default for ThreadPoolOptions {
    fn default() -> ThreadPoolOptions {
        ThreadPoolOptions {
            threads: Topology::detect().compute_threads(),
            pin_workers: true,
            spin_ns: 100_000,
        }
    }
}

#[derive(Debug)]
pub struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    caller: Mutex<Caller>,
    /// A lock that is held during a measurement, so that only one measurement runs at a time.
    measuring: Mutex<()>,
}

/// State that only the calling thread uses.
#[derive(Debug, Default)]
struct Caller {
    epoch: u64,
    /// The stopwatch of the current measurement, if any, and the cost measured so far.
    meter: Option<(Stopwatch, CriticalPathCost)>,
}

type Job = dyn Fn(usize) + Sync;

#[derive(Debug, Default)]
struct Shared {
    /// The number of the job (epoch) in the upper 32 bits, then the bit [`OPEN`], then the number of workers that run
    /// the job ([`RUNNING`]).
    state: AtomicU64,
    /// The closure of the open job: a reference on the stack of the calling thread, valid while a worker runs the job.
    job: AtomicPtr<&'static Job>,
    stop: AtomicBool,
    panicked: AtomicBool,
    /// Whether the calling thread has parked until the last worker finishes the job.
    caller_parked: AtomicBool,
    /// The calling thread that has parked last.
    caller: Mutex<Option<Thread>>,
    worker_states: Vec<WorkerState>,
    spin_ns: u64,
}

/// The state of a worker thread, on cache lines that no other data share.
#[derive(Debug, Default)]
#[repr(align(128))]
struct WorkerState {
    parked: AtomicBool,
    /// The measurements of this worker for the most recent job that it ran.
    report: AtomicReport,
}

/// A [`WorkerReport`] that its worker writes during a job, and the calling thread reads after all workers have
/// finished. [`Shared::state`] orders these accesses.
#[derive(Debug, Default)]
struct AtomicReport {
    epoch: AtomicU64,
    end_ns: AtomicU64,
    wall_ns: AtomicU64,
    cpu_ns: AtomicU64,
    queue_ns: AtomicU64,
}

impl AtomicReport {
    fn store(&self, report: WorkerReport) {
        let WorkerReport { epoch, end_ns, work: ThreadTimes { wall_ns, cpu_ns, queue_ns } } = report;
        self.epoch.store(epoch, Ordering::Relaxed);
        self.end_ns.store(end_ns, Ordering::Relaxed);
        self.wall_ns.store(wall_ns, Ordering::Relaxed);
        self.cpu_ns.store(cpu_ns, Ordering::Relaxed);
        self.queue_ns.store(queue_ns, Ordering::Relaxed);
    }

    fn load(&self) -> WorkerReport {
        let load = |value: &AtomicU64| value.load(Ordering::Relaxed);
        let work = ThreadTimes {
            wall_ns: load(&self.wall_ns),
            cpu_ns: load(&self.cpu_ns),
            queue_ns: load(&self.queue_ns),
        };
        WorkerReport { epoch: load(&self.epoch), end_ns: load(&self.end_ns), work }
    }
}

/// The number of items that threads have taken from a region, on cache lines that no other data share.
#[derive(Default)]
#[repr(align(128))]
struct TakenCount(AtomicUsize);

/// The bit of [`Shared::state`] that is set while workers may start the job.
const OPEN: u64 = 1 << 31;
/// The bits of [`Shared::state`] that count the workers that run the job.
const RUNNING: u64 = OPEN - 1;

impl ThreadPool {
    pub fn new(options: ThreadPoolOptions) -> std::io::Result<ThreadPool> {
        let workers = options.threads.max(1) - 1;
        let worker_states = (0..workers).map(|_| WorkerState::default()).collect();
        let shared = Arc::new(Shared { worker_states, spin_ns: options.spin_ns, ..Shared::default() });
        let topology = (options.pin_workers && workers > 0).then(Topology::detect);
        let start = |index: usize| {
            // The first CPU of the order is left for the calling thread, which is not pinned.
            let cpu = topology.as_ref().and_then(|topology| topology.cpu(index + 1));
            let shared = Arc::clone(&shared);
            thread::Builder::new().name(format!("compute-{}", index + 1)).spawn(move || {
                if let Some(cpu) = cpu {
                    pin_to_cpu(cpu);
                }
                run_worker(&shared, index);
            })
        };
        let workers = (0..workers).map(start).collect::<std::io::Result<Vec<_>>>()?;
        Ok(ThreadPool { shared, workers, caller: Mutex::default(), measuring: Mutex::default() })
    }

    /// Returns the number of threads, including the calling thread.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `job(participant)` once on the calling thread (participant 0) and at most once on every worker thread.
    ///
    /// # Panics
    /// If `job` panics in any thread.
    pub fn run(&self, job: impl Fn(usize) + Sync) {
        let mut caller = self.lock();
        if self.workers.is_empty() {
            return job(0);
        }
        let mut start_ns = 0;
        if let Some((watch, cost)) = &mut caller.meter {
            cost.add_interval(watch.lap());
            start_ns = watch.last_lap_end_ns();
        }
        caller.epoch = (caller.epoch + 1) & u64::from(u32::MAX);
        // Workers may use the closure, and this reference to it, until `close` returns.
        let job: &(dyn Fn(usize) + Sync) = &job;
        self.open(caller.epoch, &job);
        let own = catch_unwind(AssertUnwindSafe(|| job(0)));
        let work = caller.meter.as_mut().map(|(watch, _)| (watch.lap(), watch.last_lap_end_ns()));
        self.close();
        let epoch = caller.epoch;
        if let (Some((own_work, own_end_ns)), Some((watch, cost))) = (work, &mut caller.meter) {
            let wait = watch.lap();
            let end_ns = watch.last_lap_end_ns();
            let times = JobTimes { epoch, start_ns, own_work, own_end_ns, wait, end_ns };
            let reports = self.shared.worker_states.iter().map(|worker| worker.report.load());
            cost.add_job(&times, reports);
        }
        drop(caller);
        if let Err(panic) = own {
            resume_unwind(panic);
        }
        assert!(!self.shared.panicked.swap(false, Ordering::AcqRel), "a compute worker panicked");
    }

    /// Calls `body(participant, range)` for chunks of at most `grain` items that together cover `0..count`. With one thread,
    /// one chunk has all items.
    ///
    /// Each participant has a region of items. It first takes the chunks of its own region, so that it reads memory in
    /// order, and then helps with the regions of other participants.
    pub fn for_each_chunk(&self, count: usize, grain: usize, body: impl Fn(usize, Range<usize>) + Sync) {
        let grain = grain.max(1);
        if count <= grain || self.workers.is_empty() {
            return body(0, 0..count);
        }
        let threads = self.threads();
        let region = count.div_ceil(threads).next_multiple_of(grain);
        let taken: Vec<TakenCount> = (0..threads).map(|_| TakenCount::default()).collect();
        self.run(|participant| {
            for offset in 0..threads {
                let index = (participant + offset) % threads;
                let end = ((index + 1) * region).min(count);
                loop {
                    let start = index * region + taken[index].0.fetch_add(grain, Ordering::Relaxed);
                    if start >= end {
                        break;
                    }
                    body(participant, start..(start + grain).min(end));
                }
            }
        });
    }

    /// Calls `body(first, chunk)` for chunks of `grain` values that together cover `values`; `first` is the index of the
    /// first value of the chunk. The last chunk may be shorter. With one thread, one chunk has all values.
    pub fn for_each_chunk_mut<T: Send>(
        &self,
        values: &mut [T],
        grain: usize,
        body: impl Fn(usize, &mut [T]) + Sync,
    ) {
        let start = AtomicPtr::new(values.as_mut_ptr());
        self.for_each_chunk(values.len(), grain, |_, range| {
            let start = start.load(Ordering::Relaxed);
            // SAFETY: the range is inside `values`, which stay borrowed until all threads have finished. No other
            // reference to these values exists, because each index is in one chunk.
            let chunk = unsafe { std::slice::from_raw_parts_mut(start.add(range.start), range.len()) };
            body(range.start, chunk);
        });
    }

    /// Runs `body` and returns its result and its cost, which includes jobs and the calling thread between jobs.
    ///
    /// Only one measurement runs at a time; calls from other threads wait. A nested measurement deadlocks.
    ///
    /// # Panics
    /// If a job panics.
    pub fn measure<R>(&self, body: impl FnOnce() -> R) -> (R, CriticalPathCost) {
        let _guard = self.measuring.lock().unwrap_or_else(PoisonError::into_inner);
        let start = monotonic_nanos();
        self.lock().meter = Some((Stopwatch::start(), CriticalPathCost::default()));
        let result = body();
        let (mut watch, mut cost) = self.lock().meter.take().expect("only one measurement runs at a time");
        cost.add_interval(watch.lap());
        cost.wall_ns = monotonic_nanos() - start;
        (result, cost)
    }

    fn lock(&self) -> MutexGuard<'_, Caller> {
        // The caller's state consists of counters, which are valid after a panic.
        self.caller.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self, epoch: u64, job: &&(dyn Fn(usize) + Sync)) {
        let shared = &*self.shared;
        // The cast erases the lifetime of the closure. The store to `state` publishes the pointer.
        shared.job.store(std::ptr::from_ref(job).cast::<&'static Job>().cast_mut(), Ordering::Relaxed);
        shared.state.store(epoch << 32 | OPEN, Ordering::SeqCst);
        for (state, worker) in shared.worker_states.iter().zip(&self.workers) {
            if state.parked.swap(false, Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
    }

    /// Closes the job, so that no more workers start it, and waits until the workers that run it have finished.
    fn close(&self) {
        let shared = &*self.shared;
        let mut running = shared.state.fetch_and(!OPEN, Ordering::AcqRel) & RUNNING;
        let mut spins = 0u32;
        while running != 0 {
            spins += 1;
            if spins < 20_000 {
                std::hint::spin_loop();
            } else {
                *shared.caller.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread::current());
                shared.caller_parked.store(true, Ordering::SeqCst);
                if shared.state.load(Ordering::SeqCst) & RUNNING != 0 {
                    thread::park();
                }
                shared.caller_parked.store(false, Ordering::SeqCst);
            }
            running = shared.state.load(Ordering::Acquire) & RUNNING;
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for (state, worker) in self.shared.worker_states.iter().zip(&self.workers) {
            state.parked.store(false, Ordering::SeqCst);
            worker.thread().unpark();
        }
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its jobs, so that joining cannot fail.
            let _ = worker.join();
        }
    }
}

/// Runs jobs on the worker thread with the index `index` until the pool is dropped.
fn run_worker(shared: &Shared, index: usize) {
    let worker = &shared.worker_states[index];
    let mut watch = Stopwatch::start();
    let mut seen = 0;
    loop {
        let Some(state) = wait_for_job(shared, worker, seen) else { return };
        seen = state >> 32;
        if !try_start(shared, state) {
            continue;
        }
        watch.lap();
        // SAFETY: the job is open, so the pointer was set, and the closure and the reference to it stay alive until all
        // workers that run the job have finished, see `close`.
        let job: &Job = unsafe { *shared.job.load(Ordering::Relaxed) };
        if catch_unwind(AssertUnwindSafe(|| job(index + 1))).is_err() {
            shared.panicked.store(true, Ordering::Release);
        }
        let done = watch.lap();
        worker.report.store(WorkerReport { epoch: seen, end_ns: watch.last_lap_end_ns(), work: done });
        let left = shared.state.fetch_sub(1, Ordering::SeqCst);
        if left & (OPEN | RUNNING) == 1 && shared.caller_parked.load(Ordering::SeqCst) {
            // It may be the caller of a later job, which then checks its job and parks again.
            let caller = shared.caller.lock().unwrap_or_else(PoisonError::into_inner).clone();
            caller.expect("a caller that parks has set its handle").unpark();
        }
    }
}

/// Spins, then parks, until a job opens whose epoch is not `seen`. Returns [`Shared::state`], or `None` when the pool
/// is dropped.
fn wait_for_job(shared: &Shared, worker: &WorkerState, seen: u64) -> Option<u64> {
    let fresh = |state: u64| state >> 32 != seen && state & OPEN != 0;
    loop {
        let mut until = 0;
        for spins in 0u32.. {
            let state = shared.state.load(Ordering::Acquire);
            if fresh(state) {
                return Some(state);
            }
            if shared.stop.load(Ordering::Relaxed) {
                return None;
            }
            std::hint::spin_loop();
            if spins % 64 == 0 {
                let now = monotonic_nanos();
                until = if until == 0 { now + shared.spin_ns } else { until };
                if now >= until {
                    break;
                }
            }
        }
        worker.parked.store(true, Ordering::SeqCst);
        let idle = || !fresh(shared.state.load(Ordering::SeqCst)) && !shared.stop.load(Ordering::SeqCst);
        while idle() && worker.parked.load(Ordering::SeqCst) {
            thread::park();
        }
        worker.parked.store(false, Ordering::SeqCst);
    }
}

/// Registers the calling worker for the job whose state is `state`. Returns false if this job has closed.
fn try_start(shared: &Shared, mut state: u64) -> bool {
    let epoch = state >> 32;
    while state & OPEN != 0 && state >> 32 == epoch {
        match shared.state.compare_exchange_weak(state, state + 1, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return true,
            Err(now) => state = now,
        }
    }
    false
}

/// Pins the calling thread to a CPU.
fn pin_to_cpu(cpu: u32) {
    #[cfg(any(target_os = "android", target_os = "linux"))]
    {
        use rustix::thread::{CpuSet, sched_setaffinity};
        let mut one = CpuSet::new();
        one.set(cpu as usize);
        // Some sandboxes forbid this call; an unpinned worker gives the same results.
        let _ = sched_setaffinity(None, &one);
    }
    #[cfg(not(any(target_os = "android", target_os = "linux")))]
    let _ = cpu;
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn pool(threads: usize) -> ThreadPool {
        ThreadPool::new(ThreadPoolOptions { threads, pin_workers: false, spin_ns: 20_000 }).unwrap()
    }

    #[test]
    fn every_chunk_is_done_once() {
        for threads in [1, 2, 3] {
            let pool = pool(threads);
            // Miri is slow.
            for round in 0..if cfg!(miri) { 10 } else { 500 } {
                let done: Vec<AtomicUsize> = (0..100 + round % 7).map(|_| AtomicUsize::new(0)).collect();
                pool.for_each_chunk(done.len(), 3, |_, range| {
                    for count in &done[range] {
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn every_chunk_of_a_slice_is_written_once() {
        for (threads, grain) in [(1, 3), (2, 3), (3, 7), (3, 200)] {
            let mut values = vec![0usize; 100];
            pool(threads).for_each_chunk_mut(&mut values, grain, |first, chunk| {
                assert!(first.is_multiple_of(grain));
                for (index, value) in (first..).zip(chunk) {
                    *value += index;
                }
            });
            assert!(values.iter().copied().eq(0..100));
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no clock for the CPU time of a thread")]
    fn waiting_is_on_the_critical_path_and_spinning_is_not() {
        let pool = pool(2);
        let waited_ns = |cost: &CriticalPathCost| cost.wall_ns.saturating_sub(cost.cpu_ns + cost.queue_ns);
        let ((), cost) = pool.measure(|| {
            pool.run(|participant| {
                // Each thread sleeps as if it waited for a page.
                let long = if participant == 0 { 30 } else { 60 };
                thread::sleep(Duration::from_millis(long));
            });
        });
        assert!(waited_ns(&cost) > 25_000_000, "{cost:?}");
        assert!(cost.cpu_ns < 10_000_000, "{cost:?}");
        let spin = || {
            let start = monotonic_nanos();
            while monotonic_nanos() - start < 5_000_000 {
                std::hint::spin_loop();
            }
        };
        let ((), cost) = pool.measure(|| pool.for_each_chunk(8, 1, |_, _| spin()));
        assert!(waited_ns(&cost) < 5_000_000, "{cost:?}");
    }

    #[test]
    #[should_panic(expected = "worker panicked")]
    fn a_panic_reaches_the_caller() {
        let pool = pool(2);
        for _ in 0..100 {
            pool.run(|participant| {
                thread::sleep(Duration::from_millis(2));
                assert_eq!(participant, 0, "on purpose");
            });
        }
    }
}
