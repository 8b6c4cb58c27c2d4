//! What did the simulator say of each published run?
//!
//! Filled in by the command line, which plans and simulates; the rest of this folder reads it.
//!
//! Not here: judging it ([`super::scores`]).

use std::collections::BTreeMap;

use hearth_schema::trace::Outcome;
use serde::Serialize;

use super::Ratio;

/// A run of one cell.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Simulated {
    /// How it ended.
    pub outcome: Outcome,
    /// Mean time per output token after the first, in milliseconds.
    pub tpot_ms: Option<f64>,
    /// Time to the first token, in milliseconds.
    pub ttft_ms: Option<f64>,
    /// Energy until the first token, in joules, of a SoC that ran alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy_j: Option<f64>,
    /// Memory pressure by device, as a share.
    pub pressure: BTreeMap<String, f64>,
    /// What each processor's memory holds, in the plan's order.
    pub footprint: Vec<Footprint>,
    /// The plan in short.
    pub plan: String,
    /// What of it has not been checked against a machine.
    pub unvalidated: Vec<String>,
    /// How sure the time per token is, if that was asked for.
    pub spread: Option<Spread>,
}

/// The memory of one processor of one device under a plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Footprint {
    /// The device and its processor, as `d3-gpu`.
    pub place: String,
    /// Weights, keys and values and buffers, whether they fit or not.
    pub bytes: u64,
    /// What a run can have there.
    pub available: u64,
}

/// How far a prediction moves with what it rests on.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Spread {
    /// A tenth of the draws lies below, in milliseconds.
    pub p10_ms: f64,
    /// A tenth lies above.
    pub p90_ms: f64,
    /// How many draws ran out of memory, and so took endlessly.
    pub failed: usize,
    /// Draws.
    pub draws: usize,
    /// The parameters that move it most, with the change of the time when each is moved by its own uncertainty, the
    /// greater of both directions, as a share; endless if the run ends badly then.
    pub sensitive: Vec<(String, f64)>,
}

/// Why a cell could not be run.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Result {
    /// It ran.
    Ran(Simulated),
    /// It has no plan, or its plan cannot be run.
    Refused {
        /// Why.
        refused: String,
    },
}

impl Spread {
    /// The parameters that move the time most, and how much.
    pub fn moved_by(&self) -> String {
        let change = |(name, change): &(String, f64)| {
            if change.is_finite() {
                format!("{name} {:+.0} %", change * 100.0)
            } else {
                format!("{name} to its end")
            }
        };
        let moved: Vec<String> = self.sensitive.iter().map(change).collect();
        if moved.is_empty() { "nothing by itself".to_owned() } else { moved.join(", ") }
    }

    /// For people.
    pub fn in_words(&self) -> String {
        let failed = match self.failed {
            0 => String::new(),
            failed => format!(" ({failed} do not fit into memory)"),
        };
        let (draws, between, moved) = (self.draws, self.between(), self.moved_by());
        format!(
            "  Of {draws} draws of all parameters{failed} eight in ten take {between}.\n  Moved most by {moved}."
        )
    }

    /// The interval; a draw that does not fit takes endlessly.
    pub fn between(&self) -> String {
        let digits = |ms: f64| usize::from(ms < 100.0);
        let show = |ms: f64| format!("{ms:.*}", digits(ms));
        match (self.p10_ms.is_finite(), self.p90_ms.is_finite()) {
            (true, true) => format!("{} to {} ms a token", show(self.p10_ms), show(self.p90_ms)),
            (true, false) => format!("{} ms a token or more, up to endlessly", show(self.p10_ms)),
            (false, _) => "endlessly".to_owned(),
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
        self.compared(Ratio::Tpot)
    }

    /// What two runs are compared by, of one that ended well.
    pub fn compared(&self, by: Ratio) -> Option<f64> {
        let run = self.ran().filter(|run| run.outcome == Outcome::Ok)?;
        match by {
            Ratio::Tpot => run.tpot_ms,
            Ratio::Ttft => run.ttft_ms,
            Ratio::Energy => run.energy_j,
        }
    }
}

/// Every cell that was run, by index of row and system.
pub type Results = BTreeMap<(usize, usize), Result>;
