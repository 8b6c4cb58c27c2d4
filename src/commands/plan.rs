//! `hearth plan`: find out which device runs which layers.

use std::path::Path;
use std::process::ExitCode;

use hearth_core::Cluster;
use hearth_halda::selection::{NAMES, Options, SelectionError};
use hearth_halda::systems::{self, SystemOptions};
use hearth_halda::{LatencyModel, Refusal, build, named, solve};
use hearth_profiles::Document;
use hearth_profiles::device::soc::Strategy as SocStrategy;
use hearth_schema::Plan;
use hearth_schema::plan::Parallelism;
use hearth_schema::plan::Role;
use hearth_schema::residency::ResidencyOptions;
use hearth_schema::scenario::PlannerOptions;
use hearth_schema::scenario::RingOrder;
use hearth_schema::tensor::Slice;
use serde::Serialize;

use super::{compare, print_json};
use crate::cli::{PlanArgs, Planning};
use crate::diagnostics::Failure;
use crate::documents::{LoadedScenario, read_plan};
use crate::files::{can_write, write};
use crate::hints;
use crate::output::{say, tell};
use crate::refinement::{self, Effort};

/// What plans are made with when nobody says otherwise.
pub const DEFAULT_STRATEGY: &str = "overlap";

/// Runs the verb.
pub fn run(args: &PlanArgs, json: bool) -> Result<ExitCode, Failure> {
    let mut loaded = LoadedScenario::read(&args.scenario)?;
    can_write(&args.output, loaded.files().iter().chain(&args.model))?;
    loaded.keep_weights(&args.planning)?;
    let cluster = loaded.cluster(args.model.as_deref())?;
    let options = merged(&loaded.scenario.planner, &args.planning);
    let effort = Effort::of(&args.planning);
    if args.compare {
        return compare::run(&loaded, &cluster, &options, effort, json);
    }
    let plan = make(&loaded, &cluster, &options, effort)?;
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

/// The strategy that options mean: windows by hand are `manual`, where nobody is named.
pub fn strategy(options: &PlannerOptions) -> &str {
    let unnamed = if options.windows.is_some() { "manual" } else { DEFAULT_STRATEGY };
    options.strategy.as_deref().unwrap_or(unnamed)
}

/// The scenario's options, overruled by the command line's.
pub fn merged(scenario: &PlannerOptions, planning: &Planning) -> PlannerOptions {
    let Planning { strategy, rounds, windows, gpu_layers, keep_all, order, .. } = planning.clone();
    // Windows by hand are the `manual` strategy, whoever else was named in the scenario.
    let strategy = strategy.or_else(|| windows.as_ref().map(|_| "manual".into()));
    PlannerOptions {
        strategy: strategy.or_else(|| scenario.strategy.clone()),
        rounds: rounds.or(scenario.rounds),
        windows: windows.or_else(|| scenario.windows.clone()),
        gpu_layers: gpu_layers.or_else(|| scenario.gpu_layers.clone()),
        keep_all: keep_all || scenario.keep_all,
        best_head: planning.best_head || scenario.best_head,
        order: order.map(RingOrder::from).or(scenario.order),
        slow_disk: scenario.slow_disk,
        weights_as: planning.weights_as.or(scenario.weights_as),
        air_time: planning.air_time.or(scenario.air_time),
    }
}

/// The plan in a file, or one made as the command line and the scenario say.
pub fn read_or_make(
    path: Option<&Path>,
    loaded: &LoadedScenario,
    cluster: &Cluster,
    planning: &Planning,
) -> Result<Plan, Failure> {
    if let Some(path) = path {
        return read_plan(path);
    }
    make(loaded, cluster, &merged(&loaded.scenario.planner, planning), Effort::of(planning))
}

/// Makes a plan. `effort` is for the one strategy that searches with the simulator.
pub fn make(
    loaded: &LoadedScenario,
    cluster: &Cluster,
    options: &PlannerOptions,
    effort: Effort,
) -> Result<Plan, Failure> {
    if options.best_head && cluster.draft.is_some() {
        return Err(Failure::unusable(
            "the head holds the draft model, so that the planner cannot choose the head",
        )
        .hint("leave `--best-head` out, and say `head: true` of a device"));
    }
    let name = strategy(options);
    if name == refinement::NAME {
        return refinement::plan(loaded, cluster, options, effort);
    }
    if systems::NAMES.contains(&name) {
        let told = SystemOptions { weights_as: options.weights_as, air_time: options.air_time };
        return systems::plan(name, cluster, &loaded.origin, told).map_err(Failure::unusable);
    }
    let instance = build::instance(cluster, options.slow_disk);
    let model = LatencyModel::new(&instance).map_err(Failure::unusable)?;
    let chosen = Options {
        // An instance begins with the cluster's head.
        head: Some(0),
        total_memory: Some(build::total_memory(cluster)),
        ..Options::from(options)
    };
    let chosen = named(name, &chosen).map_err(|error| match error {
        // The planner does not know the strategy that needs the simulator.
        SelectionError::Unknown { name } => unknown(&name),
        error @ SelectionError::Missing { .. } => Failure::unusable(error),
    })?;
    let solution = solve(chosen.as_ref(), &model).map_err(refused)?;
    hearth_halda::plan(&solution, cluster, &loaded.origin).map_err(Failure::running)
}

/// That no planner has this name.
fn unknown(name: &str) -> Failure {
    let failure = Failure::unusable(format!("no strategy is called `{name}`"));
    if SocStrategy::ALL.iter().any(|strategy| strategy.name() == name) {
        return failure.hint(format!(
            "it is one of a phone's processors: write `soc: {{strategy: {name}}}` at the device in the scenario"
        ));
    }
    let (own, others) = (NAMES.join(", "), systems::NAMES.join(", "));
    failure.hint(format!("use one of {own}, {}, {others}", refinement::NAME))
}

/// That a strategy has no plan.
pub fn refused(refusal: Refusal) -> Failure {
    let hint = hints::of_refusal(&refusal);
    Failure::unusable(refusal).hint(hint)
}

/// What `--json` gives.
#[derive(Serialize)]
pub struct Summary {
    strategy: String,
    #[serde(skip_serializing_if = "Parallelism::is_ring")]
    kind: Parallelism,
    /// Rounds around the ring.
    pub rounds: u32,
    /// What the latency model expects.
    pub predicted: Predicted,
    /// The devices in ring order.
    pub devices: Vec<Device>,
    dropped: Vec<hearth_schema::plan::DroppedDevice>,
    explanation: Vec<String>,
}

/// What the latency model expects.
#[derive(Serialize)]
pub struct Predicted {
    /// Time per token.
    pub tpot_ms: Option<f64>,
}

/// A device's part.
#[derive(Serialize)]
pub struct Device {
    name: String,
    role: Role,
    window: u32,
    gpu_layers: u32,
    residency: ResidencyOptions,
    /// The most that it reads ahead of its turn, in bytes; null is a whole window.
    budget: Option<u64>,
    /// Its part of every layer, where layers are sliced.
    #[serde(skip_serializing_if = "Option::is_none")]
    slice: Option<Slice>,
}

impl Device {
    /// Its window, and how much of it is on the GPU.
    pub fn words(&self) -> String {
        match self.gpu_layers {
            0 => format!("{} {}", self.name, self.window),
            gpu => format!("{} {} ({gpu})", self.name, self.window),
        }
    }
}

impl Summary {
    /// Of a plan.
    pub fn of(plan: &Plan) -> Summary {
        let slice = |place: usize| plan.kind.tensor().and_then(|tensor| tensor.slices.get(place).cloned());
        let device = |(place, device): (usize, &hearth_schema::plan::PlannedDevice)| Device {
            slice: slice(place),
            name: device.name.clone(),
            role: device.role,
            window: device.window,
            gpu_layers: device.gpu_layers,
            residency: device.residency,
            budget: device.residency.budget().map(|budget| budget.0),
        };
        Summary {
            strategy: plan.planner.strategy.clone(),
            kind: plan.kind.parallelism(),
            rounds: plan.rounds,
            predicted: Predicted { tpot_ms: plan.predicted.map(|predicted| predicted.tpot.as_millis()) },
            devices: plan.devices.iter().enumerate().map(device).collect(),
            dropped: plan.dropped.clone(),
            explanation: plan.explanation.clone(),
        }
    }
}

/// The plan as a person reads it.
pub fn table(plan: &Plan) -> String {
    use std::fmt::Write;
    let mut text = String::new();
    let tpot = plan.predicted.map_or(String::new(), |it| format!(", expected {} a token", it.tpot));
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
        let layers = match plan.kind.tensor() {
            None => windows.join(" "),
            Some(tensor) => {
                let slice = &tensor.slices[place];
                format!("of each {} heads, {} rows", slice.kv_heads, slice.feed_forward)
            }
        };
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
