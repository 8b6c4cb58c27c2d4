//! The commands of `hearth`, one module for each: parse flags, call a library, print the result.

mod advise;
mod bench;
mod device;
mod execute;
mod experts;
mod gpu;
mod init;
mod key;
mod lab;
mod lint;
mod model;
mod pack;
mod plan;
mod profile;
mod pull;
mod report;
mod reproduce;
mod run;
mod serve;
mod shell;
mod simulate;
mod sweep;
mod synth;
mod tokenize;
mod whatif;
mod worker;

use serde::Serialize;

use crate::cli::{Cli, Verb};
use crate::diagnostics::{ExitCode, Failure};
use crate::hub;
use crate::output::say;

pub fn run(mut cli: Cli) -> Result<ExitCode, Failure> {
    let json = cli.json;
    hub::locate_models(cli.verb.model_paths_mut())?;
    match cli.verb {
        Verb::Run(args) => run::run(&args, json),
        Verb::Plan(args) => plan::run(&args, json),
        Verb::Key(args) => key::run(&args, json),
        Verb::Simulate(args) => simulate::run(&args, json),
        Verb::Sweep(args) => sweep::run(&args, json),
        Verb::Lint(args) => lint::run(&args, json),
        Verb::Execute(args) => execute::run(&args, json),
        Verb::Worker(args) => worker::run(&args, json),
        Verb::Gpu(args) => gpu::run(&args, json),
        Verb::Device(args) => device::run(&args, json),
        Verb::Model(args) => model::run(&args, json),
        Verb::Experts(args) => experts::run(&args, json),
        Verb::Advise(args) => advise::run(&args, json),
        Verb::Serve(args) => serve::run(&args, json),
        Verb::Bench(args) => bench::run(&args, json),
        Verb::Pull(args) => pull::run(&args, json),
        Verb::Profile(args) => profile::run(&args, json),
        Verb::Lab(args) => lab::run(&args, json),
        Verb::Report(args) => report::run(&args, json),
        Verb::Reproduce(args) => reproduce::run(&args, json),
        Verb::Pack(args) => pack::run(&args, json),
        Verb::Synth(args) => synth::run(&args, json),
        Verb::Tokenize(args) => tokenize::run(&args, json),
        Verb::Whatif(args) => whatif::run(&args, json),
        Verb::Init(args) => init::run(&args, json),
        Verb::Completions(args) => shell::print_completions(&args, json),
        Verb::Man(args) => shell::write_man_pages(&args, json),
        Verb::Schema(args) => shell::print_schema(&args),
    }
}

/// Prints the result of a command as JSON or as text.
fn print_result<T: Serialize>(
    json: bool,
    result: &T,
    text: impl FnOnce(&T) -> String,
) -> Result<ExitCode, Failure> {
    if json {
        print_json(result)?;
    } else {
        say!("{}", text(result));
    }
    Ok(ExitCode::SUCCESS)
}

fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value).map_err(Failure::failed)?;
    say!("{text}\n");
    Ok(())
}
