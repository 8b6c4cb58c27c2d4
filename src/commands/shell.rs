//! `hearth completions` and `hearth man`: what a shell and `man` need to know of the command line.
//!
//! Both are made from the command line's own definition, so that they cannot lag behind it.

use std::process::ExitCode;

use clap::CommandFactory;
use serde::Serialize;

use super::print_json;
use crate::cli::{Cli, CompletionsArgs, ManArgs};
use crate::diagnostics::Failure;
use crate::documents::write_in;
use crate::output::say;

/// The program's name.
const NAME: &str = "hearth";

/// What `completions --json` gives.
#[derive(Serialize)]
struct Completions {
    shell: String,
    script: String,
}

/// What `man --json` gives.
#[derive(Serialize)]
struct Pages {
    folder: String,
    pages: Vec<String>,
}

/// Runs `completions`.
pub fn completions(args: &CompletionsArgs, json: bool) -> Result<ExitCode, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), NAME, &mut script);
    let script = String::from_utf8(script).map_err(Failure::running)?;
    if json {
        print_json(&Completions { shell: args.shell.to_string(), script })?;
    } else {
        say!("{script}");
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs `man`.
pub fn man(args: &ManArgs, json: bool) -> Result<ExitCode, Failure> {
    let mut command = Cli::command();
    command.build();
    let mut pages = Vec::new();
    page(&command, NAME.to_owned(), &mut pages)?;
    for (name, text) in &pages {
        write_in(&args.folder, name, text)?;
    }
    if json {
        let pages = pages.into_iter().map(|(name, _)| name).collect();
        print_json(&Pages { folder: args.folder.display().to_string(), pages })?;
    } else {
        say!("wrote {} pages to {}\n", pages.len(), args.folder.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// The page of a command, and those of its own commands.
fn page(command: &clap::Command, name: String, pages: &mut Vec<(String, Vec<u8>)>) -> Result<(), Failure> {
    for one in command.get_subcommands().filter(|one| !one.is_hide_set() && one.get_name() != "help") {
        page(one, format!("{name}-{}", one.get_name()), pages)?;
    }
    let titled = command.clone().name(name.clone()).display_name(name.clone());
    let mut text = Vec::new();
    clap_mangen::Man::new(titled).render(&mut text).map_err(Failure::running)?;
    pages.push((format!("{name}.1"), text));
    Ok(())
}
