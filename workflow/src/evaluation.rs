//! Plans and simulates a cluster, and returns the metrics by which runs are compared.
//!
//! The rows of a sweep and the variants of `hearth whatif` are evaluated here in the same way as the run of `hearth
//! simulate`: with the same planner or a given plan, the limits and events of the scenario, and the same simulator. An
//! error becomes the outcome of the evaluation, which keeps the results before the error: the plan of a run that ends
//! out of memory is kept.

use hearth_core::{Cluster, metrics};
use hearth_profiles::Bytes;
use hearth_schema::Plan;
use hearth_schema::trace::Outcome;
use hearth_sim::{ScenarioEvents, SimulationResult};
use serde::Serialize;

use crate::simulation::{MemoryOptions, simulate_with_events};
use crate::{Error, ErrorKind, LoadedScenario, ScenarioReplanner, SearchBudget, limits, planning};

/// Simulates a plan with the limits and events of its scenario. If a device is lost, a new plan is made.
pub fn simulate_scenario(
    loaded: &LoadedScenario,
    mut cluster: Cluster,
    plan: &Plan,
) -> Result<SimulationResult, Error> {
    let scenario = &loaded.scenario;
    limits::apply_memory_limits(scenario, &mut cluster, plan, Bytes::ZERO);
    let replanner = ScenarioReplanner::new(loaded);
    let events = ScenarioEvents { events: &scenario.events, replanner: Some(&replanner), adapts: false };
    simulate_with_events(&cluster, plan, scenario, MemoryOptions::default(), &events)
}

/// The result of planning and simulating a cluster. Unknown values are `None`.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Evaluation {
    pub strategy: Option<String>,
    pub rounds: Option<u32>,
    /// The devices in ring order, each with the number of layers in its window and, in brackets, of its GPU layers.
    pub windows: Option<String>,
    /// Mean time of the tokens after the first, in milliseconds.
    pub tpot_ms: Option<f64>,
    /// Time to the first token, in milliseconds.
    pub ttft_ms: Option<f64>,
    /// 95th percentile of the time to the first token of requests that arrive during the run, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttft_p95_ms: Option<f64>,
    /// 95th percentile of the time between their tokens, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub itl_p95_ms: Option<f64>,
    /// Generated tokens per second, without the first token.
    pub tokens_per_s: Option<f64>,
    /// Bytes that all devices together read from disk per token, without the first token.
    pub bytes_read_per_token: Option<f64>,
    /// Maximum memory pressure of a device: its unreclaimable bytes divided by its total memory.
    pub memory_pressure: Option<f64>,
    /// `ok`, or the reason why there is no plan or the run did not succeed.
    pub outcome: String,
}

impl Evaluation {
    /// Evaluates a cluster: makes a plan if `given_plan` is `None`, and simulates the plan.
    pub fn new(loaded: &LoadedScenario, mut cluster: Cluster, given_plan: Option<&Plan>) -> Self {
        limits::apply_absolute_memory_limits(&loaded.scenario, &mut cluster);
        let make = || planning::make_plan(loaded, &cluster, &loaded.scenario.planner, SearchBudget::NONE);
        let plan = match given_plan.cloned().map_or_else(make, Ok) {
            Ok(plan) => plan,
            Err(error) => {
                return Self::default().with_outcome(&format!("no plan: {}", error.one_line_message()));
            }
        };
        let planned = Self {
            strategy: Some(plan.planner.strategy.clone()),
            rounds: Some(plan.rounds),
            windows: Some(windows(&plan)),
            ..Self::default()
        };
        let metrics = match simulate_scenario(loaded, cluster, &plan) {
            Ok(run) => metrics::compute_metrics(&run.trace),
            Err(error) => {
                let word = if error.kind() == ErrorKind::Invalid { "refused" } else { "failed" };
                return planned.with_outcome(&format!("{word}: {}", error.one_line_message()));
            }
        };
        let ended = planned.with_outcome(metrics.outcome.label());
        if metrics.outcome != Outcome::Ok {
            return ended;
        }
        Self {
            tpot_ms: metrics.tpot_ms.map(|tpot| tpot.mean_ms),
            ttft_ms: metrics.ttft_ms,
            ttft_p95_ms: metrics.requests.as_ref().map(|requests| requests.ttft_ms.p95),
            itl_p95_ms: metrics.requests.as_ref().and_then(|requests| Some(requests.itl_ms?.p95)),
            tokens_per_s: metrics.tokens_per_s,
            bytes_read_per_token: metrics.bytes_read_per_token(),
            memory_pressure: metrics.devices.iter().map(|device| device.memory_pressure).reduce(f64::max),
            ..ended
        }
    }

    /// Returns the evaluation of an input that is invalid for the given reason, so it is not planned.
    pub fn rejected(reason: &str) -> Self {
        Self::default().with_outcome(&format!("refused: {reason}"))
    }

    /// Sets the outcome, with line breaks replaced by spaces because the outcome is a cell of a table.
    fn with_outcome(self, outcome: &str) -> Self {
        Self { outcome: outcome.replace('\n', " "), ..self }
    }

    /// Returns whether the run succeeded.
    pub fn is_ok(&self) -> bool {
        self.outcome == Outcome::Ok.label()
    }
}

/// Returns the devices in ring order, each with the number of layers of its window and, in brackets, of its GPU.
fn windows(plan: &Plan) -> String {
    let words = plan.devices.iter().map(|device| match device.gpu_layers {
        0 => format!("{} {}", device.name, device.window),
        gpu => format!("{} {} ({gpu})", device.name, device.window),
    });
    words.collect::<Vec<_>>().join("; ")
}
