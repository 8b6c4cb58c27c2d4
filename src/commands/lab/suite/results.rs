//! How does a suite keep what it has found?
//!
//! A line for each scenario that was run, appended when it is done, with a key of all that the result depends on. A
//! scenario that has changed since is run again; one that failed, too. The last line of a name and key counts, and a
//! line that was cut off is none.
//!
//! Not here: running.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use hearth_reports::validation::{Case, Failed};
use serde::{Deserialize, Serialize};

use crate::diagnostics::Failure;

/// More than any suite writes.
/// source: assumed
const MOST_BYTES: u64 = 64 << 20;

/// What came of a scenario.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kept {
    /// Its numbers.
    Done(Case),
    /// Why there are none.
    Failed(Failed),
}

#[derive(Debug, Serialize, Deserialize)]
struct Line {
    key: String,
    #[serde(flatten)]
    kept: Kept,
}

/// The file of results.
#[derive(Debug)]
pub struct Results {
    path: PathBuf,
    /// By name and key.
    kept: BTreeMap<(String, String), Kept>,
}

impl Results {
    /// Those that are there.
    pub fn open(path: &Path) -> Result<Results, Failure> {
        let mut kept = BTreeMap::new();
        if path.exists() {
            let length = fs::metadata(path).map_err(|error| Failure::file(path, "open", &error))?.len();
            if length > MOST_BYTES {
                return Err(Failure::unusable("this is no file of a suite's results").at(path.display()));
            }
            let text = fs::read_to_string(path).map_err(|error| Failure::file(path, "read", &error))?;
            for line in text.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok()) {
                kept.insert((name(&line.kept).to_owned(), line.key), line.kept);
            }
        }
        Ok(Results { path: path.into(), kept })
    }

    /// Whether a scenario has its numbers.
    pub fn has(&self, name: &str, key: &str) -> bool {
        matches!(self.kept.get(&(name.to_owned(), key.to_owned())), Some(Kept::Done(_)))
    }

    /// Adds one, and writes it.
    pub fn add(&mut self, key: &str, kept: Kept) -> Result<(), Failure> {
        let failed = |error: &std::io::Error| Failure::file(&self.path, "write", error);
        let mut line = serde_json::to_vec(&Line { key: key.to_owned(), kept: kept.clone() })
            .map_err(Failure::running)?;
        line.push(b'\n');
        // A line that was cut off is ended first, so that it does not spoil this one.
        let text = fs::read(&self.path).unwrap_or_default();
        if text.last().is_some_and(|last| *last != b'\n') {
            line.insert(0, b'\n');
        }
        let file = File::options().create(true).append(true).open(&self.path);
        file.and_then(|mut file| file.write_all(&line)).map_err(|error| failed(&error))?;
        self.kept.insert((name(&kept).to_owned(), key.to_owned()), kept);
        Ok(())
    }

    /// Those of a suite's scenarios by name and key: what was measured, and what failed.
    pub fn of<'a>(&self, wanted: impl Iterator<Item = (&'a str, &'a str)>) -> (Vec<Case>, Vec<Failed>) {
        let (mut cases, mut failures) = (Vec::new(), Vec::new());
        for (name, key) in wanted {
            match self.kept.get(&(name.to_owned(), key.to_owned())) {
                Some(Kept::Done(case)) => cases.push(case.clone()),
                Some(Kept::Failed(failed)) => failures.push(failed.clone()),
                None => {}
            }
        }
        (cases, failures)
    }
}

fn name(kept: &Kept) -> &str {
    match kept {
        Kept::Done(case) => &case.name,
        Kept::Failed(failed) => &failed.name,
    }
}

#[cfg(test)]
mod tests {
    use hearth_reports::validation::Numbers;

    use super::*;

    #[test]
    fn results_stay_after_a_cut_and_failures_are_run_again() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("results.jsonl");
        let case = |name: &str| {
            let numbers = Numbers { tpot_ms: Some(1.5), ..Numbers::default() };
            let (question, prediction) = (String::new(), String::new());
            Case {
                name: name.into(),
                question,
                prediction,
                predicted: numbers.clone(),
                measured: vec![numbers],
            }
        };
        let mut results = Results::open(&file).expect("nothing is there yet");
        results.add("1", Kept::Done(case("a"))).expect("it is written");
        results
            .add("1", Kept::Failed(Failed { name: "b".into(), why: "why".into() }))
            .expect("it is written");
        let mut text = fs::read(&file).expect("a file");
        text.extend(b"{\"key\":\"1\",\"done\":{\"na");
        fs::write(&file, text).expect("it is written");
        let mut results = Results::open(&file).expect("what is whole");
        assert!(
            results.has("a", "1")
                && !results.has("a", "2")
                && !results.has("b", "1")
                && !results.has("c", "1")
        );
        results.add("1", Kept::Done(case("b"))).expect("it is written");
        let results = Results::open(&file).expect("results");
        assert!(results.has("b", "1"), "the last line counts");
        let (cases, failed) = results.of([("b", "1"), ("a", "1"), ("a", "2")].into_iter());
        assert_eq!((cases, failed), (vec![case("b"), case("a")], vec![]));
    }
}
