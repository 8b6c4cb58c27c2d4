//! Flags of `hearth profile`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use hearth_profiles::Bytes;
use hearth_schema::address;

use super::MeasureGpu;

/// `hearth profile`.
#[derive(Debug, Args)]
pub struct ProfileArgs {
    /// Measure the disk with this model file, and the formats of its weights.
    #[arg(long, value_name = "GGUF")]
    pub model: Option<PathBuf>,
    /// Measure the link to the worker at this address. Can be repeated.
    #[arg(long, value_name = "HOST:PORT", value_parser = address::checked)]
    pub peer: Vec<String>,
    /// Use the key in FILE for those workers [default: the text of the environment variable HEARTH_KEY].
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Set the name of the device.
    #[arg(long, default_value = "this")]
    pub name: String,
    /// Measure with this many threads [default: all cores].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Measure the GPU: if it is not a software driver, always, or never.
    #[arg(long, value_enum, default_value_t = MeasureGpu::Auto)]
    pub gpu: MeasureGpu,
    /// Set the memory that a run may use on a GPU with its own memory, as `8 GiB`; it cannot be queried.
    #[arg(long, value_name = "SIZE", value_parser = Bytes::from_str)]
    pub gpu_memory: Option<Bytes>,
    /// Instead of measuring, correct the rates of the document `--profile` by the ratio of the processor time of device
    /// `--name` in this trace of a run to that in `--predicted`.
    #[arg(long, value_name = "TRACE", requires_all = ["predicted", "profile"], conflicts_with_all = ["model", "peer", "quick", "threads", "gpu", "gpu_memory", "key", "pass_tokens"])]
    pub from_trace: Option<PathBuf>,
    /// Use this trace of the same plan, simulated with that document.
    #[arg(long, value_name = "TRACE", requires = "from_trace")]
    pub predicted: Option<PathBuf>,
    /// Correct this device document.
    #[arg(long, value_name = "DEVICE", requires = "from_trace")]
    pub profile: Option<PathBuf>,
    /// Measure for a shorter time, with less certain results.
    #[arg(long)]
    pub quick: bool,
    /// Reserve memory for the buffers of a prompt of this many tokens.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub pass_tokens: u32,
    /// Exit when standard input ends, so as not to outlive the parent process.
    #[arg(long, hide = true)]
    pub exit_with_stdin: bool,
    /// Write the document to FILE instead of standard output.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}
