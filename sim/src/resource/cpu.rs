//! CPU: shares the cores of a device among computations and other programs.
//!
//! A computation runs on a number of threads and takes a known time when undisturbed. The kernel's fair scheduler
//! gives every runnable thread the same share, so with more runnable threads than cores every thread runs for cores /
//! threads of the time. Other programs ("co-runners") are threads that never end. A slower clock lengthens the time
//! that a thread runs, not the time that it waits. Under a quota (`quota`) all threads wait for the next period when
//! they have used up the CPU time of the current one.

use hearth_profiles::Seconds;
use hearth_profiles::device::Quota;

use super::nanos_until;
use super::quota::CpuQuota;
use crate::engine::Nanos;

#[derive(Debug, Clone)]
pub struct CpuSim {
    cores: f64,
    /// Number of threads of other programs, which are always runnable.
    co_runners: f64,
    /// Clock rate as a fraction of the full clock rate.
    clock: f64,
    /// The running computations, sorted by key. A vector is fast, because there are only a few, which change often.
    jobs: Vec<Job>,
    settled: Nanos,
    quota: Option<CpuQuota>,
}

#[derive(Debug, Clone)]
struct Job {
    key: u64,
    threads: f64,
    /// Remaining running time in seconds, if no other program disturbs the computation.
    remaining: f64,
    /// Running time in seconds that a slower clock has added.
    slowdown: f64,
}

impl CpuSim {
    pub fn new(cores: f64) -> Self {
        Self { cores, co_runners: 0.0, clock: 1.0, jobs: Vec::new(), settled: 0, quota: None }
    }

    #[must_use]
    pub fn with_quota(self, quota: Option<&Quota>) -> Self {
        Self { quota: quota.map(CpuQuota::new), ..self }
    }

    pub fn set_co_runners(&mut self, now: Nanos, threads: f64) {
        self.settle(now);
        self.co_runners = threads.max(0.0);
    }

    pub fn set_clock_fraction(&mut self, now: Nanos, fraction: f64) {
        self.settle(now);
        self.clock = fraction;
    }

    /// Returns the time that a slower clock has added to a computation by `now`.
    pub fn slowdown_time(&mut self, now: Nanos, key: u64) -> Seconds {
        self.settle(now);
        let job = self.jobs.iter().find(|job| job.key == key);
        Seconds(job.map_or(0.0, |job| job.slowdown))
    }

    /// Starts a computation that takes `seconds` on `threads` threads if no other program disturbs it.
    pub fn start_job(&mut self, now: Nanos, key: u64, threads: f64, seconds: f64) {
        self.settle(now);
        let job = Job { key, threads, remaining: seconds, slowdown: 0.0 };
        match self.jobs.binary_search_by_key(&key, |job| job.key) {
            Ok(at) => self.jobs[at] = job,
            Err(at) => self.jobs.insert(at, job),
        }
    }

    /// Returns the time at which the next computation ends if nothing changes before; `None` if none makes progress.
    pub fn next_completion_time(&self) -> Option<Nanos> {
        let speed = self.share() * self.clock;
        let remaining = self.jobs.iter().map(|job| job.remaining.max(0.0)).min_by(f64::total_cmp)?;
        if speed <= 0.0 {
            return None;
        }
        Some(match &self.quota {
            None => self.settled.saturating_add(nanos_until(remaining / speed)),
            Some(quota) => quota.completion_time(self.settled, remaining / speed, self.running()),
        })
    }

    /// Removes one computation that is complete by `now`, and returns the key of the computation.
    pub fn pop_completed(&mut self, now: Nanos) -> Option<u64> {
        self.settle(now);
        let at = self.jobs.iter().position(|job| job.remaining <= 1e-9)?;
        Some(self.jobs.remove(at).key)
    }

    /// Returns the fraction of the time during which each runnable thread runs.
    fn share(&self) -> f64 {
        let runnable = self.runnable();
        if runnable > self.cores { self.cores / runnable } else { 1.0 }
    }

    fn runnable(&self) -> f64 {
        self.jobs.iter().map(|job| job.threads).sum::<f64>() + self.co_runners
    }

    /// Returns the number of threads that run at the same time.
    fn running(&self) -> f64 {
        self.runnable().min(self.cores)
    }

    fn settle(&mut self, now: Nanos) {
        let running = self.running();
        let seconds = match &mut self.quota {
            None => now.saturating_sub(self.settled) as f64 * 1e-9,
            Some(quota) => quota.run_threads(self.settled, now, running),
        };
        let share = self.share();
        let speed = share * self.clock;
        for job in &mut self.jobs {
            job.remaining -= speed * seconds;
            job.slowdown += share * (1.0 - self.clock) * seconds;
        }
        self.settled = self.settled.max(now);
    }
}

#[cfg(test)]
mod tests {
    use hearth_profiles::Sourced;

    use super::*;

    const SECOND: Nanos = 1_000_000_000;

    #[test]
    fn co_runner_shares_cores() {
        let mut cpu = CpuSim::new(8.0);
        cpu.start_job(0, 1, 8.0, 2.0);
        assert_eq!(cpu.next_completion_time(), Some(2 * SECOND));
        // With eight more threads on eight cores the remaining second runs at half the speed.
        cpu.set_co_runners(SECOND, 8.0);
        assert_eq!(cpu.next_completion_time(), Some(3 * SECOND));
        assert_eq!(cpu.pop_completed(2 * SECOND), None);
        assert_eq!(cpu.pop_completed(3 * SECOND), Some(1));
        assert_eq!(cpu.next_completion_time(), None);
    }

    #[test]
    fn slower_clock_lengthens_running_time() {
        let mut cpu = CpuSim::new(8.0);
        cpu.start_job(0, 1, 8.0, 2.0);
        // One second runs at the full clock rate. The rest takes two seconds at half the rate, of which the clock
        // adds one.
        cpu.set_clock_fraction(SECOND, 0.5);
        assert_eq!(cpu.next_completion_time(), Some(3 * SECOND));
        assert_eq!(cpu.slowdown_time(3 * SECOND, 1), Seconds(1.0));
        // With as many other threads it runs for half of the time.
        cpu.start_job(3 * SECOND, 2, 8.0, 1.0);
        assert_eq!(cpu.pop_completed(3 * SECOND), Some(1));
        cpu.set_co_runners(3 * SECOND, 8.0);
        assert_eq!(cpu.next_completion_time(), Some(7 * SECOND));
        assert_eq!(cpu.slowdown_time(7 * SECOND, 2), Seconds(1.0));
    }

    #[test]
    fn spare_cores_slow_nothing() {
        let mut cpu = CpuSim::new(8.0);
        cpu.set_co_runners(0, 4.0);
        cpu.start_job(0, 1, 4.0, 1.0);
        assert_eq!(cpu.next_completion_time(), Some(SECOND));
        assert_eq!(cpu.pop_completed(SECOND), Some(1));
    }

    #[test]
    fn quota_stops_all_threads_until_next_period() {
        let (cores, period) = (Sourced::new(1.0, "test"), Sourced::new(Seconds(0.01), "test"));
        let mut cpu = CpuSim::new(2.0).with_quota(Some(&Quota { cores, period }));
        // Two threads can run for 5 ms of every 10.
        cpu.start_job(0, 1, 2.0, 0.012);
        assert_eq!(cpu.next_completion_time(), Some(22_000_000));
        // Another thread of the same group runs too and uses up the quota: three threads share 2 cores, so each runs
        // for two thirds of the time, in 5 ms of each period.
        cpu.set_co_runners(10_000_000, 1.0);
        assert_eq!(cpu.next_completion_time().map(|end| end.abs_diff(30_500_000) <= 1), Some(true));
        assert_eq!(cpu.pop_completed(30_500_001), Some(1));
    }
}
