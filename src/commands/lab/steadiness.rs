//! Checks that the speed of the machine did not change during a run of a lab.
//!
//! The speed of the machine ([`hearth_runtime::profile::measure_matvec_speed`]) is measured when the devices are
//! profiled, and before and after each run. The CPU time that a hypervisor steals is measured during the run. A run is
//! unsteady if the changed speed or the stolen time would change the predicted time too much. A suite then repeats the
//! lab a few times, regardless of its result. A cached profile is used only at a similar speed.

use std::fs;

use hearth_core::metrics::Metrics;
use hearth_runtime::profile::measure_matvec_speed;
use serde::{Deserialize, Serialize};

use crate::diagnostics::Failure;

/// Maximum relative change of the speed of the machine up to which a device profile is valid.
/// source: assumed, the accepted error of a predicted time per token
const MAX_SPEED_CHANGE: f64 = 0.1;
/// Maximum relative change of the predicted time per token by a changed speed or by stolen CPU time.
/// source: assumed, the same as [`MAX_SPEED_CHANGE`]
const MAX_TIME_CHANGE: f64 = 0.1;

/// Returns whether a profile that was measured at the machine speed `then` is valid at the machine speed `now`.
pub fn is_similar_speed(then: f64, now: f64) -> bool {
    (now / then - 1.0).abs() <= MAX_SPEED_CHANGE
}

/// Whether the speed of the machine remained the same during a run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Steadiness {
    /// The speeds of the machine before and after the run, relative to the speed when the devices were measured.
    #[serde(rename = "pace")]
    pub relative_speeds: [f64; 2],
    /// The share of CPU time that a hypervisor gave to other virtual machines during the run; 0 if unknown.
    #[serde(rename = "stolen")]
    pub steal_time_share: f64,
    /// Whether `relative_speeds` and `steal_time_share` would change the predicted time per token by at most a tenth.
    #[serde(rename = "steady")]
    pub is_steady: bool,
}

impl Steadiness {
    /// Determines whether a run was steady. `computing` is the share of CPU time in the predicted time per token,
    /// `stolen` the share of CPU time that the hypervisor stole.
    ///
    /// ```text
    /// |computing (1 / relative speed - 1)| <= 0.1    and    1 / (1 - stolen) - 1 <= 0.1
    /// ```
    ///
    /// Stolen CPU time counts fully, because a stolen CPU also handles no interrupts of disks and links.
    fn new(relative_speeds: [f64; 2], stolen: f64, computing: f64) -> Steadiness {
        // False for NaN.
        let is_small = |share: f64, speed: f64| (share * (1.0 / speed - 1.0)).abs() <= MAX_TIME_CHANGE;
        let is_steady =
            relative_speeds.iter().all(|&speed| is_small(computing, speed)) && is_small(1.0, 1.0 - stolen);
        Steadiness { relative_speeds, steal_time_share: stolen, is_steady }
    }

    pub fn warning(&self) -> Option<String> {
        let [before, after] = self.relative_speeds;
        (!self.is_steady).then(|| {
            format!(
                "before the run the machine was {before:.2} times as fast as when the devices were measured, and after it \
                 {after:.2} times; during the run {:.0} % of the CPU time was stolen by the hypervisor",
                self.steal_time_share * 100.0
            )
        })
    }
}

/// Calls `run`, and returns its result and the steadiness of the machine. `measured` is the speed of the machine when
/// the devices were measured, in FLOP/s.
pub fn measure_steadiness<T>(
    measured: f64,
    predicted: &Metrics,
    run: impl FnOnce() -> Result<T, Failure>,
) -> Result<(T, Steadiness), Failure> {
    let computing =
        predicted.tpot_ms.map_or(0.0, |tpot| (predicted.terms_ms.cpu / tpot.mean_ms).clamp(0.0, 1.0));
    let before = measure_flops_per_second()?;
    let times = CpuTimes::now();
    let result = run()?;
    let stolen = CpuTimes::now().zip(times).map_or(0.0, |(now, then)| now.stolen_since(then));
    let relative_speeds = [before / measured, measure_flops_per_second()? / measured];
    Ok((result, Steadiness::new(relative_speeds, stolen, computing)))
}

/// Time of all CPUs since boot, in ticks. source: Linux, Documentation/filesystems/proc.rst, 1.7: `/proc/stat`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CpuTimes {
    stolen: u64,
    all: u64,
}

impl CpuTimes {
    fn now() -> Option<CpuTimes> {
        CpuTimes::parse(&fs::read_to_string("/proc/stat").ok()?)
    }

    /// Parses the `cpu` line of `/proc/stat`: user, nice, system, idle, iowait, irq, softirq and steal. The guest times
    /// at the end of the line are already included in user and nice.
    fn parse(text: &str) -> Option<CpuTimes> {
        let times = text.lines().find_map(|line| line.strip_prefix("cpu "))?;
        let times: Vec<u64> =
            times.split_whitespace().take(8).map(|time| time.parse().ok()).collect::<Option<_>>()?;
        Some(CpuTimes {
            stolen: *times.get(7)?,
            all: times.iter().try_fold(0, |sum: u64, time| sum.checked_add(*time))?,
        })
    }

    fn stolen_since(self, then: CpuTimes) -> f64 {
        let [stolen, all] = [(self.stolen, then.stolen), (self.all, then.all)]
            .map(|(now, then)| now.saturating_sub(then) as f64);
        if all > 0.0 { (stolen / all).min(1.0) } else { 0.0 }
    }
}

pub fn measure_flops_per_second() -> Result<f64, Failure> {
    Ok(measure_matvec_speed().map_err(Failure::failed)?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn change_of_speed_counts_by_the_share_of_computing() {
        let is_steady = |computing, speeds| Steadiness::new(speeds, 0.0, computing).is_steady;
        assert!(is_steady(1.0, [1.0, 0.96]) && is_steady(1.0, [1.05, 1.0]));
        assert!(!is_steady(1.0, [1.0, 0.8]) && !is_steady(1.0, [1.3, 1.0]));
        assert!(is_steady(0.1, [0.7, 1.3]), "most of the time is waiting for disks");
        assert!(!is_steady(0.0, [0.0, 1.0]) && !is_steady(0.0, [1.0, f64::NAN]), "no speed at all");
        assert!(is_similar_speed(10.0, 10.9) && !is_similar_speed(10.0, 8.0));
    }

    #[test]
    fn stolen_time_makes_a_run_unsteady() {
        let is_steady = |stolen| Steadiness::new([1.0, 1.0], stolen, 0.05).is_steady;
        assert!(is_steady(0.0) && is_steady(0.09));
        let is_unsteady = !is_steady(0.1) && !is_steady(0.5) && !is_steady(1.0);
        assert!(is_unsteady, "a stolen CPU reads nothing from disk");
        let warned = Steadiness::new([1.0, 1.0], 0.5, 0.05).warning();
        assert!(warned.is_some_and(|text| text.contains("50 % of the CPU time was stolen")));
    }

    #[test]
    fn stolen_time_is_the_eighth_field() {
        let parse = CpuTimes::parse;
        let then = parse("cpu  10 1 5 100 2 1 1 30 7 7\ncpu0 1 2 3 4 5 6 7 8\n").expect("all CPUs");
        assert_eq!(then, CpuTimes { stolen: 30, all: 150 });
        let now = parse("cpu  30 1 5 140 2 1 1 70 9 9").expect("a line of all CPUs");
        assert!((now.stolen_since(then) - 0.4).abs() < 1e-12);
        assert!(then.stolen_since(now).abs() < 1e-12 && now.stolen_since(now).abs() < 1e-12);
        let none =
            ["", "cpu  1 2 3 4 5 6 7", "cpu  1 2 3 4 5 6 7 x", "cpu  1 2 3 4 5 6 18446744073709551615 8"];
        assert!(none.into_iter().all(|line| parse(line).is_none()));
    }
}
