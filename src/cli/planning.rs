//! Flags of `hearth plan`, `hearth simulate` and `hearth lint`, and those that say how to plan.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use hearth_profiles::{Bytes, Format, Seconds};
use hearth_schema::residency::Residency;
use hearth_schema::scenario::RingOrder;
use hearth_workflow::{Budget, Overrides, Progress};

/// How long a search goes on if nobody says.
/// source: assumed, what a person waits for
const REFINE_SECONDS: u64 = 30;

/// The flags of [`Planning`], which say nothing where a plan is given.
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

/// Which plan to make.
#[derive(Debug, Clone, Args)]
pub struct Planning {
    /// Strategy by name: overlap, exact, halda, halda-shipped, single, mem, mem-total, perf, edgeshard, lingualinked,
    /// even, manual, exhaustive; or refine, which searches on from the default's plan, or from windows by hand, for
    /// one that the simulator says is faster. Or another system's, whose plans are simulated only: exo, dllama,
    /// tpi-llm, hepti, galaxy, airinfer.
    #[arg(long)]
    pub strategy: Option<String>,
    /// Rounds around the ring for one token.
    #[arg(long)]
    pub rounds: Option<u32>,
    /// Layers of each device's window in ring order; the strategy is `manual` then.
    #[arg(long, value_delimiter = ',')]
    pub windows: Option<Vec<u32>>,
    /// Of these on each GPU, for `manual`.
    #[arg(long, value_delimiter = ',')]
    pub gpu_layers: Option<Vec<u32>>,
    /// Give every device a layer.
    #[arg(long)]
    pub keep_all: bool,
    /// Let `overlap` and `exact` choose the head instead of the scenario.
    #[arg(long)]
    pub best_head: bool,
    /// Whose order the ring follows, for `overlap` and `exact`: the scenario's, or the best there is.
    #[arg(long, value_enum)]
    pub order: Option<Order>,
    /// `refine`: for at most so many seconds. Ctrl-C ends it earlier and keeps the best plan so far.
    #[arg(long, default_value_t = REFINE_SECONDS, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub refine_seconds: u64,
    /// `refine`: at most so many plans are simulated; with enough seconds the same plan on every machine.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub refine_evaluations: Option<u64>,
    /// Who decides what stays in memory, on every device: replaces all that the scenario says of residency. If
    /// nobody says, `overlap` chooses for each device, and other strategies leave it to the system.
    #[arg(long, value_enum)]
    pub residency: Option<Policy>,
    /// Memory through which every `managed` device streams what it does not keep, as `16 MiB`; at least 512 KiB. If
    /// nobody says, `overlap` chooses, and other strategies take 8 MiB. Some device must be said to be `managed`.
    #[arg(long, allow_hyphen_values = true)]
    pub stream_buffer: Option<Bytes>,
    /// `tpi-llm`, `hepti`, `galaxy`, `airinfer`: the format of the weights, as `q4_0`; f32 if absent.
    #[arg(long)]
    pub weights_as: Option<Format>,
    /// `airinfer`: what one all-reduce over the air takes, as `2ms`.
    #[arg(long, allow_hyphen_values = true)]
    pub air_time: Option<Seconds>,
}

/// Whose order the ring follows.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Order {
    /// The scenario's.
    Given,
    /// The fastest.
    Best,
}

/// Who decides what stays in memory.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Policy {
    /// The system, advised of the next window.
    Os,
    /// The system, with the next window populated.
    Windowed,
    /// The device: it keeps what fits and streams the rest.
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

/// Which plan, and of which model.
#[derive(Debug, Clone, Args)]
pub struct PlanAndModel {
    /// A plan made before.
    #[arg(long, conflicts_with_all = PLANNING)]
    pub plan: Option<PathBuf>,
    /// How to plan, if there is no plan.
    #[command(flatten)]
    pub planning: Planning,
    /// A model file instead of the scenario's model.
    #[arg(long)]
    pub model: Option<PathBuf>,
}

/// `hearth plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// The scenario.
    pub scenario: PathBuf,
    /// How to plan.
    #[command(flatten)]
    pub planning: Planning,
    /// A model file instead of the scenario's model.
    #[arg(long)]
    pub model: Option<PathBuf>,
    /// Plan with every strategy but `exhaustive` and other systems', simulate each plan for a few tokens, and compare;
    /// writes no plan.
    #[arg(long, conflicts_with_all = ["output", "strategy"])]
    pub compare: bool,
    /// Where to write the plan; standard output if absent.
    #[arg(short, long)]
    pub output: Option<PathBuf>,
}

/// `hearth simulate`.
#[derive(Debug, Args)]
pub struct SimulateArgs {
    /// The scenario.
    pub scenario: PathBuf,
    /// How it is planned.
    #[command(flatten)]
    pub planned: PlanAndModel,
    /// Seed instead of the scenario's.
    #[arg(long)]
    pub seed: Option<u64>,
    /// Tokens to generate instead of the scenario's.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: Option<u32>,
    /// Take every memory to hold what a device pins: what a run would take that ends out of memory.
    #[arg(long)]
    pub ignore_memory: bool,
    /// Begin with memory as earlier tokens would have left it.
    #[arg(long)]
    pub warm: bool,
    /// How many times all parameters are drawn anew, to say how sure the time per token is; 0 leaves it out.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    pub draws: u32,
    /// Where to write the trace.
    #[arg(long)]
    pub trace: Option<PathBuf>,
}

/// `hearth lint`.
#[derive(Debug, Args)]
pub struct LintArgs {
    /// The scenario.
    pub scenario: PathBuf,
    /// How it is planned.
    #[command(flatten)]
    pub planned: PlanAndModel,
}
