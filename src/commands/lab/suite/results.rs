//! Results file of a suite, with which an interrupted suite can continue.
//!
//! Each finished lab appends a line with the scenario, the repetition, and a digest of everything that the result
//! depends on. Changed or failed scenarios are run again. If a lab has several lines, the last one counts. Incomplete
//! lines are ignored.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use hearth_reports::validation::RunPair;
use hearth_workflow::Error;
use hearth_workflow::files::read_text_at_most;
use serde::{Deserialize, Serialize};

use crate::diagnostics::Failure;

/// Maximum size of the results file, in bytes.
/// source: assumed
const MAX_BYTES: u64 = 64 << 20;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LabResult {
    Done(Box<RunPair>),
    /// The lab failed; the text is the reason.
    Failed(String),
}

/// Identifies a lab within a suite.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LabId {
    pub name: String,
    /// The digest of everything on which the result of the lab depends.
    #[serde(rename = "key")]
    pub input_digest: String,
    /// Index of the repetition of the whole suite, from 0.
    #[serde(rename = "pass")]
    pub repetition: u32,
}

#[derive(Debug, Serialize, Deserialize)]
struct Line {
    #[serde(flatten)]
    id: LabId,
    #[serde(flatten)]
    result: LabResult,
}

#[derive(Debug)]
pub struct ResultsFile {
    path: PathBuf,
    results: BTreeMap<LabId, LabResult>,
}

impl ResultsFile {
    /// Reads the results in a file. A file that does not exist has no results.
    pub fn open(path: &Path) -> Result<ResultsFile, Failure> {
        let mut results = BTreeMap::new();
        if path.exists() {
            let text = read_text_at_most(path, MAX_BYTES)?;
            for line in text.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok()) {
                results.insert(line.id, line.result);
            }
        }
        Ok(ResultsFile { path: path.into(), results })
    }

    pub fn is_done(&self, id: &LabId) -> bool {
        matches!(self.results.get(id), Some(LabResult::Done(_)))
    }

    /// Adds the result of a lab, and appends the result to the file.
    pub fn append(&mut self, id: LabId, result: LabResult) -> Result<(), Failure> {
        let failed = |error: &std::io::Error| Error::from_io_error(&self.path, "write", error);
        let line = Line { id: id.clone(), result: result.clone() };
        let mut line = serde_json::to_vec(&line).map_err(Failure::failed)?;
        line.push(b'\n');
        // If the last line is incomplete, the new line must not continue it.
        let text = fs::read(&self.path).unwrap_or_default();
        if text.last().is_some_and(|last| *last != b'\n') {
            line.insert(0, b'\n');
        }
        let file = File::options().create(true).append(true).open(&self.path);
        file.and_then(|mut file| file.write_all(&line)).map_err(|error| failed(&error))?;
        self.results.insert(id, result);
        Ok(())
    }

    /// Returns the runs of the labs with these ids that succeeded, and the reason of the last failure among these labs.
    pub fn runs_of(&self, ids: impl Iterator<Item = LabId>) -> (Vec<RunPair>, Option<String>) {
        let (mut runs, mut why) = (Vec::new(), None);
        for result in ids.filter_map(|id| self.results.get(&id)) {
            match result {
                LabResult::Done(run) => runs.push((**run).clone()),
                LabResult::Failed(reason) => why = Some(reason.clone()),
            }
        }
        (runs, why)
    }
}

#[cfg(test)]
mod tests {
    use hearth_reports::validation::RunMetrics;

    use super::*;

    fn id(name: &str, input_digest: &str, repetition: u32) -> LabId {
        LabId { name: name.into(), input_digest: input_digest.into(), repetition }
    }

    #[test]
    fn incomplete_lines_are_ignored_and_failures_are_run_again() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("results.jsonl");
        let numbers = RunMetrics { tpot_ms: Some(1.5), ..RunMetrics::default() };
        let run = Box::new(RunPair {
            prediction_digest: "sha256:1".into(),
            predicted_metrics: numbers.clone(),
            measured_metrics: numbers,
            has_steady_speed: true,
            discarded_attempts: 0,
        });
        let mut results = ResultsFile::open(&file).expect("nothing is there yet");
        results.append(id("a", "1", 0), LabResult::Done(run.clone())).expect("it is written");
        results.append(id("b", "1", 0), LabResult::Failed("why".into())).expect("it is written");
        assert_eq!(results.runs_of([id("b", "1", 0)].into_iter()), (vec![], Some("why".into())));
        let mut text = fs::read(&file).expect("a file");
        text.extend(b"{\"key\":\"1\",\"done\":{\"na");
        fs::write(&file, text).expect("it is written");
        let mut results = ResultsFile::open(&file).expect("the complete lines");
        assert!(results.is_done(&id("a", "1", 0)));
        for missing in [id("a", "2", 0), id("a", "1", 1), id("b", "1", 0), id("c", "1", 0)] {
            assert!(!results.is_done(&missing), "{missing:?}");
        }
        results.append(id("b", "1", 0), LabResult::Done(run.clone())).expect("it is written");
        results.append(id("b", "1", 1), LabResult::Done(run.clone())).expect("it is written");
        let results = ResultsFile::open(&file).expect("results");
        assert!(results.is_done(&id("b", "1", 0)), "the last line counts");
        let all = (0..3).map(|repetition| id("b", "1", repetition));
        assert_eq!(results.runs_of(all), (vec![(*run).clone(), *run], None));
    }
}
