//! The cost of a multi-threaded computation along its critical path.
//!
//! Between the jobs of the thread pool ([`crate::pool`]), the critical path is the calling thread. During a job, the
//! critical path is the calling thread until the participant that finishes last starts the job, and then this
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
    /// Time for which the critical path was ready to run but had no CPU.
    pub queue_ns: u64,
    /// Sum of the CPU times of all threads.
    pub all_threads_cpu_ns: u64,
}

impl CriticalPathCost {
    /// Adds an interval in which only the calling thread computed.
    pub(crate) fn add_interval(&mut self, slice: ThreadTimes) {
        self.cpu_ns += slice.cpu_ns;
        self.all_threads_cpu_ns += slice.cpu_ns;
        self.queue_ns += slice.queue_ns;
    }

    /// Adds a job to the critical path: the calling thread until the participant that finished last started the job,
    /// then this participant, then the time until the calling thread noticed the end of the job.
    pub(crate) fn add_job(&mut self, job: &JobTimes, reports: impl Iterator<Item = WorkerReport>) {
        let own = job.own_work;
        let mut last = WorkerReport { epoch: job.epoch, end_ns: job.own_end_ns, work: own };
        self.all_threads_cpu_ns += own.cpu_ns;
        for report in reports {
            if report.epoch == job.epoch {
                self.all_threads_cpu_ns += report.work.cpu_ns;
                last = if report.end_ns > last.end_ns { report } else { last };
            }
        }
        let before = last.end_ns.saturating_sub(job.start_ns).saturating_sub(last.work.wall_ns);
        let share = before as f64 / own.wall_ns.max(1) as f64;
        let after = job.end_ns.saturating_sub(last.end_ns);
        let late = job.wait.queue_ns.min(after);
        self.cpu_ns +=
            last.work.cpu_ns + (own.cpu_ns as f64 * share) as u64 + job.wait.cpu_ns.min(after - late);
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

/// The measurements of a job by the calling thread. Points in time are values of [`crate::clock::monotonic_nanos`].
pub(crate) struct JobTimes {
    pub(crate) epoch: u64,
    pub(crate) start_ns: u64,
    pub(crate) own_work: ThreadTimes,
    pub(crate) own_end_ns: u64,
    /// How the calling thread spent the time from `own_end_ns` until all workers had finished the job.
    pub(crate) wait: ThreadTimes,
    /// The time at which all workers had finished the job.
    pub(crate) end_ns: u64,
}

/// The measurements of a worker thread for the most recent job that it ran.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct WorkerReport {
    pub(crate) epoch: u64,
    /// The time at which the worker finished the job, as a value of [`crate::clock::monotonic_nanos`].
    pub(crate) end_ns: u64,
    pub(crate) work: ThreadTimes,
}
