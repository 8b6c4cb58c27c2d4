//! Flags of `hearth plan`, `hearth simulate`, `hearth lint` and `hearth whatif`, and the planning flags that other
//! commands share.

use std::path::PathBuf;

use clap::Args;
use hearth_halda::export::Engine;
use hearth_profiles::parts::{Catalogue, PartKind};
use hearth_profiles::{Bytes, Format, Seconds};
use hearth_schema::residency::Residency;
use hearth_schema::scenario::{MemoryRisk, PlannerOptions, RingOrder};
use hearth_workflow::{Error, LoadedScenario, Progress, ScenarioOverrides, SearchBudget};

use super::choice_parser;

/// Default time limit of the plan search of the strategy `refine`, in seconds.
/// source: assumed, an acceptable waiting time
const REFINE_SECONDS: u64 = 30;

/// Ids of the flags of [`PlanningArgs`] that conflict with `--plan`.
pub(super) const PLANNING_FLAGS: [&str; 14] = [
    "strategy",
    "rounds",
    "windows",
    "gpu_layers",
    "keep_all",
    "best_head",
    "order",
    "risk",
    "residency",
    "stream_buffer",
    "refine_seconds",
    "refine_evaluations",
    "weights_as",
    "air_time",
];

/// The planning flags, which override the planner options of the scenario.
#[derive(Debug, Clone, Args)]
pub struct PlanningArgs {
    /// Plan with this strategy: overlap (default), exact, halda, halda-shipped, single, mem, mem-total, perf,
    /// edgeshard, lingualinked, even, manual or exhaustive. `refine` improves the plan of overlap (or manual) by
    /// simulating similar plans. The strategies of other systems make plans that can be simulated but not executed:
    /// exo, dllama, tpi-llm, hepti, galaxy, airinfer.
    #[arg(long)]
    pub strategy: Option<String>,
    /// Set the number of rounds around the ring for one token.
    #[arg(long)]
    pub rounds: Option<u32>,
    /// Set the number of layers in the window of each device, in ring order; implies `--strategy manual`.
    #[arg(long, value_delimiter = ',')]
    pub windows: Option<Vec<u32>>,
    /// Set the number of layers that the GPU computes in the window of each device, for the strategy `manual`.
    #[arg(long, value_delimiter = ',')]
    pub gpu_layers: Option<Vec<u32>>,
    /// Give every device at least one layer.
    #[arg(id = "keep_all", long = "keep-all")]
    pub keep_all_devices: bool,
    /// Let the strategies `overlap` and `exact` choose which device is the head.
    #[arg(id = "best_head", long = "best-head")]
    pub choose_best_head: bool,
    /// Set the order of the devices in the ring; only the strategies `overlap` and `exact` can find the best order.
    #[arg(long, value_parser = choice_parser(&ORDERS))]
    pub order: Option<RingOrder>,
    /// Set how the strategy `overlap` treats the uncertainty of the devices' memory, which follows from the sources in
    /// their profiles [default: average].
    #[arg(long, value_parser = choice_parser(&RISKS))]
    pub risk: Option<MemoryRisk>,
    /// Limit the search of the strategy `refine` to this many seconds. Ctrl-C ends the search early and keeps the
    /// best plan found.
    #[arg(long, default_value_t = REFINE_SECONDS, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub refine_seconds: u64,
    /// Limit the search of the strategy `refine` to this many simulated plans. If the search reaches this limit before
    /// its time limit, the result is the same on every machine.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub refine_evaluations: Option<u64>,
    /// Set the residency policy of every device, which decides which weights stay in memory. By default, the strategy
    /// `overlap` chooses a policy for each device, and other strategies use `os`.
    #[arg(long, value_parser = choice_parser(&RESIDENCY_POLICIES))]
    pub residency: Option<Residency>,
    /// Set the size of the buffer for streamed weights on each device with `managed` residency, such as `16 MiB`; at
    /// least 512 KiB. By default, the strategy `overlap` chooses the size, and other strategies use 8 MiB.
    #[arg(long, allow_hyphen_values = true)]
    pub stream_buffer: Option<Bytes>,
    /// Set the weight format in the plans of the strategies `tpi-llm`, `hepti`, `galaxy` and `airinfer`, such as `q4_0`
    /// [default: f32].
    #[arg(id = "weights_as", long = "weights-as", value_name = "FORMAT")]
    pub weight_format: Option<Format>,
    /// Set the time of one over-the-air all-reduce, such as `2ms`; required by the strategy `airinfer`.
    #[arg(id = "air_time", long = "air-time", value_name = "DURATION", allow_hyphen_values = true)]
    pub all_reduce_time: Option<Seconds>,
    /// Use the model in this GGUF file, instead of the model of the scenario.
    #[arg(long, value_name = "GGUF")]
    pub model: Option<PathBuf>,
}

const ORDERS: [(&str, &str, RingOrder); 2] = [
    ("given", "The order of the scenario", RingOrder::Given),
    ("best", "The best order that the planner finds", RingOrder::Best),
];

const RISKS: [(&str, &str, MemoryRisk); 2] = [
    (
        "average",
        "Prefer the plan with the best mean time over the memory that devices may have",
        MemoryRisk::Average,
    ),
    ("ignore", "Prefer the plan that is fastest in the memory of the profiles", MemoryRisk::Ignore),
];

const RESIDENCY_POLICIES: [(&str, &str, Residency); 3] = [
    ("os", "The operating system evicts weights; `madvise` announces the next window", Residency::Os),
    ("windowed", "The operating system evicts weights; hearth reads one window ahead", Residency::Windowed),
    ("managed", "hearth keeps the weights that fit in memory and streams the rest", Residency::Managed),
];

const ENGINES: [(&str, &str, Engine); 2] = [
    ("llama.cpp", "`llama-server` on the head, and `ggml-rpc-server` on the other devices", Engine::LlamaCpp),
    ("prima.cpp", "A ring of prima.cpp's `llama-cli`", Engine::PrimaCpp),
];

impl PlanningArgs {
    pub fn overrides(&self) -> ScenarioOverrides {
        let planner = PlannerOptions {
            strategy: self.strategy.clone(),
            rounds: self.rounds,
            windows: self.windows.clone(),
            gpu_layers: self.gpu_layers.clone(),
            keep_all_devices: self.keep_all_devices,
            order: self.order,
            risk: self.risk,
            choose_best_head: self.choose_best_head,
            slow_disk_threshold: None,
            weight_format: self.weight_format,
            all_reduce_time: self.all_reduce_time,
        };
        ScenarioOverrides { planner, residency: self.residency, stream_buffer: self.stream_buffer }
    }

    /// Returns the path of the model file: of the flag, otherwise of the scenario, if it names a file.
    pub fn model_file(&self, loaded: &LoadedScenario) -> Result<Option<PathBuf>, Error> {
        self.model.clone().map_or_else(|| loaded.model_file(), |path| Ok(Some(path)))
    }

    /// Returns the search limits of the strategy `refine`, and where the search reports its progress.
    pub fn budget<'p>(&self, progress: &'p dyn Progress) -> SearchBudget<'p> {
        SearchBudget { max_seconds: self.refine_seconds, max_evaluations: self.refine_evaluations, progress }
    }
}

/// The source of the plan: a plan file, or the flags for making a plan.
#[derive(Debug, Clone, Args)]
pub struct PlanSource {
    /// Read the plan from FILE instead of planning.
    #[arg(long, value_name = "FILE", conflicts_with_all = PLANNING_FLAGS)]
    pub plan: Option<PathBuf>,
    #[command(flatten)]
    pub planning: PlanningArgs,
}

#[derive(Debug, Args)]
pub struct PlanArgs {
    /// The scenario file.
    pub scenario: PathBuf,
    #[command(flatten)]
    pub planning: PlanningArgs,
    /// Compare the plans of all strategies except `exhaustive` and those of other systems, by a short simulation of
    /// each plan. No plan is written.
    #[arg(long, conflicts_with_all = ["output", "strategy"])]
    pub compare: bool,
    /// Store SHA-256 digests of the weights of the model file in the plan, with which each device can check its layers
    /// (`--verify`). Reads the whole file.
    #[arg(long, conflicts_with = "compare")]
    pub hash_weights: bool,
    /// Print the commands with which another engine runs the placement of the plan, and what their flags cannot
    /// express, instead of the plan.
    #[arg(long, value_name = "ENGINE", conflicts_with = "compare", value_parser = choice_parser(&ENGINES))]
    pub export: Option<Engine>,
    /// Export the plan in FILE instead of planning.
    #[arg(
        long,
        value_name = "FILE",
        requires = "export",
        conflicts_with_all = ["compare", "hash_weights", "output"],
        conflicts_with_all = PLANNING_FLAGS
    )]
    pub plan: Option<PathBuf>,
    /// Write the plan to FILE instead of standard output.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct SimulateArgs {
    /// The scenario file.
    pub scenario: PathBuf,
    #[command(flatten)]
    pub source: PlanSource,
    /// Use this random seed, instead of the seed in the scenario.
    #[arg(long)]
    pub seed: Option<u64>,
    /// Generate this many tokens, instead of the number in the scenario.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: Option<u32>,
    /// Ignore the memory sizes of the devices, to predict the speed of a plan that does not fit in memory.
    #[arg(long)]
    pub ignore_memory: bool,
    /// Start with as many weights in memory as fit, like after earlier tokens. By default, all weights are on disk at
    /// the start.
    #[arg(long)]
    pub warm: bool,
    /// Estimate the uncertainty of the time per token from this many simulations with random device and link
    /// parameters; 0 disables the estimate [default: 32 for a run of few steps, otherwise 0].
    #[arg(long, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    pub draws: Option<u32>,
    /// Let the tokens use the experts of this recording (`route_trace v1`), instead of random ones. After its last token,
    /// it begins again.
    #[arg(long, value_name = "FILE")]
    pub routes: Option<PathBuf>,
    /// Let the ring change its plan when the events of the scenario make a device slower or take its memory, as a ring
    /// that serves requests does.
    #[arg(long)]
    pub adapt: bool,
    /// Write the trace of the simulated run to FILE.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct LintArgs {
    /// The scenario file.
    pub scenario: PathBuf,
    #[command(flatten)]
    pub source: PlanSource,
}

#[derive(Debug, Args)]
pub struct WhatifArgs {
    /// The scenario file.
    pub scenario: PathBuf,
    #[command(flatten)]
    pub planning: PlanningArgs,
    /// Generate this many tokens, instead of the number in the scenario.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: Option<u32>,
    /// Set a price: of a graphics card by its name in the catalogue (`rtx-3090=700`), of a disk, of a cable, or of a
    /// GiB of memory (`memory=4`). Changes with a price are ranked by the time that they save for it. Can be repeated.
    #[arg(long, value_name = "WHAT=MONEY", value_parser = parse_price)]
    pub price: Vec<(String, f64)>,
    /// Simulate with this many CPU threads; their number does not change the results [default: one per core].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub jobs: Option<u32>,
}

/// Parses a price: `rtx-3090=700`.
fn parse_price(text: &str) -> Result<(String, f64), String> {
    let wrong = || "write for example `rtx-3090=700`, `memory=4`, `disk=80` or `cable=10`".to_owned();
    let (what, price) = text.split_once('=').ok_or_else(wrong)?;
    let price: f64 = price.trim().parse().map_err(|_| wrong())?;
    let is_card = Catalogue::shipped().part(what).is_ok_and(|part| part.kind == PartKind::Gpu);
    if !is_card && !["memory", "disk", "cable"].contains(&what) {
        return Err(format!("there is no graphics card `{what}`; {}", wrong()));
    }
    if price > 0.0 && price.is_finite() { Ok((what.to_owned(), price)) } else { Err(wrong()) }
}
