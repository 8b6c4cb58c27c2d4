//! Processor sharing: divides a capacity among concurrent jobs.
//!
//! Egalitarian processor sharing with a maximum rate for each job (max-min fairness by water filling): all jobs get the
//! same share, and the part of a share that a job cannot use is divided among the other jobs. Between two changes the
//! rates are constant, so the next completion time is exact.
//!
//! Work is a floating-point number, time is in integer nanoseconds. A completion time is rounded up, and a job with
//! less than a nanosecond of remaining work is complete. Rounding errors do not accumulate, because each job ends once.

use super::nanos_until;
use crate::engine::Nanos;

#[derive(Debug, Clone)]
struct Job {
    key: u64,
    remaining: f64,
    max_rate: f64,
    rate: f64,
}

#[derive(Debug, Clone)]
pub struct ProcessorSharing {
    capacity: f64,
    jobs: Vec<Job>,
    /// The time for which the remaining work of the jobs is up to date.
    settled: Nanos,
}

impl ProcessorSharing {
    pub fn new(capacity: f64) -> Self {
        Self { capacity, jobs: Vec::new(), settled: 0 }
    }

    pub fn set_capacity(&mut self, now: Nanos, capacity: f64) {
        self.settle(now);
        self.capacity = capacity;
        self.divide();
    }

    /// Adds a job with `work` units of work, which is done at a rate of at most `max_rate` units per second.
    pub fn add_job(&mut self, now: Nanos, key: u64, work: f64, max_rate: f64) {
        self.settle(now);
        self.jobs.push(Job { key, remaining: work, max_rate, rate: 0.0 });
        self.divide();
    }

    /// Returns the time at which the next job ends if nothing changes; `None` if no job makes progress.
    pub fn next_completion_time(&self) -> Option<Nanos> {
        let ends = self.jobs.iter().filter(|job| job.rate > 0.0);
        ends.map(|job| self.settled.saturating_add(nanos_until(job.remaining.max(0.0) / job.rate))).min()
    }

    /// Removes one job that is complete by `now`, the earliest added job first. Returns the key of the job.
    pub fn pop_completed(&mut self, now: Nanos) -> Option<u64> {
        self.settle(now);
        let at = self.jobs.iter().position(|job| job.remaining <= job.rate * 1e-9 && job.rate > 0.0)?;
        let key = self.jobs.remove(at).key;
        self.divide();
        Some(key)
    }

    #[cfg(test)]
    pub fn rate(&self, key: u64) -> Option<f64> {
        self.jobs.iter().find(|job| job.key == key).map(|job| job.rate)
    }

    fn settle(&mut self, now: Nanos) {
        let seconds = now.saturating_sub(self.settled) as f64 * 1e-9;
        if seconds > 0.0 {
            for job in &mut self.jobs {
                job.remaining -= job.rate * seconds;
            }
            self.settled = now;
        }
    }

    /// Sets the rates of the jobs by water filling. The loop is quadratic, which is fast for a small number of jobs.
    fn divide(&mut self) {
        let mut left = self.capacity.max(0.0);
        let mut unserved = self.jobs.len();
        for job in &mut self.jobs {
            job.rate = -1.0;
        }
        while unserved > 0 {
            let share = left / unserved as f64;
            let mut limited = false;
            for job in self.jobs.iter_mut().filter(|job| job.rate < 0.0 && job.max_rate <= share) {
                job.rate = job.max_rate;
                left -= job.max_rate;
                unserved -= 1;
                limited = true;
            }
            if !limited {
                self.jobs.iter_mut().filter(|job| job.rate < 0.0).for_each(|job| job.rate = share);
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Nanos = 1_000_000_000;

    #[test]
    fn unused_share_is_redistributed() {
        let mut sharing = ProcessorSharing::new(100.0);
        sharing.add_job(0, 1, 10.0, 10.0);
        sharing.add_job(0, 2, 1000.0, 80.0);
        sharing.add_job(0, 3, 1000.0, 80.0);
        // An equal share would be 33.3: job 1 uses 10, and the other two get half of 90 each.
        assert_eq!([1, 2, 3].map(|key| sharing.rate(key).unwrap()), [10.0, 45.0, 45.0]);
    }

    #[test]
    fn new_job_delays_completion() {
        let mut sharing = ProcessorSharing::new(100.0);
        sharing.add_job(0, 1, 100.0, f64::INFINITY);
        assert_eq!(sharing.next_completion_time(), Some(SECOND));
        // After 0.5 s half of the work remains; at half the rate that takes another second.
        sharing.add_job(SECOND / 2, 2, 200.0, f64::INFINITY);
        assert_eq!(sharing.next_completion_time(), Some(SECOND * 3 / 2));
        assert_eq!(sharing.pop_completed(SECOND * 3 / 2), Some(1));
        // 50 of the second job's 200 are done, and the rest runs at the full rate.
        assert_eq!(sharing.next_completion_time(), Some(SECOND * 3));
    }

    #[test]
    fn zero_capacity_never_ends() {
        let mut sharing = ProcessorSharing::new(0.0);
        sharing.add_job(0, 1, 1.0, 1.0);
        assert_eq!(sharing.next_completion_time(), None);
        sharing.set_capacity(SECOND, 1.0);
        assert_eq!(sharing.next_completion_time(), Some(2 * SECOND));
    }

    proptest! {
        #[test]
        fn rates_sum_to_capacity(
            capacity in 1.0f64..1e9,
            max_rates in prop::collection::vec(1.0f64..1e9, 1..6),
        ) {
            let mut sharing = ProcessorSharing::new(capacity);
            for (key, max_rate) in max_rates.iter().enumerate() {
                sharing.add_job(0, key as u64, 1.0, *max_rate);
            }
            let total: f64 = (0..max_rates.len()).map(|key| sharing.rate(key as u64).unwrap()).sum();
            let wanted = capacity.min(max_rates.iter().sum());
            prop_assert!((total / wanted - 1.0).abs() < 1e-9);
        }
    }
}
