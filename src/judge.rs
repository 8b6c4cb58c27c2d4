//! How fast does the simulator say a plan is, where many plans are to be put in order?
//!
//! A few tokens are simulated after the scenario's prompt, and the mean time of those after the first counts, as in
//! a long run. The scenario's limits hold, shares of memory by what the plan gives each device.
//!
//! Not here: the full picture of a run, which is `hearth simulate`.

use hearth_core::Cluster;
use hearth_core::metrics;
use hearth_profiles::Bytes;
use hearth_schema::Plan;
use hearth_schema::Scenario;
use hearth_schema::trace::Outcome;
use serde::Serialize;

use crate::commands::simulate;
use crate::diagnostics::Failure;
use crate::limits;

/// Tokens that are generated to judge a plan.
/// source: measured, a 70B model over four devices; the mean of 7 tokens is within 2 % of that of 15, for each
/// residency
pub const TOKENS: u32 = 8;

/// What a plan comes to.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Judged {
    /// Mean time of a token after the first; absent where none followed the first.
    pub tpot_ms: Option<f64>,
    /// How the run ended.
    pub outcome: Outcome,
    /// Tokens that were generated.
    pub tokens: u32,
}

impl Judged {
    /// Simulates a plan of a scenario.
    pub fn of(plan: &Plan, cluster: &Cluster, scenario: &Scenario) -> Result<Judged, Failure> {
        let mut cluster = cluster.clone();
        let context = plan.context;
        let workload = &mut cluster.workload;
        workload.generate = TOKENS.min(context.saturating_sub(1)).max(1);
        workload.prompt = workload.prompt.min(context.saturating_sub(workload.generate)).max(1);
        let tokens = workload.generate;
        limits::restrict_memory(scenario, &mut cluster, plan, Bytes::ZERO);
        let trace = simulate::simulate(&cluster, plan, scenario, false)?;
        let tpot_ms = metrics::compute(&trace).tpot_ms.map(|tpot| tpot.mean);
        Ok(Judged {
            tpot_ms: tpot_ms.filter(|_| trace.outcome == Outcome::Ok),
            outcome: trace.outcome,
            tokens,
        })
    }
}
