//! The cost of a computation that several threads share, along its critical path.
//!
//! The cost follows the critical path. Between phases that is the caller; in a phase it is the participant that
//! finished last, and before that one came in, the caller. So `wall - cpu - queue` is the time the critical
//! path waited, which in a compute step is for pages of weights, whatever the number of threads. A thread's
//! spinning counts as nothing: waiting for another participant is part of that participant's time.
//!
//! Not here: reading clocks. That is [`crate::clock`].

use crate::clock::TimeSlice;

/// The cost of a computation on its critical path, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ComputeCost {
    pub wall_ns: u64,
    /// CPU time on the critical path.
    pub cpu_ns: u64,
    /// Time the critical path was ready to run and had no processor.
    pub queue_ns: u64,
    /// CPU time of all participants together.
    pub all_cpu_ns: u64,
}

impl ComputeCost {
    /// The rest: the time that the critical path waited for pages of weights.
    pub fn demand_disk_ns(&self) -> u64 {
        self.wall_ns.saturating_sub(self.cpu_ns).saturating_sub(self.queue_ns)
    }

    /// Adds an interval in which only the caller computed.
    pub(crate) fn add(&mut self, slice: TimeSlice) {
        self.cpu_ns += slice.cpu;
        self.all_cpu_ns += slice.cpu;
        self.queue_ns += slice.queue;
    }

    /// Adds a phase to the critical path: the caller until the participant that finished last came in, then
    /// that participant, then what it took the caller to notice.
    pub(crate) fn add_phase(&mut self, phase: &Phase, reports: impl Iterator<Item = Report>) {
        let own = phase.own;
        let mut last = Report { epoch: phase.epoch, end: phase.own_end, work: own };
        self.all_cpu_ns += own.cpu;
        for report in reports {
            if report.epoch == phase.epoch {
                self.all_cpu_ns += report.work.cpu;
                last = if report.end > last.end { report } else { last };
            }
        }
        let before = last.end.saturating_sub(phase.opened).saturating_sub(last.work.wall);
        let share = before as f64 / own.wall.max(1) as f64;
        let after = phase.closed.saturating_sub(last.end);
        let late = phase.waited.queue.min(after);
        self.cpu_ns += last.work.cpu + (own.cpu as f64 * share) as u64 + phase.waited.cpu.min(after - late);
        self.queue_ns += last.work.queue + (own.queue as f64 * share) as u64 + late;
    }
}

impl std::ops::AddAssign for ComputeCost {
    fn add_assign(&mut self, other: ComputeCost) {
        self.wall_ns += other.wall_ns;
        self.cpu_ns += other.cpu_ns;
        self.queue_ns += other.queue_ns;
        self.all_cpu_ns += other.all_cpu_ns;
    }
}

/// The caller's measurements of a phase.
pub(crate) struct Phase {
    pub(crate) epoch: u64,
    pub(crate) opened: u64,
    /// The caller's own work, and its end.
    pub(crate) own: TimeSlice,
    pub(crate) own_end: u64,
    /// From then until all threads had left.
    pub(crate) waited: TimeSlice,
    pub(crate) closed: u64,
}

/// A worker's measurements of its last phase.
#[derive(Clone, Copy, Default)]
pub(crate) struct Report {
    pub(crate) epoch: u64,
    pub(crate) end: u64,
    pub(crate) work: TimeSlice,
}
