//! The program `hearth`: plans, simulates and runs language models across the devices people already own.
//!
//! Each command parses its flags, calls a library, and prints the result.

mod cli;
mod commands;
mod conversation;
mod diagnostics;
mod emulation;
mod gpu;
mod hub;
mod interruption;
mod logging;
mod machine;
mod output;
mod profile_cache;
mod progress;
mod prompts;
mod repl;
mod ring;

use std::io::{self, Write};

use hearth_lab::{CpuHog, MemoryHog};

use crate::diagnostics::{ExitCode, Failure};

fn main() {
    let exit_code = run();
    let _ = io::stdout().flush();
    exit_code.exit()
}

fn run() -> ExitCode {
    let first: Vec<String> = arguments().take(5).collect();
    // A lab also runs this program as the background load of a device.
    if MemoryHog::run_if_requested(&first) || CpuHog::run_if_requested(&first) {
        return ExitCode::SUCCESS;
    }
    let (json, result) = match cli::parse() {
        Ok(cli) => {
            let logging = logging::init(cli.log.as_deref(), cli.log_format);
            (cli.json, logging.and_then(|()| commands::run(cli)))
        }
        Err(error) if !error.use_stderr() => error.exit(),
        // If the command line is invalid, there are no parsed flags.
        Err(error) if arguments().any(|word| word == "--json") => (true, Err(Failure::from_clap(&error))),
        // clap prints errors in colour, with the arguments as they are.
        Err(error) if arguments().all(|word| output::escape(&word) == word) => error.exit(),
        Err(error) => {
            output::say_stderr!("{}", error.render().to_string().trim_end());
            return ExitCode(diagnostics::EXIT_INVALID);
        }
    };
    result.unwrap_or_else(|failure| {
        let text = if json { failure.to_json() } else { failure.to_string() };
        output::say_stderr!("{}", text.trim_end());
        ExitCode(failure.exit_code)
    })
}

fn arguments() -> impl Iterator<Item = String> {
    std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned())
}
