//! CPU quota of a device.
//!
//! A control group's quota: in every period all threads together may use a processor time, then wait for the next
//! period (kernel/sched/fair.c, bandwidth control). Unused time is lost. So short work runs at full speed and long work
//! at the quota's share. The rates of a profile with a quota are those without it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Cpu;
use crate::units::Seconds;
use crate::values::{PerFormat, Sourced};

/// The range of a quota's processors. source: kernel/sched/core.c, `tg_set_cfs_bandwidth` takes from 1 ms of 1 s; the
/// upper end is assumed
const CORES: [f64; 2] = [0.01, 1024.0];
/// The range of a quota's period. source: kernel/sched/core.c, `min_bw_quota_period_us`, `max_bw_quota_period_us`
const PERIODS: [f64; 2] = [1e-3, 1.0];

/// The period of a quota that emulates a slow processor.
/// source: docs/decisions/0012: the shortest period with which the duration of long work is within 7 %
pub const PERIOD: Seconds = Seconds(0.01);

/// A quota of processor time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "a quota, such as `{cores: {value: 0.5, source: \"set\"}, period: {value: 10 ms, source: \"set\"}}`"
)]
pub struct Quota {
    /// Processors.
    pub cores: Sourced<f64>,
    /// Period.
    pub period: Sourced<Seconds>,
}

impl Quota {
    /// Whether a number of processors is in the range of a quota.
    pub fn takes(cores: f64) -> bool {
        (CORES[0]..=CORES[1]).contains(&cores)
    }

    pub(super) fn wrong(&self) -> Option<String> {
        let (cores, period) = (self.cores.value, self.period.value.0);
        if !Quota::takes(cores) {
            return Some(format!("`cpu.quota.cores` is {cores}: choose from {} to {}", CORES[0], CORES[1]));
        }
        let within = (PERIODS[0]..=PERIODS[1]).contains(&period);
        (!within).then(|| format!("`cpu.quota.period` is {}: choose from 1 ms to 1 s", self.period.value))
    }
}

impl Cpu {
    /// The processor as long work sees it: slowed by its quota, and without one.
    #[must_use]
    pub fn sustained(&self) -> Cpu {
        let mut slowed = self.clone();
        let Some(quota) = slowed.quota.take() else { return slowed };
        let left = quota.cores.value / f64::from(self.cores.max(1));
        if left >= 1.0 {
            return slowed;
        }
        for rates in [&mut slowed.matvec, &mut slowed.matvec_streamed, &mut slowed.matmul] {
            *rates = rates
                .iter()
                .map(|(format, rate)| (format, rate.map(|rate| *rate * left)))
                .collect::<PerFormat<_>>();
        }
        slowed.read_bandwidth = self.read_bandwidth.map(|rate| *rate * left);
        slowed.attention = self.attention.as_ref().map(|rate| rate.map(|rate| *rate * left));
        for cost in [&mut slowed.layer_overhead, &mut slowed.token_overhead] {
            *cost = cost.as_ref().map(|cost| cost.map(|time| *time * (1.0 / left)));
        }
        slowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::shipped;

    #[test]
    fn sustained_rates_follow_quota() {
        let mut cpu = shipped("d3").unwrap().cpu;
        let plain = cpu.sustained();
        assert_eq!(plain, cpu, "no quota");
        let quota =
            |cores| Quota { cores: Sourced::new(cores, "t"), period: Sourced::new(Seconds(0.01), "t") };
        cpu.quota = Some(quota(f64::from(cpu.cores) / 4.0));
        let slowed = cpu.sustained();
        assert_eq!(slowed.quota, None);
        assert_eq!(slowed.read_bandwidth.value.0, cpu.read_bandwidth.value.0 / 4.0);
        for ((_, slow), (_, fast)) in slowed.matvec.iter().zip(cpu.matvec.iter()) {
            assert_eq!(slow.value.0, fast.value.0 / 4.0);
        }
        cpu.quota = Some(quota(f64::from(cpu.cores) * 2.0));
        assert_eq!(cpu.sustained(), plain, "more than it has slows nothing");
        assert!(
            quota(0.0).wrong().is_some() && quota(f64::NAN).wrong().is_some() && quota(0.5).wrong().is_none()
        );
        let long = Quota { period: Sourced::new(Seconds(2.0), "t"), ..quota(0.5) };
        assert!(long.wrong().is_some_and(|why| why.contains("1 ms to 1 s")));
    }
}
