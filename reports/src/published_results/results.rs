//! Simulated results of the cells of a `published/1` document.
//!
//! Not here: planning and simulating the cells (`hearth_workflow::reproduction`), and comparing the results with the
//! published numbers ([`super::scores`]).

use std::collections::BTreeMap;

use hearth_schema::trace::Outcome;
use serde::Serialize;

use super::ClaimQuantity;

/// The simulated run for one cell (a row and a system) of a `published/1` document.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SimulatedRun {
    pub outcome: Outcome,
    /// Mean time per output token after the first, in milliseconds.
    pub tpot_ms: Option<f64>,
    pub ttft_ms: Option<f64>,
    /// Energy until the first token, in joules; only for a run on a single SoC.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy_j: Option<f64>,
    /// Memory pressure by device, as a share of the memory of the device.
    #[serde(rename = "pressure")]
    pub memory_pressure: BTreeMap<String, f64>,
    /// The memory that the plan needs on each processor, in the order of the plan's devices.
    #[serde(rename = "footprint")]
    pub memory_footprints: Vec<MemoryFootprint>,
    /// The layers of each device and the number of rounds, as text.
    #[serde(rename = "plan")]
    pub plan_summary: String,
    /// Parts of the device profiles that have not been validated on real hardware.
    #[serde(rename = "unvalidated")]
    pub unvalidated_parts: Vec<String>,
    /// The uncertainty of the simulated time per token, if an estimate was requested.
    #[serde(rename = "spread")]
    pub prediction_interval: Option<PredictionInterval>,
}

/// The memory that a plan needs on one processor of a device.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MemoryFootprint {
    /// The device and its processor, such as `d3-gpu`.
    pub processor: String,
    /// Size of weights, KV cache and buffers, even if it exceeds `available_bytes`.
    #[serde(rename = "bytes")]
    pub required_bytes: u64,
    /// The memory that a run can use on this processor.
    #[serde(rename = "available")]
    pub available_bytes: u64,
}

/// The uncertainty of a prediction, from repeated simulations with randomly drawn parameters.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PredictionInterval {
    /// The 10th percentile of the time per token, in milliseconds.
    pub p10_ms: f64,
    /// The 90th percentile of the time per token, in milliseconds.
    pub p90_ms: f64,
    /// Number of repeated simulations that ran out of memory; their time per token counts as infinite.
    #[serde(rename = "failed")]
    pub failed_draw_count: usize,
    #[serde(rename = "draws")]
    pub draw_count: usize,
    /// The parameters with the largest effect on the time per token. Each value is the relative change of this time if
    /// the parameter increases or decreases by its uncertainty, whichever has the larger effect; infinite if the run
    /// then runs out of memory.
    #[serde(rename = "sensitive")]
    pub sensitive_parameters: Vec<(String, f64)>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum CellResult {
    Ran(SimulatedRun),
    /// The cell has no plan, or its plan cannot be simulated.
    Failed {
        /// The reason why there is no result, as text for users.
        #[serde(rename = "refused")]
        reason: String,
    },
}

impl PredictionInterval {
    /// Returns the parameters with the largest effect on the time per token, as text.
    pub fn sensitivities_text(&self) -> String {
        let change = |(name, change): &(String, f64)| {
            let percent = format!("{:+.0} %", change * 100.0);
            let effect = if change.is_finite() { percent.as_str() } else { "out of memory" };
            format!("{name} {effect}")
        };
        let changes: Vec<String> = self.sensitive_parameters.iter().map(change).collect();
        if changes.is_empty() { "no single parameter".to_owned() } else { changes.join(", ") }
    }

    /// Returns the interval from the 10th to the 90th percentile of the time per token, as text.
    pub fn interval_text(&self) -> String {
        let [p10, p90] = [self.p10_ms, self.p90_ms].map(|ms| format!("{ms:.*}", usize::from(ms < 100.0)));
        match (self.p10_ms.is_finite(), self.p90_ms.is_finite()) {
            (true, true) => format!("{p10} to {p90} ms per token"),
            (true, false) => format!("at least {p10} ms per token, or run out of memory"),
            (false, _) => "infinitely long: they run out of memory".to_owned(),
        }
    }
}

impl CellResult {
    /// Returns the simulated run; `None` if the cell has no plan, or its plan cannot be simulated.
    pub fn simulated_run(&self) -> Option<&SimulatedRun> {
        match self {
            CellResult::Ran(simulated) => Some(simulated),
            CellResult::Failed { .. } => None,
        }
    }

    /// Returns the quantity that a claim compares; `None` if the run did not complete.
    pub fn claim_quantity(&self, by: ClaimQuantity) -> Option<f64> {
        let run = self.simulated_run().filter(|run| run.outcome == Outcome::Ok)?;
        match by {
            ClaimQuantity::Tpot => run.tpot_ms,
            ClaimQuantity::Ttft => run.ttft_ms,
            ClaimQuantity::Energy => run.energy_j,
        }
    }
}

#[cfg(test)]
impl SimulatedRun {
    /// Returns a run with these times and this outcome; all other fields are empty.
    pub fn fixture(tpot_ms: Option<f64>, ttft_ms: Option<f64>, outcome: Outcome) -> CellResult {
        CellResult::Ran(Self {
            outcome,
            tpot_ms,
            ttft_ms,
            energy_j: None,
            memory_pressure: BTreeMap::new(),
            memory_footprints: Vec::new(),
            plan_summary: String::new(),
            unvalidated_parts: Vec::new(),
            prediction_interval: None,
        })
    }
}

/// The results of the simulated cells, by the indices of their row and system in the `published/1` document.
pub type CellResults = BTreeMap<(usize, usize), CellResult>;
