//! `hearth reproduce`: simulates published experiments and compares the results with the published numbers.

use std::path::{Path, PathBuf};

use hearth_reports::published_results::scores::PublishedScores;
use hearth_reports::published_results::{PublishedResults, page};
use hearth_workflow::Error;
use hearth_workflow::documents::read_document;
use hearth_workflow::files::{check_parent_folder, create_folder};
use hearth_workflow::report_folder::ReportFolder;
use hearth_workflow::reproduction::{Reproduction, reproduce};
use serde::Serialize;

use super::print_json;
use crate::cli::ReproduceArgs;
use crate::diagnostics::{ExitCode, Failure};
use crate::interruption::CancellationGuard;
use crate::machine::LocalMachineResolver;
use crate::output::say;
use crate::progress::TerminalProgress;

/// Folder of the documents of published numbers in a clone of the repository.
const SHIPPED_FOLDER: &str = "reports/published";

/// The scores of a document of published numbers as `--json` prints them.
#[derive(Serialize)]
struct Output {
    name: String,
    scores: PublishedScores,
    /// The scores without each inferred value.
    without: Vec<ScoresWithout>,
}

/// The scores of a document if one of its inferred values is replaced.
#[derive(Serialize)]
struct ScoresWithout {
    name: String,
    scores: PublishedScores,
}

pub fn run(args: &ReproduceArgs, json: bool) -> Result<ExitCode, Failure> {
    let documents = if args.documents.is_empty() { shipped_paths()? } else { args.documents.clone() };
    args.output.as_deref().map_or(Ok(()), check_parent_folder)?;
    let mut outputs = Vec::new();
    for path in &documents {
        let published: PublishedResults = read_document(path)?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let progress = TerminalProgress::new();
        let Reproduction { results, without_inferred_values, failed_cells } =
            reproduce(&published, folder, args.draws as usize, &LocalMachineResolver, &progress).map_err(
                |error| {
                    let cancelled = CancellationGuard::is_cancelled();
                    if cancelled { Failure::interrupted(&error) } else { error.into() }
                },
            )?;
        drop(progress);
        for (row, system, error) in failed_cells {
            tracing::info!("{}, {row}, {system}: {}", published.name, error.one_line_message());
        }
        if let Some(folder) = &args.output {
            create_folder(folder)?;
            let files = page::render_files(&published, &results, &without_inferred_values);
            ReportFolder::write_all(&folder.join(&published.name), "hearth reproduce", &files)?;
        }
        let scores = PublishedScores::from_results(&published, &results);
        if !json {
            say!("{}", page::summary_text(&published, &results));
        }
        let inferred = published.inferred_values.iter().zip(&without_inferred_values);
        let without = inferred.map(|(value, results)| ScoresWithout {
            name: value.name.clone(),
            scores: PublishedScores::from_results(&published, results),
        });
        let without = without.collect();
        outputs.push(Output { name: published.name, scores, without });
    }
    if json {
        print_json(&outputs)?;
    } else if let Some(folder) = &args.output {
        say!("wrote {}\n", folder.display());
    } else {
        say!("Use `-o FOLDER` to write a report with the plan and the error of every cell.\n");
    }
    Ok(ExitCode::SUCCESS)
}

fn shipped_paths() -> Result<Vec<PathBuf>, Error> {
    let folder = Path::new(SHIPPED_FOLDER);
    let hint = "run the command in a clone of the repository, or name the documents of published numbers";
    let entries = std::fs::read_dir(folder)
        .map_err(|error| Error::from_folder_error(folder, "open", &error).with_hint(hint))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|kind| kind == "yaml"));
    paths.sort();
    Ok(paths)
}
