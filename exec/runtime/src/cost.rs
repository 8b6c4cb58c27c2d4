//! The cost of a multi-threaded computation along its critical path.
//!
//! Between the phases of the thread pool ([`crate::pool`]), the critical path is the calling thread. In a phase, the
//! critical path is the calling thread until the participant that finishes last enters the phase, and then this
//! participant. So `wall - cpu - queue` is the time for which the critical path waited. In a compute step, the critical
//! path waits only for pages of weights, whatever the number of threads. A thread that spins waits for another
//! participant, whose time already counts, so spinning adds nothing.
//!
//! Not here: reading clocks. That is [`crate::clock`].

use crate::clock::ThreadTimes;

/// The cost of a computation along its critical path, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CriticalPathCost {
    pub wall_ns: u64,
    /// CPU time of the threads on the critical path.
    pub cpu_ns: u64,
    /// Time for which the critical path was ready to run but had no processor.
    pub queue_ns: u64,
    /// Sum of the CPU times of all threads.
    pub all_threads_cpu_ns: u64,
}

impl CriticalPathCost {
    /// Adds an interval in which only the calling thread computed.
    pub(crate) fn add(&mut self, slice: ThreadTimes) {
        self.cpu_ns += slice.cpu_ns;
        self.all_threads_cpu_ns += slice.cpu_ns;
        self.queue_ns += slice.queue_ns;
    }

    /// Adds a phase to the critical path: the calling thread until the participant that finished last entered the
    /// phase, then this participant, then the time until the calling thread noticed the end of the phase.
    pub(crate) fn add_phase(&mut self, phase: &Phase, reports: impl Iterator<Item = WorkerReport>) {
        let own = phase.own_work;
        let mut last = WorkerReport { epoch: phase.epoch, end: phase.own_end, work: own };
        self.all_threads_cpu_ns += own.cpu_ns;
        for report in reports {
            if report.epoch == phase.epoch {
                self.all_threads_cpu_ns += report.work.cpu_ns;
                last = if report.end > last.end { report } else { last };
            }
        }
        let before = last.end.saturating_sub(phase.start).saturating_sub(last.work.wall_ns);
        let share = before as f64 / own.wall_ns.max(1) as f64;
        let after = phase.end.saturating_sub(last.end);
        let late = phase.wait.queue_ns.min(after);
        self.cpu_ns +=
            last.work.cpu_ns + (own.cpu_ns as f64 * share) as u64 + phase.wait.cpu_ns.min(after - late);
        self.queue_ns += last.work.queue_ns + (own.queue_ns as f64 * share) as u64 + late;
    }
}

impl std::ops::AddAssign for CriticalPathCost {
    fn add_assign(&mut self, other: CriticalPathCost) {
        self.wall_ns += other.wall_ns;
        self.cpu_ns += other.cpu_ns;
        self.queue_ns += other.queue_ns;
        self.all_threads_cpu_ns += other.all_threads_cpu_ns;
    }
}

/// The measurements of a phase by the calling thread; times are in nanoseconds of [`crate::clock::monotonic_nanos`].
pub(crate) struct Phase {
    pub(crate) epoch: u64,
    pub(crate) start: u64,
    pub(crate) own_work: ThreadTimes,
    pub(crate) own_end: u64,
    /// How the calling thread spent the time from `own_end` until all workers had left the phase.
    pub(crate) wait: ThreadTimes,
    /// The time at which all workers had left the phase.
    pub(crate) end: u64,
}

/// The measurements of a worker thread in the most recent phase in which it took part.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct WorkerReport {
    pub(crate) epoch: u64,
    /// The time at which the worker finished its part of the phase, in nanoseconds of
    /// [`crate::clock::monotonic_nanos`].
    pub(crate) end: u64,
    pub(crate) work: ThreadTimes,
}
