//! Flags of `hearth plan`, `hearth simulate` and `hearth lint`, and those that say how to plan.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use hearth_profiles::{Bytes, Format, Seconds};
use hearth_schema::residency::Residency;
use hearth_schema::scenario::RingOrder;
use hearth_workflow::{Budget, Overrides, Progress};

/// The default time of a search.
/// source: assumed, how long a user waits
const REFINE_SECONDS: u64 = 30;

/// The flags of [`Planning`], which conflict with a given plan.
pub(super) const PLANNING: [&str; 13] = [
    "strategy",
    "rounds",
    "windows",
    "gpu_layers",
    "keep_all",
    "best_head",
    "order",
    "residency",
    "stream_buffer",
    "refine_seconds",
    "refine_evaluations",
    "weights_as",
    "air_time",
];

/// Flags that say how to plan.
#[derive(Debug, Clone, Args)]
pub struct Planning {
    /// Plan with this strategy: overlap (default), exact, halda, halda-shipped, single, mem, mem-total, perf, edgeshard,
    /// lingualinked, even, manual, exhaustive; or refine, which improves the plan of overlap (or manual) by simulating
    /// its neighbours. Plans of other systems can only be simulated: exo, dllama, tpi-llm, hepti, galaxy, airinfer.
    #[arg(long)]
    pub strategy: Option<String>,
    /// Set the number of rounds around the ring for one token.
    #[arg(long)]
    pub rounds: Option<u32>,
    /// Set the layers of each device's window in ring order; implies `--strategy manual`.
    #[arg(long, value_delimiter = ',')]
    pub windows: Option<Vec<u32>>,
    /// Set how many layers of each window are on the GPU, for `manual`.
    #[arg(long, value_delimiter = ',')]
    pub gpu_layers: Option<Vec<u32>>,
    /// Give every device at least one layer.
    #[arg(long)]
    pub keep_all: bool,
    /// Let `overlap` and `exact` choose the head.
    #[arg(long)]
    pub best_head: bool,
    /// Order the ring as in the scenario, or let `overlap` and `exact` find the best order.
    #[arg(long, value_enum)]
    pub order: Option<Order>,
    /// Search for at most this many seconds with `refine`. Ctrl-C ends it earlier and keeps the best plan so far.
    #[arg(long, default_value_t = REFINE_SECONDS, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub refine_seconds: u64,
    /// Simulate at most this many plans with `refine`; with enough seconds the result is the same on every machine.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub refine_evaluations: Option<u64>,
    /// Set the residency policy of every device, instead of the scenario's. By default `overlap` chooses one for each
    /// device, and other strategies use `os`.
    #[arg(long, value_enum)]
    pub residency: Option<Policy>,
    /// Set the stream buffer of every `managed` device, as `16 MiB`; at least 512 KiB. By default `overlap` chooses it,
    /// and other strategies use 8 MiB. At least one device must be `managed`.
    #[arg(long, allow_hyphen_values = true)]
    pub stream_buffer: Option<Bytes>,
    /// Set the weight format of `tpi-llm`, `hepti`, `galaxy` and `airinfer`, as `q4_0` [default: f32].
    #[arg(long)]
    pub weights_as: Option<Format>,
    /// Set the time of one over-the-air all-reduce of `airinfer`, as `2ms`.
    #[arg(long, allow_hyphen_values = true)]
    pub air_time: Option<Seconds>,
}

/// The order of the ring.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Order {
    /// As in the scenario.
    Given,
    /// The best one.
    Best,
}

/// A residency policy.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Policy {
    /// The operating system, advised of the next window.
    Os,
    /// The operating system, with the next window populated.
    Windowed,
    /// hearth: keeps what fits and streams the rest.
    Managed,
}

impl Planning {
    pub fn overrides(&self) -> Overrides {
        Overrides {
            strategy: self.strategy.clone(),
            rounds: self.rounds,
            windows: self.windows.clone(),
            gpu_layers: self.gpu_layers.clone(),
            keep_all: self.keep_all,
            best_head: self.best_head,
            order: self.order.map(|order| match order {
                Order::Given => RingOrder::Given,
                Order::Best => RingOrder::Best,
            }),
            residency: self.residency.map(|policy| match policy {
                Policy::Os => Residency::Os,
                Policy::Windowed => Residency::Windowed,
                Policy::Managed => Residency::Managed,
            }),
            stream_buffer: self.stream_buffer,
            weights_as: self.weights_as,
            air_time: self.air_time,
        }
    }

    /// The budget of `refine`.
    pub fn budget<'p>(&self, progress: &'p dyn Progress) -> Budget<'p> {
        Budget { seconds: self.refine_seconds, evaluations: self.refine_evaluations, progress }
    }
}

/// Flags that give a plan or say how to make one.
#[derive(Debug, Clone, Args)]
pub struct PlanAndModel {
    /// Use the plan in this file instead of planning.
    #[arg(long, conflicts_with_all = PLANNING)]
    pub plan: Option<PathBuf>,
    #[command(flatten)]
    pub planning: Planning,
    /// Use this model file instead of the scenario's model.
    #[arg(long)]
    pub model: Option<PathBuf>,
}

/// `hearth plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// The scenario file.
    pub scenario: PathBuf,
    #[command(flatten)]
    pub planning: Planning,
    /// Use this model file instead of the scenario's model.
    #[arg(long)]
    pub model: Option<PathBuf>,
    /// Plan with every strategy except `exhaustive` and those of other systems, simulate each plan for a few tokens, and
    /// compare. Writes no plan.
    #[arg(long, conflicts_with_all = ["output", "strategy"])]
    pub compare: bool,
    /// Write the plan to FILE instead of standard output.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// `hearth simulate`.
#[derive(Debug, Args)]
pub struct SimulateArgs {
    /// The scenario file.
    pub scenario: PathBuf,
    #[command(flatten)]
    pub planned: PlanAndModel,
    /// Use this seed instead of the scenario's.
    #[arg(long)]
    pub seed: Option<u64>,
    /// Generate this many tokens instead of the scenario's.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: Option<u32>,
    /// Ignore the size of memory, to see how fast a plan would be that does not fit.
    #[arg(long)]
    pub ignore_memory: bool,
    /// Start with weights in memory, as earlier tokens would have left them.
    #[arg(long)]
    pub warm: bool,
    /// Draw all parameters this many times to estimate the uncertainty of the time per token; 0 turns it off.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    pub draws: u32,
    /// Write the trace to FILE.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
}

/// `hearth lint`.
#[derive(Debug, Args)]
pub struct LintArgs {
    /// The scenario file.
    pub scenario: PathBuf,
    #[command(flatten)]
    pub planned: PlanAndModel,
}
