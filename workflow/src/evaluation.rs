//! Plans and simulates a cluster, and reduces the result to the few numbers by which many runs are compared.
//!
//! The rows of a sweep and the variants of `hearth whatif` are made here in the same way as the answer of `hearth
//! simulate`: the same planner or a given plan, the scenario's limits and events, the same simulator. An error is an
//! outcome, and everything known before it is kept: a run that ends out of memory had a plan.

use hearth_core::metrics::Metrics;
use hearth_core::{Cluster, metrics};
use hearth_profiles::Bytes;
use hearth_schema::Plan;
use hearth_schema::trace::Outcome;
use hearth_sim::{Disturbances, Run};
use serde::Serialize;

use crate::simulation::{MemoryOptions, simulate_with};
use crate::{Budget, Error, ErrorKind, LoadedScenario, MidRunPlanner, limits, planning};

/// Runs a plan in the simulator as its scenario says: within its limits, while its events happen, planning again when a
/// device is lost.
pub fn run_scenario(loaded: &LoadedScenario, mut cluster: Cluster, plan: &Plan) -> Result<Run, Error> {
    let scenario = &loaded.scenario;
    limits::restrict_memory(scenario, &mut cluster, plan, Bytes::ZERO);
    let replanner = MidRunPlanner::new(loaded);
    let disturbances = Disturbances { events: &scenario.events, replanner: Some(&replanner) };
    simulate_with(&cluster, plan, scenario, MemoryOptions::default(), &disturbances)
}

/// The result of planning and simulating; what is not known is absent.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Evaluation {
    pub strategy: Option<String>,
    pub rounds: Option<u32>,
    /// Each device and its window in ring order, GPU layers in brackets.
    pub windows: Option<String>,
    /// Mean time of a token after the first.
    pub tpot_ms: Option<f64>,
    /// Time to the first token.
    pub ttft_ms: Option<f64>,
    /// Tokens after the first, per second.
    pub tokens_per_s: Option<f64>,
    /// What all devices read from disk for a token after the first.
    pub bytes_read_per_token: Option<f64>,
    /// The largest share of a device's memory that cannot be reclaimed.
    pub memory_pressure: Option<f64>,
    /// `ok`, or what went wrong.
    pub outcome: String,
}

impl Evaluation {
    /// Evaluates a cluster: plans it, unless a plan is given, and simulates the plan.
    pub fn new(loaded: &LoadedScenario, mut cluster: Cluster, given: Option<&Plan>) -> Self {
        limits::bound_memory(&loaded.scenario, &mut cluster);
        let made = given.map_or_else(
            || planning::make(loaded, &cluster, &loaded.scenario.planner, Budget::NONE),
            |plan| Ok(plan.clone()),
        );
        let plan = match made {
            Ok(plan) => plan,
            Err(error) => return Self::default().ended(&format!("no plan: {}", error.what())),
        };
        let planned = Self {
            strategy: Some(plan.planner.strategy.clone()),
            rounds: Some(plan.rounds),
            windows: Some(windows(&plan)),
            ..Self::default()
        };
        match run_scenario(loaded, cluster, &plan) {
            Ok(run) => planned.with_metrics(&metrics::compute(&run.trace)),
            Err(error) => {
                let word = if error.kind() == ErrorKind::Invalid { "refused" } else { "failed" };
                planned.ended(&format!("{word}: {}", error.what()))
            }
        }
    }

    /// The result where the input was refused before planning.
    pub fn refused(why: &str) -> Self {
        Self::default().ended(&format!("refused: {why}"))
    }

    /// Sets the outcome, which is a cell of a table and so has one line.
    fn ended(self, outcome: &str) -> Self {
        Self { outcome: outcome.replace('\n', " "), ..self }
    }

    /// Adds the numbers of a run that ended well.
    fn with_metrics(self, metrics: &Metrics) -> Self {
        let ended = self.ended(metrics.outcome.word());
        if metrics.outcome != Outcome::Ok {
            return ended;
        }
        Self {
            tpot_ms: metrics.tpot_ms.map(|tpot| tpot.mean),
            ttft_ms: metrics.ttft_ms,
            tokens_per_s: metrics.tokens_per_s,
            bytes_read_per_token: metrics.bytes_read_per_token(),
            memory_pressure: metrics.devices.iter().map(|device| device.memory_pressure).reduce(f64::max),
            ..ended
        }
    }

    /// Returns whether the run ended well.
    pub fn is_ok(&self) -> bool {
        self.outcome == Outcome::Ok.word()
    }
}

fn windows(plan: &Plan) -> String {
    let words = plan.devices.iter().map(|device| match device.gpu_layers {
        0 => format!("{} {}", device.name, device.window),
        gpu => format!("{} {} ({gpu})", device.name, device.window),
    });
    words.collect::<Vec<_>>().join("; ")
}
