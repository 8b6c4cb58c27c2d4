//! Compares the plans of all strategies, on random clusters and on the testbeds of the prima.cpp paper.
//!
//! ```text
//! cargo run --release -p hearth-studies --bin planners -- [--instances N] [--small N] [--seed S] [-o FOLDER]
//! cargo run --release -p hearth-studies --bin planners -- --paper [-o FOLDER]
//! ```
//!
//! The first command writes `report.md`, `data.csv` and `gaps.svg`: each strategy plans for N random clusters of home
//! devices, and each plan is scored by the paper's objective and by the simulator. For small instances the report also
//! has the regret of each strategy against all plans. The second command writes `report.md` about the testbeds in
//! `scenarios/paper`, with the published results. The same arguments give the same bytes on every machine.
//!
//! Not here: the accuracy of the simulator, which the lab measures.

mod clusters;
mod curves;
mod devices;
mod evaluation;
mod gaps;
mod paper;
mod paper_page;
mod parallel;
mod population;
mod published;
mod random;
mod regret;
mod risk;
mod risk_tables;
mod tables;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use hearth_studies::{StudyError, run_study};
use regret::ExhaustiveSearchResult;

const COMMAND: &str = "cargo run --release -p hearth-studies --bin planners --";

#[derive(Parser)]
struct Arguments {
    /// Plan for the testbeds of the prima.cpp paper instead of random clusters.
    #[arg(long)]
    paper: bool,
    /// Plan for this number of random clusters.
    #[arg(long, default_value_t = 300)]
    instances: usize,
    /// Simulate all plans of this number of small instances.
    #[arg(long, default_value_t = 40)]
    small: usize,
    /// Set the seed of the random clusters.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write the files to this folder instead of `docs/studies/planners` or `docs/studies/paper-testbed`.
    #[arg(short = 'o')]
    folder: Option<PathBuf>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    run_study(|_| if arguments.paper { run_testbeds(&arguments) } else { run_random_clusters(&arguments) })
}

fn run_testbeds(arguments: &Arguments) -> Result<(), StudyError> {
    let folder = arguments.folder.as_deref().unwrap_or(Path::new("docs/studies/paper-testbed"));
    let results = paper::evaluate_testbeds()?;
    write(folder, "report.md", &paper_page::markdown_page(&format!("{COMMAND} --paper"), &results))
}

fn run_random_clusters(arguments: &Arguments) -> Result<(), StudyError> {
    let Arguments { instances, small, seed, .. } = *arguments;
    let folder = arguments.folder.as_deref().unwrap_or(Path::new("docs/studies/planners"));
    let results =
        parallel::map("random clusters", instances, |number| population::evaluate_instance(seed, number))?;
    let exhaustive =
        parallel::map("small instances", small, |number| regret::search_exhaustively(seed, number))?;
    let risks = parallel::map("uncertain memory", instances, |number| risk::evaluate_risk(seed, number))?;
    let exhaustive: Vec<ExhaustiveSearchResult> = exhaustive.into_iter().flatten().collect();
    let command = format!("{COMMAND} --instances {instances} --small {small} --seed {seed}");
    write(
        folder,
        "report.md",
        &(tables::markdown_page(&command, &results, &exhaustive) + &risk_tables::risk_section(&risks)),
    )?;
    write(folder, "gaps.svg", &tables::gaps_svg(&results))?;
    write(folder, "data.csv", &tables::evaluations_csv(&results, &exhaustive))
}

fn write(folder: &Path, name: &str, text: &str) -> Result<(), StudyError> {
    let path = folder.join(name);
    let failed = |error: std::io::Error| format!("cannot write {}: {error}", path.display());
    std::fs::create_dir_all(folder).map_err(failed)?;
    Ok(std::fs::write(&path, text.trim_end().to_owned() + "\n").map_err(failed)?)
}
