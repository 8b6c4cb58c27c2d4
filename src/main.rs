//! `hearth`: plan, simulate and run language models across the devices people already own.
//!
//! Each verb parses its flags, calls a library, and prints the result.

mod cli;
mod commands;
mod diagnostics;
mod emulation;
mod gpu;
mod interruption;
mod logging;
mod machine;
mod output;
mod progress;
mod prompts;
mod ring;

use std::process::ExitCode;

use clap::Parser;
use hearth_lab::{CpuHog, MemoryHog};

use crate::diagnostics::Failure;

fn main() -> ExitCode {
    let arguments: Vec<String> = words().take(5).collect();
    // In a lab this program also plays the other programs of a device.
    if MemoryHog::run_if_asked(&arguments) || CpuHog::run_if_asked(&arguments) {
        return ExitCode::SUCCESS;
    }
    let (json, result) = match cli::Cli::try_parse() {
        Ok(cli) => {
            let logging = logging::init(cli.log.as_deref(), cli.log_format);
            (cli.json, logging.and_then(|()| commands::run(cli)))
        }
        // Help and the version are no errors, and are printed as they are.
        Err(error) if !error.use_stderr() => error.exit(),
        // The command line was not understood, so that its flags are only words.
        Err(error) if words().any(|word| word == "--json") => (true, Err(Failure::usage(&error))),
        Err(error) => error.exit(),
    };
    result.unwrap_or_else(|failure| {
        let text = if json { failure.json() } else { failure.to_string() };
        output::say_stderr!("{}", text.trim_end());
        ExitCode::from(failure.code)
    })
}

/// The words behind the program's name. A path may be no text.
fn words() -> impl Iterator<Item = String> {
    std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned())
}
