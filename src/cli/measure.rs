//! Flags of `hearth profile`, `hearth bench` and `hearth gpu`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use hearth_profiles::Bytes;
use hearth_schema::address;

#[derive(Debug, Args)]
pub struct ProfileArgs {
    /// Measure the disk on which this GGUF file is stored, and the speed of the weight formats in the file [default:
    /// the disk of the current folder, and all formats].
    #[arg(long, value_name = "GGUF")]
    pub model: Option<PathBuf>,
    /// Measure the network link to the worker at this address. Can be repeated.
    #[arg(long, value_name = "HOST:PORT", value_parser = address::validate)]
    pub peer: Vec<String>,
    /// Encrypt the connections to the workers of --peer with the key in FILE [default: the environment variable
    /// HEARTH_KEY].
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Set the name of the device in the profile.
    #[arg(long, default_value = "this")]
    pub name: String,
    /// Measure with this many CPU threads [default: one per core].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Choose whether to measure the GPU.
    #[arg(long, value_enum, default_value_t = GpuMeasurementMode::Auto)]
    pub gpu: GpuMeasurementMode,
    /// Set the usable memory of a discrete GPU, such as `8 GiB`, because drivers do not report the memory size.
    #[arg(long, value_name = "SIZE", value_parser = Bytes::from_str)]
    pub gpu_memory: Option<Bytes>,
    /// Instead of measuring, correct the CPU rates in the profile of --profile with this measured trace. The rates are
    /// divided by the CPU time of the device --name in this trace relative to the trace of --predicted.
    #[arg(long, value_name = "TRACE", requires_all = ["predicted", "profile"], conflicts_with_all = ["model", "peer", "quick", "threads", "gpu", "gpu_memory", "key", "pass_tokens"])]
    pub from_trace: Option<PathBuf>,
    /// Read the predicted CPU time from this trace, which must be a simulation of the same plan with the profile of
    /// --profile.
    #[arg(long, value_name = "TRACE", requires = "from_trace")]
    pub predicted: Option<PathBuf>,
    /// Read the profile to correct from this `device/1` document.
    #[arg(long, value_name = "DEVICE", requires = "from_trace")]
    pub profile: Option<PathBuf>,
    /// Measure for a shorter time, with less certain results.
    #[arg(long)]
    pub quick: bool,
    /// Include in the profile the memory of compute buffers for batches of this many prompt tokens.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub pass_tokens: u32,
    /// Exit at the end of standard input, which comes when the parent process ends.
    #[arg(long, hide = true)]
    pub exit_with_stdin: bool,
    /// Write the profile to FILE instead of standard output.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct BenchArgs {
    /// The GGUF file of the model.
    pub model: PathBuf,
    /// Repeat the benchmark with each of these numbers of CPU threads [default: one per core].
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Vec<u32>,
    /// Measure the prefill of prompts of these lengths, in tokens.
    #[arg(id = "prompts", long = "prompts", value_name = "TOKENS", value_delimiter = ',', default_value = "64,512", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub prompt_lengths: Vec<u32>,
    /// Measure the decoding of this many tokens.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub tokens: u32,
    /// Run hearth and llama.cpp at least this many times each, alternately, and print the medians.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub repeats: u32,
    /// Repeat until the 95 % confidence interval of the decode ratio is within 5 % of the ratio, but at most this many
    /// times.
    #[arg(long, default_value_t = 10, value_name = "REPEATS", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub max_repeats: u32,
    /// Run llama.cpp with this Python interpreter, which needs the package llama-cpp-python. The value `llama.cpp`
    /// selects `python3`; the value `none` skips llama.cpp.
    #[arg(long = "peer", default_value = "llama.cpp", value_name = "PEER")]
    pub llama_cpp_python: String,
    /// Stop a benchmark run that takes longer than this many seconds.
    #[arg(id = "deadline", long = "deadline", value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout_seconds: u64,
    /// Do not use packed weights, which `hearth pack` has written.
    #[arg(long)]
    pub unpacked: bool,
    /// Benchmark only hearth, once, and print the result as JSON.
    #[arg(long, hide = true)]
    pub once: bool,
}

#[derive(Debug, Args)]
pub struct GpuArgs {
    /// Benchmark the variants of the GPU kernels, and save the fastest variant for this GPU and driver.
    #[arg(long)]
    pub tune: bool,
}

/// Whether `hearth profile` measures the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GpuMeasurementMode {
    /// Measure the GPU, unless its driver is a software renderer.
    Auto,
    /// Measure the GPU, and fail if there is no GPU.
    Always,
    /// Do not measure the GPU.
    Never,
}

/// The format of the weights in GPU memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GpuWeightFormat {
    /// The format of the model file.
    AsStored,
    /// 8 bits per weight, with one scale per matrix row.
    Q8,
    /// 8 bits per weight in attention, 4 bits in the feed-forward block and the output matrix, with one scale per
    /// matrix row.
    #[value(name = "8/4/4")]
    Mixed,
}
