//! The cost of a multi-threaded computation along its critical path.
//!
//! Between phases of the pool ([`crate::pool`]) the critical path is the calling thread. In a phase it is the
//! participant that finished last, and the caller until that participant entered. So `wall - cpu - queue` is the time
//! for which the critical path waited; in a compute step this is waiting for pages of weights, for any number of
//! threads. Spinning is not counted, because waiting for another participant is part of that participant's time.
//!
//! Not here: reading clocks. That is [`crate::clock`].

use crate::clock::ThreadTimes;

/// The cost of a computation along its critical path, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CriticalPathCost {
    pub wall_ns: u64,
    /// CPU time on the critical path.
    pub cpu_ns: u64,
    /// Time for which the critical path was ready to run but had no processor.
    pub queue_ns: u64,
    /// CPU time of all threads together.
    pub all_threads_cpu_ns: u64,
}

impl CriticalPathCost {
    /// Returns the time for which the critical path waited for pages of weights: wall time less CPU and queue time.
    pub fn demand_disk_ns(&self) -> u64 {
        self.wall_ns.saturating_sub(self.cpu_ns).saturating_sub(self.queue_ns)
    }

    /// Adds an interval in which only the caller computed.
    pub(crate) fn add(&mut self, slice: ThreadTimes) {
        self.cpu_ns += slice.cpu_ns;
        self.all_threads_cpu_ns += slice.cpu_ns;
        self.queue_ns += slice.queue_ns;
    }

    /// Adds a phase to the critical path: the caller until the last participant to finish entered the phase, then
    /// that participant, then the time until the caller noticed its end.
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

/// The caller's measurements of a phase, in nanoseconds of the wall clock.
pub(crate) struct Phase {
    pub(crate) epoch: u64,
    pub(crate) start: u64,
    pub(crate) own_work: ThreadTimes,
    pub(crate) own_end: u64,
    /// How the caller spent the time from `own_end` until all workers had left the phase.
    pub(crate) wait: ThreadTimes,
    /// The time at which all workers had left the phase.
    pub(crate) end: u64,
}

/// A worker's measurements of the last phase in which it took part.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct WorkerReport {
    pub(crate) epoch: u64,
    /// The end of the worker's part, in nanoseconds of the wall clock.
    pub(crate) end: u64,
    pub(crate) work: ThreadTimes,
}
