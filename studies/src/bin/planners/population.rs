//! Evaluates the strategies on many random clusters.
//!
//! Every strategy plans for every instance, under each residency. Under the paper's objective a plan is compared
//! with the optimum, that of `exact`; in the simulator with the fastest plan that any strategy found for that
//! instance and residency.
//!
//! Two statements about the instances are counted beside it: whether any number of rounds but one is ever better
//! under the paper's objective, and whether the few simulated tokens stand for many.
//!
//! Not here: small instances, for which all plans are known ([`crate::regret`]).

use hearth_halda::{Exact, Instance, LatencyModel, Rules, solve, valid_rounds};
use hearth_schema::residency::Residency;
use hearth_schema::scenario::Workload;

use crate::clusters::{self, cluster, memory_ratio, under};
use crate::evaluation::{CHUNK, REFERENCE, Score, WORKLOAD, evaluate_strategy, simulated, strategies};
use crate::gaps::{SAME, gap};

/// Devices may be dropped; every turn of the ring is whole.
pub const SELECTION: Rules = Rules { may_drop: true, may_leave_remainder: false };
/// The residencies that are planned for: one for all devices, or the planner's choice.
pub const RESIDENCIES: [Option<Residency>; 3] = [Some(Residency::Os), Some(Residency::Managed), None];
/// The larger number of tokens, and the number of instances simulated with it.
pub const MANY_TOKENS: u32 = 64;
pub const CHECKED: usize = 40;

/// An instance with the results of all strategies.
pub struct Home {
    pub number: usize,
    pub model: String,
    pub devices: usize,
    pub memory_ratio: f64,
    /// For each residency, each strategy's score, in the order of [`strategies`].
    pub scores: Vec<Vec<Result<Score, String>>>,
    /// T of the best plan with one round, and of the best with more.
    pub one_round: Option<f64>,
    pub more_rounds: Option<f64>,
    /// The simulated time of few tokens and of many, of the reference's plan, for each residency; for the
    /// first instances.
    pub steady: Vec<Option<(f64, f64)>>,
}

impl Home {
    /// T of the optimum, if there is a plan at all.
    pub fn optimum(&self) -> Option<f64> {
        let place = strategies().position(|name| name == REFERENCE)?;
        self.scores[0][place].as_ref().ok().map(|score| score.predicted)
    }

    /// The best simulated time under one of the residencies.
    pub fn fastest(&self, residency: usize) -> Option<f64> {
        let times = self.scores[residency].iter().flatten().filter_map(|score| score.simulated);
        times.min_by(f64::total_cmp)
    }

    /// The gap of a strategy's plan under the paper's objective, if it has a plan.
    pub fn objective_gap(&self, strategy: usize) -> Option<f64> {
        let score = self.scores[0][strategy].as_ref().ok()?;
        Some(gap(Some(score.predicted), self.optimum()?))
    }

    /// The gap of a strategy's plan in the simulator, if it has a plan.
    pub fn simulated_gap(&self, residency: usize, strategy: usize) -> Option<f64> {
        let score = self.scores[residency][strategy].as_ref().ok()?;
        Some(gap(score.simulated, self.fastest(residency)?))
    }

    /// Whether more rounds than one are better under the paper's objective.
    pub fn prefers_rounds(&self) -> bool {
        match (self.one_round, self.more_rounds) {
            (Some(one), Some(more)) => more < one * (1.0 - SAME),
            (None, Some(_)) => true,
            (_, None) => false,
        }
    }
}

pub fn instance(seed: u64, number: usize) -> Result<Home, String> {
    let drawn = cluster(seed, number as u64, WORKLOAD)?;
    let mut scores = Vec::new();
    let mut steady = vec![None; RESIDENCIES.len()];
    for (place, residency) in RESIDENCIES.into_iter().enumerate() {
        let cluster = under(drawn.clone(), residency);
        let problem = Instance::from_cluster(&cluster, None);
        let model = LatencyModel::new(&problem).map_err(|error| error.to_string())?;
        let mut row = Vec::new();
        for strategy in strategies() {
            let answer = evaluate_strategy(&cluster, &model, strategy, SELECTION, CHUNK)?;
            if let (Ok((plan, score)), true) = (&answer, number < CHECKED && strategy == REFERENCE) {
                let mut longer = cluster.clone();
                longer.workload = Workload { generate: MANY_TOKENS, ..WORKLOAD };
                let many = simulated(&longer, plan, CHUNK)?;
                steady[place] = score.simulated.zip(many);
            }
            row.push(answer.map(|(_, score)| score));
        }
        scores.push(row);
    }
    let problem = Instance::from_cluster(&drawn, None);
    let model = LatencyModel::new(&problem).map_err(|error| error.to_string())?;
    let (one_round, more_rounds) = by_rounds(&model);
    Ok(Home {
        number,
        model: drawn.model.name.clone(),
        devices: drawn.members.len(),
        memory_ratio: memory_ratio(&drawn),
        scores,
        one_round,
        more_rounds,
        steady,
    })
}

/// The optimum with one round, and the best of those with more.
fn by_rounds(model: &LatencyModel) -> (Option<f64>, Option<f64>) {
    let optimum = |rounds| {
        let exact = Exact { rules: SELECTION, rounds: Some(rounds), ..Exact::default() };
        solve(&exact, model).ok().map(|solution| solution.seconds())
    };
    let more = valid_rounds(model.model_layers()).into_iter().filter(|rounds| *rounds > 1);
    (optimum(1), more.filter_map(optimum).min_by(f64::total_cmp))
}

pub fn label(residency: Option<Residency>) -> String {
    residency.map_or_else(|| "chosen".to_owned(), |residency| residency.to_string())
}

/// The names of the models that instances are drawn from.
pub fn models() -> String {
    clusters::MODELS.join(", ")
}
