//! Is the machine that runs still the one that was measured?
//!
//! The machine's pace ([`hearth_exec::profile::pace`]) is taken when its devices are measured, and before and after each
//! run. Where it differs by more than a predicted time can bear, the run says nothing about the prediction: a suite starts
//! that lab over, a few times, and what came out of it plays no part in that. Profiles of another pace are not taken from
//! those that were kept.
//!
//! Not here: running ([`super::stage`]).

use hearth_exec::profile::pace;
use hearth_schema::metrics::Metrics;
use serde::{Deserialize, Serialize};

use crate::diagnostics::Failure;

/// A pace that differs by more is another machine's, as far as a profile goes.
/// source: assumed, the error that predictions of a token's time are held to
const ANOTHER: f64 = 0.1;
/// The part of the predicted time per token that a changed pace may move.
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
    /// Whether the predicted time would be the same at these paces, as far as the run computes.
    pub steady: bool,
}

impl Steadiness {
    /// Of a run in whose predicted time per token processors compute for this share.
    fn of(pace: [f64; 2], computing: f64) -> Steadiness {
        let bears = |pace: &f64| (computing * (1.0 / pace - 1.0)).abs() <= BEARABLE;
        Steadiness { pace, steady: pace.iter().all(bears) }
    }

    /// What to tell of a machine that changed.
    pub fn warning(&self) -> Option<String> {
        let [before, after] = self.pace;
        (!self.steady).then(|| {
            format!(
                "the machine computed {before:.2} times as fast as when its devices were measured before the run, and \
                 {after:.2} times after it"
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
    let ran = run()?;
    let pace = [before / measured, now()? / measured];
    Ok((ran, Steadiness::of(pace, computing)))
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
        let bears = |computing, pace| Steadiness::of(pace, computing).steady;
        assert!(bears(1.0, [1.0, 0.96]) && bears(1.0, [1.05, 1.0]));
        assert!(!bears(1.0, [1.0, 0.8]) && !bears(1.0, [1.3, 1.0]));
        assert!(bears(0.1, [0.7, 1.3]), "most of it waits for disks");
        assert!(holds(10.0, 10.9) && !holds(10.0, 8.0));
    }
}
