//! `hearth plan`: find out which device runs which layers.

use std::process::ExitCode;

use hearth_halda::selection::{NAMES, Options};
use hearth_halda::{LatencyModel, build, named, solve};
use hearth_profiles::Document;
use hearth_schema::plan::Role;
use hearth_schema::residency::ResidencyOptions;
use hearth_schema::scenario::PlannerOptions;
use hearth_schema::{Cluster, Plan};
use serde::Serialize;

use super::print_json;
use crate::cli::{PlanArgs, Planning};
use crate::diagnostics::Failure;
use crate::documents::{LoadedScenario, write};
use crate::output::{say, tell};

/// What plans are made with when nobody says otherwise.
pub const DEFAULT_STRATEGY: &str = "exact";

/// Runs the verb.
pub fn run(args: &PlanArgs, json: bool) -> Result<ExitCode, Failure> {
    let mut loaded = LoadedScenario::read(&args.scenario)?;
    loaded.keep_weights(&args.planning)?;
    let cluster = loaded.cluster(args.model.as_deref())?;
    let options = merged(&loaded.scenario.planner, &args.planning);
    if args.compare {
        return compare(&loaded, &cluster, &options, json);
    }
    let plan = make(&loaded, &cluster, &options)?;
    match &args.output {
        Some(path) => write(path, plan.to_yaml().as_bytes())?,
        None if !json => say!("{}", plan.to_yaml()),
        None => {}
    }
    if json {
        print_json(&Summary::of(&plan))?;
    } else if args.output.is_some() {
        say!("{}", table(&plan));
    } else {
        tell!("{}", table(&plan).trim_end());
    }
    Ok(ExitCode::SUCCESS)
}

/// The scenario's options, overruled by the command line's.
pub fn merged(scenario: &PlannerOptions, planning: &Planning) -> PlannerOptions {
    let Planning { strategy, rounds, windows, gpu_layers, keep_all, .. } = planning.clone();
    // Windows by hand are the `manual` strategy, whoever else was named in the scenario.
    let strategy = strategy.or_else(|| windows.as_ref().map(|_| "manual".into()));
    PlannerOptions {
        strategy: strategy.or_else(|| scenario.strategy.clone()),
        rounds: rounds.or(scenario.rounds),
        windows: windows.or_else(|| scenario.windows.clone()),
        gpu_layers: gpu_layers.or_else(|| scenario.gpu_layers.clone()),
        keep_all: keep_all || scenario.keep_all,
        slow_disk: scenario.slow_disk,
    }
}

/// Makes a plan.
pub fn make(loaded: &LoadedScenario, cluster: &Cluster, options: &PlannerOptions) -> Result<Plan, Failure> {
    let name = options.strategy.as_deref().unwrap_or(DEFAULT_STRATEGY);
    let instance = build::instance(cluster, options.slow_disk);
    let model = LatencyModel::new(&instance).map_err(Failure::unusable)?;
    let chosen = Options { head: Some(cluster.head), ..Options::from(options) };
    let strategy = named(name, &chosen).map_err(Failure::unusable)?;
    let solution = solve(strategy.as_ref(), &model).map_err(|refusal| {
        Failure::unusable(refusal)
            .hint("try another strategy, fewer rounds, a shorter context or a smaller model")
    })?;
    hearth_halda::plan(&solution, cluster, &loaded.origin).map_err(Failure::running)
}

/// What `--json` gives.
#[derive(Serialize)]
struct Summary {
    strategy: String,
    rounds: u32,
    predicted: Predicted,
    devices: Vec<Device>,
    dropped: Vec<hearth_schema::plan::DroppedDevice>,
    explanation: Vec<String>,
}

#[derive(Serialize)]
struct Predicted {
    tpot_ms: Option<f64>,
}

#[derive(Serialize)]
struct Device {
    name: String,
    role: Role,
    window: u32,
    gpu_layers: u32,
    residency: ResidencyOptions,
}

impl Summary {
    fn of(plan: &Plan) -> Summary {
        let device = |device: &hearth_schema::plan::PlannedDevice| Device {
            name: device.name.clone(),
            role: device.role,
            window: device.window,
            gpu_layers: device.gpu_layers,
            residency: device.residency,
        };
        Summary {
            strategy: plan.planner.strategy.clone(),
            rounds: plan.rounds,
            predicted: Predicted { tpot_ms: plan.predicted.map(|predicted| predicted.tpot.as_millis()) },
            devices: plan.devices.iter().map(device).collect(),
            dropped: plan.dropped.clone(),
            explanation: plan.explanation.clone(),
        }
    }
}

/// The plan as a person reads it.
pub fn table(plan: &Plan) -> String {
    use std::fmt::Write;
    let mut text = String::new();
    let tpot = plan.predicted.map_or(String::new(), |it| format!(", latency model {} a token", it.tpot));
    let _ = writeln!(
        text,
        "{} over {} layers: {} round{} by `{}`{tpot}",
        plan.model.name,
        plan.model.layers,
        plan.rounds,
        if plan.rounds == 1 { "" } else { "s" },
        plan.planner.strategy
    );
    let _ = writeln!(
        text,
        "  {:<14} {:<7} {:>6} {:>5}  {:<9} layers",
        "device", "role", "window", "gpu", "residency"
    );
    for (place, device) in plan.devices.iter().enumerate() {
        let windows: Vec<String> =
            plan.windows(place).iter().map(|window| format!("{}-{}", window.start, window.end - 1)).collect();
        let role = match device.role {
            Role::Head => "head",
            Role::Worker => "worker",
            Role::Relay => "relay",
        };
        let (name, window, gpu) = (&device.name, device.window, device.gpu_layers);
        let policy = device.residency.policy;
        let layers = windows.join(" ");
        let _ = writeln!(text, "  {name:<14} {role:<7} {window:>6} {gpu:>5}  {policy:<9} {layers}");
    }
    for dropped in &plan.dropped {
        let _ = writeln!(text, "  {:<14} dropped: {}", dropped.name, dropped.reason);
    }
    for sentence in &plan.explanation {
        let _ = writeln!(text, "  {sentence}");
    }
    text
}

/// One row of a comparison.
#[derive(Serialize)]
struct Compared {
    strategy: &'static str,
    #[serde(flatten)]
    plan: Option<Summary>,
    refused: Option<String>,
}

fn compare(
    loaded: &LoadedScenario,
    cluster: &Cluster,
    options: &PlannerOptions,
    json: bool,
) -> Result<ExitCode, Failure> {
    let mut rows = Vec::new();
    for strategy in NAMES {
        // By hand needs windows; every combination takes too long beyond toys.
        if strategy == "exhaustive" || strategy == "manual" && options.windows.is_none() {
            continue;
        }
        let named = PlannerOptions { strategy: Some(strategy.into()), ..options.clone() };
        let (plan, refused) = match make(loaded, cluster, &named) {
            Ok(plan) => (Some(Summary::of(&plan)), None),
            Err(failure) => (None, Some(failure.to_string().trim().replace('\n', "; "))),
        };
        rows.push(Compared { strategy, plan, refused });
    }
    if json {
        print_json(&rows)?;
        return Ok(ExitCode::SUCCESS);
    }
    say!("{:<14} {:>12} {:>6}  windows (GPU layers)\n", "strategy", "ms a token", "rounds");
    for row in &rows {
        let Some(plan) = &row.plan else {
            say!("{:<14} {}\n", row.strategy, row.refused.as_deref().unwrap_or_default());
            continue;
        };
        let part = |device: &Device| match device.gpu_layers {
            0 => format!("{} {}", device.name, device.window),
            gpu => format!("{} {} ({gpu})", device.name, device.window),
        };
        let parts: Vec<String> = plan.devices.iter().map(part).collect();
        let tpot = plan.predicted.tpot_ms.map_or("-".into(), |ms| format!("{ms:.1}"));
        say!("{:<14} {tpot:>12} {:>6}  {}\n", row.strategy, plan.rounds, parts.join(", "));
    }
    Ok(ExitCode::SUCCESS)
}
