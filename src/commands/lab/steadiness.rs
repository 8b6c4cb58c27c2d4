//! Whether the machine stayed as it was measured, for each run of a lab.
//!
//! The machine's pace ([`hearth_runtime::profile::pace`]) is taken when its devices are measured, and before and after each
//! run; and during the run, where the system tells it, how much of the processors' time a hypervisor gave to others. Where
//! either changes a predicted time by more than it can bear, the run says nothing about the prediction: a suite starts that
//! lab over, a few times, and what came out of it plays no part in that. Profiles of another pace are not taken from those
//! that were kept.
//!
//! Not here: running ([`super::session`]).

use std::fs;

use hearth_core::metrics::Metrics;
use hearth_runtime::profile::pace;
use serde::{Deserialize, Serialize};

use crate::diagnostics::Failure;

/// A pace that differs by more is another machine's, as far as a profile goes.
/// source: assumed, the error that predictions of a token's time are held to
const ANOTHER: f64 = 0.1;
/// The part of the predicted time per token that a changed pace, or processors that stand still, may move.
/// source: assumed, as much
const BEARABLE: f64 = 0.1;

/// Whether a profile of that pace stands for a machine of this.
pub fn holds(then: f64, now: f64) -> bool {
    (now / then - 1.0).abs() <= ANOTHER
}

/// How the machine computed around a run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Steadiness {
    /// Its pace before and after the run, over that when its devices were measured.
    pub pace: [f64; 2],
    /// The share of all processors' time during the run that a hypervisor gave to others; 0 where none tells it.
    pub stolen: f64,
    /// Whether the predicted time would be the same at these paces, as far as the run computes, and with processors
    /// that stand still for so long.
    pub steady: bool,
}

impl Steadiness {
    /// Of a run in whose predicted time per token processors compute for this share.
    ///
    /// ```text
    /// |computing (1 / pace - 1)| <= 0.1    and    1 / (1 - stolen) - 1 <= 0.1
    /// ```
    ///
    /// A processor that stands still takes no interrupts of disks and links either: what is stolen counts whole.
    fn of(pace: [f64; 2], stolen: f64, computing: f64) -> Steadiness {
        // A pace that is no number bears nothing.
        let bears = |share: f64, pace: f64| (share * (1.0 / pace - 1.0)).abs() <= BEARABLE;
        let steady = pace.iter().all(|&pace| bears(computing, pace)) && bears(1.0, 1.0 - stolen);
        Steadiness { pace, stolen, steady }
    }

    /// What to tell of a machine that changed.
    pub fn warning(&self) -> Option<String> {
        let [before, after] = self.pace;
        (!self.steady).then(|| {
            format!(
                "the machine computed {before:.2} times as fast as when its devices were measured before the run, and \
                 {after:.2} times after it; during it others had {:.0} % of the processors' time",
                self.stolen * 100.0
            )
        })
    }
}

/// Makes a run and watches the machine; `measured` is its pace when the devices were.
pub fn watched<T>(
    measured: f64,
    predicted: &Metrics,
    run: impl FnOnce() -> Result<T, Failure>,
) -> Result<(T, Steadiness), Failure> {
    let computing =
        predicted.tpot_ms.map_or(0.0, |tpot| (predicted.terms_ms.cpu / tpot.mean).clamp(0.0, 1.0));
    let before = now()?;
    let times = ProcessorTimes::now();
    let ran = run()?;
    let stolen = ProcessorTimes::now().zip(times).map_or(0.0, |(now, then)| now.stolen_since(then));
    let pace = [before / measured, now()? / measured];
    Ok((ran, Steadiness::of(pace, stolen, computing)))
}

/// Time of all processors since the system began, in ticks.
/// source: Linux, Documentation/filesystems/proc.rst, 1.7: `/proc/stat`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ProcessorTimes {
    stolen: u64,
    all: u64,
}

impl ProcessorTimes {
    fn now() -> Option<ProcessorTimes> {
        ProcessorTimes::of(&fs::read_to_string("/proc/stat").ok()?)
    }

    /// Of the line of all processors: user, nice, system, idle, iowait, irq, softirq, steal. Guests' time is part of user's.
    fn of(text: &str) -> Option<ProcessorTimes> {
        let times = text.lines().find_map(|line| line.strip_prefix("cpu "))?;
        let times: Vec<u64> =
            times.split_whitespace().take(8).map(|time| time.parse().ok()).collect::<Option<_>>()?;
        Some(ProcessorTimes {
            stolen: *times.get(7)?,
            all: times.iter().try_fold(0, |sum: u64, time| sum.checked_add(*time))?,
        })
    }

    /// The share of the time since then. Neither count runs backwards but by a system's fault.
    fn stolen_since(self, then: ProcessorTimes) -> f64 {
        let [stolen, all] = [(self.stolen, then.stolen), (self.all, then.all)]
            .map(|(now, then)| now.saturating_sub(then) as f64);
        if all > 0.0 { (stolen / all).min(1.0) } else { 0.0 }
    }
}

/// The machine's pace.
pub fn now() -> Result<f64, Failure> {
    Ok(pace().map_err(Failure::running)?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_judged_by_how_much_of_it_computes() {
        let bears = |computing, pace| Steadiness::of(pace, 0.0, computing).steady;
        assert!(bears(1.0, [1.0, 0.96]) && bears(1.0, [1.05, 1.0]));
        assert!(!bears(1.0, [1.0, 0.8]) && !bears(1.0, [1.3, 1.0]));
        assert!(bears(0.1, [0.7, 1.3]), "most of it waits for disks");
        assert!(!bears(0.0, [0.0, 1.0]) && !bears(0.0, [1.0, f64::NAN]), "no pace at all");
        assert!(holds(10.0, 10.9) && !holds(10.0, 8.0));
    }

    #[test]
    fn a_run_is_judged_by_what_others_had_of_the_processors() {
        let bears = |stolen| Steadiness::of([1.0, 1.0], stolen, 0.05).steady;
        assert!(bears(0.0) && bears(0.09));
        assert!(!bears(0.1) && !bears(0.5) && !bears(1.0), "a processor that stands still reads nothing");
        let warned = Steadiness::of([1.0, 1.0], 0.5, 0.05).warning();
        assert!(warned.is_some_and(|text| text.contains("others had 50 %")));
    }

    #[test]
    fn stolen_time_is_the_eighth() {
        let of = ProcessorTimes::of;
        let then =
            of("cpu  10 1 5 100 2 1 1 30 7 7\ncpu0 1 2 3 4 5 6 7 8\n").expect("a line of all processors");
        assert_eq!(then, ProcessorTimes { stolen: 30, all: 150 });
        let now = of("cpu  30 1 5 140 2 1 1 70 9 9").expect("a line of all processors");
        assert!((now.stolen_since(then) - 0.4).abs() < 1e-12);
        assert!(then.stolen_since(now).abs() < 1e-12 && now.stolen_since(now).abs() < 1e-12);
        let none =
            ["", "cpu  1 2 3 4 5 6 7", "cpu  1 2 3 4 5 6 7 x", "cpu  1 2 3 4 5 6 18446744073709551615 8"];
        assert!(none.into_iter().all(|line| of(line).is_none()));
    }
}
