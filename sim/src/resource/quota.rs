//! CPU quota: limits the CPU time that a group of threads uses in each period.
//!
//! As in the bandwidth control of kernel/sched/fair.c, periods follow each other from time zero, whether threads run or
//! not. The threads of the group use up the quota of a period together, then wait for the next period. Unused quota is
//! lost. So a burst shorter than the quota runs at full speed.
//!
//! Deviation: the kernel stops a thread at a tick, up to 4 ms late, and subtracts the excess from the next periods;
//! here a thread stops exactly. docs/decisions/0031 states the effect.

use hearth_profiles::device::Quota;

use super::nanos_until;
use crate::engine::Nanos;

/// CPU time in seconds that counts as zero: less than a nanosecond of one thread.
const NEGLIGIBLE: f64 = 1e-10;

#[derive(Debug, Clone)]
pub struct CpuQuota {
    period: Nanos,
    /// CPU time in seconds that all threads together may use in a period.
    budget: f64,
    /// Remaining CPU time in seconds of the period that ends at `ends`.
    left: f64,
    ends: Nanos,
}

impl CpuQuota {
    pub fn new(quota: &Quota) -> Self {
        let period = quota.period.value.to_nanos().max(1);
        let budget = quota.cores.value * period as f64 * 1e-9;
        Self { period, budget, left: budget, ends: period }
    }

    /// Runs `threads` threads from the time `from` to the time `to`. Returns for how many seconds each thread ran.
    pub fn run_threads(&mut self, from: Nanos, to: Nanos, threads: f64) -> f64 {
        let (mut at, mut ran) = (from, 0.0);
        while at < to {
            self.enter_period(at);
            let until = self.ends.min(to);
            let runnable = self.runnable(threads, (until - at) as f64 * 1e-9);
            self.left -= runnable * threads;
            ran += runnable;
            at = until;
        }
        ran
    }

    /// Returns the time at which each of `threads` threads, which start at `now`, has run for `seconds` seconds.
    pub fn completion_time(&self, now: Nanos, seconds: f64, threads: f64) -> Nanos {
        let (mut ahead, mut at, mut remaining) = (self.clone(), now, seconds);
        // The running time of each thread in a full period, with which full periods are skipped below.
        let each = ahead.full_period_time(threads);
        loop {
            ahead.enter_period(at);
            let runnable = ahead.runnable(threads, (ahead.ends - at) as f64 * 1e-9);
            if remaining <= runnable {
                return at.saturating_add(nanos_until(remaining));
            }
            remaining -= runnable;
            at = ahead.ends;
            // All full periods are equal: skip all of them but the last.
            let whole = ((remaining / each).floor() - 1.0).max(0.0) as u64;
            remaining -= whole as f64 * each;
            at = at.saturating_add(whole.saturating_mul(ahead.period));
            if at == Nanos::MAX {
                return at;
            }
        }
    }

    fn enter_period(&mut self, at: Nanos) {
        if at >= self.ends {
            self.ends = (at / self.period + 1).saturating_mul(self.period);
            self.left = self.budget;
        }
    }

    /// Returns for how many of the next `seconds`, all in this period, each thread can run.
    fn runnable(&self, threads: f64, seconds: f64) -> f64 {
        if threads <= 0.0 {
            return seconds;
        }
        if self.left <= NEGLIGIBLE { 0.0 } else { seconds.min(self.left / threads) }
    }

    /// Returns for how many seconds each thread can run in a full period.
    fn full_period_time(&self, threads: f64) -> f64 {
        let period = self.period as f64 * 1e-9;
        if threads <= 0.0 { period } else { period.min(self.budget / threads) }
    }
}

#[cfg(test)]
mod tests {
    use hearth_profiles::{Seconds, Sourced};
    use proptest::prelude::*;

    use super::*;

    const MS: Nanos = 1_000_000;

    fn quota(cores: f64) -> CpuQuota {
        let (cores, period) = (Sourced::new(cores, "test"), Sourced::new(Seconds(0.01), "test"));
        CpuQuota::new(&Quota { cores, period })
    }

    #[test]
    fn work_beyond_quota_waits_for_next_period() {
        // Half a CPU in periods of 10 ms: 5 ms of each period.
        let half = quota(0.5);
        assert_eq!(half.completion_time(0, 0.004, 1.0), 4 * MS);
        assert_eq!(half.completion_time(0, 0.012, 1.0), 22 * MS);
        // Two threads can run for 2.5 ms each in a period; those that start at 8 ms run for 2 ms until its end.
        assert_eq!(half.completion_time(8 * MS, 0.004, 2.0), 12 * MS);
        assert_eq!(half.completion_time(0, 0.004, 2.0), 11 * MS + MS / 2);
        // A quota of as many CPUs as threads slows nothing.
        assert!(quota(2.0).completion_time(3 * MS, 1.0, 2.0).abs_diff(1003 * MS) <= 1);
    }

    #[test]
    fn unused_quota_is_lost() {
        let mut half = quota(0.5);
        assert!((half.run_threads(0, 3 * MS, 1.0) - 0.003).abs() < 1e-12);
        assert_eq!(half.completion_time(3 * MS, 0.003, 1.0), 11 * MS, "2 ms are left");
        assert!((half.run_threads(3 * MS, 10 * MS, 1.0) - 0.002).abs() < 1e-12);
        // After ten idle periods the quota of one period is available, not of ten.
        assert_eq!(half.completion_time(110 * MS, 0.006, 1.0), 121 * MS);
    }

    proptest! {
        /// Running in parts does as much work as running at once, and the work ends at the predicted time.
        #[test]
        fn running_in_parts_equals_running_at_once(
            cores in 0.05f64..3.0,
            threads in 1u32..4,
            begin in 0u64..50_000_000,
            work in 1e-6f64..0.2,
            cuts in prop::collection::vec(0u64..400_000_000, 0..6),
        ) {
            let threads = f64::from(threads);
            let mut whole = quota(cores);
            let end = whole.completion_time(begin, work, threads);
            let mut parts = whole.clone();
            let at_once = whole.run_threads(begin, end, threads);
            prop_assert!((at_once - work).abs() < 1e-7, "{at_once} and {work}");
            let mut cuts: Vec<u64> = cuts.into_iter().map(|cut| begin + cut).filter(|&cut| cut < end).collect();
            cuts.sort_unstable();
            cuts.push(end);
            let (mut at, mut ran) = (begin, 0.0);
            for cut in cuts {
                ran += parts.run_threads(at, cut, threads);
                at = cut;
            }
            prop_assert!((ran - at_once).abs() < 1e-9, "{ran} and {at_once}");
            // Never faster than without a quota, nor than the quota allows with one more period.
            let seconds = (end - begin) as f64 * 1e-9;
            prop_assert!(seconds >= work - 1e-9);
            prop_assert!(work * threads <= cores * (seconds + 0.02) + 1e-9);
        }
    }
}
