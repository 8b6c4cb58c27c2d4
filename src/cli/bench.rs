//! Flags of `hearth bench`.

use std::path::PathBuf;

use clap::Args;

/// `hearth bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// The model file.
    pub model: PathBuf,
    /// Compute with this many threads; several numbers are measured one after another [default: all cores].
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Vec<u32>,
    /// Prefill prompts of these lengths.
    #[arg(long, value_delimiter = ',', default_value = "64,512", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub prompts: Vec<u32>,
    /// Decode this many tokens.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub tokens: u32,
    /// Run each engine this many times, in turn, and print medians.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub repeats: u32,
    /// Run llama.cpp with this Python, which has the package llama-cpp-python; `llama.cpp` means `python3`, `none` skips
    /// it.
    #[arg(long, default_value = "llama.cpp", value_name = "PYTHON")]
    pub peer: String,
    /// Stop a run of an engine after this many seconds.
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub deadline: u64,
    /// Run this engine once and print the result as JSON.
    #[arg(long, hide = true)]
    pub once: bool,
}
