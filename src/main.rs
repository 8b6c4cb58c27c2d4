//! `hearth`: plan, simulate and run language models across the devices people already own.
//!
//! The command line is the only place that opens scenario, plan, trace and report files. Each verb reads
//! its files, calls one crate, and writes its files.

mod cli;
mod commands;
mod counters;
mod diagnostics;
mod documents;
mod gpu;
mod happenings;
mod hints;
mod interruption;
mod judge;
mod limits;
mod output;
mod progress;
mod prompts;
mod refinement;
mod replanner;
mod soc;
mod sweep;
mod uncertainty;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    match commands::run(cli) {
        Ok(code) => code,
        Err(failure) => {
            output::tell!("{}", failure.to_string().trim_end());
            ExitCode::from(failure.code)
        }
    }
}
