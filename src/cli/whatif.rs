//! Flags of `hearth whatif`.

use std::path::PathBuf;

use clap::Args;

use super::Planning;

/// `hearth whatif`.
#[derive(Debug, Args)]
pub struct WhatifArgs {
    /// The scenario.
    pub scenario: PathBuf,
    /// How to plan.
    #[command(flatten)]
    pub planning: Planning,
    /// A model file instead of the scenario's model.
    #[arg(long)]
    pub model: Option<PathBuf>,
    /// Tokens to generate instead of the scenario's.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: Option<u32>,
    /// Threads; all cores if absent. Their number changes no result.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub jobs: Option<u32>,
}
