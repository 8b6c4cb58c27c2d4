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
