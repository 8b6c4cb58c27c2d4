//! What comes of a cluster that is planned and then simulated, in the few numbers by which many are compared?
//!
//! A sweep's rows and the variants of `hearth whatif` are made here, as `hearth simulate` makes its answer: the same
//! planner or a plan given, the scenario's limits and events, the same simulator. What goes wrong is the outcome, and
//! what was known before it is kept: a run that ends out of memory had a plan.
//!
//! Not here: which clusters are tried ([`crate::sweep`], [`crate::variants`]).

use hearth_core::Cluster;
use hearth_core::metrics;
use hearth_core::metrics::Metrics;
use hearth_schema::Plan;
use hearth_schema::trace::Outcome;
use serde::Serialize;

use crate::commands::{plan, simulate};
use crate::diagnostics::UNUSABLE;
use crate::documents::LoadedScenario;
use crate::limits;
use crate::refinement::Effort;

/// What came of it; what is not known is absent.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Attempt {
    /// Who made the plan.
    pub strategy: Option<String>,
    /// Rounds around the ring.
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

impl Attempt {
    /// Plans, unless a plan is given, and simulates.
    pub fn of(loaded: &LoadedScenario, mut cluster: Cluster, given: Option<&Plan>, effort: Effort) -> Self {
        limits::bound_memory(&loaded.scenario, &mut cluster);
        let made = given.map_or_else(
            || plan::make(loaded, &cluster, &loaded.scenario.planner, effort),
            |plan| Ok(plan.clone()),
        );
        let plan = match made {
            Ok(plan) => plan,
            Err(failure) => return Self::default().ended(&format!("no plan: {}", failure.reason())),
        };
        let planned = Self {
            strategy: Some(plan.planner.strategy.clone()),
            rounds: Some(plan.rounds),
            windows: Some(windows(&plan)),
            ..Self::default()
        };
        match simulate::as_it_says(loaded, cluster, &plan, effort) {
            Ok(run) => planned.ran(&metrics::compute(&run.trace)),
            Err(failure) => {
                let word = if failure.code == UNUSABLE { "refused" } else { "failed" };
                planned.ended(&format!("{word}: {}", failure.reason()))
            }
        }
    }

    /// It came to nothing before it was planned.
    pub fn refused(why: &str) -> Self {
        Self::default().ended(&format!("refused: {why}"))
    }

    /// A cell of a table is a line.
    fn ended(self, outcome: &str) -> Self {
        Self { outcome: outcome.replace('\n', " "), ..self }
    }

    /// With the numbers of a run, if it came to its end.
    fn ran(self, metrics: &Metrics) -> Self {
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

    /// Whether a run came to its end.
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
