//! Plan evaluation: scores the plan of each strategy for one cluster.
//!
//! A plan is scored by the objective of the prima.cpp paper (T), which is the same for all strategies, and by the
//! simulator, which does not use this objective. Only a few tokens are simulated, with coarse chunks. The weights are
//! on disk at the start, and the first token, which loads the weights, is not counted.
//!
//! Not here: the clusters ([`crate::clusters`]) and the statistics over many scores ([`crate::population`]).

use hearth_core::{Cluster, metrics};
use hearth_halda::registry::{STRATEGY_NAMES, StrategyOptions};
use hearth_halda::{
    Instance, LatencyModel, PlanRules, Solution, exo_memory_by_device, solve_within_memory, strategy_by_name,
};
use hearth_profiles::{Bytes, BytesPerSecond};
use hearth_schema::Plan;
use hearth_schema::plan::ScenarioRecord;
use hearth_schema::scenario::Workload;
use hearth_studies::StudyError;

/// The simulated workload: so few tokens that the simulation of a plan takes only tens of milliseconds.
pub const WORKLOAD: Workload = Workload::new(1, 16);
/// The simulated workload of small instances, for which many plans are simulated.
pub const SMALL_WORKLOAD: Workload = Workload::new(1, 8);
/// The chunk size of the simulated page cache.
pub const CHUNK_SIZE: Bytes = Bytes::from_mib(4);
/// The strategy whose plan is the optimum of the prima.cpp paper's objective.
pub const REFERENCE_STRATEGY: &str = "exact";

/// The scores of a plan by the prima.cpp paper's objective and by the simulator.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanEvaluation {
    pub rounds: u32,
    pub device_count: usize,
    /// Time per token by the prima.cpp paper's objective (T), in seconds.
    pub paper_objective_seconds: f64,
    /// Time per token by the strategy's own objective, in seconds.
    pub strategy_objective_seconds: f64,
    /// Simulated time per output token, in seconds; `None` if the run ends out of memory.
    pub simulated_tpot_seconds: Option<f64>,
}

/// Returns the names of all strategies except `manual`, which needs windows, and `exhaustive`, which is too slow.
pub fn strategy_names() -> impl Iterator<Item = &'static str> {
    STRATEGY_NAMES.into_iter().filter(|name| !matches!(*name, "manual" | "exhaustive"))
}

/// The plan of a strategy and its scores, or the reason why the strategy has no plan.
pub type PlanResult = Result<(Plan, PlanEvaluation), String>;

/// Runs and scores every strategy, in the order of [`strategy_names`]. The outer `Err` means a defect of the program.
pub fn evaluate_strategies(
    cluster: &Cluster,
    slow_disk: Option<BytesPerSecond>,
    rules: PlanRules,
    chunk: Bytes,
) -> Result<Vec<PlanResult>, StudyError> {
    let problem = Instance::from_cluster(cluster, slow_disk);
    let model = LatencyModel::new(&problem)?;
    strategy_names().map(|strategy| evaluate_strategy(cluster, &model, strategy, rules, chunk)).collect()
}

fn evaluate_strategy(
    cluster: &Cluster,
    model: &LatencyModel,
    strategy: &str,
    rules: PlanRules,
    chunk: Bytes,
) -> Result<PlanResult, StudyError> {
    let (head, total_bytes_by_device) = (Some(0), Some(exo_memory_by_device(cluster)));
    let options = StrategyOptions { rules, head, total_bytes_by_device, ..StrategyOptions::default() };
    let (solution, plan) = match make_plan(cluster, model, strategy, &options)? {
        Ok(made) => made,
        Err(refusal) => return Ok(Err(refusal)),
    };
    let score = PlanEvaluation {
        rounds: plan.rounds,
        device_count: plan.devices.len(),
        paper_objective_seconds: model.evaluate(&solution.assignment)?.seconds_per_token,
        strategy_objective_seconds: solution.seconds_per_token(),
        simulated_tpot_seconds: simulate_tpot_seconds(cluster, &plan, chunk)?,
    };
    Ok(Ok((plan, score)))
}

/// Makes the plan of a strategy. The outer `Err` means a defect of the program, the inner one that there is no plan.
pub fn make_plan(
    cluster: &Cluster,
    model: &LatencyModel,
    strategy: &str,
    options: &StrategyOptions,
) -> Result<Result<(Solution, Plan), String>, StudyError> {
    let strategy = match strategy_by_name(strategy, options) {
        Ok(strategy) => strategy,
        Err(error) => return Ok(Err(error.to_string())),
    };
    let solution = match solve_within_memory(strategy.as_ref(), model) {
        Ok(solution) => solution,
        Err(refusal) => return Ok(Err(refusal.to_string())),
    };
    let origin = ScenarioRecord { name: "study".into(), digest: String::new() };
    let plan = hearth_halda::plan_from_solution(&solution, cluster, &origin)?;
    Ok(Ok((solution, plan)))
}

/// Returns the simulated time per output token in seconds; `None` if the run ends out of memory.
pub fn simulate_tpot_seconds(
    cluster: &Cluster,
    plan: &Plan,
    chunk: Bytes,
) -> Result<Option<f64>, StudyError> {
    let options = hearth_sim::Options { chunk_size: chunk, ..hearth_sim::Options::default() };
    let input = hearth_sim::Input { cluster, plan, options: &options };
    let trace = hearth_sim::simulate(&input)?;
    Ok(metrics::compute_metrics(&trace).tpot_ms.map(|tpot| tpot.mean_ms / 1e3))
}
