//! Evaluates the strategies on many random clusters.
//!
//! Every strategy plans for every cluster, with each residency policy. By the paper's objective, a plan is compared
//! with the optimum that `exact` finds; in the simulator, with the fastest plan of any strategy for the same cluster
//! and policy.
//!
//! Two properties of the clusters are evaluated too: whether more than one round is ever better by the paper's
//! objective, and whether the few simulated tokens are representative of many.
//!
//! Not here: small instances, for which all plans are simulated ([`crate::regret`]).

use hearth_halda::{Exact, Instance, LatencyModel, Rules, solve, valid_rounds};
use hearth_schema::residency::Residency;
use hearth_schema::scenario::Workload;

use crate::clusters::{self, cluster, memory_ratio, with_residency};
use crate::evaluation::{
    CHUNK_SIZE, REFERENCE_STRATEGY, Score, WORKLOAD, evaluate_strategy, simulate_tpot, strategies,
};
use crate::gaps::{EQUALITY_TOLERANCE, gap};

/// The rules of all plans: devices may be dropped, and every round is complete.
pub const SELECTION_RULES: Rules = Rules { may_drop: true, may_leave_remainder: false };
/// The compared residency policies, each for all devices; with `None` the planner chooses one for each device.
pub const RESIDENCIES: [Option<Residency>; 3] = [Some(Residency::Os), Some(Residency::Managed), None];
/// Number of tokens of the longer simulation.
pub const LONG_RUN_TOKENS: u32 = 64;
/// Number of clusters for which the longer simulation is also run.
pub const CHECKED_CLUSTERS: usize = 40;

/// A random cluster and the scores of all strategies.
pub struct InstanceResult {
    pub number: usize,
    pub model: String,
    pub devices: usize,
    pub memory_ratio: f64,
    /// For each residency policy, the score of each strategy in the order of [`strategies`].
    pub scores: Vec<Vec<Result<Score, String>>>,
    /// Objective T of the best plan with one round, in seconds.
    pub one_round_time: Option<f64>,
    /// Objective T of the best plan with more than one round, in seconds.
    pub more_rounds_time: Option<f64>,
    /// For each residency policy, the simulated times of the plan of [`REFERENCE_STRATEGY`]; `None` unless the cluster
    /// is one of the first [`CHECKED_CLUSTERS`].
    pub steady_state_tpots: Vec<Option<SteadyStateTpot>>,
}

/// The simulated time per token of one plan in a short and in a long run, in seconds.
#[derive(Clone, Copy)]
pub struct SteadyStateTpot {
    /// The time with the tokens of [`WORKLOAD`].
    pub few_tokens: f64,
    /// The time with [`LONG_RUN_TOKENS`] tokens.
    pub many_tokens: f64,
}

impl InstanceResult {
    /// Returns the optimum of the paper's objective in seconds, if there is a plan.
    pub fn optimum(&self) -> Option<f64> {
        let place = strategies().position(|name| name == REFERENCE_STRATEGY)?;
        self.scores[0][place].as_ref().ok().map(|score| score.objective)
    }

    /// Returns the shortest simulated time per token of all strategies with a residency policy, in seconds.
    pub fn fastest_time(&self, residency: usize) -> Option<f64> {
        let times = self.scores[residency].iter().flatten().filter_map(|score| score.simulated_tpot);
        times.min_by(f64::total_cmp)
    }

    /// Returns the gap of a strategy's plan by the paper's objective, if it has a plan.
    pub fn objective_gap(&self, strategy: usize) -> Option<f64> {
        let score = self.scores[0][strategy].as_ref().ok()?;
        Some(gap(Some(score.objective), self.optimum()?))
    }

    /// Returns the gap of a strategy's plan in the simulator, if it has a plan.
    pub fn simulated_gap(&self, residency: usize, strategy: usize) -> Option<f64> {
        let score = self.scores[residency][strategy].as_ref().ok()?;
        Some(gap(score.simulated_tpot, self.fastest_time(residency)?))
    }

    /// Returns whether more than one round is better by the paper's objective.
    pub fn prefers_rounds(&self) -> bool {
        match (self.one_round_time, self.more_rounds_time) {
            (Some(one), Some(more)) => more < one * (1.0 - EQUALITY_TOLERANCE),
            (None, Some(_)) => true,
            (_, None) => false,
        }
    }
}

/// Evaluates all strategies on the random cluster of a seed and a number.
pub fn evaluate(seed: u64, number: usize) -> Result<InstanceResult, String> {
    let random_cluster = cluster(seed, number as u64, WORKLOAD)?;
    let mut scores = Vec::new();
    let mut steady_state_tpots = vec![None; RESIDENCIES.len()];
    for (place, residency) in RESIDENCIES.into_iter().enumerate() {
        let cluster = with_residency(random_cluster.clone(), residency);
        let problem = Instance::from_cluster(&cluster, None);
        let model = LatencyModel::new(&problem).map_err(|error| error.to_string())?;
        let mut row = Vec::new();
        for strategy in strategies() {
            let planned = evaluate_strategy(&cluster, &model, strategy, SELECTION_RULES, CHUNK_SIZE)?;
            if let (Ok((plan, score)), true) =
                (&planned, number < CHECKED_CLUSTERS && strategy == REFERENCE_STRATEGY)
            {
                let mut longer = cluster.clone();
                longer.workload = Workload { generate: LONG_RUN_TOKENS, ..WORKLOAD };
                let many_tokens = simulate_tpot(&longer, plan, CHUNK_SIZE)?;
                let times = score.simulated_tpot.zip(many_tokens);
                steady_state_tpots[place] =
                    times.map(|(few_tokens, many_tokens)| SteadyStateTpot { few_tokens, many_tokens });
            }
            row.push(planned.map(|(_, score)| score));
        }
        scores.push(row);
    }
    let problem = Instance::from_cluster(&random_cluster, None);
    let model = LatencyModel::new(&problem).map_err(|error| error.to_string())?;
    let (one_round_time, more_rounds_time) = best_by_rounds(&model);
    Ok(InstanceResult {
        number,
        model: random_cluster.model.name.clone(),
        devices: random_cluster.members.len(),
        memory_ratio: memory_ratio(&random_cluster),
        scores,
        one_round_time,
        more_rounds_time,
        steady_state_tpots,
    })
}

/// Returns the optimum with one round, and the best optimum with more than one round, in seconds.
fn best_by_rounds(model: &LatencyModel) -> (Option<f64>, Option<f64>) {
    let optimum = |rounds| {
        let exact = Exact { rules: SELECTION_RULES, rounds: Some(rounds), ..Exact::default() };
        solve(&exact, model).ok().map(|solution| solution.seconds())
    };
    let more = valid_rounds(model.model_layers()).into_iter().filter(|rounds| *rounds > 1);
    (optimum(1), more.filter_map(optimum).min_by(f64::total_cmp))
}

/// Returns the name of a residency policy in reports.
pub fn label(residency: Option<Residency>) -> String {
    residency.map_or_else(|| "chosen".to_owned(), |residency| residency.to_string())
}

/// Returns the names of the models of the random clusters.
pub fn models() -> String {
    clusters::MODELS.join(", ")
}
