//! `hearth lab --suite` and `--random`: measures the accuracy of predictions over many scenarios.
//!
//! Every scenario runs as a lab in a separate process, so that a failure does not affect other scenarios. Each result
//! is written immediately, so that an interrupted suite can continue. Device profiles are reused for a few minutes.
//! `--repeats` repeats the whole suite, so that the spread of the results includes changes of the machine speed.

mod draw;
mod machine;
mod results;

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, SystemTime};

use hearth_core::metrics::Metrics;
use hearth_reports::validation::{FailedScenario, RunMetrics, RunPair, Validation, ValidationCase, page};
use hearth_schema::trace::Outcome;
use hearth_workflow::Error;
use hearth_workflow::files::{create_folder, write_in_folder};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use serde::Deserialize;

use self::results::{LabId, LabResult, ResultsFile};
use super::checks::{FILE_NAME_HINT, is_valid_file_name};
use super::steadiness::Steadiness;
use crate::cli::LabArgs;
use crate::commands::print_result;
use crate::diagnostics::{EXIT_INCOMPLETE, ExitCode, Failure};
use crate::interruption::{self, EXIT_INTERRUPTED};
use crate::machine::read_scenario;

struct Entry {
    path: PathBuf,
    name: String,
    /// The question that the scenario answers, which is the first line of the comment in its file.
    question: String,
    /// The digest of everything that the result of the scenario depends on: the document, the models, this program,
    /// the machine and the command line.
    input_digest: String,
}

impl Entry {
    fn id(&self, repetition: u32) -> LabId {
        LabId { name: self.name.clone(), input_digest: self.input_digest.clone(), repetition }
    }
}

/// The part of the JSON output of a lab process that a suite reads.
#[derive(Debug, Deserialize)]
struct LabOutput {
    predicted: Metrics,
    measured: Metrics,
    prediction: String,
    steadiness: Vec<Steadiness>,
}

/// Maximum number of repetitions of a lab run during which the speed of the machine changed.
/// source: assumed
const MAX_RESTARTS: u32 = 2;

/// Time limit of a lab process: several times the time limit between two lines of the output of its head device.
const MAX_LAB_TIME: Duration = Duration::from_hours(2);

pub fn run(args: &LabArgs, json: bool) -> Result<ExitCode, Failure> {
    let Some(output) = &args.output else { return Err(Failure::invalid("a suite needs `--output`")) };
    create_folder(output)?;
    let (folder, title) = match (&args.suite, args.random_scenarios) {
        (Some(folder), _) => (folder.clone(), folder.display().to_string()),
        (None, Some(count)) => {
            let folder = output.join("scenarios");
            draw::write_random_scenarios(&folder, count, args.seed, args.planning.model.as_deref())?;
            (folder, format!("{count} scenarios drawn with seed {}", args.seed))
        }
        (None, None) => return Err(Failure::invalid("the lab needs a scenario, `--suite` or `--random`")),
    };
    let entries = entries(&folder, args)?;
    let mut results = ResultsFile::open(&output.join("results.jsonl"))?;
    forward_interruptions();
    let labs: Vec<(&Entry, LabId)> = (0..args.repeats)
        .flat_map(|repetition| entries.iter().map(move |entry| (entry, entry.id(repetition))))
        .collect();
    #[allow(clippy::disallowed_methods)] // a suite takes real time
    let start = std::time::Instant::now();
    let mut done = 0u32;
    for (index, (entry, id)) in labs.iter().enumerate() {
        let progress = format!("{} of {}", index + 1, labs.len());
        if results.is_done(id) {
            tracing::info!("{progress}: {} is already done", entry.name);
            continue;
        }
        let left = labs[index..].iter().filter(|(_, id)| !results.is_done(id)).count();
        let time_left = time_left(start.elapsed(), done, left);
        tracing::info!("{progress}: {}{time_left}", entry.name);
        let result = match run_steadily(entry, id.repetition, args, output) {
            Ok(run) => LabResult::Done(Box::new(run)),
            Err(why) => {
                tracing::info!("  failed: {}", why.lines().next().unwrap_or_default());
                LabResult::Failed(why)
            }
        };
        if IS_INTERRUPTED.load(Ordering::SeqCst) {
            tracing::info!("interrupted; run the same command again to continue");
            return Ok(EXIT_INTERRUPTED);
        }
        results.append(id.clone(), result)?;
        done += 1;
    }
    let (cases, failed) = collect(&entries, args.repeats, &results);
    let validation =
        Validation { title, machine_properties: machine::properties(), cases, failed_scenarios: failed };
    for (name, bytes) in page::render_files(&validation) {
        write_in_folder(output, name, &bytes)?;
    }
    let report = output.join("index.html");
    print_result(json, &validation, |validation| {
        format!("{}report: {}\n", page::summary_text(validation), report.display())
    })?;
    let all_met = validation.scores().criteria.iter().all(|criterion| criterion.is_met);
    Ok(if all_met { ExitCode::SUCCESS } else { ExitCode(EXIT_INCOMPLETE) })
}

/// Collects the successful runs of each scenario, and the scenarios with a failed run.
fn collect(
    entries: &[Entry],
    repetitions: u32,
    results: &ResultsFile,
) -> (Vec<ValidationCase>, Vec<FailedScenario>) {
    let (mut cases, mut failed) = (Vec::new(), Vec::new());
    for entry in entries {
        let (runs, why) = results.runs_of((0..repetitions).map(|repetition| entry.id(repetition)));
        let name = entry.name.clone();
        failed.extend(why.map(|reason| FailedScenario { name: name.clone(), reason }));
        if !runs.is_empty() {
            cases.push(ValidationCase { name, question: entry.question.clone(), run_pairs: runs });
        }
    }
    (cases, failed)
}

/// Formats the elapsed time and an estimate of the remaining time of a suite; empty before the first lab is done.
fn time_left(elapsed: Duration, done: u32, left: usize) -> String {
    if done == 0 {
        return String::new();
    }
    let rest = elapsed.as_secs_f64() / f64::from(done) * left as f64;
    format!(" ({:.0} min so far, about {:.0} min left)", elapsed.as_secs_f64() / 60.0, (rest / 60.0).ceil())
}

fn entries(folder: &Path, args: &LabArgs) -> Result<Vec<Entry>, Failure> {
    let found =
        std::fs::read_dir(folder).map_err(|error| Error::from_folder_error(folder, "open", &error))?;
    let is_yaml = |path: &PathBuf| path.extension().is_some_and(|kind| kind == "yaml" || kind == "yml");
    let mut paths: Vec<PathBuf> = found.flatten().map(|entry| entry.path()).filter(is_yaml).collect();
    paths.sort();
    let program = file_stamp(&std::env::current_exe().map_err(Failure::failed)?);
    let machine = machine::constant_properties();
    let environment = format!("{:?} {:?} {program:?} {machine:?}", args.tokens, args.scratch);
    let mut entries: Vec<Entry> = Vec::new();
    for path in paths {
        let loaded = read_scenario(&path)?;
        let name = loaded.scenario.name.clone();
        if let Some(twin) = entries.iter().find(|entry| entry.name == name) {
            let what = format!("two scenarios are called `{name}`: this one and {}", twin.path.display());
            return Err(Failure::invalid(what)
                .with_location(path.display())
                .with_hint("give each scenario a unique name"));
        }
        if !is_valid_file_name(&name) {
            let what = format!("the scenario name `{name}` cannot be the name of a folder");
            return Err(Failure::invalid(what).with_location(path.display()).with_hint(FILE_NAME_HINT));
        }
        let model = args.planning.model_file(&loaded)?;
        let files = [model.as_deref().map(file_stamp), loaded.draft_model_file()?.as_deref().map(file_stamp)];
        let input_digest =
            hearth_schema::digest::digest_text(&format!("{} {files:?} {environment}", loaded.record.digest));
        entries.push(Entry { question: loaded.question, path, name, input_digest });
    }
    if entries.is_empty() {
        return Err(Failure::invalid("there is no scenario in this folder")
            .with_location(folder.display())
            .with_hint("name a folder with scenario files, which end in .yaml"));
    }
    Ok(entries)
}

/// Returns the path, size and modification time of a file, which identify its contents.
fn file_stamp(path: &Path) -> (PathBuf, Option<(u64, Option<SystemTime>)>) {
    let metadata = path.metadata().ok().map(|file| (file.len(), file.modified().ok()));
    (path.to_path_buf(), metadata)
}

/// Runs one scenario, and repeats the run if the speed of the machine changed, regardless of the result.
fn run_steadily(entry: &Entry, repetition: u32, args: &LabArgs, output: &Path) -> Result<RunPair, String> {
    let mut restarts = 0;
    loop {
        let run = run_once(entry, repetition, args, output)?;
        if run.has_steady_speed || restarts == MAX_RESTARTS || IS_INTERRUPTED.load(Ordering::SeqCst) {
            return Ok(RunPair { discarded_attempts: restarts, ..run });
        }
        restarts += 1;
        tracing::info!("  the speed of the machine changed: restart {restarts} of {MAX_RESTARTS}");
    }
}

/// Runs one scenario in a separate process.
fn run_once(entry: &Entry, repetition: u32, args: &LabArgs, output: &Path) -> Result<RunPair, String> {
    let suffix = if repetition == 0 { String::new() } else { format!("-{}", repetition + 1) };
    let report = output.join("runs").join(format!("{}{suffix}", entry.name));
    std::fs::create_dir_all(output.join("runs")).map_err(|error| error.to_string())?;
    let mut command = Command::new(std::env::current_exe().map_err(|error| error.to_string())?);
    command.arg("lab").arg(&entry.path).arg("--json");
    command.arg("--report").arg(report).arg("--profiles").arg(output.join("profiles"));
    for (flag, path) in [("--model", &args.planning.model), ("--scratch", &args.scratch)] {
        if let Some(path) = path {
            command.arg(flag).arg(path);
        }
    }
    if let Some(tokens) = args.tokens {
        command.args(["--tokens", &tokens.to_string()]);
    }
    terminate_with_this_thread(&mut command);
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = child.map_err(|error| error.to_string())?;
    let number = child.id();
    LAB_PROCESS_ID.store(number, Ordering::SeqCst);
    let (done_tx, done_rx) = mpsc::channel::<()>();
    let watch = std::thread::spawn(move || {
        let timed_out = done_rx.recv_timeout(MAX_LAB_TIME) == Err(RecvTimeoutError::Timeout);
        if timed_out {
            terminate(number);
        }
        timed_out
    });
    let ended = child.wait_with_output();
    LAB_PROCESS_ID.store(0, Ordering::SeqCst);
    drop(done_tx);
    let ended = ended.map_err(|error| error.to_string())?;
    if watch.join().unwrap_or(false) {
        return Err(format!("the lab process was terminated after {} min", MAX_LAB_TIME.as_secs() / 60));
    }
    let errors = String::from_utf8_lossy(&ended.stderr);
    if !ended.status.success() {
        return Err(failure_reason(&errors).unwrap_or_else(|| ended.status.to_string()));
    }
    for line in errors.lines().filter(|line| line.starts_with("warning")) {
        tracing::info!("  {line}");
    }
    let output: LabOutput = serde_json::from_slice(&ended.stdout).map_err(|error| error.to_string())?;
    for (run, metrics) in [("predicted", &output.predicted), ("measured", &output.measured)] {
        if metrics.outcome != Outcome::Ok {
            return Err(format!("the {run} run did not complete: {}", metrics.outcome.label()));
        }
    }
    Ok(RunPair {
        prediction_digest: output.prediction,
        predicted_metrics: RunMetrics::from_metrics(&output.predicted),
        measured_metrics: RunMetrics::from_metrics(&output.measured),
        has_steady_speed: output.steadiness.iter().all(|run| run.is_steady),
        discarded_attempts: 0,
    })
}

/// Returns the reason why a lab process failed: the last JSON error in its standard error, or else the whole text.
fn failure_reason(errors: &str) -> Option<String> {
    let what = |line: &str| {
        let error: serde_json::Value = serde_json::from_str(line).ok()?;
        Some(error.get("error")?.get("what")?.as_str()?.to_owned())
    };
    let reason = errors.lines().rev().find_map(what).unwrap_or_else(|| errors.trim().to_owned());
    (!reason.is_empty()).then_some(reason)
}

/// Process id of the running lab process; 0 if there is none.
static LAB_PROCESS_ID: AtomicU32 = AtomicU32::new(0);
static IS_INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Installs a signal handler that terminates the running lab process, which cleans up. The suite then ends.
fn forward_interruptions() {
    interruption::on_signal(|| {
        IS_INTERRUPTED.store(true, Ordering::SeqCst);
        let child = LAB_PROCESS_ID.load(Ordering::SeqCst);
        if child != 0 {
            terminate(child);
        }
    });
}

fn terminate(child: u32) {
    // A process that has exited meanwhile is no error.
    let _ = Pid::from_raw(child as i32).map(|child| kill_process(child, Signal::TERM));
}

/// Makes the kernel terminate the child process when this thread ends, so that the child cleans up if the suite is
/// killed.
fn terminate_with_this_thread(command: &mut Command) {
    let request = || Ok(set_parent_process_death_signal(Some(Signal::TERM))?);
    // SAFETY: between fork and exec there is only one system call, and nothing is allocated.
    unsafe { command.pre_exec(request) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_left_follows_from_finished_labs() {
        assert_eq!(time_left(Duration::from_mins(1), 0, 9), "");
        assert_eq!(time_left(Duration::from_mins(2), 2, 3), " (2 min so far, about 3 min left)");
    }

    #[test]
    fn failure_reason_is_in_json_or_text() {
        let json = "warning: w\n{\"error\":{\"code\":2,\"what\":\"no disk\"}}\n";
        assert_eq!(failure_reason(json).as_deref(), Some("no disk"));
        assert_eq!(failure_reason("Killed\n").as_deref(), Some("Killed"));
        assert_eq!(failure_reason(" \n"), None);
    }
}
