//! Population study: evaluates the strategies on many random clusters.
//!
//! Every strategy plans for every cluster, with each residency policy. By the prima.cpp paper's objective, a plan is
//! compared with the optimum that `exact` finds; in the simulator, with the fastest plan of any strategy for the same
//! cluster and policy.
//!
//! Two assumptions are checked, too: one round is optimal by the paper's objective, and short runs are representative.
//!
//! Not here: small instances, for which all plans are simulated ([`crate::regret`]).

use hearth_core::Cluster;
use hearth_halda::{ExactSearch, Instance, LatencyModel, PlanRules, solve, valid_rounds};
use hearth_schema::residency::Residency;
use hearth_schema::scenario::Workload;
use hearth_studies::StudyError;

use crate::clusters::{ClusterProperties, generate_cluster, with_residency};
use crate::evaluation::{
    CHUNK_SIZE, PlanEvaluation, REFERENCE_STRATEGY, WORKLOAD, evaluate_strategies, simulate_tpot_seconds,
    strategy_names,
};
use crate::gaps::{EQUALITY_TOLERANCE, optimality_gap};

/// The planning rules of all strategies in this study: devices may be dropped, but no round may be partial.
pub const PLAN_RULES: PlanRules = PlanRules { may_drop_devices: true, may_have_partial_round: false };
/// The compared residency policies, each for all devices; with `None` the planner chooses the policy of each device.
pub const RESIDENCIES: [Option<Residency>; 3] = [Some(Residency::Os), Some(Residency::Managed), None];
/// Number of tokens of a long run, which checks whether a run of a few tokens is representative.
pub const LONG_RUN_TOKENS: u32 = 64;
/// Number of clusters for which a run of [`LONG_RUN_TOKENS`] tokens is simulated, too.
pub const LONG_RUN_CLUSTER_COUNT: usize = 40;

pub struct InstanceResult {
    pub cluster_properties: ClusterProperties,
    /// For each residency policy, the scores of each strategy in the order of [`strategy_names`].
    pub plan_evaluations: Vec<Vec<Result<PlanEvaluation, String>>>,
    /// Whether, by the prima.cpp paper's objective, a plan with several rounds is better than all plans with one round.
    pub prefers_multiple_rounds: bool,
    /// For each residency policy, the relative difference between the simulated times per token of
    /// [`REFERENCE_STRATEGY`] in a run of [`WORKLOAD`] and in a long run; `None` after the first
    /// [`LONG_RUN_CLUSTER_COUNT`] clusters.
    pub long_run_tpot_differences: Vec<Option<f64>>,
}

impl InstanceResult {
    /// Returns the minimum of the prima.cpp paper's objective in seconds; `None` if the instance has no plan.
    pub fn optimal_objective_seconds(&self) -> Option<f64> {
        let score = self.plan_evaluations[0][reference_strategy()].as_ref().ok()?;
        Some(score.paper_objective_seconds)
    }

    /// Returns the shortest simulated time per token in seconds; `residency` is an index of [`RESIDENCIES`].
    pub fn fastest_tpot_seconds(&self, residency: usize) -> Option<f64> {
        let scores = self.plan_evaluations[residency].iter().flatten();
        scores.filter_map(|score| score.simulated_tpot_seconds).min_by(f64::total_cmp)
    }

    pub fn objective_gap(&self, strategy: usize) -> Option<f64> {
        let score = self.plan_evaluations[0][strategy].as_ref().ok()?;
        Some(optimality_gap(Some(score.paper_objective_seconds), self.optimal_objective_seconds()?))
    }

    pub fn simulated_gap(&self, residency: usize, strategy: usize) -> Option<f64> {
        let score = self.plan_evaluations[residency][strategy].as_ref().ok()?;
        Some(optimality_gap(score.simulated_tpot_seconds, self.fastest_tpot_seconds(residency)?))
    }
}

/// Returns the index of [`REFERENCE_STRATEGY`] in the order of [`strategy_names`].
fn reference_strategy() -> usize {
    strategy_names().position(|name| name == REFERENCE_STRATEGY).expect("the reference is a strategy")
}

pub fn evaluate_instance(seed: u64, number: usize) -> Result<InstanceResult, StudyError> {
    let random_cluster = generate_cluster(seed, number as u64)?;
    let mut plan_evaluations = Vec::new();
    let mut long_run_tpot_differences = vec![None; RESIDENCIES.len()];
    let reference = reference_strategy();
    for (place, residency) in RESIDENCIES.into_iter().enumerate() {
        let cluster = with_residency(random_cluster.clone(), residency);
        let plans = evaluate_strategies(&cluster, None, PLAN_RULES, CHUNK_SIZE)?;
        if let (Ok((plan, score)), true) = (&plans[reference], number < LONG_RUN_CLUSTER_COUNT) {
            let workload = Workload { generated_tokens: LONG_RUN_TOKENS, ..WORKLOAD };
            let many_tokens = simulate_tpot_seconds(&Cluster { workload, ..cluster }, plan, CHUNK_SIZE)?;
            let times = score.simulated_tpot_seconds.zip(many_tokens);
            long_run_tpot_differences[place] = times.map(|(few, many)| (few / many - 1.0).abs());
        }
        plan_evaluations.push(plans.into_iter().map(|planned| planned.map(|(_, score)| score)).collect());
    }
    let problem = Instance::from_cluster(&random_cluster, None);
    let model = LatencyModel::new(&problem)?;
    Ok(InstanceResult {
        cluster_properties: ClusterProperties::new(number, &random_cluster),
        plan_evaluations,
        prefers_multiple_rounds: prefers_rounds(&model),
        long_run_tpot_differences,
    })
}

fn prefers_rounds(model: &LatencyModel) -> bool {
    let optimum = |rounds| {
        let exact = ExactSearch { rules: PLAN_RULES, rounds: Some(rounds), ..ExactSearch::default() };
        solve(&exact, model).ok().map(|solution| solution.seconds_per_token())
    };
    let more = valid_rounds(model.model_layers()).into_iter().filter(|rounds| *rounds > 1);
    match (optimum(1), more.filter_map(optimum).min_by(f64::total_cmp)) {
        (Some(one), Some(more)) => more < one * (1.0 - EQUALITY_TOLERANCE),
        (None, Some(_)) => true,
        (_, None) => false,
    }
}

/// Returns the name of a residency policy in the reports.
pub fn residency_label(residency: Option<Residency>) -> String {
    residency.map_or_else(|| "chosen".to_owned(), |residency| residency.to_string())
}
