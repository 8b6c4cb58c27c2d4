//! `hearth completions`, `hearth man` and `hearth schema`: generate files for shells, `man` and editors.
//!
//! The files are generated from the definitions of the command line and of the document types.

use clap::CommandFactory;
use hearth_schema::editor;
use hearth_workflow::Error;
use hearth_workflow::files::create_folder;
use serde::Serialize;

use super::{print_json, print_result};
use crate::cli::{Cli, CompletionsArgs, ManArgs, SchemaArgs};
use crate::diagnostics::{ExitCode, Failure};

const PROGRAM_NAME: &str = "hearth";

/// The output of `hearth completions --json`.
#[derive(Serialize)]
struct Completions {
    shell: String,
    script: String,
}

/// The output of `hearth man --json`.
#[derive(Serialize)]
struct Pages {
    folder: String,
    pages: Vec<String>,
}

pub fn print_completions(args: &CompletionsArgs, json: bool) -> Result<ExitCode, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), PROGRAM_NAME, &mut script);
    let script = String::from_utf8(script).map_err(Failure::failed)?;
    let shell = args.shell.to_string();
    print_result(json, &Completions { shell, script }, |completions| completions.script.clone())
}

/// Prints the schema of `hearth schema`, which is always JSON.
pub fn print_schema(args: &SchemaArgs) -> Result<ExitCode, Failure> {
    let schema = editor::json_schema(&args.kind)
        .ok_or_else(|| Failure::invalid(format!("no kind of document is called `{}`", args.kind)))?;
    print_json(&schema)?;
    Ok(ExitCode::SUCCESS)
}

pub fn write_man_pages(args: &ManArgs, json: bool) -> Result<ExitCode, Failure> {
    create_folder(&args.folder)?;
    let failed = |error: std::io::Error| Error::from_folder_error(&args.folder, "write to", &error);
    clap_mangen::generate_to(Cli::command(), &args.folder).map_err(failed)?;
    let mut pages = Vec::new();
    page_names(&Cli::command(), PROGRAM_NAME, &mut pages);
    let pages = Pages { folder: args.folder.display().to_string(), pages };
    print_result(json, &pages, |Pages { folder, pages }| format!("wrote {} pages to {folder}\n", pages.len()))
}

/// Adds the file names of the man pages of a command and of its subcommands to `pages`.
fn page_names(command: &clap::Command, name: &str, pages: &mut Vec<String>) {
    for one in command.get_subcommands().filter(|one| !one.is_hide_set()) {
        page_names(one, &format!("{name}-{}", one.get_name()), pages);
    }
    pages.push(format!("{name}.1"));
}
