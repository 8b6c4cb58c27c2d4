//! CPU quota of a device.
//!
//! A control group's quota limits the CPU time of all threads together in every period. Threads that have used up the
//! quota wait for the next period (kernel/sched/fair.c, bandwidth control), and unused CPU time is lost. So short work
//! runs at full speed, and long work at the fraction of this speed that the quota allows. A profile with a quota has
//! the rates of the CPU without the quota.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Cpu;
use crate::document_values::Sourced;
use crate::units::Seconds;

/// Minimum and maximum number of cores of a quota. source: kernel/sched/core.c, `tg_set_cfs_bandwidth` accepts at
/// least 1 ms of 1 s; the maximum is assumed
const CORES_RANGE: [f64; 2] = [0.01, 1024.0];
/// Minimum and maximum period of a quota in seconds. source: kernel/sched/core.c, `min_bw_quota_period_us`,
/// `max_bw_quota_period_us`
const PERIOD_RANGE: [f64; 2] = [1e-3, 1.0];

/// Period of the quota with which `hearth lab` emulates a slow CPU.
/// source: docs/decisions/0012: the shortest period with which the duration of long work is within 7 % of the
/// expected duration
pub const EMULATION_QUOTA_PERIOD: Seconds = Seconds(0.01);

/// A limit of the CPU time per period.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "a quota, such as `{cores: {value: 0.5, source: \"set\"}, period: {value: 10 ms, source: \"set\"}}`"
)]
pub struct Quota {
    /// CPU time per period divided by the period: the number of cores, which may be fractional.
    pub cores: Sourced<f64>,
    /// Length of a period.
    pub period: Sourced<Seconds>,
}

impl Quota {
    /// Returns whether a number of cores is in the range that a quota may have.
    pub fn is_valid_core_count(cores: f64) -> bool {
        (CORES_RANGE[0]..=CORES_RANGE[1]).contains(&cores)
    }

    /// Returns the reason why the quota is invalid, or `None` if the quota is valid.
    pub(super) fn invalid_reason(&self) -> Option<String> {
        let (cores, period) = (self.cores.value, self.period.value.0);
        if !Quota::is_valid_core_count(cores) {
            let [min, max] = CORES_RANGE;
            return Some(format!("`cpu.quota.cores` is {cores}: choose from {min} to {max}"));
        }
        let within = (PERIOD_RANGE[0]..=PERIOD_RANGE[1]).contains(&period);
        (!within).then(|| format!("`cpu.quota.period` is {}: choose from 1 ms to 1 s", self.period.value))
    }
}

impl Cpu {
    /// Returns the CPU without its quota, with all rates reduced to those that the quota allows for long work.
    #[must_use]
    pub fn with_sustained_rates(&self) -> Cpu {
        let mut sustained = self.clone();
        let Some(quota) = sustained.quota.take() else { return sustained };
        let available = quota.cores.value / f64::from(self.cores.max(1));
        if available >= 1.0 {
            return sustained;
        }
        sustained.at_speed(available)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::shipped_profile;

    #[test]
    fn sustained_rates_follow_quota() {
        let mut cpu = shipped_profile("d3").unwrap().cpu;
        let plain = cpu.with_sustained_rates();
        assert_eq!(plain, cpu, "no quota");
        let quota =
            |cores| Quota { cores: Sourced::new(cores, "t"), period: Sourced::new(Seconds(0.01), "t") };
        cpu.quota = Some(quota(f64::from(cpu.cores) / 4.0));
        let slowed = cpu.with_sustained_rates();
        assert_eq!(slowed.quota, None);
        assert_eq!(slowed.read_bandwidth.value.0, cpu.read_bandwidth.value.0 / 4.0);
        for ((_, slow), (_, fast)) in slowed.matvec.iter().zip(cpu.matvec.iter()) {
            assert_eq!(slow.value.0, fast.value.0 / 4.0);
        }
        cpu.quota = Some(quota(f64::from(cpu.cores) * 2.0));
        assert_eq!(cpu.with_sustained_rates(), plain, "a quota of more cores than there are has no effect");
        let is_invalid = |cores| quota(cores).invalid_reason().is_some();
        assert_eq!([0.0, f64::NAN, 0.5].map(is_invalid), [true, true, false]);
        let long = Quota { period: Sourced::new(Seconds(2.0), "t"), ..quota(0.5) };
        assert!(long.invalid_reason().is_some_and(|why| why.contains("1 ms to 1 s")));
    }
}
