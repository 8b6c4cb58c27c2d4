//! `hearth lab --suite` and `--random`: the accuracy of predictions over many scenarios.
//!
//! Every scenario is a lab of its own, in a process of its own, so that one that fails ends nothing else. Its result goes
//! into a file at once: a suite that was interrupted goes on where it was. Profiles are kept for some minutes, for each
//! model and set of limits.
//!
//! With `--repeats` all scenarios are gone through so often, each time with predictions of its own: what changes on the
//! machine in minutes is then seen as the spread that it is.
//!
//! Not here: one lab ([`super::session`]), and what the numbers mean (`hearth_reports::validation`).

mod draw;
mod machine;
mod results;

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, SystemTime};

use hearth_core::metrics::Metrics;
use hearth_reports::validation::{Case, Failed, Run, RunNumbers, Validation, page};
use hearth_schema::trace::Outcome;
use hearth_workflow::Error;
use hearth_workflow::files::{make_folder, write_in};
use serde::Deserialize;

use self::results::{Kept, Results, Which};
use super::checks::{OF_FILES, is_file_name};
use super::steadiness::Steadiness;
use crate::cli::LabArgs;
use crate::commands::print_json;
use crate::diagnostics::{ENDED_BADLY, Failure};
use crate::interruption::{self, INTERRUPTED};
use crate::machine::read_scenario;
use crate::output::say;

/// A scenario of a suite.
struct Entry {
    path: PathBuf,
    name: String,
    /// The first line of its comment.
    question: String,
    /// What its result depends on: the document, its models' files, this program, the machine, and the command line.
    key: String,
}

impl Entry {
    fn which(&self, pass: u32) -> Which {
        Which { name: self.name.clone(), key: self.key.clone(), pass }
    }
}

/// What a lab prints with `--json`, as far as a suite reads it.
#[derive(Debug, Deserialize)]
struct Told {
    predicted: Metrics,
    measured: Metrics,
    prediction: String,
    steadiness: Vec<Steadiness>,
}

/// How often a lab is started over whose machine changed under it.
/// source: assumed
const STARTED_OVER: u32 = 2;

/// No lab takes longer: several times the deadline of a silent head.
const MAX_LAB: Duration = Duration::from_hours(2);

/// Runs a suite.
pub fn run(args: &LabArgs, json: bool) -> Result<ExitCode, Failure> {
    let Some(output) = &args.output else { return Err(Failure::unusable("a suite needs --output")) };
    make_folder(output)?;
    let (folder, title) = match (&args.suite, args.random) {
        (Some(folder), _) => (folder.clone(), folder.display().to_string()),
        (None, Some(count)) => {
            let folder = output.join("scenarios");
            draw::write(&folder, count, args.seed, args.planning.model.as_deref())?;
            (folder, format!("{count} scenarios drawn by seed {}", args.seed))
        }
        (None, None) => return Err(Failure::unusable("give a scenario, --suite or --random")),
    };
    let entries = entries(&folder, args)?;
    let mut results = Results::open(&output.join("results.jsonl"))?;
    forward_interruptions();
    let labs: Vec<(&Entry, Which)> = (0..args.repeats)
        .flat_map(|pass| entries.iter().map(move |entry| (entry, entry.which(pass))))
        .collect();
    let start = elapsed();
    let mut ran = 0u32;
    for (index, (entry, which)) in labs.iter().enumerate() {
        let place = format!("{} of {}", index + 1, labs.len());
        if results.has(which) {
            tracing::info!("{place}: {} is done already", entry.name);
            continue;
        }
        let left = labs[index..].iter().filter(|(_, which)| !results.has(which)).count();
        tracing::info!("{place}: {}{}", entry.name, expected(elapsed().saturating_sub(start), ran, left));
        let kept = match steadily(entry, which.pass, args, output) {
            Ok(run) => Kept::Done(Box::new(run)),
            Err(why) => {
                tracing::info!("  failed: {}", why.lines().next().unwrap_or_default());
                Kept::Failed(why)
            }
        };
        if IS_INTERRUPTED.load(Ordering::SeqCst) {
            tracing::info!("interrupted; the same command goes on where this one was");
            return Ok(ExitCode::from(INTERRUPTED as u8));
        }
        results.add(which.clone(), kept)?;
        ran += 1;
    }
    let (cases, failed) = collected(&entries, args.repeats, &results);
    let validation = Validation { title, machine: machine::describe(), cases, failed };
    for (name, bytes) in page::files(&validation) {
        write_in(output, name, &bytes)?;
    }
    if json {
        print_json(&validation)?;
    } else {
        say!("{}report: {}\n", page::summary_text(&validation), output.join("index.html").display());
    }
    let met = validation.scores().criteria.iter().all(|criterion| criterion.met);
    Ok(if met { ExitCode::SUCCESS } else { ExitCode::from(ENDED_BADLY) })
}

/// Each scenario with its runs, and those of which at least one failed.
fn collected(entries: &[Entry], passes: u32, results: &Results) -> (Vec<Case>, Vec<Failed>) {
    let (mut cases, mut failed) = (Vec::new(), Vec::new());
    for entry in entries {
        let (runs, why) = results.of((0..passes).map(|pass| entry.which(pass)));
        let name = entry.name.clone();
        failed.extend(why.map(|reason| Failed { name: name.clone(), reason }));
        if !runs.is_empty() {
            cases.push(Case { name, question: entry.question.clone(), runs });
        }
    }
    (cases, failed)
}

/// What is expected of the time that is left, once something has been run.
fn expected(so_far: Duration, ran: u32, left: usize) -> String {
    if ran == 0 {
        return String::new();
    }
    let rest = so_far.as_secs_f64() / f64::from(ran) * left as f64;
    format!(" ({:.0} min so far, about {:.0} min left)", so_far.as_secs_f64() / 60.0, (rest / 60.0).ceil())
}

/// The scenarios of a folder, by name of file. All are read before anything is run.
fn entries(folder: &Path, args: &LabArgs) -> Result<Vec<Entry>, Failure> {
    let found = std::fs::read_dir(folder).map_err(|error| Error::file(folder, "open", &error))?;
    let is_yaml = |path: &PathBuf| path.extension().is_some_and(|kind| kind == "yaml" || kind == "yml");
    let mut paths: Vec<PathBuf> = found.flatten().map(|entry| entry.path()).filter(is_yaml).collect();
    paths.sort();
    let program = std::env::current_exe().map_err(Failure::running)?;
    let added =
        format!("{:?} {:?} {:?} {:?}", args.tokens, args.scratch, stamp(&program), machine::lasting());
    let mut entries: Vec<Entry> = Vec::new();
    for path in paths {
        let loaded = read_scenario(&path)?;
        let name = loaded.scenario.name.clone();
        if let Some(twin) = entries.iter().find(|entry| entry.name == name) {
            let what = format!("two scenarios are called `{name}`: {}", twin.path.display());
            return Err(Failure::unusable(what).at(path.display()).hint("give each a name of its own"));
        }
        if !is_file_name(&name) {
            return Err(Failure::unusable(format!("the name `{name}` cannot be that of a folder"))
                .at(path.display())
                .hint(OF_FILES));
        }
        let model = args.planning.model.clone().or_else(|| loaded.model_file());
        let files = [model.as_deref().map(stamp), loaded.draft_file().as_deref().map(stamp)];
        let key = hearth_schema::digest::of(&format!("{} {files:?} {added}", loaded.origin.digest));
        entries.push(Entry { question: loaded.question, path, name, key });
    }
    if entries.is_empty() {
        return Err(Failure::unusable("there is no scenario in this folder")
            .at(folder.display())
            .hint("scenarios are files that end in .yaml"));
    }
    Ok(entries)
}

/// What tells a file from what it was before.
fn stamp(path: &Path) -> (PathBuf, Option<(u64, Option<SystemTime>)>) {
    let known = path.metadata().ok().map(|file| (file.len(), file.modified().ok()));
    (path.to_path_buf(), known)
}

/// Runs one scenario, and starts over while the machine changes under it. What came out is not looked at before.
fn steadily(entry: &Entry, pass: u32, args: &LabArgs, output: &Path) -> Result<Run, String> {
    let mut over = 0;
    loop {
        let run = one(entry, pass, args, output)?;
        if run.steady || over == STARTED_OVER || IS_INTERRUPTED.load(Ordering::SeqCst) {
            return Ok(Run { restarts: over, ..run });
        }
        over += 1;
        tracing::info!("  started over, {over} of {STARTED_OVER}");
    }
}

/// Runs one scenario in a process of its own.
fn one(entry: &Entry, pass: u32, args: &LabArgs, output: &Path) -> Result<Run, String> {
    let said = |error: &dyn std::fmt::Display| error.to_string();
    let again = if pass == 0 { String::new() } else { format!("-{}", pass + 1) };
    let report = output.join("runs").join(format!("{}{again}", entry.name));
    std::fs::create_dir_all(output.join("runs")).map_err(|error| said(&error))?;
    let mut command = Command::new(std::env::current_exe().map_err(|error| said(&error))?);
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
    end_with_this_thread(&mut command);
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = child.map_err(|error| said(&error))?;
    let number = child.id();
    CHILD.store(number, Ordering::SeqCst);
    let (over, waits) = mpsc::channel::<()>();
    let watch = std::thread::spawn(move || {
        let late = waits.recv_timeout(MAX_LAB) == Err(RecvTimeoutError::Timeout);
        if late {
            end(number);
        }
        late
    });
    let ended = child.wait_with_output();
    CHILD.store(0, Ordering::SeqCst);
    drop(over);
    let ended = ended.map_err(|error| said(&error))?;
    if watch.join().unwrap_or(false) {
        return Err(format!("it was ended after {} min", MAX_LAB.as_secs() / 60));
    }
    let errors = String::from_utf8_lossy(&ended.stderr);
    if !ended.status.success() {
        return Err(why(&errors).unwrap_or_else(|| ended.status.to_string()));
    }
    for line in errors.lines().filter(|line| line.starts_with("warning")) {
        tracing::info!("  {line}");
    }
    let told: Told = serde_json::from_slice(&ended.stdout).map_err(|error| said(&error))?;
    for (run, metrics) in [("predicted", &told.predicted), ("measured", &told.measured)] {
        if metrics.outcome != Outcome::Ok {
            let outcome = serde_json::to_value(metrics.outcome).map_err(|error| said(&error))?;
            return Err(format!("the {run} run ended badly: {outcome}"));
        }
    }
    let (predicted, measured) = (RunNumbers::of(&told.predicted), RunNumbers::of(&told.measured));
    let steady = told.steadiness.iter().all(|run| run.steady);
    Ok(Run { prediction: told.prediction, predicted, measured, steady, restarts: 0 })
}

/// What a lab that failed has said: with `--json` its error is one line of JSON.
fn why(errors: &str) -> Option<String> {
    let what = |line: &str| {
        let error: serde_json::Value = serde_json::from_str(line).ok()?;
        Some(error.get("error")?.get("what")?.as_str()?.to_owned())
    };
    let said = errors.lines().rev().find_map(what).unwrap_or_else(|| errors.trim().to_owned());
    (!said.is_empty()).then_some(said)
}

/// The lab that runs now; none if zero.
static CHILD: AtomicU32 = AtomicU32::new(0);
static IS_INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// A signal ends the lab that runs, which undoes what it did, and the suite after it.
fn forward_interruptions() {
    interruption::on_signal(|| {
        IS_INTERRUPTED.store(true, Ordering::SeqCst);
        let child = CHILD.load(Ordering::SeqCst);
        if child != 0 {
            end(child);
        }
    });
}

/// Asks a lab to end; it undoes what it did.
fn end(child: u32) {
    // SAFETY: kill takes two numbers and touches no memory of this process.
    unsafe { libc::kill(child as libc::pid_t, libc::SIGTERM) };
}

/// A lab whose suite is killed undoes what it did.
fn end_with_this_thread(command: &mut Command) {
    // SAFETY: between fork and exec only one system call is made, which takes two numbers.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
            Ok(())
        });
    }
}

/// Since this process first asked.
#[allow(clippy::disallowed_methods)] // a suite takes real time
fn elapsed() -> Duration {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    START.get_or_init(std::time::Instant::now).elapsed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_follows_from_what_was_run() {
        assert_eq!(expected(Duration::from_mins(1), 0, 9), "");
        assert_eq!(expected(Duration::from_mins(2), 2, 3), " (2 min so far, about 3 min left)");
    }

    #[test]
    fn why_a_lab_failed_is_in_its_json_or_its_words() {
        let json = "warning: w\n{\"error\":{\"code\":2,\"what\":\"no disk\"}}\n";
        assert_eq!(why(json).as_deref(), Some("no disk"));
        assert_eq!(why("Killed\n").as_deref(), Some("Killed"));
        assert_eq!(why(" \n"), None);
    }
}
