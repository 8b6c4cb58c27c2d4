//! Flags of `hearth profile`, `hearth bench` and `hearth gpu`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use hearth_profiles::Bytes;
use hearth_schema::address;

#[derive(Debug, Args)]
pub struct ProfileArgs {
    /// Measure the disk, and the weight formats of a model, with this GGUF file.
    #[arg(long, value_name = "GGUF")]
    pub model: Option<PathBuf>,
    /// Measure the link to a worker. Can be repeated.
    #[arg(long, value_name = "HOST:PORT", value_parser = address::validate)]
    pub peer: Vec<String>,
    /// Read the key of these workers from FILE [default: the environment variable HEARTH_KEY].
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Set the device's name in the profile.
    #[arg(long, default_value = "this")]
    pub name: String,
    /// Measure with this many threads [default: all cores].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Measure the GPU.
    #[arg(long, value_enum, default_value_t = GpuMeasurementMode::Auto)]
    pub gpu: GpuMeasurementMode,
    /// Set the usable memory of a GPU with its own memory, such as `8 GiB`; it cannot be queried.
    #[arg(long, value_name = "SIZE", value_parser = Bytes::from_str)]
    pub gpu_memory: Option<Bytes>,
    /// Correct the rates of a profile instead of measuring, by the ratio of the CPU times of device `--name` in this
    /// measured trace and in the `--predicted` trace.
    #[arg(long, value_name = "TRACE", requires_all = ["predicted", "profile"], conflicts_with_all = ["model", "peer", "quick", "threads", "gpu", "gpu_memory", "key", "pass_tokens"])]
    pub from_trace: Option<PathBuf>,
    /// Read the prediction from this trace of the same plan, simulated with `--profile`.
    #[arg(long, value_name = "TRACE", requires = "from_trace")]
    pub predicted: Option<PathBuf>,
    /// Read the profile to correct from this device document.
    #[arg(long, value_name = "DEVICE", requires = "from_trace")]
    pub profile: Option<PathBuf>,
    /// Measure for a shorter time; the results are less certain.
    #[arg(long)]
    pub quick: bool,
    /// Reserve buffers for a prompt of this many tokens.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub pass_tokens: u32,
    /// Exit when standard input ends, which is when the parent process ends.
    #[arg(long, hide = true)]
    pub exit_with_stdin: bool,
    /// Write the profile to FILE instead of standard output.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct BenchArgs {
    /// The model file.
    pub model: PathBuf,
    /// Repeat the benchmark with each of these thread counts [default: all cores].
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Vec<u32>,
    /// Measure the prefill of prompts with these numbers of tokens.
    #[arg(id = "prompts", long = "prompts", value_name = "TOKENS", value_delimiter = ',', default_value = "64,512", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub prompt_lengths: Vec<u32>,
    /// Measure the decoding of this many tokens.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub tokens: u32,
    /// Run each engine this many times, alternately, and print medians.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub repeats: u32,
    /// Compare with llama.cpp. `llama.cpp` runs it with `python3`, `none` skips it; any other value is the Python to
    /// use, which needs the package llama-cpp-python.
    #[arg(long = "peer", default_value = "llama.cpp", value_name = "PEER")]
    pub llama_cpp_python: String,
    /// Stop a run after this many seconds.
    #[arg(id = "deadline", long = "deadline", value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout_seconds: u64,
    /// Measure only hearth, once, and print the result as JSON.
    #[arg(long, hide = true)]
    pub once: bool,
}

#[derive(Debug, Args)]
pub struct GpuArgs {
    /// Benchmark the kernel variants and save the fastest for this adapter and driver.
    #[arg(long)]
    pub tune: bool,
}

/// When `hearth profile` measures the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GpuMeasurementMode {
    /// Measure the GPU, unless its driver is a software renderer.
    Auto,
    /// Always measure the GPU.
    Always,
    /// Never measure the GPU.
    Never,
}

/// The weight format on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GpuWeightFormat {
    /// The format of the file.
    AsStored,
    /// 8 bits with one scale per row.
    Q8,
    /// 8 bits in attention, 4 bits in the feed-forward block and the output matrix, with one scale per row.
    #[value(name = "8/4/4")]
    Mixed,
}
