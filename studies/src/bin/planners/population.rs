//! Evaluates the strategies on many random clusters.
//!
//! Every strategy plans for every cluster, with each residency policy. By the prima.cpp paper's objective, a plan is
//! compared with the optimum that `exact` finds; in the simulator, with the fastest plan of any strategy for the same
//! cluster and policy.
//!
//! Two properties of the clusters are evaluated too: whether more than one round is ever better by the paper's
//! objective, and whether the few simulated tokens are representative of many.
//!
//! Not here: small instances, for which all plans are simulated ([`crate::regret`]).

use hearth_core::Cluster;
use hearth_halda::{Exact, Instance, LatencyModel, PlanRules, solve, valid_rounds};
use hearth_schema::residency::Residency;
use hearth_schema::scenario::Workload;
use hearth_studies::Failure;

use crate::clusters::{ClusterFacts, cluster, with_residency};
use crate::evaluation::{
    CHUNK_SIZE, REFERENCE_STRATEGY, Score, WORKLOAD, evaluate_strategies, simulate_tpot, strategies,
};
use crate::gaps::{EQUALITY_TOLERANCE, gap};

/// The rules of all plans: devices may be dropped, and every round is complete.
pub const SELECTION_RULES: PlanRules = PlanRules { may_drop_devices: true, may_have_partial_round: false };
/// The compared residency policies, each for all devices; with `None` the planner chooses one for each device.
pub const RESIDENCIES: [Option<Residency>; 3] = [Some(Residency::Os), Some(Residency::Managed), None];
/// Number of tokens of a long simulation, which checks that few tokens are representative.
pub const LONG_RUN_TOKENS: u32 = 64;
/// Number of clusters for which [`LONG_RUN_TOKENS`] are simulated, too.
pub const LONG_RUN_CLUSTER_COUNT: usize = 40;

pub struct InstanceResult {
    pub facts: ClusterFacts,
    /// For each residency policy, the score of each strategy in the order of [`strategies`].
    pub scores: Vec<Vec<Result<Score, String>>>,
    /// Whether more than one round is better by the prima.cpp paper's objective.
    pub prefers_multiple_rounds: bool,
    /// For each residency policy, how much the simulated time per token of [`REFERENCE_STRATEGY`] differs between
    /// [`WORKLOAD`] and [`LONG_RUN_TOKENS`], as a fraction; `None` after the first [`LONG_RUN_CLUSTER_COUNT`] clusters.
    pub steady_state_differences: Vec<Option<f64>>,
}

impl InstanceResult {
    /// Returns the minimum of the prima.cpp paper's objective in seconds, if there is a plan.
    pub fn optimum(&self) -> Option<f64> {
        self.scores[0][reference_strategy()].as_ref().ok().map(|score| score.objective)
    }

    /// Returns the shortest simulated time per token of all strategies in seconds; `residency` is an index of
    /// [`RESIDENCIES`].
    pub fn fastest_time(&self, residency: usize) -> Option<f64> {
        let times = self.scores[residency].iter().flatten().filter_map(|score| score.simulated_tpot);
        times.min_by(f64::total_cmp)
    }

    pub fn objective_gap(&self, strategy: usize) -> Option<f64> {
        let score = self.scores[0][strategy].as_ref().ok()?;
        Some(gap(Some(score.objective), self.optimum()?))
    }

    pub fn simulated_gap(&self, residency: usize, strategy: usize) -> Option<f64> {
        let score = self.scores[residency][strategy].as_ref().ok()?;
        Some(gap(score.simulated_tpot, self.fastest_time(residency)?))
    }
}

/// Returns the index of [`REFERENCE_STRATEGY`] in the order of [`strategies`].
fn reference_strategy() -> usize {
    strategies().position(|name| name == REFERENCE_STRATEGY).expect("the reference is a strategy")
}

pub fn evaluate(seed: u64, number: usize) -> Result<InstanceResult, Failure> {
    let random_cluster = cluster(seed, number as u64)?;
    let mut scores = Vec::new();
    let mut steady_state_differences = vec![None; RESIDENCIES.len()];
    let reference = reference_strategy();
    for (place, residency) in RESIDENCIES.into_iter().enumerate() {
        let cluster = with_residency(random_cluster.clone(), residency);
        let plans = evaluate_strategies(&cluster, None, SELECTION_RULES, CHUNK_SIZE)?;
        if let (Ok((plan, score)), true) = (&plans[reference], number < LONG_RUN_CLUSTER_COUNT) {
            let workload = Workload { generated_tokens: LONG_RUN_TOKENS, ..WORKLOAD };
            let many_tokens = simulate_tpot(&Cluster { workload, ..cluster }, plan, CHUNK_SIZE)?;
            let times = score.simulated_tpot.zip(many_tokens);
            steady_state_differences[place] = times.map(|(few, many)| (few / many - 1.0).abs());
        }
        scores.push(plans.into_iter().map(|planned| planned.map(|(_, score)| score)).collect());
    }
    let problem = Instance::from_cluster(&random_cluster, None);
    let model = LatencyModel::new(&problem)?;
    Ok(InstanceResult {
        facts: ClusterFacts::new(number, &random_cluster),
        scores,
        prefers_multiple_rounds: prefers_rounds(&model),
        steady_state_differences,
    })
}

fn prefers_rounds(model: &LatencyModel) -> bool {
    let optimum = |rounds| {
        let exact = Exact { rules: SELECTION_RULES, rounds: Some(rounds), ..Exact::default() };
        solve(&exact, model).ok().map(|solution| solution.seconds_per_token())
    };
    let more = valid_rounds(model.model_layers()).into_iter().filter(|rounds| *rounds > 1);
    match (optimum(1), more.filter_map(optimum).min_by(f64::total_cmp)) {
        (Some(one), Some(more)) => more < one * (1.0 - EQUALITY_TOLERANCE),
        (None, Some(_)) => true,
        (_, None) => false,
    }
}

/// Returns the name of a residency policy in reports.
pub fn label(residency: Option<Residency>) -> String {
    residency.map_or_else(|| "chosen".to_owned(), |residency| residency.to_string())
}
