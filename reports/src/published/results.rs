//! Simulated results of the published runs.
//!
//! The command line, which plans and simulates, fills them in.
//!
//! Not here: their comparison with the published numbers ([`super::scores`]).

use std::collections::BTreeMap;

use hearth_schema::trace::Outcome;
use serde::Serialize;

use super::Ratio;

/// The simulated run of one cell.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Simulated {
    pub outcome: Outcome,
    /// Mean time per output token after the first, in milliseconds.
    pub tpot_ms: Option<f64>,
    pub ttft_ms: Option<f64>,
    /// Energy until the first token, in joules, of a SoC that ran alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy_j: Option<f64>,
    /// Memory pressure by device, as a share.
    pub pressure: BTreeMap<String, f64>,
    /// The memory of each processor, in the plan's order.
    pub footprint: Vec<Footprint>,
    pub plan: String,
    /// Parts of the system that have not been validated against real hardware.
    pub unvalidated: Vec<String>,
    /// The uncertainty of the time per token, if requested.
    pub spread: Option<Spread>,
}

/// The memory of one processor of one device under a plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Footprint {
    /// The device and its processor, as `d3-gpu`.
    pub processor: String,
    /// Weights, KV cache and buffers, whether they fit or not.
    pub bytes: u64,
    /// The memory that a run can use there.
    pub available: u64,
}

/// The uncertainty of a prediction, from draws of all parameters.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Spread {
    /// The 10th percentile in milliseconds.
    pub p10_ms: f64,
    pub p90_ms: f64,
    /// Draws that ran out of memory, which count as infinitely long.
    pub failed: usize,
    pub draws: usize,
    /// The parameters with the largest effect, with the relative change of the time when each is changed by its own
    /// uncertainty (the larger of both directions); infinite if the run then runs out of memory.
    pub sensitive: Vec<(String, f64)>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Result {
    Ran(Simulated),
    /// There is no plan, or its plan cannot be simulated.
    Refused {
        refused: String,
    },
}

impl Spread {
    /// The parameters with the largest effect on the time, in words.
    pub fn sensitivities(&self) -> String {
        let change = |(name, change): &(String, f64)| {
            if change.is_finite() {
                format!("{name} {:+.0} %", change * 100.0)
            } else {
                format!("{name} out of memory")
            }
        };
        let changes: Vec<String> = self.sensitive.iter().map(change).collect();
        if changes.is_empty() { "no single parameter".to_owned() } else { changes.join(", ") }
    }

    pub fn summary(&self) -> String {
        let failed = match self.failed {
            0 => String::new(),
            failed => format!(" ({failed} do not fit in memory)"),
        };
        let (draws, interval, changes) = (self.draws, self.interval(), self.sensitivities());
        format!(
            "  80 % of {draws} draws of all parameters{failed} take {interval}.\n  Most sensitive to {changes}."
        )
    }

    /// The 80 % interval in words; a draw that does not fit in memory counts as infinitely long.
    pub fn interval(&self) -> String {
        let digits = |ms: f64| usize::from(ms < 100.0);
        let show = |ms: f64| format!("{ms:.*}", digits(ms));
        match (self.p10_ms.is_finite(), self.p90_ms.is_finite()) {
            (true, true) => format!("{} to {} ms per token", show(self.p10_ms), show(self.p90_ms)),
            (true, false) => format!("at least {} ms per token, or run out of memory", show(self.p10_ms)),
            (false, _) => "infinitely long: they run out of memory".to_owned(),
        }
    }
}

impl Result {
    /// The run, if there was one.
    pub fn ran(&self) -> Option<&Simulated> {
        match self {
            Result::Ran(simulated) => Some(simulated),
            Result::Refused { .. } => None,
        }
    }

    /// The time per token of a run that ended well, in milliseconds.
    pub fn tpot_ms(&self) -> Option<f64> {
        self.quantity(Ratio::Tpot)
    }

    /// The quantity of a claim, of a run that ended well.
    pub fn quantity(&self, by: Ratio) -> Option<f64> {
        let run = self.ran().filter(|run| run.outcome == Outcome::Ok)?;
        match by {
            Ratio::Tpot => run.tpot_ms,
            Ratio::Ttft => run.ttft_ms,
            Ratio::Energy => run.energy_j,
        }
    }
}

#[cfg(test)]
impl Simulated {
    /// A run without memory and plan.
    pub fn fixture(tpot_ms: Option<f64>, ttft_ms: Option<f64>, outcome: Outcome) -> Result {
        let (pressure, footprint, unvalidated) = (BTreeMap::new(), Vec::new(), Vec::new());
        Result::Ran(Self {
            outcome,
            tpot_ms,
            ttft_ms,
            energy_j: None,
            pressure,
            footprint,
            plan: String::new(),
            unvalidated,
            spread: None,
        })
    }
}

/// Every cell that was run, by index of row and system.
pub type Results = BTreeMap<(usize, usize), Result>;
