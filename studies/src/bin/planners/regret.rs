//! Regret: compares the plan of each strategy with the fastest of all plans.
//!
//! For small instances all plans are simulated: all windows, GPU layers, valid rounds and selections of devices. The
//! regret of a strategy is the ratio of its simulated time to that of the fastest plan, minus one. All plans satisfy
//! the constraints of the planner with [`PLAN_RULES`], so they include the plans of the strategies. Only a strategy
//! that also chooses residency policies can have other plans; they are added to the comparison.
//!
//! Not here: the accuracy of the simulator.

use hearth_core::Cluster;
use hearth_halda::baselines::exhaustive::for_each_split;
use hearth_halda::{Assignment, Instance, LatencyModel, valid_rounds, violations};
use hearth_schema::residency::Residency;
use hearth_studies::{StudyError, manual_plan};

use crate::clusters::{ClusterProperties, generate_small_cluster, with_residency};
use crate::evaluation::{CHUNK_SIZE, PlanEvaluation, evaluate_strategies, simulate_tpot_seconds};
use crate::population::{PLAN_RULES, RESIDENCIES};

/// The fastest of all plans and the scores of the strategies, for a small instance with one residency policy.
pub struct ExhaustiveSearchResult {
    pub cluster_properties: ClusterProperties,
    /// The residency policy of all devices; `None` if the planner chooses the policy of each device.
    pub residency: Option<Residency>,
    pub plan_count: usize,
    /// The simulated time per token of the fastest plan in seconds, and its number of rounds.
    pub fastest_tpot_and_rounds: Option<(f64, u32)>,
    /// The scores of each strategy, in the order of [`crate::evaluation::strategy_names`].
    pub plan_evaluations: Vec<Result<PlanEvaluation, String>>,
}

/// Returns the results of the small instance with this number, for each residency policy.
pub fn search_exhaustively(seed: u64, number: usize) -> Result<Vec<ExhaustiveSearchResult>, StudyError> {
    let instance = generate_small_cluster(seed, number as u64)?;
    let mut all: Vec<ExhaustiveSearchResult> = Vec::new();
    for residency in RESIDENCIES {
        let mut result = search(&instance, number, residency)?;
        if residency.is_none() {
            // The fastest of all plans with one policy for all devices, and of the plans of the strategies.
            let others = all.iter().filter_map(|other| other.fastest_tpot_and_rounds);
            let plans = others.chain(result.fastest_tpot_and_rounds);
            result.fastest_tpot_and_rounds = plans.min_by(|one, other| one.0.total_cmp(&other.0));
        }
        all.push(result);
    }
    Ok(all)
}

fn search(
    small: &Cluster,
    number: usize,
    residency: Option<Residency>,
) -> Result<ExhaustiveSearchResult, StudyError> {
    let cluster = with_residency(small.clone(), residency);
    let problem = Instance::from_cluster(&cluster, None);
    let model = LatencyModel::new(&problem)?;
    let assignments = if residency.is_some() { all_assignments(&model) } else { Vec::new() };
    let (plan_count, mut fastest_plan) = (assignments.len(), None);
    for Assignment { rounds, window_layers, gpu_layers, .. } in assignments {
        let plan = manual_plan(&cluster, rounds, &window_layers, &gpu_layers);
        if let Some(seconds) = simulate_tpot_seconds(&cluster, &plan, CHUNK_SIZE)?
            && fastest_plan.is_none_or(|(best, _)| seconds < best)
        {
            fastest_plan = Some((seconds, rounds));
        }
    }
    let plans = evaluate_strategies(&cluster, None, PLAN_RULES, CHUNK_SIZE)?;
    let scores: Vec<_> = plans.into_iter().map(|planned| planned.map(|(_, score)| score)).collect();
    // A strategy may choose a stream buffer, or a policy for each device, and so be faster than all of these plans.
    for score in scores.iter().flatten() {
        let own = score.simulated_tpot_seconds.map(|seconds| (seconds, score.rounds));
        fastest_plan = fastest_plan.into_iter().chain(own).min_by(|one, other| one.0.total_cmp(&other.0));
    }
    Ok(ExhaustiveSearchResult {
        cluster_properties: ClusterProperties::new(number, &cluster),
        residency,
        plan_count,
        fastest_tpot_and_rounds: fastest_plan,
        plan_evaluations: scores,
    })
}

/// Returns all assignments, with the first device as the head, that [`PLAN_RULES`] and the latency model allow.
fn all_assignments(model: &LatencyModel) -> Vec<Assignment> {
    let devices = model.device_count();
    let mut found = Vec::new();
    for rounds in valid_rounds(model.model_layers()) {
        let mut plan = Assignment::new(0, rounds, vec![0; devices], vec![0; devices]);
        for_each_split(&mut plan, 0, model.model_layers() / rounds, &mut |plan| {
            if violations(model, plan, PLAN_RULES).is_empty() {
                found.push(plan.clone());
            }
        });
    }
    found
}
