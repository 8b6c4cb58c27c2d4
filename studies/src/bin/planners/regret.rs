//! Regret of each strategy against the best of all plans.
//!
//! On small instances every plan is simulated: all windows, all GPU splits, all valid rounds, all choices of
//! devices. The regret of a strategy is its simulated time over the fastest of all plans, less one. The plans
//! keep to the named constraints, so that a strategy's plan is one of them, unless it chooses a residency; such plans
//! are added to them.
//!
//! Not here: whether the simulator is right.

use hearth_core::Cluster;
use hearth_halda::baselines::exhaustive::for_each_split;
use hearth_halda::{Assignment, Instance, LatencyModel, valid_rounds, violations};
use hearth_schema::residency::Residency;
use hearth_studies::manual_plan;

use crate::clusters::{memory_ratio, small, under};
use crate::evaluation::{CHUNK, SMALL_WORKLOAD, Score, evaluate_strategy, simulated, strategies};
use crate::population::{RESIDENCIES, SELECTION};

/// A small instance under one residency, with the fastest of all its plans.
pub struct Searched {
    pub number: usize,
    pub model: String,
    pub devices: usize,
    pub memory_ratio: f64,
    /// How devices keep their weights, if the planner does not choose.
    pub residency: Option<Residency>,
    /// How many plans were simulated.
    pub plans: usize,
    /// The best simulated time, and the number of rounds that gives it.
    pub fastest: Option<(f64, u32)>,
    /// Each strategy's score, in the order of [`strategies`].
    pub scores: Vec<Result<Score, String>>,
}

/// The small instance of a number, under each residency.
pub fn searched(seed: u64, number: usize) -> Result<Vec<Searched>, String> {
    let drawn = small(seed, number as u64, SMALL_WORKLOAD)?;
    let mut all: Vec<Searched> = Vec::new();
    for residency in RESIDENCIES {
        let mut searched = search(&drawn, number, residency)?;
        if residency.is_none() {
            // All plans with one residency for all, and those of the strategies.
            let fastest = all.iter().filter_map(|other| other.fastest).chain(searched.fastest);
            searched.fastest = fastest.min_by(|one, other| one.0.total_cmp(&other.0));
        }
        all.push(searched);
    }
    Ok(all)
}

fn search(drawn: &Cluster, number: usize, residency: Option<Residency>) -> Result<Searched, String> {
    let cluster = under(drawn.clone(), residency);
    let problem = Instance::from_cluster(&cluster, None);
    let model = LatencyModel::new(&problem).map_err(|error| error.to_string())?;
    let (mut plans, mut fastest) = (0, None);
    let every = if residency.is_some() { assignments(&model) } else { Vec::new() };
    for assignment in every {
        plans += 1;
        let Assignment { rounds, window_layers, gpu_layers, .. } = &assignment;
        let plan = manual_plan(&cluster, *rounds, window_layers, gpu_layers);
        if let Some(seconds) = simulated(&cluster, &plan, CHUNK)?
            && fastest.is_none_or(|(best, _)| seconds < best)
        {
            fastest = Some((seconds, assignment.rounds));
        }
    }
    let mut scores = Vec::new();
    for strategy in strategies() {
        let answer = evaluate_strategy(&cluster, &model, strategy, SELECTION, CHUNK)?;
        scores.push(answer.map(|(_, score)| score));
    }
    // A strategy may choose a stream buffer, or a residency for each device, and be faster than all of them.
    for score in scores.iter().flatten() {
        let own = score.simulated.map(|seconds| (seconds, score.rounds));
        fastest = fastest.into_iter().chain(own).min_by(|one, other| one.0.total_cmp(&other.0));
    }
    Ok(Searched {
        number,
        model: cluster.model.name.clone(),
        devices: cluster.members.len(),
        memory_ratio: memory_ratio(&cluster),
        residency,
        plans,
        fastest,
        scores,
    })
}

/// Every assignment with the first device as head that breaks no constraint.
fn assignments(model: &LatencyModel) -> Vec<Assignment> {
    let devices = model.device_count();
    let mut found = Vec::new();
    for rounds in valid_rounds(model.model_layers()) {
        let mut plan = Assignment::new(0, rounds, vec![0; devices], vec![0; devices]);
        for_each_split(&mut plan, 0, model.model_layers() / rounds, &mut |plan| {
            if violations(model, plan, SELECTION).is_empty() {
                found.push(plan.clone());
            }
        });
    }
    found
}
