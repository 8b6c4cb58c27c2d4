//! `hearth pull`: downloads a model from a hub, and prints its path.

use std::fmt::Write;

use hearth_hub::{ListedModel, Pull};
use hearth_profiles::Bytes;
use hearth_schema::hub_model::{HubModelName, Repository};
use serde::Serialize;

use super::print_result;
use crate::cli::PullArgs;
use crate::diagnostics::{ExitCode, Failure};
use crate::hub;

/// The downloaded model, as `--json` prints it.
#[derive(Serialize)]
struct Downloaded {
    path: String,
}

/// The models of a repository, as `--json` prints them.
#[derive(Serialize)]
struct Choice {
    repository: String,
    models: Vec<ListedModel>,
}

pub fn run(args: &PullArgs, json: bool) -> Result<ExitCode, Failure> {
    let name = hub::parse_name(&args.model)?;
    match hub::pull(&name)? {
        Pull::Model(path) => {
            let downloaded = Downloaded { path: path.display().to_string() };
            // Only the path, for `--model $(hearth pull NAME)`.
            print_result(json, &downloaded, |downloaded| format!("{}\n", downloaded.path))
        }
        Pull::Choice(models) => {
            let HubModelName { repository, .. } = name;
            let choice = Choice { repository: repository.to_string(), models };
            print_result(json, &choice, |choice| table(&choice.models, &repository))
        }
    }
}

fn table(models: &[ListedModel], repository: &Repository) -> String {
    let width = models.iter().map(|model| model.quant.len()).max().unwrap_or(0).max("quantisation".len());
    let mut text = format!("{:<width$}  {:>9}  files\n", "quantisation", "size");
    for ListedModel { quant, bytes, files, downloaded } in models {
        let note = if *downloaded { ", downloaded" } else { "" };
        let files = if let [file] = &files[..] { file.clone() } else { format!("{} files", files.len()) };
        let _ = writeln!(text, "{quant:<width$}  {:>9}  {files}{note}", Bytes(*bytes).to_string());
    }
    let example = &models[0].quant;
    let _ = writeln!(text, "next: hearth pull {repository}:{example}");
    text
}
