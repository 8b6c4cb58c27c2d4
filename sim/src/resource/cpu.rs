//! Processor: shares the cores of a device among computations and other programs.
//!
//! A computation runs on a number of threads and needs a number of seconds when undisturbed. The kernel's fair
//! scheduler gives every runnable thread the same share, so with more runnable threads than cores all slow down by
//! cores / threads. Other programs ("co-runners") are threads that never end. A slower clock lengthens the time that a
//! thread runs, not the time that it waits. Under a quota (`quota`) all threads wait for the next period when they have
//! used up the processor time of one.

use hearth_profiles::Seconds;
use hearth_profiles::device::Quota;

use super::nanos_until;
use super::quota::CpuQuota;
use crate::engine::Nanos;

/// The cores of a device and the computations on them.
#[derive(Debug, Clone)]
pub struct Cpu {
    cores: f64,
    /// Threads of other programs that are runnable all the time.
    co_runners: f64,
    /// Remaining part of the clock rate.
    clock: f64,
    /// Ordered by key. There are few and they change often: a list needs no allocation for that.
    jobs: Vec<Job>,
    settled: Nanos,
    quota: Option<CpuQuota>,
}

#[derive(Debug, Clone)]
struct Job {
    key: u64,
    threads: f64,
    /// Remaining seconds of undisturbed running.
    remaining: f64,
    /// Seconds of running added by a slower clock.
    slowdown: f64,
}

impl Cpu {
    pub fn new(cores: f64) -> Self {
        Self { cores, co_runners: 0.0, clock: 1.0, jobs: Vec::new(), settled: 0, quota: None }
    }

    /// Sets the quota.
    #[must_use]
    pub fn with_quota(self, quota: Option<&Quota>) -> Self {
        Self { quota: quota.map(CpuQuota::new), ..self }
    }

    /// Sets the number of other programs' runnable threads.
    pub fn set_co_runners(&mut self, now: Nanos, threads: f64) {
        self.settle(now);
        self.co_runners = threads.max(0.0);
    }

    /// Sets the remaining part of the clock rate.
    pub fn set_clock(&mut self, now: Nanos, left: f64) {
        self.settle(now);
        self.clock = left;
    }

    /// The time that a slower clock has added to a computation by `now`.
    pub fn slowdown(&mut self, now: Nanos, key: u64) -> Seconds {
        self.settle(now);
        let job = self.jobs.iter().find(|job| job.key == key);
        Seconds(job.map_or(0.0, |job| job.slowdown))
    }

    /// Starts a computation that takes `seconds` on `threads` threads when undisturbed.
    pub fn start(&mut self, now: Nanos, key: u64, threads: f64, seconds: f64) {
        self.settle(now);
        let job = Job { key, threads, remaining: seconds, slowdown: 0.0 };
        match self.jobs.binary_search_by_key(&key, |job| job.key) {
            Ok(at) => self.jobs[at] = job,
            Err(at) => self.jobs.insert(at, job),
        }
    }

    /// Returns the time at which the next computation ends if nothing changes.
    pub fn next_end(&self) -> Option<Nanos> {
        let speed = self.speed();
        let left = self.jobs.iter().map(|job| job.remaining.max(0.0)).min_by(f64::total_cmp)?;
        if speed <= 0.0 {
            return None;
        }
        Some(match &self.quota {
            None => self.settled.saturating_add(nanos_until(left / speed)),
            Some(quota) => quota.done(self.settled, left / speed, self.running()),
        })
    }

    /// Takes one computation that has ended by `now`.
    pub fn ended(&mut self, now: Nanos) -> Option<u64> {
        self.settle(now);
        let at = self.jobs.iter().position(|job| job.remaining <= 1e-9)?;
        Some(self.jobs.remove(at).key)
    }

    /// The speed of every thread, 1 when there is a core for each at full clock.
    pub fn speed(&self) -> f64 {
        self.share() * self.clock
    }

    /// The part of the time in which every thread runs.
    fn share(&self) -> f64 {
        let runnable = self.runnable();
        if runnable > self.cores { self.cores / runnable } else { 1.0 }
    }

    fn runnable(&self) -> f64 {
        self.jobs.iter().map(|job| job.threads).sum::<f64>() + self.co_runners
    }

    /// The number of threads that run at a time.
    fn running(&self) -> f64 {
        self.runnable().min(self.cores)
    }

    fn settle(&mut self, now: Nanos) {
        let running = self.running();
        let seconds = match &mut self.quota {
            None => now.saturating_sub(self.settled) as f64 * 1e-9,
            Some(quota) => quota.run(self.settled, now, running),
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
    fn undisturbed_computation_time() {
        let mut cpu = Cpu::new(8.0);
        cpu.start(0, 1, 8.0, 2.0);
        assert_eq!(cpu.next_end(), Some(2 * SECOND));
        assert_eq!(cpu.ended(2 * SECOND), Some(1));
        assert_eq!(cpu.next_end(), None);
    }

    #[test]
    fn co_runner_shares_cores() {
        let mut cpu = Cpu::new(8.0);
        cpu.start(0, 1, 8.0, 2.0);
        // Eight threads more on eight cores: half the speed for the second that is left.
        cpu.set_co_runners(SECOND, 8.0);
        assert_eq!(cpu.next_end(), Some(3 * SECOND));
        assert_eq!(cpu.ended(2 * SECOND), None);
        assert_eq!(cpu.ended(3 * SECOND), Some(1));
    }

    #[test]
    fn slower_clock_lengthens_running_time() {
        let mut cpu = Cpu::new(8.0);
        cpu.start(0, 1, 8.0, 2.0);
        // A second at full clock; what is left takes two at half of it, one of them for the clock.
        cpu.set_clock(SECOND, 0.5);
        assert_eq!(cpu.next_end(), Some(3 * SECOND));
        assert_eq!(cpu.slowdown(3 * SECOND, 1), Seconds(1.0));
        // Beside as many other threads it runs half of the time.
        cpu.start(3 * SECOND, 2, 8.0, 1.0);
        assert_eq!(cpu.ended(3 * SECOND), Some(1));
        cpu.set_co_runners(3 * SECOND, 8.0);
        assert_eq!(cpu.next_end(), Some(7 * SECOND));
        assert_eq!(cpu.slowdown(7 * SECOND, 2), Seconds(1.0));
    }

    #[test]
    fn spare_cores_slow_nothing() {
        let mut cpu = Cpu::new(8.0);
        cpu.set_co_runners(0, 4.0);
        cpu.start(0, 1, 4.0, 1.0);
        assert_eq!(cpu.next_end(), Some(SECOND));
    }

    #[test]
    fn quota_stops_all_threads_until_next_period() {
        let (cores, period) = (Sourced::new(1.0, "test"), Sourced::new(Seconds(0.01), "test"));
        let mut cpu = Cpu::new(2.0).with_quota(Some(&Quota { cores, period }));
        // Two threads have 5 ms of every 10.
        cpu.start(0, 1, 2.0, 0.012);
        assert_eq!(cpu.next_end(), Some(22_000_000));
        // A neighbour in the same group runs too, and uses up what there is: of 2 cores three threads have two thirds,
        // for 5 ms of each period.
        cpu.set_co_runners(10_000_000, 1.0);
        assert_eq!(cpu.next_end().map(|end| end.abs_diff(30_500_000) <= 1), Some(true));
        assert_eq!(cpu.ended(30_500_001), Some(1));
    }
}
