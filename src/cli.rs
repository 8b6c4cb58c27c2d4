//! Command line of `hearth`: the commands and their flags.

mod advise;
mod device;
mod examples;
mod experts;
mod init;
mod key;
mod lab;
mod measure;
mod model;
mod model_paths;
mod pack;
mod planning;
mod pull;
mod report;
mod ring;
mod run;
mod shell;
mod sweep;
mod synth;
mod tokenize;

#[cfg(test)]
mod tests;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

pub use self::advise::AdviseArgs;
pub use self::device::{CatalogueArgs, CatalogueCommand, NewArgs};
pub use self::experts::ExpertsArgs;
pub use self::init::InitArgs;
pub use self::key::KeyArgs;
pub use self::lab::LabArgs;
pub use self::measure::{BenchArgs, GpuArgs, GpuMeasurementMode, GpuWeightFormat, ProfileArgs};
pub use self::model::{ModelArgs, ModelCommand};
pub use self::pack::PackArgs;
use self::planning::PLANNING_FLAGS;
pub use self::planning::{LintArgs, PlanArgs, PlanSource, PlanningArgs, SimulateArgs, WhatifArgs};
pub use self::pull::PullArgs;
pub use self::report::{ReportArgs, ReproduceArgs};
pub use self::ring::{AnnouncePolicy, DeviceArgs, ExecuteArgs, PlanOrModel, RingArgs, ServeArgs, WorkerArgs};
pub use self::run::{RunArgs, SingleDeviceArgs};
pub use self::shell::{CompletionsArgs, ManArgs, SchemaArgs};
pub use self::sweep::{MergeArgs, SweepArgs, SweepCommand};
pub use self::synth::SynthArgs;
pub use self::tokenize::TokenizeArgs;
use crate::logging::LogFormat;

/// Plan, simulate and run language models across the devices people already own.
///
/// `run` answers texts with a model on this machine. For more devices, a scenario names devices, network links and a
/// model. `plan` assigns the layers of the model to the devices, `simulate` predicts how fast the plan is and why,
/// `execute` runs the plan on real devices, and `report` compares prediction and measurement. `lab` does all of this on
/// one machine.
///
/// Where a command expects a GGUF file, `hf:OWNER/REPO:QUANT` names a model on Hugging Face, which is downloaded if it
/// is missing; `pull` lists and downloads such models.
///
/// Exit codes: 0 success; 1 a failure at run time; 2 invalid input (flags, documents or models); 3 the run did not
/// complete, `lint` found an error, a lab suite exceeds an error limit, or Ctrl-C stopped `execute`, `sweep` or
/// `whatif`, which keep their results; 130 Ctrl-C stopped any other command. `worker` and `serve` exit with 0 when
/// Ctrl-C stops them.
#[derive(Debug, Parser)]
#[command(
    version,
    arg_required_else_help = true,
    after_help = "Example: hearth run model.gguf 'What is the capital of France?'\n\
                  Example: hearth init home.yaml --device 'laptop=laptop-ddr4-3200,16 GiB,nvme-gen3,linux'\n\
                  Example: hearth simulate scenarios/home/llama-70b-on-four.yaml"
)]
pub struct Cli {
    /// Print the result as JSON instead of text, and errors as JSON to standard error.
    #[arg(long, global = true)]
    pub json: bool,
    /// Set the log level (off, error, warn, info, debug or trace), or a log level for each target, such as
    /// `hearth=debug,hyper=info` [default: the environment variable HEARTH_LOG, otherwise hearth=info].
    #[arg(long, global = true, value_name = "FILTER", help_heading = "Diagnostics")]
    pub log: Option<String>,
    /// Set the format of the log messages.
    #[arg(long, global = true, value_name = "FORMAT", default_value = "text", help_heading = "Diagnostics")]
    pub log_format: LogFormat,
    #[command(subcommand)]
    pub verb: Verb,
}

/// Parses the arguments of the program.
pub fn parse() -> Result<Cli, clap::Error> {
    let mut command = examples::break_examples(Cli::command());
    let mut matches = command.try_get_matches_from_mut(std::env::args_os())?;
    Cli::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Run a model on this machine: answer a text, or chat.
    ///
    /// In a chat, Ctrl-C stops the answer, `/help` lists the commands, and Ctrl-D ends the chat. Text that begins with
    /// """ may have several lines and ends with """. What you enter is kept in
    /// `hearth/history` in the folder XDG_STATE_HOME, or in ~/.local/state.
    #[command(after_help = "Example: hearth run model.gguf 'What is the capital of France?'\n\
                      Example: hearth run model.gguf --system 'Answer in one sentence.'")]
    Run(RunArgs),
    /// Assign the layers of a model to devices.
    #[command(
        after_help = "Example: hearth plan scenarios/home/llama-70b-on-four.yaml --strategy exact -o plan.yaml\n\
                      Example: hearth plan scenarios/home/llama-70b-on-four.yaml --compare --refine-seconds 5\n\
                      Example: hearth plan scenarios/home/llama-70b-on-four.yaml --export llama.cpp"
    )]
    Plan(PlanArgs),
    /// Predict how fast a plan is, and why.
    #[command(
        after_help = "Example: hearth simulate scenarios/paper/llama-70b-on-d1-d4.yaml --tokens 8 --trace sim.trace"
    )]
    Simulate(SimulateArgs),
    /// Plan and simulate a scenario for each combination of values of one or two fields.
    #[command(after_help = sweep::EXAMPLES)]
    Sweep(Box<SweepArgs>),
    /// Check a scenario and a plan for errors and implausible values.
    ///
    /// Exits with code 3 if it finds an error, otherwise with code 0.
    #[command(after_help = "Example: hearth lint scenarios/home/llama-70b-on-four.yaml --plan plan.yaml")]
    Lint(LintArgs),
    /// Run a plan on real devices.
    #[command(
        after_help = "Example: hearth execute plan.yaml --model model.gguf --prompt 'Once upon' --tokens 32\n\
                      Example: hearth execute plan.yaml --model model.gguf --prompt 'Once upon' --key ring.key --discover\n\
                      Example: hearth execute plan.yaml --model model.gguf --prompt 'Once \
                      upon' --prompt 'In the end' --draft-model small.gguf --draft-tokens 4\n\
                      Example: hearth execute model.gguf --prompt 'Once upon' --trace run.trace"
    )]
    Execute(ExecuteArgs),
    /// Serve a model over HTTP: an OpenAI-compatible API, metrics and a chat page.
    #[command(after_help = "Example: hearth serve model.gguf\n\
                      Example: hearth serve plan.yaml --model model.gguf --sequences 4\n\
                      Then: curl http://127.0.0.1:8080/v1/completions -H 'Content-Type: application/json' -d '{\"prompt\": \
                      \"Once upon\", \"max_tokens\": 20}'")]
    Serve(ServeArgs),
    /// Run a worker, which computes layers for the head device of a ring.
    #[command(after_help = "Example: hearth worker --listen 127.0.0.1:9001 --model model.gguf\n\
                      Example: hearth worker --listen 0.0.0.0:9001 --model model.gguf --key ring.key --name laptop")]
    Worker(WorkerArgs),
    /// Create a random key, for a ring or for the API of a server.
    ///
    /// The file has 64 hexadecimal digits, and only you can read it. Copy the key of a ring to all of its devices.
    #[command(after_help = "Example: hearth key home.key\n\
                      Then: hearth worker --listen 0.0.0.0:9001 --model model.gguf --key home.key\n\
                      Then: hearth key api.key\n\
                      Then: hearth serve model.gguf --listen 0.0.0.0:8080 --token api.key")]
    Key(KeyArgs),
    /// Download a GGUF model from Hugging Face, and print its path.
    ///
    /// The model is stored in the cache that other programs share, in the folder of HF_HUB_CACHE, in `hub` in the
    /// folder of HF_HOME, or in ~/.cache/huggingface/hub. A download that was stopped is continued. For private and
    /// gated models, set HF_TOKEN to a token of your account. HF_ENDPOINT selects another server, and HF_HUB_OFFLINE=1
    /// forbids downloads. Where a command expects a GGUF file, `hf:OWNER/REPO:QUANT` downloads it, too.
    #[command(after_help = "Example: hearth pull Qwen/Qwen3-8B-GGUF\n\
                      Example: hearth pull Qwen/Qwen3-8B-GGUF:Q4_K_M\n\
                      Then: hearth run hf:Qwen/Qwen3-8B-GGUF:Q4_K_M 'Why is the sky blue?'")]
    Pull(PullArgs),
    /// Measure the speed of this machine, or correct its profile with the trace of a run.
    #[command(after_help = "Example: hearth profile --model model.gguf -o this.yaml\n\
                      Example: hearth profile --from-trace run.trace --predicted sim.trace --profile this.yaml --name a -o new.yaml")]
    Profile(ProfileArgs),
    /// Find parts of devices, such as graphics cards, and write profiles of devices that consist of them.
    #[command(after_help = "Example: hearth device search rtx 3060\n\
                      Example: hearth device new --cpu ddr4-3200-dual --memory '16 GiB' --disk nvme-gen3 --os windows --gpu \
                      rtx-3060-12gb -o desktop.yaml")]
    Device(CatalogueArgs),
    /// List the models that ship with hearth, as documents without weights.
    #[command(after_help = "Example: hearth model list qwen3\nExample: hearth model show qwen3-30b-a3b")]
    Model(ModelArgs),
    /// List the GPUs that can compute layers.
    ///
    /// Exits with code 0 even if there is no such GPU.
    #[command(after_help = "Example: hearth gpu --tune")]
    Gpu(GpuArgs),
    /// Benchmark a model on this machine with hearth, and with llama.cpp if its Python package is installed.
    #[command(after_help = "Example: hearth bench model.gguf --threads 1,2 --peer ~/venv/bin/python")]
    Bench(BenchArgs),
    /// Predict and measure a scenario on this machine, with resource limits for each device.
    #[command(
        after_help = "Example: hearth lab scenarios/lab/three-half.yaml --model model.gguf --report report/\n\
                      Example: hearth lab --suite scenarios/lab --repeats 3 -o out/suite\n\
                      Example: hearth lab --random 12 --seed 7 -o out/random"
    )]
    Lab(Box<LabArgs>),
    /// Write a report that compares traces.
    #[command(after_help = "Example: hearth report sim.trace run.trace -o report/\n\
                      Example: hearth report sim.trace --published prima-table-4 --system prima.cpp --sweep out.csv -o report/")]
    Report(ReportArgs),
    /// Simulate published experiments and compare the results with the published numbers.
    #[command(
        after_help = "Example: hearth reproduce reports/published/prima-table-4.yaml --draws 32 -o out/"
    )]
    Reproduce(ReproduceArgs),
    /// Write a GGUF model of any shape with random weights.
    #[command(after_help = "Example: hearth synth --preset 1b --quant q4_k_m -o model.gguf")]
    Synth(SynthArgs),
    /// Write the weights of a model in an order that this processor multiplies faster, to a file beside the model.
    ///
    /// `run`, `execute`, `worker`, `serve`, `profile` and `bench` use the file MODEL.packed if it belongs to the model, on
    /// processors with AVX-512 and VNNI. It takes as much disk space as the model; of both files, only what is used takes
    /// memory.
    #[command(after_help = "Example: hearth pack model.gguf\nExample: hearth pack model.gguf --bench")]
    Pack(PackArgs),
    /// Print the tokens of a text.
    #[command(after_help = "Example: hearth tokenize model.gguf 'Once upon a time'\n\
                      Example: hearth tokenize model.gguf --file scenarios/home/llama-70b-on-four.yaml --ids --no-bos")]
    Tokenize(TokenizeArgs),
    /// Rank possible changes of a scenario by the time per token that they would save.
    ///
    /// Plans and simulates a variant of the scenario for each single change: a device removed, twice the memory, a
    /// faster disk or another graphics card for a device, cables instead of Wi-Fi, a different weight format, or
    /// another model.
    #[command(after_help = "Example: hearth whatif scenarios/home/llama-70b-on-four.yaml --tokens 8\n\
                      Example: hearth whatif scenarios/home/llama-70b-on-four.yaml --tokens 8 --price memory=4 --price cable=10")]
    Whatif(Box<WhatifArgs>),
    /// Replay a recording of expert routing through caches of experts, and describe the recording.
    ///
    /// Shows which part of a mixture of experts a cache of some size would find in memory, by policy, and how many bytes
    /// it would read. `belady` is the best that is possible.
    #[command(
        after_help = "Example: hearth experts tests/data/moe/qwen3-30b-a3b.route.csv --budget '1 GiB,4 GiB' --policy lru,belady"
    )]
    Experts(ExpertsArgs),
    /// Show which models run well on some devices.
    ///
    /// Plans and simulates each model of the catalogue, and shows the best ones by quality, with their speed, the time
    /// to the first token, the memory that they need, and the layers of each device.
    #[command(
        after_help = "Example: hearth advise 'desktop=rtx-3060-12gb,ddr4-3200-dual,32 GiB,nvme-gen3,windows'\n\
                      Example: hearth advise scenarios/home/llama-70b-on-four.yaml --all"
    )]
    Advise(AdviseArgs),
    /// Write a new scenario from flags, discovered workers, and answers to questions.
    #[command(
        after_help = "Example: hearth init home.yaml --model llama-8b --device 'desktop=rtx-3060-12gb,ddr4-3200-dual,16 \
                      GiB,nvme-gen3,windows' --device 'laptop=laptop-ddr4-3200,16 GiB,nvme-gen3,linux'\n\
                      Example: hearth init home.yaml --discover --network cable"
    )]
    Init(InitArgs),
    /// Print a completion script for a shell.
    #[command(
        after_help = "Example: hearth completions bash > ~/.local/share/bash-completion/completions/hearth"
    )]
    Completions(CompletionsArgs),
    /// Print the JSON Schema of a document kind, for validation and completion in editors.
    #[command(after_help = "Example: hearth schema scenario > scenario.schema.json")]
    Schema(SchemaArgs),
    /// Write a man page for each command.
    #[command(after_help = "Example: hearth man ~/.local/share/man/man1")]
    Man(ManArgs),
}

/// Returns a parser for a flag with a fixed list of values. Each value has a name, a description and a parsed value.
fn choice_parser<T: Copy + Send + Sync + 'static>(
    values: &'static [(&'static str, &'static str, T)],
) -> impl TypedValueParser<Value = T> {
    let described = values.iter().map(|(name, help, _)| PossibleValue::new(*name).help(*help));
    let value = |name: String| values.iter().find(|value| value.0 == name).expect("a possible value").2;
    PossibleValuesParser::new(described).map(value)
}
