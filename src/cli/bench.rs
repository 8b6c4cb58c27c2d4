//! Flags of `hearth bench`.

use std::path::PathBuf;

use clap::Args;

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
