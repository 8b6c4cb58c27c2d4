//! The results of a suite, kept in a file.
//!
//! A line for each lab that was run, appended when it is done: the scenario, the pass, and a key of all that the result
//! depends on. A scenario that has changed since is run again; one that failed, too. The last line counts, and a line that
//! was cut off is none.
//!
//! Not here: running.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use hearth_reports::validation::Run;
use hearth_workflow::Error;
use hearth_workflow::files::read_at_most;
use serde::{Deserialize, Serialize};

use crate::diagnostics::Failure;

/// More than any suite writes.
/// source: assumed
const MAX_BYTES: u64 = 64 << 20;

/// What came of a lab.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kept {
    /// Its numbers.
    Done(Box<Run>),
    /// Why there are none.
    Failed(String),
}

/// Which lab it was.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Which {
    /// The scenario's name.
    pub name: String,
    /// What the result depends on.
    pub key: String,
    /// How often the suite was gone through before.
    pub pass: u32,
}

#[derive(Debug, Serialize, Deserialize)]
struct Line {
    #[serde(flatten)]
    which: Which,
    #[serde(flatten)]
    kept: Kept,
}

/// The file of results.
#[derive(Debug)]
pub struct Results {
    path: PathBuf,
    kept: BTreeMap<Which, Kept>,
}

impl Results {
    /// Those that are there.
    pub fn open(path: &Path) -> Result<Results, Failure> {
        let mut kept = BTreeMap::new();
        if path.exists() {
            let text = read_at_most(path, MAX_BYTES)?;
            for line in text.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok()) {
                kept.insert(line.which, line.kept);
            }
        }
        Ok(Results { path: path.into(), kept })
    }

    /// Whether a lab has its numbers.
    pub fn has(&self, which: &Which) -> bool {
        matches!(self.kept.get(which), Some(Kept::Done(_)))
    }

    /// Adds one, and writes it.
    pub fn add(&mut self, which: Which, kept: Kept) -> Result<(), Failure> {
        let failed = |error: &std::io::Error| Error::file(&self.path, "write", error);
        let line = Line { which: which.clone(), kept: kept.clone() };
        let mut line = serde_json::to_vec(&line).map_err(Failure::running)?;
        line.push(b'\n');
        // A line that was cut off is ended first, so that it does not spoil this one.
        let text = fs::read(&self.path).unwrap_or_default();
        if text.last().is_some_and(|last| *last != b'\n') {
            line.insert(0, b'\n');
        }
        let file = File::options().create(true).append(true).open(&self.path);
        file.and_then(|mut file| file.write_all(&line)).map_err(|error| failed(&error))?;
        self.kept.insert(which, kept);
        Ok(())
    }

    /// What each pass came to.
    pub fn of(&self, which: impl Iterator<Item = Which>) -> (Vec<Run>, Option<String>) {
        let (mut runs, mut why) = (Vec::new(), None);
        for kept in which.filter_map(|which| self.kept.get(&which)) {
            match kept {
                Kept::Done(run) => runs.push((**run).clone()),
                Kept::Failed(because) => why = Some(because.clone()),
            }
        }
        (runs, why)
    }
}

#[cfg(test)]
mod tests {
    use hearth_reports::validation::RunNumbers;

    use super::*;

    fn which(name: &str, key: &str, pass: u32) -> Which {
        Which { name: name.into(), key: key.into(), pass }
    }

    #[test]
    fn results_stay_after_a_cut_and_failures_are_run_again() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("results.jsonl");
        let numbers = RunNumbers { tpot_ms: Some(1.5), ..RunNumbers::default() };
        let run = Box::new(Run {
            prediction: "sha256:1".into(),
            predicted: numbers.clone(),
            measured: numbers,
            steady: true,
            restarts: 0,
        });
        let mut results = Results::open(&file).expect("nothing is there yet");
        results.add(which("a", "1", 0), Kept::Done(run.clone())).expect("it is written");
        results.add(which("b", "1", 0), Kept::Failed("why".into())).expect("it is written");
        assert_eq!(results.of([which("b", "1", 0)].into_iter()), (vec![], Some("why".into())));
        let mut text = fs::read(&file).expect("a file");
        text.extend(b"{\"key\":\"1\",\"done\":{\"na");
        fs::write(&file, text).expect("it is written");
        let mut results = Results::open(&file).expect("what is whole");
        assert!(results.has(&which("a", "1", 0)));
        for missing in [which("a", "2", 0), which("a", "1", 1), which("b", "1", 0), which("c", "1", 0)] {
            assert!(!results.has(&missing), "{missing:?}");
        }
        results.add(which("b", "1", 0), Kept::Done(run.clone())).expect("it is written");
        results.add(which("b", "1", 1), Kept::Done(run.clone())).expect("it is written");
        let results = Results::open(&file).expect("results");
        assert!(results.has(&which("b", "1", 0)), "the last line counts");
        let all = (0..3).map(|pass| which("b", "1", pass));
        assert_eq!(results.of(all), (vec![(*run).clone(), *run], None));
    }
}
