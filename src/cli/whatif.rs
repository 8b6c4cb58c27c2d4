//! Flags of `hearth whatif`.

use std::path::PathBuf;

use clap::Args;

use super::Planning;

/// `hearth whatif`.
#[derive(Debug, Args)]
pub struct WhatifArgs {
    /// The scenario file.
    pub scenario: PathBuf,
    #[command(flatten)]
    pub planning: Planning,
    /// Use this model file instead of the scenario's model.
    #[arg(long, value_name = "GGUF")]
    pub model: Option<PathBuf>,
    /// Generate this many tokens instead of the scenario's.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: Option<u32>,
    /// Use this many threads, which does not change the results [default: all cores].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub jobs: Option<u32>,
}
