//! Scores a plan by the time per token in a short simulated run, so that many plans can be compared.
//!
//! The run generates a few tokens after the prompt of the scenario. The score is the mean time of the tokens after the
//! first one, which estimates the mean time in a long run. The limits of the scenario apply; a limit as a share of the
//! weights is computed from the layers that the plan assigns to the device.

use hearth_core::{Cluster, metrics};
use hearth_profiles::Bytes;
use hearth_schema::trace::Outcome;
use hearth_schema::{Plan, Scenario};
use serde::Serialize;

use crate::{Error, limits, simulation};

/// Number of tokens that a run generates to score a plan. source: measured with a 70B model on four devices: the mean
/// time of 7 tokens is within 2 % of the mean time of 15 tokens with each residency policy
pub const SCORE_TOKENS: u32 = 8;

/// The result of a short simulated run of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PlanScore {
    /// Mean time of the tokens after the first one, in milliseconds; `None` if the run failed or has only one token.
    pub tpot_ms: Option<f64>,
    pub outcome: Outcome,
    #[serde(rename = "tokens")]
    pub generated_tokens: u32,
}

/// Returns a copy of a cluster whose workload starts when the run begins, and generates at most the tokens that a score
/// needs.
pub fn with_short_run(cluster: &Cluster) -> Cluster {
    let mut short = cluster.clone();
    short.workload.arrivals = None;
    short.workload.generated_tokens = short.workload.generated_tokens.min(SCORE_TOKENS);
    short
}

/// Scores a plan of a scenario in a short run. The memory limits of the scenario are applied to a copy of the cluster.
pub fn score_plan(plan: &Plan, cluster: &Cluster, scenario: &Scenario) -> Result<PlanScore, Error> {
    let mut cluster = cluster.clone();
    let context = plan.context_length;
    let workload = &mut cluster.workload;
    workload.arrivals = None;
    workload.generated_tokens = SCORE_TOKENS.min(context.saturating_sub(1)).max(1);
    workload.prompt_tokens =
        workload.prompt_tokens.min(context.saturating_sub(workload.generated_tokens)).max(1);
    let generated_tokens = workload.generated_tokens;
    limits::apply_memory_limits(scenario, &mut cluster, plan, Bytes::ZERO);
    let trace = simulation::simulate(&cluster, plan, scenario, false)?;
    let outcome = trace.outcome;
    let tpot = metrics::compute_metrics(&trace).tpot_ms.filter(|_| outcome == Outcome::Ok);
    Ok(PlanScore { tpot_ms: tpot.map(|tpot| tpot.mean_ms), outcome, generated_tokens })
}
