//! Testbeds of the prima.cpp paper: evaluates all strategies on them.
//!
//! Reads `scenarios/paper/*.yaml`, makes a plan with every strategy, and scores each plan by the paper's objective
//! and by the simulator, with each residency policy. The simulated workload is that of the scenario.
//!
//! Not here: the published results ([`crate::published`]), and the page with all results ([`crate::paper_page`]).

use std::path::Path;

use hearth_halda::PlanRules;
use hearth_schema::Plan;
use hearth_studies::StudyError;
use hearth_workflow::{FileResolver, LoadedScenario};

use crate::clusters::with_residency;
use crate::evaluation::{PlanEvaluation, evaluate_strategies, strategy_names};
use crate::parallel;
use crate::population::RESIDENCIES;
use crate::published::TABLE_4;

const FOLDER: &str = "scenarios/paper";

/// The device sets of Fig. 8, as named in the file names of the scenarios; smaller sets come first. source: prima.cpp
/// paper, appendix A.7 names {D2, D3}, {D2, D3, D5} and all six devices; the other sets are assumed
const SETS: [&str; 8] =
    ["d3", "d2-d3", "d2-d3-d5", "d1-d2-d3-d5", "d1-d4-kept", "d1-d5", "d1-d6", "d1-d6-selected"];

pub struct ScenarioResults {
    /// The model's size, such as `70b`.
    pub model_size: String,
    pub devices: Vec<String>,
    /// Whether every device must have at least one layer.
    pub keep_all_devices: bool,
    /// The result of each strategy, in the order of [`strategy_names`].
    pub results: Vec<StrategyOutcomes>,
}

pub struct StrategyOutcomes {
    pub strategy: &'static str,
    /// For each residency policy: a summary of the plan and its scores, or the reason why the strategy has no plan.
    pub outcomes: Vec<Result<(String, PlanEvaluation), String>>,
}

pub struct TestbedResults {
    /// Table 4 of the prima.cpp paper: each model on the devices D1 to D4.
    pub table_4: Vec<ScenarioResults>,
    /// Fig. 8 of the prima.cpp paper: the 70B model on each set of devices.
    pub fig_8: Vec<ScenarioResults>,
    /// Fig. 10 of the prima.cpp paper: each model on the devices of appendix A.10.
    pub fig_10: Vec<ScenarioResults>,
}

pub fn evaluate_testbeds() -> Result<TestbedResults, StudyError> {
    let sizes = TABLE_4.iter().map(|row| row.model_size);
    let on = |devices: &'static str| sizes.clone().map(move |size| format!("llama-{size}-on-{devices}"));
    let mut names: Vec<String> = on("d1-d4").collect();
    names.extend(SETS.map(|set| format!("llama-70b-on-{set}")));
    names.extend(on("pc-laptop-mac-phone"));
    let mut table_4 = parallel::map("scenarios", names.len(), |number| evaluate(&names[number]))?;
    let fig_10 = table_4.split_off(TABLE_4.len() + SETS.len());
    let fig_8 = table_4.split_off(TABLE_4.len());
    Ok(TestbedResults { table_4, fig_8, fig_10 })
}

fn evaluate(name: &str) -> Result<ScenarioResults, StudyError> {
    let path = Path::new(FOLDER).join(format!("{name}.yaml"));
    let loaded = LoadedScenario::read(&path, &FileResolver)?;
    let scenario_cluster = loaded.resolve_cluster(None)?;
    let scenario = loaded.scenario;
    let rules =
        PlanRules { may_drop_devices: !scenario.planner.keep_all_devices, may_have_partial_round: false };
    let mut results: Vec<StrategyOutcomes> =
        strategy_names().map(|strategy| StrategyOutcomes { strategy, outcomes: Vec::new() }).collect();
    for residency in RESIDENCIES {
        let cluster = with_residency(scenario_cluster.clone(), residency);
        let chunk = hearth_sim::Options::default().chunk_size;
        let plans = evaluate_strategies(&cluster, scenario.planner.slow_disk_threshold, rules, chunk)?;
        for (result, planned) in results.iter_mut().zip(plans) {
            result.outcomes.push(planned.map(|(plan, score)| (summary(&plan), score)));
        }
    }
    let devices = scenario.devices.into_iter().map(|device| device.name).collect();
    let model_size = scenario.model.profile.unwrap_or_default().replace("llama-", "");
    let keep_all_devices = scenario.planner.keep_all_devices;
    Ok(ScenarioResults { model_size, devices, keep_all_devices, results })
}

/// Returns the window of each device of a plan, with its GPU layers in brackets: `d3 40 (28) + d2 20 (18), 2 rounds`.
fn summary(plan: &Plan) -> String {
    let device = |device: &hearth_schema::plan::PlannedDevice| match device.gpu_layers {
        0 => format!("{} {}", device.name, device.window),
        gpu => format!("{} {} ({gpu})", device.name, device.window),
    };
    let devices: Vec<String> = plan.devices.iter().map(device).collect();
    let rounds = if plan.rounds == 1 { String::new() } else { format!(", {} rounds", plan.rounds) };
    devices.join(" + ") + &rounds
}
