//! Plans of the strategies for the testbeds of the prima.cpp paper.
//!
//! Reads `scenarios/paper/*.yaml`, lets every strategy plan, and scores each plan by the paper's objective and by
//! the simulator, under each residency. What is simulated is what the scenario asks for.
//!
//! Not here: the published numbers ([`crate::published`]) and the page ([`crate::paper_page`]).

use std::path::Path;

use hearth_halda::{Instance, LatencyModel, Rules};
use hearth_schema::Plan;
use hearth_workflow::{FilesOnly, LoadedScenario};

use crate::clusters::under;
use crate::evaluation::{Score, evaluate_strategy, strategies};
use crate::parallel;
use crate::population::RESIDENCIES;
use crate::published::TABLE_4;

const FOLDER: &str = "scenarios/paper";

/// The device sets for Fig. 8 as the scenarios name them, smaller ones first. source: prima.cpp paper, appendix
/// A.7 names {D2, D3}, {D2, D3, D5} and all six; the others fill in the sizes
const SETS: [&str; 8] =
    ["d3", "d2-d3", "d2-d3-d5", "d1-d2-d3-d5", "d1-d4-kept", "d1-d5", "d1-d6", "d1-d6-selected"];

/// A scenario and what every strategy made of it.
pub struct Question {
    /// The model's size, such as `70b`.
    pub size: String,
    pub devices: Vec<String>,
    /// Whether each of them must have a layer.
    pub keep_all: bool,
    /// Each strategy's answer, in the order of [`strategies`].
    pub answers: Vec<Planned>,
}

/// The result of a strategy on a scenario.
pub struct Planned {
    pub strategy: &'static str,
    /// For each residency the plan in words and its score, or why there is none.
    pub outcomes: Vec<Result<(String, Score), String>>,
}

pub struct Testbeds {
    /// D1 to D4 with each model.
    pub table_4: Vec<Question>,
    /// 70B on the device sets.
    pub fig_8: Vec<Question>,
    /// Each model on the devices of appendix A.10.
    pub fig_10: Vec<Question>,
}

/// Reads and answers everything.
pub fn testbeds() -> Result<Testbeds, String> {
    let sizes = TABLE_4.iter().map(|row| row.size);
    let on = |devices: &'static str| sizes.clone().map(move |size| format!("llama-{size}-on-{devices}"));
    let mut names: Vec<String> = on("d1-d4").collect();
    names.extend(SETS.map(|set| format!("llama-70b-on-{set}")));
    names.extend(on("pc-laptop-mac-phone"));
    let mut answered = parallel::each("scenarios", names.len(), |number| question(&names[number]))?;
    let fig_10 = answered.split_off(TABLE_4.len() + SETS.len());
    let fig_8 = answered.split_off(TABLE_4.len());
    Ok(Testbeds { table_4: answered, fig_8, fig_10 })
}

fn question(name: &str) -> Result<Question, String> {
    let path = Path::new(FOLDER).join(format!("{name}.yaml"));
    let loaded = LoadedScenario::read(&path, &FilesOnly).map_err(|error| error.to_string())?;
    let drawn = loaded.cluster(None).map_err(|error| error.to_string())?;
    let scenario = loaded.scenario;
    let rules = Rules { may_drop: !scenario.planner.keep_all, may_leave_remainder: false };
    let mut answers: Vec<Planned> =
        strategies().map(|strategy| Planned { strategy, outcomes: Vec::new() }).collect();
    for residency in RESIDENCIES {
        let cluster = under(drawn.clone(), residency);
        let problem = Instance::from_cluster(&cluster, scenario.planner.slow_disk);
        let model = LatencyModel::new(&problem).map_err(|error| error.to_string())?;
        for answer in &mut answers {
            let chunk = hearth_sim::Options::default().chunk;
            let answered = evaluate_strategy(&cluster, &model, answer.strategy, rules, chunk)?;
            answer.outcomes.push(answered.map(|(plan, score)| (words(&plan), score)));
        }
    }
    Ok(Question {
        size: scenario.model.profile.unwrap_or_default().replace("llama-", ""),
        keep_all: scenario.planner.keep_all,
        devices: scenario.devices.iter().map(|device| device.name.clone()).collect(),
        answers,
    })
}

/// `d3 40 (28) + d2 20 (18), 2 rounds`: windows, and in brackets the GPU layers of each.
fn words(plan: &Plan) -> String {
    let device = |device: &hearth_schema::plan::PlannedDevice| match device.gpu_layers {
        0 => format!("{} {}", device.name, device.window),
        gpu => format!("{} {} ({gpu})", device.name, device.window),
    };
    let devices: Vec<String> = plan.devices.iter().map(device).collect();
    let rounds = if plan.rounds == 1 { String::new() } else { format!(", {} rounds", plan.rounds) };
    devices.join(" + ") + &rounds
}
