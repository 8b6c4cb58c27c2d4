//! Which verbs and flags are there?

mod execute;
mod gpu;
mod init;
mod lab;
mod report;
mod ring;
mod serve;
mod shell;
mod sweep;
mod whatif;

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand, ValueEnum};
use hearth_profiles::{Bytes, Format, Seconds};
use hearth_schema::address;
use hearth_schema::residency::Residency;
use hearth_schema::residency::ResidencyOptions;
use hearth_schema::scenario::PlannerOptions;

pub use self::execute::ExecuteArgs;
pub use self::gpu::{GpuArgs, GpuWeights, MeasureGpu};
pub use self::init::{InitArgs, Network};
pub use self::lab::LabArgs;
pub use self::report::ReportArgs;
pub use self::ring::RingArgs;
use self::ring::parse_delay;
pub use self::serve::ServeArgs;
pub use self::shell::{CompletionsArgs, ManArgs, SchemaArgs};
pub use self::sweep::{MergeArgs, Shard, SweepArgs, SweepVerb};
pub use self::whatif::WhatifArgs;
use crate::commands::plan::DEFAULT_STRATEGY;
use crate::commands::synth::SynthArgs;
use crate::diagnostics::Failure;
use hearth_halda::systems::NAMES;
use hearth_schema::scenario::RingOrder;

/// Plan, simulate and run language models across the devices people already own.
///
/// A scenario names devices, links and a model. `plan` finds which device runs which layers, `simulate`
/// tells how fast that will be and why, `execute` runs the same plan on real devices, `report` puts
/// the two side by side. `lab` does all four on this machine.
///
/// Exit codes: 0 done; 1 something failed while running; 2 what was given cannot be used; 3 the run ended, but not well,
/// `lint` found an error, a suite of labs misses a bar, or Ctrl-C stopped what keeps its results (`execute`, `sweep`,
/// `whatif`); 130 ended by Ctrl-C otherwise; `worker` and `serve` end with 0.
#[derive(Debug, Parser)]
#[command(
    version,
    arg_required_else_help = true,
    after_help = "Example: hearth init home.yaml --device desktop=d3 --device laptop=d2\n\
                  Example: hearth simulate scenarios/home/llama-70b-on-four.yaml"
)]
pub struct Cli {
    /// Print one JSON document instead of text; an error is one too, on standard error.
    #[arg(long, global = true)]
    pub json: bool,
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Find out which device runs which layers.
    #[command(
        after_help = "Example: hearth plan scenarios/home/llama-70b-on-four.yaml --strategy exact -o plan.yaml\n\
                      Example: hearth plan scenarios/home/llama-70b-on-four.yaml --compare --refine-seconds 5"
    )]
    Plan(PlanArgs),
    /// Tell how fast a plan will be, and why.
    #[command(
        after_help = "Example: hearth simulate scenarios/paper/llama-70b-on-d1-d4.yaml --tokens 8 --trace sim.trace"
    )]
    Simulate(SimulateArgs),
    /// Plan and simulate at every value of one or two fields of a scenario.
    #[command(after_help = sweep::EXAMPLES)]
    Sweep(Box<SweepArgs>),
    /// Say what is wrong or doubtful about a scenario and a plan for it.
    ///
    /// Exit code 3 if there is an error among the findings, 0 otherwise.
    #[command(after_help = "Example: hearth lint scenarios/home/llama-70b-on-four.yaml --plan plan.yaml")]
    Lint(LintArgs),
    /// Run a plan on real devices.
    #[command(
        after_help = "Example: hearth execute plan.yaml --model model.gguf --prompt 'Once upon' --tokens 32\n\
                      Example: hearth execute plan.yaml --model model.gguf --prompt 'Once upon' --key ring.key --discover\n\
                      Example: hearth execute plan.yaml --model model.gguf --prompt 'Once \
                      upon' --prompt 'In the end' --draft-model small.gguf --draft-tokens 4"
    )]
    Execute(ExecuteArgs),
    /// Offer a ring to programs and people: OpenAI's API, metrics, and a page to chat on.
    #[command(after_help = "Example: hearth serve plan.yaml --model model.gguf --sequences 4\n\
                      Then: curl http://127.0.0.1:8080/v1/completions -H 'Content-Type: application/json' -d '{\"prompt\": \
                      \"Once upon\", \"max_tokens\": 20}'")]
    Serve(ServeArgs),
    /// Serve layers to a head.
    #[command(after_help = "Example: hearth worker --listen 127.0.0.1:9001 --model model.gguf\n\
                      Example: hearth worker --listen 0.0.0.0:9001 --model model.gguf --key ring.key --name laptop")]
    Worker(WorkerArgs),
    /// Measure this machine, or learn from a run of it.
    #[command(after_help = "Example: hearth profile --model model.gguf -o this.yaml\n\
                      Example: hearth profile --from-trace run.trace --predicted sim.trace --profile this.yaml --name a -o new.yaml")]
    Profile(ProfileArgs),
    /// List the GPUs that layers can be computed on, with what is used of them.
    ///
    /// Exit code 0 also where there is none.
    #[command(after_help = "Example: hearth gpu --tune")]
    Gpu(GpuArgs),
    /// Time a model on this machine, beside llama.cpp where its Python package is present.
    #[command(after_help = "Example: hearth bench model.gguf --threads 1,2 --peer ~/venv/bin/python")]
    Bench(BenchArgs),
    /// Plan, simulate, execute and compare on this machine, with limits for each device.
    #[command(
        after_help = "Example: hearth lab scenarios/lab/three-half.yaml --model model.gguf --report report/\n\
                      Example: hearth lab --suite scenarios/lab --repeats 3 -o out/suite\n\
                      Example: hearth lab --random 12 --seed 7 -o out/random"
    )]
    Lab(Box<LabArgs>),
    /// Put traces side by side.
    #[command(after_help = "Example: hearth report sim.trace run.trace -o report/\n\
                      Example: hearth report sim.trace --published prima-table-4 --system prima.cpp --sweep out.csv -o report/")]
    Report(ReportArgs),
    /// Simulate what others have published, and put both side by side.
    #[command(
        after_help = "Example: hearth reproduce reports/published/prima-table-4.yaml --draws 32 -o out/"
    )]
    Reproduce(ReproduceArgs),
    /// Write a model of random weights, of any shape.
    #[command(after_help = "Example: hearth synth --preset 1b --quant q4_k_m -o model.gguf")]
    Synth(SynthArgs),
    /// Say what would be gained by another device, disk, network or model.
    ///
    /// Leaves out each device, doubles each one's memory, gives it a faster disk, lays cables, and takes the model in
    /// other formats, one at a time: each is planned again and simulated.
    #[command(after_help = "Example: hearth whatif scenarios/home/llama-70b-on-four.yaml --tokens 8")]
    Whatif(Box<WhatifArgs>),
    /// Write a first scenario: by flags, by what is heard of workers, and by questions at a terminal.
    #[command(
        after_help = "Example: hearth init home.yaml --model llama-8b --device desktop=d3 --device laptop=d2\n\
                      Example: hearth init home.yaml --discover --network cable"
    )]
    Init(InitArgs),
    /// Print what a shell needs to complete commands and flags.
    #[command(
        after_help = "Example: hearth completions bash > ~/.local/share/bash-completion/completions/hearth"
    )]
    Completions(CompletionsArgs),
    /// Print what an editor needs to complete and check a kind of document: its JSON Schema.
    #[command(after_help = "Example: hearth schema scenario > scenario.schema.json")]
    Schema(SchemaArgs),
    /// Write a man page for each command.
    #[command(after_help = "Example: hearth man ~/.local/share/man/man1")]
    Man(ManArgs),
}

/// How long a search goes on if nobody says.
/// source: assumed, what a person waits for
const REFINE_SECONDS: u64 = 30;

/// The flags of [`Planning`], which say nothing where a plan is given.
const PLANNING: [&str; 13] = [
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

impl From<Order> for RingOrder {
    fn from(order: Order) -> Self {
        match order {
            Order::Given => RingOrder::Given,
            Order::Best => RingOrder::Best,
        }
    }
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
    /// Refuses flags that would be passed over.
    pub fn check(&self, scenario: &PlannerOptions) -> Result<(), Failure> {
        let named = self.strategy.as_deref().filter(|name| !matches!(*name, "manual" | "refine"));
        if let (Some(name), true) = (named, self.windows.is_some()) {
            return Err(Failure::unusable(format!("--windows: strategy `{name}` chooses its own"))
                .hint("leave one of the two out, or use `manual` or `refine`"));
        }
        let windows = self.windows.is_some() || scenario.windows.is_some();
        let strategy = self.strategy.as_deref().or(scenario.strategy.as_deref()).unwrap_or(DEFAULT_STRATEGY);
        for (flag, given) in
            [("--weights-as", self.weights_as.is_some()), ("--air-time", self.air_time.is_some())]
        {
            if given && !NAMES.contains(&strategy) {
                let what = format!("{flag}: is for the plans of other systems, and `{strategy}` is none");
                return Err(Failure::unusable(what).hint(format!("use one of {}", NAMES.join(", "))));
            }
        }
        if self.gpu_layers.is_some() && !windows {
            return Err(Failure::unusable("--gpu-layers: there are no windows to which they belong")
                .hint("add --windows"));
        }
        Ok(())
    }

    /// What the command line makes of what a scenario says of residency.
    pub fn residency(&self, scenario: Option<ResidencyOptions>) -> Option<ResidencyOptions> {
        let policy = self.residency.map(|policy| match policy {
            Policy::Os => Residency::Os,
            Policy::Windowed => Residency::Windowed,
            Policy::Managed => Residency::Managed,
        });
        let mut options = policy.map(ResidencyOptions::of).or(scenario)?;
        if options.policy == Residency::Managed {
            options.stream_buffer = self.stream_buffer.or(options.stream_buffer);
        }
        Some(options)
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

/// `hearth worker`.
#[derive(Debug, Args)]
pub struct WorkerArgs {
    /// Where to listen; port 0 takes a free one. Without a key only 127.0.0.1.
    #[arg(long, value_name = "HOST:PORT", value_parser = address::checked)]
    pub listen: String,
    /// The model file on this device.
    #[arg(long, required_unless_present = "fetch")]
    pub model: Option<PathBuf>,
    /// Have no model: fetch the layers that a plan gives this device from its head, and keep them in this folder.
    #[arg(long, value_name = "FOLDER", conflicts_with = "model")]
    pub fetch: Option<PathBuf>,
    /// The ring's key: seals every connection and lets the ring leave this machine. All devices need the
    /// same. A file that only you can read, with 64 random hexadecimal digits, or at least 16 bytes of
    /// any text; if absent, the text in the variable HEARTH_KEY, if set.
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Threads to compute with; all cores if absent.
    #[arg(long)]
    pub threads: Option<usize>,
    /// What becomes of weights on this device's GPU, as with `hearth execute`.
    #[arg(long, value_enum, default_value_t = GpuWeights::AsStored)]
    pub gpu_weights: GpuWeights,
    /// This device's name in plans, by which `hearth execute --discover` finds it; if absent, what the system calls
    /// itself.
    #[arg(long)]
    pub name: Option<String>,
    /// Whether to say by multicast DNS that this worker is here: its name, its port and the protocol's version.
    #[arg(long, value_enum, default_value_t = Announce::Auto)]
    pub announce: Announce,
    /// Rehearse a slow network: what this device sends arrives so much later, as `5ms`.
    #[arg(long, value_name = "TIME", value_parser = parse_delay)]
    pub link_delay: Option<std::time::Duration>,
    /// Run over the links in this file, which the lab writes: what this device sends is as late as they make it.
    #[arg(long, hide = true, value_name = "FILE", conflicts_with = "link_delay")]
    pub emulate_links: Option<PathBuf>,
    /// End when standard input ends, so as not to outlive who started it.
    #[arg(long, hide = true)]
    pub exit_with_stdin: bool,
}

/// Whether a worker announces itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Announce {
    /// With a key, when other machines can reach it.
    Auto,
    /// On this machine too.
    Always,
    /// Never.
    Never,
}

/// `hearth profile`.
#[derive(Debug, Args)]
pub struct ProfileArgs {
    /// Measure the disk that this model lies on, and its formats.
    #[arg(long)]
    pub model: Option<PathBuf>,
    /// Measure the link to a worker at this address; may be repeated.
    #[arg(long, value_name = "HOST:PORT", value_parser = address::checked)]
    pub peer: Vec<String>,
    /// The key that those workers have; if absent, the text in the variable HEARTH_KEY, if set.
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// The device's name.
    #[arg(long, default_value = "this")]
    pub name: String,
    /// Threads to measure with; all cores if absent.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Measure the GPU too: if there is one whose driver is no software, whatever there is, or never.
    #[arg(long, value_enum, default_value_t = MeasureGpu::Auto)]
    pub gpu: MeasureGpu,
    /// Memory that a run may use on a GPU with memory of its own, as `8 GiB`: no interface tells it.
    #[arg(long, value_name = "SIZE", value_parser = Bytes::from_str)]
    pub gpu_memory: Option<Bytes>,
    /// Measure nothing: take the document in `--profile`, and put on its rates how much longer or shorter than in
    /// `--predicted` the device `--name` computed in this trace of a run.
    #[arg(long, value_name = "TRACE", requires_all = ["predicted", "profile"], conflicts_with_all = ["model", "peer", "quick", "threads", "gpu", "gpu_memory", "key", "pass_tokens"])]
    pub from_trace: Option<PathBuf>,
    /// The trace of the same plan as it was simulated with that document.
    #[arg(long, value_name = "TRACE", requires = "from_trace")]
    pub predicted: Option<PathBuf>,
    /// The document of the device that is to be recalibrated.
    #[arg(long, value_name = "DEVICE", requires = "from_trace")]
    pub profile: Option<PathBuf>,
    /// Shorter, and less certain.
    #[arg(long)]
    pub quick: bool,
    /// Tokens of the longest prompt that is read at once: memory is set aside for its buffers.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub pass_tokens: u32,
    /// End when standard input ends, so as not to outlive who started it.
    #[arg(long, hide = true)]
    pub exit_with_stdin: bool,
    /// Where to write the document; standard output if absent.
    #[arg(short, long)]
    pub output: Option<PathBuf>,
}

/// `hearth bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// The model file.
    pub model: PathBuf,
    /// Threads to compute with, one number or several; all cores if absent.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Vec<u32>,
    /// Lengths of the prompts to read at once.
    #[arg(long, value_delimiter = ',', default_value = "64,512", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub prompts: Vec<u32>,
    /// Tokens to decode, one by one.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub tokens: u32,
    /// How often each engine is run, in turn; medians are printed.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub repeats: u32,
    /// The Python with the package llama-cpp-python; `llama.cpp` is `python3`; `none` leaves llama.cpp out.
    #[arg(long, default_value = "llama.cpp", value_name = "PYTHON")]
    pub peer: String,
    /// Longest time that one run of an engine may take, in seconds.
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub deadline: u64,
    /// Time this engine once and print the result as JSON.
    #[arg(long, hide = true)]
    pub once: bool,
}

/// `hearth reproduce`.
#[derive(Debug, Args)]
pub struct ReproduceArgs {
    /// The documents of published numbers; those in `reports/published` if none is named.
    pub documents: Vec<PathBuf>,
    /// How many times all parameters are drawn anew, to say how sure each time is; 0 leaves it out.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    pub draws: u32,
    /// The folder to write reports to, one folder in it for each document.
    #[arg(short, long)]
    pub output: Option<PathBuf>,
}
