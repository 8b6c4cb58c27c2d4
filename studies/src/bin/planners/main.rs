//! Quality of the plans of each strategy, on random clusters and on the testbeds of the prima.cpp paper.
//!
//! ```text
//! cargo run --release -p hearth-studies --bin planners -- [--instances N] [--small N] [--seed S] [-o FOLDER]
//! cargo run --release -p hearth-studies --bin planners -- --paper [-o FOLDER]
//! ```
//!
//! The first writes `report.md`, `data.csv` and `gaps.svg`: every strategy's plan for each of N random homes, scored
//! by the paper's objective and by the simulator, and the regret against all plans on small instances. The second
//! writes `report.md` on the testbeds in `scenarios/paper`, beside the published numbers. The same arguments give the
//! same bytes on every machine.
//!
//! Not here: whether the simulator is right; the lab answers that.

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

use hearth_studies::run_study;
use regret::Searched;

const USAGE: &str = "usage: planners [--instances N] [--small N] [--seed S] [-o FOLDER]\n       \
                     planners --paper [-o FOLDER]";
const COMMAND: &str = "cargo run --release -p hearth-studies --bin planners --";

/// The subject of the study.
struct Arguments {
    paper: bool,
    instances: usize,
    small: usize,
    seed: u64,
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
        if arguments.paper { testbeds(&arguments) } else { homes(&arguments) }
    })
}

fn parse(words: &[String]) -> Result<Arguments, String> {
    let mut words = words.iter();
    let mut arguments = Arguments::default();
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("`{word}` needs a value\n{USAGE}"));
        let number = |text: &String| text.parse().map_err(|_| format!("`{text}` is no number\n{USAGE}"));
        match word.as_str() {
            "--paper" => arguments.paper = true,
            "--instances" => arguments.instances = number(value()?)?,
            "--small" => arguments.small = number(value()?)?,
            "--seed" => arguments.seed = number(value()?)? as u64,
            "-o" => arguments.folder = Some(value()?.into()),
            _ => return Err(format!("`{word}` is no option\n{USAGE}")),
        }
    }
    Ok(arguments)
}

fn testbeds(arguments: &Arguments) -> Result<(), String> {
    let folder = arguments.folder.as_deref().unwrap_or(Path::new("docs/studies/paper-testbed"));
    let answered = paper::testbeds()?;
    write(folder, "report.md", &paper_page::page(&format!("{COMMAND} --paper"), &answered))
}

fn homes(arguments: &Arguments) -> Result<(), String> {
    let Arguments { instances, small, seed, .. } = *arguments;
    let folder = arguments.folder.as_deref().unwrap_or(Path::new("docs/studies/planners"));
    let homes = parallel::each("homes", instances, |number| population::instance(seed, number))?;
    let searched = parallel::each("small instances", small, |number| regret::searched(seed, number))?;
    let searched: Vec<Searched> = searched.into_iter().flatten().collect();
    let command = format!("{COMMAND} --instances {instances} --small {small} --seed {seed}");
    write(folder, "report.md", &tables::page(&command, &homes, &searched))?;
    write(folder, "gaps.svg", &tables::curves(&homes))?;
    write(folder, "data.csv", &tables::data(&homes, &searched))
}

fn write(folder: &Path, name: &str, text: &str) -> Result<(), String> {
    let path = folder.join(name);
    let failed = |error: std::io::Error| format!("cannot write {}: {error}", path.display());
    std::fs::create_dir_all(folder).map_err(failed)?;
    std::fs::write(&path, text.trim_end().to_owned() + "\n").map_err(failed)
}
