//! Compares the plans of all strategies, on random clusters and on the testbeds of the prima.cpp paper.
//!
//! ```text
//! cargo run --release -p hearth-studies --bin planners -- [--instances N] [--small N] [--seed S] [-o FOLDER]
//! cargo run --release -p hearth-studies --bin planners -- --paper [-o FOLDER]
//! ```
//!
//! The first command writes `report.md`, `data.csv` and `gaps.svg`: each strategy plans for N random clusters of home
//! devices, and each plan is scored by the paper's objective and by the simulator. On small instances the report also
//! has the regret against all plans. The second command writes `report.md` about the testbeds in `scenarios/paper`,
//! with the published results. The same arguments give the same bytes on every machine.
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
mod tables;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use hearth_studies::{Failure, run_study};
use regret::ExhaustiveResult;

const USAGE: &str = "usage: planners [--instances N] [--small N] [--seed S] [-o FOLDER]\n       \
                     planners --paper [-o FOLDER]";
const COMMAND: &str = "cargo run --release -p hearth-studies --bin planners --";

struct Arguments {
    /// Whether to plan for the testbeds of the prima.cpp paper instead of random clusters.
    paper: bool,
    /// Number of random clusters.
    instances: usize,
    /// Number of small instances, for which all plans are simulated.
    small: usize,
    seed: u64,
    /// The output folder; the default depends on `paper`.
    folder: Option<PathBuf>,
}

impl Default for Arguments {
    fn default() -> Self {
        Self { paper: false, instances: 300, small: 40, seed: 1, folder: None }
    }
}

fn main() -> ExitCode {
    run_study(|words| {
        let arguments = parse(words)?;
        if arguments.paper { run_testbeds(&arguments) } else { run_random_clusters(&arguments) }
    })
}

fn parse(words: &[String]) -> Result<Arguments, Failure> {
    let mut words = words.iter();
    let mut arguments = Arguments::default();
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("`{word}` needs a value\n{USAGE}"));
        let number =
            |text: &String| text.parse::<usize>().map_err(|_| format!("`{text}` is not a number\n{USAGE}"));
        match word.as_str() {
            "--paper" => arguments.paper = true,
            "--instances" => arguments.instances = number(value()?)?,
            "--small" => arguments.small = number(value()?)?,
            "--seed" => arguments.seed = number(value()?)? as u64,
            "-o" => arguments.folder = Some(value()?.into()),
            _ => return Err(format!("`{word}` is not an option\n{USAGE}").into()),
        }
    }
    Ok(arguments)
}

fn run_testbeds(arguments: &Arguments) -> Result<(), Failure> {
    let folder = arguments.folder.as_deref().unwrap_or(Path::new("docs/studies/paper-testbed"));
    let results = paper::testbeds()?;
    write(folder, "report.md", &paper_page::page(&format!("{COMMAND} --paper"), &results))
}

fn run_random_clusters(arguments: &Arguments) -> Result<(), Failure> {
    let Arguments { instances, small, seed, .. } = *arguments;
    let folder = arguments.folder.as_deref().unwrap_or(Path::new("docs/studies/planners"));
    let results = parallel::map("random clusters", instances, |number| population::evaluate(seed, number))?;
    let exhaustive = parallel::map("small instances", small, |number| regret::search_all(seed, number))?;
    let exhaustive: Vec<ExhaustiveResult> = exhaustive.into_iter().flatten().collect();
    let command = format!("{COMMAND} --instances {instances} --small {small} --seed {seed}");
    write(folder, "report.md", &tables::page(&command, &results, &exhaustive))?;
    write(folder, "gaps.svg", &tables::curves(&results))?;
    write(folder, "data.csv", &tables::data(&results, &exhaustive))
}

fn write(folder: &Path, name: &str, text: &str) -> Result<(), Failure> {
    let path = folder.join(name);
    let failed = |error: std::io::Error| format!("cannot write {}: {error}", path.display());
    std::fs::create_dir_all(folder).map_err(failed)?;
    Ok(std::fs::write(&path, text.trim_end().to_owned() + "\n").map_err(failed)?)
}
