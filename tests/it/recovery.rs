//! A ring of processes survives the loss of a worker with the tokens of an undisturbed run.
//!
//! At a random token a worker is killed, stopped for good or for ten seconds, its connections are dropped or broken by a
//! gate in front of it, or the link to its network namespace is taken down; the head has to go on with the same tokens.
//! `HEARTH_RECOVERIES` is how many trials the ignored test makes, `HEARTH_RECOVERY` the first of them.
//!
//! Not here: who is in the ring afterwards (`returning`).

#![allow(clippy::disallowed_methods)] // how long a ring stands still is what these tests are about

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use hearth_schema::Trace;
use hearth_schema::run_events::RunEventKind;
use hearth_schema::trace::Outcome;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::gate::Gate;
use crate::namespace::{End, Namespace};
use crate::processes::{Worker, error, hearth, model, plan};
use crate::returning::stopped_for_a_while;

/// What happens to a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Blow {
    Killed,
    Stopped,
    Dropped,
    Broken,
    /// Its link is taken down.
    Unplugged,
    /// Stopped, and woken while the run goes on.
    Woken,
}

const BLOWS: [Blow; 6] =
    [Blow::Killed, Blow::Stopped, Blow::Dropped, Blow::Broken, Blow::Unplugged, Blow::Woken];

/// Tokens of a trial.
const TOKENS: usize = 160;
/// What goes before them.
pub const PROMPT: &str = "The Lord is my";
/// How long a worker is stopped that is woken again.
const STOPPED: Duration = Duration::from_secs(10);

fn arguments<'a>(plan: &'a str, model: &'a str, tokens: &'a str) -> Vec<&'a str> {
    vec![
        "execute",
        plan,
        "--model",
        model,
        "--prompt",
        PROMPT,
        "--tokens",
        tokens,
        "--ignore-end",
        "--threads",
        "1",
        "--json",
        "--mark-tokens",
    ]
}

/// The number in a line `token N`.
fn token(line: &str) -> Option<u32> {
    line.strip_prefix("token ")?.trim().parse().ok()
}

/// What a trial showed.
#[derive(Debug)]
pub struct Seen {
    /// Tokens that came out.
    pub tokens: Vec<u32>,
    /// The longest time between two tokens.
    pub longest: Duration,
    /// Whether it did not end.
    pub hung: bool,
    /// What was said of it.
    pub said: String,
}

/// Runs a head, and does something to the ring when so many tokens are out.
fn watch(arguments: &[&str], at: usize, mut blow: impl FnMut()) -> Seen {
    let mut head = hearth(arguments);
    let mut head = head.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the head starts");
    let (sender, lines) = mpsc::channel();
    let out = head.stdout.take().expect("piped");
    std::thread::spawn(move || {
        for line in BufReader::new(out).lines().map_while(Result::ok) {
            let _ = sender.send((Instant::now(), line));
        }
    });
    let (mut tokens, mut last, mut longest, mut hung) = (Vec::new(), None, Duration::ZERO, false);
    let mut printed = String::new();
    loop {
        match lines.recv_timeout(Duration::from_mins(1)) {
            Ok((now, line)) => {
                let Some(token) = token(&line) else {
                    printed += &line;
                    continue;
                };
                longest = last.map_or(longest, |last: Instant| longest.max(now - last));
                last = Some(now);
                tokens.push(token);
                if tokens.len() == at {
                    blow();
                }
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                hung = true;
                let _ = head.kill();
                break;
            }
        }
    }
    let output = head.wait_with_output().expect("the head ends");
    Seen { tokens, longest, hung, said: printed + &String::from_utf8_lossy(&output.stderr) }
}

/// One blow to a ring of four at a random token; none if it cannot be dealt here.
fn trial(seed: u64, blow: Blow, expected: &[u32]) -> Option<Seen> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let victim = random.next_u32() as usize % 3;
    let at = 1 + random.next_u32() as usize % (expected.len() - 2);
    match blow {
        Blow::Unplugged => return unplugged((victim, at, seed), expected),
        Blow::Woken => {
            let (mut seen, is_back) = stopped_for_a_while(victim, at, STOPPED, expected);
            // A worker that wakes up and disturbs the ring, or is not taken in again, is as bad as a hang.
            seen.hung |= !is_back;
            return Some(seen);
        }
        _ => {}
    }
    let mut workers: Vec<Worker> = (0..3).map(|_| Worker::start(&model("q4_k"))).collect();
    let gates: Vec<Gate> = workers.iter().map(|worker| Gate::before(&worker.address)).collect();
    let addresses: Vec<&str> = gates.iter().map(|gate| gate.address.as_str()).collect();
    let folder = tempfile::tempdir().expect("a folder");
    let file = write(folder.path(), "plan.yaml", &plan("q4_k", &[1, 2, 1, 2], &addresses, 512));
    let count = expected.len().to_string();
    let seen = watch(&arguments(&file, &model("q4_k"), &count), at, || match blow {
        Blow::Killed => workers[victim].kill(),
        Blow::Dropped => gates[victim].drop_all(),
        Blow::Broken => gates[victim].break_off(),
        _ => workers[victim].signal("STOP"),
    });
    if blow == Blow::Stopped {
        workers[victim].signal("CONT");
    }
    Some(seen)
}

/// A ring with a worker in a network namespace, whose link is taken down.
fn unplugged((victim, at, seed): (usize, usize, u64), expected: &[u32]) -> Option<Seen> {
    let namespace = Namespace::for_test("unplugged")?;
    let (folder, q4_k) = (tempfile::tempdir().expect("a folder"), model("q4_k"));
    let key = key(folder.path());
    let worker = |place: usize| {
        if place == victim {
            return Worker::inside(&namespace.name, &q4_k, &format!("{}:0", namespace.inside), &key);
        }
        Worker::with_key(&q4_k, &format!("{}:0", namespace.here), &key)
    };
    let workers: Vec<Worker> = (0..3).map(worker).collect();
    let addresses: Vec<&str> = workers.iter().map(|worker| worker.address.as_str()).collect();
    let file = write(folder.path(), "plan.yaml", &plan("q4_k", &[1, 2, 1, 2], &addresses, 512));
    let count = expected.len().to_string();
    let mut arguments = arguments(&file, &q4_k, &count);
    arguments.extend(["--key", &key]);
    let end = if seed.is_multiple_of(2) { End::Inside } else { End::Here };
    Some(watch(&arguments, at, || namespace.set(end, false)))
}

/// A key file in a folder.
pub fn key(folder: &Path) -> String {
    let path = write(folder, "ring.key", "a phrase for tests of links");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("it is ours");
    }
    path
}

/// Writes a file into a folder; its path.
pub fn write(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    fs::write(&path, text).expect("the folder can be written");
    path.display().to_string()
}

/// The tokens of one process.
pub fn undisturbed(count: usize) -> Vec<u32> {
    let folder = tempfile::tempdir().expect("a folder");
    let file = write(folder.path(), "plan.yaml", &plan("q4_k", &[8], &[], 512));
    let seen = watch(&arguments(&file, &model("q4_k"), &count.to_string()), usize::MAX, || {});
    assert_eq!(seen.tokens.len(), count, "{}", seen.said);
    seen.tokens
}

/// Trials with one blow after the other, and what they came to.
fn trials(count: u64, first: u64, blows: &[Blow]) {
    let expected = undisturbed(TOKENS);
    let (mut wrong, mut lost, mut doubled, mut hung) = (0, 0, 0, 0);
    let mut times: Vec<(Blow, Duration)> = Vec::new();
    for seed in first..first + count {
        let blow = blows[(seed % blows.len() as u64) as usize];
        let Some(seen) = trial(seed, blow, &expected) else { continue };
        hung += u32::from(seen.hung);
        lost += expected.len().saturating_sub(seen.tokens.len());
        doubled += seen.tokens.len().saturating_sub(expected.len());
        let differs = seen.tokens.iter().zip(&expected).filter(|(seen, expected)| seen != expected).count();
        wrong += differs;
        if differs > 0 || seen.tokens.len() != expected.len() || seen.hung {
            println!("seed {seed}, {blow:?}: {} tokens, {differs} wrong: {}", seen.tokens.len(), seen.said);
        }
        times.push((blow, seen.longest));
    }
    println!("{} trials: {wrong} wrong, {lost} lost, {doubled} doubled tokens, {hung} hangs", times.len());
    for &blow in blows {
        let mut own: Vec<u128> = times.iter().filter(|it| it.0 == blow).map(|it| it.1.as_millis()).collect();
        own.sort_unstable();
        if let (Some(worst), Some(median)) = (own.last(), own.get(own.len() / 2)) {
            println!(
                "{blow:?}: {} times, to the next token {median} ms (median), {worst} ms (worst)",
                own.len()
            );
        }
    }
    assert_eq!((wrong, lost, doubled, hung), (0, 0, 0, 0));
}

#[test]
fn ring_recovers_with_the_same_tokens() {
    // The one that takes ten seconds is `returning`'s.
    trials(5, 0, &BLOWS[..5]);
}

#[test]
#[ignore = "minutes: 200 trials, or HEARTH_RECOVERIES"]
fn ring_recovers_two_hundred_times() {
    let number = |name, usual| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual);
    trials(number("HEARTH_RECOVERIES", 200), number("HEARTH_RECOVERY", 1000), &BLOWS);
}

#[test]
fn recovery_is_in_the_trace_and_its_plan_is_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let (first, mut second) = (Worker::start(&model("q4_k")), Worker::start(&model("q4_k")));
    let addresses = [first.address.as_str(), second.address.as_str()];
    let file = write(folder.path(), "plan.yaml", &plan("q4_k", &[2, 1, 1], &addresses, 512));
    let (model, trace) = (model("q4_k"), folder.path().join("run.trace").display().to_string());
    let mut arguments = arguments(&file, &model, "60");
    arguments.extend(["--trace", &trace]);
    let seen = watch(&arguments, 20, || second.kill());
    assert_eq!(seen.tokens.len(), 60, "{}", seen.said);
    let trace = Trace::read(&mut fs::read(&trace).expect("a trace").as_slice()).expect("a trace");
    let kinds: Vec<RunEventKind> = trace.run_events.iter().map(|it| it.kind).collect();
    assert_eq!((trace.outcome, kinds), (Outcome::Ok, vec![RunEventKind::Silent, RunEventKind::Replanned]));
    let renewed = &trace.run_events[1];
    assert_eq!(renewed.device.as_deref(), Some("d2"));
    assert!(renewed.end.is_some() && renewed.what.starts_with("d0 3, d1 1; "), "{}", renewed.what);
    let text = fs::read_to_string(folder.path().join("run.plan-1.yaml")).expect("the new plan");
    assert_eq!(renewed.plan, Some(hearth_schema::digest::of(&text)));
    let layers = |device: u16| trace.records.iter().any(|record| record.device == device);
    assert!(layers(0) && layers(1), "those who are left hand their traces over");
    assert!(seen.said.contains("\"trace_lost\": true"), "{}", seen.said);
}

#[test]
fn failed_run_keeps_its_tokens() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut worker = Worker::start(&model("q4_k"));
    let file = write(folder.path(), "plan.yaml", &plan("q4_k", &[4, 4], &[&worker.address], 512));
    let (model, trace) = (model("q4_k"), folder.path().join("run.trace").display().to_string());
    let mut arguments = arguments(&file, &model, "400");
    arguments.extend(["--trace", &trace, "--give-up"]);
    let seen = watch(&arguments, 20, || worker.kill());
    assert!(
        seen.said.contains("worker `d1` is gone") && seen.said.contains("does not plan again"),
        "{}",
        seen.said
    );
    assert!(seen.said.contains(&format!("after token {} of 400", seen.tokens.len())), "{}", seen.said);
    let trace = Trace::read(&mut fs::read(&trace).expect("a trace").as_slice()).expect("a trace");
    assert_eq!(trace.outcome, Outcome::Killed);
    assert!(
        trace.passes.len() >= 20 && trace.run_events.iter().any(|it| it.kind == RunEventKind::NotReplanned)
    );
}

#[test]
fn interrupted_run_frees_its_workers() {
    let folder = tempfile::tempdir().expect("a folder");
    let worker = Worker::start(&model("q4_k"));
    let file = write(folder.path(), "plan.yaml", &plan("q4_k", &[4, 4], &[&worker.address], 4096));
    let (model, trace) = (model("q4_k"), folder.path().join("run.trace").display().to_string());
    for signal in ["-INT", "-TERM"] {
        let mut arguments = arguments(&file, &model, "4000");
        arguments.extend(["--trace", &trace]);
        let mut head = hearth(&arguments);
        let mut head = head.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the head starts");
        let mut lines = BufReader::new(head.stdout.take().expect("piped")).lines().map_while(Result::ok);
        lines.by_ref().filter(|line| token(line).is_some()).nth(9).expect("ten tokens");
        let asked = Instant::now();
        let sent = Command::new("kill").args([signal, &head.id().to_string()]).status();
        assert!(sent.is_ok_and(|status| status.success()));
        let rest = lines.filter(|line| token(line).is_some()).count();
        let output = head.wait_with_output().expect("the head ends");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(3) && said.contains("interrupted"), "{signal}: {said}");
        assert!(asked.elapsed() < Duration::from_secs(10), "{signal}: {:?}", asked.elapsed());
        let trace = Trace::read(&mut fs::read(&trace).expect("a trace").as_slice()).expect("a trace");
        assert_eq!(trace.outcome, Outcome::Killed);
        let outputs = trace.passes.iter().filter(|pass| pass.output).count();
        assert!(outputs >= 10 + rest, "{outputs} passes for {} tokens", 10 + rest);
    }
    // The worker takes the next head at once.
    let seen = watch(&arguments(&file, &model, "4"), usize::MAX, || {});
    assert_eq!(seen.tokens.len(), 4, "{}", seen.said);
}

#[test]
fn suspended_head_loses_no_worker() {
    let folder = tempfile::tempdir().expect("a folder");
    let worker = Worker::start(&model("q4_k"));
    let file = write(folder.path(), "plan.yaml", &plan("q4_k", &[4, 4], &[&worker.address], 512));
    let (model, trace) = (model("q4_k"), folder.path().join("run.trace").display().to_string());
    let mut arguments = arguments(&file, &model, "60");
    arguments.extend(["--trace", &trace]);
    let mut head = hearth(&arguments);
    let mut head = head.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the head starts");
    let mut lines = BufReader::new(head.stdout.take().expect("piped")).lines().map_while(Result::ok);
    lines.by_ref().filter(|line| token(line).is_some()).nth(9).expect("ten tokens");
    for (signal, pause) in [("-STOP", 3), ("-CONT", 0)] {
        let sent = Command::new("kill").args([signal, &head.id().to_string()]).status();
        assert!(sent.is_ok_and(|status| status.success()));
        std::thread::sleep(Duration::from_secs(pause));
    }
    assert_eq!(10 + lines.filter(|line| token(line).is_some()).count(), 60);
    assert!(head.wait().expect("the head ends").success());
    let trace = Trace::read(&mut fs::read(&trace).expect("a trace").as_slice()).expect("a trace");
    assert_eq!((trace.outcome, trace.run_events), (Outcome::Ok, vec![]));
}

#[test]
fn worker_without_the_model_fetches_its_layers() {
    let (folder, kept) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let kept = kept.path().display().to_string();
    let worker = Worker::fetching(&kept);
    let file = write(folder.path(), "plan.yaml", &plan("q4_k", &[4, 4], &[&worker.address], 512));
    let expected = undisturbed(8);
    for session in ["fetched", "kept"] {
        let seen = watch(&arguments(&file, &model("q4_k"), "8"), usize::MAX, || {});
        assert_eq!(seen.tokens, expected, "{}", seen.said);
        assert_eq!(seen.said.contains("d1 has fetched"), session == "fetched", "{}", seen.said);
    }
    let part = fs::read_dir(&kept).expect("a folder").next().expect("one model").expect("readable").path();
    let part = part.join("model.gguf").display().to_string();
    let text = error(&["worker", "--listen", "127.0.0.1:0", "--model", &part], 2);
    assert!(text.contains("only some layers"), "{text}");
}

#[test]
fn invalid_recovery_scenario_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = write(folder.path(), "plan.yaml", &plan("q4_k", &[8], &[], 512));
    let text =
        error(&["execute", &file, "--model", &model("q4_k"), "--prompt", "And", "--scenario", &file], 2);
    assert!(text.contains("this is not a scenario/1 document"), "{text}");
}

/// A scenario of three devices, whose planner gives each the same.
fn scenario(folder: &Path) -> String {
    let text = "schema: scenario/1
name: replanned
seed: 1
model: {profile: tiny}
context: 512
workload: {prompt: 4, generate: 60}
devices:
  - {name: d0, profile: d4}
  - {name: d1, profile: d4}
  - {name: d2, profile: d4}
links:
  default: {latency: {value: 50 us, source: test}, bandwidth: {value: 1 GB/s, source: test}}
planner: {strategy: even}
";
    write(folder, "scenario.yaml", text)
}

#[test]
fn scenario_planner_replans_during_a_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let (first, mut second) = (Worker::start(&model("q4_k")), Worker::start(&model("q4_k")));
    let addresses = [first.address.as_str(), second.address.as_str()];
    let mut text = plan("q4_k", &[5, 1, 2], &addresses, 512);
    text = text.replace("kv_cache: f32", "kv_cache: f16");
    let file = write(folder.path(), "plan.yaml", &text);
    let (scenario, model) = (scenario(folder.path()), model("q4_k"));
    let trace = folder.path().join("run.trace").display().to_string();
    let mut arguments = arguments(&file, &model, "60");
    arguments.extend(["--trace", &trace, "--scenario", &scenario]);
    let seen = watch(&arguments, 20, || second.kill());
    assert_eq!(seen.tokens.len(), 60, "{}", seen.said);
    let trace = Trace::read(&mut fs::read(&trace).expect("a trace").as_slice()).expect("a trace");
    assert_eq!(trace.outcome, Outcome::Ok);
    let renewed =
        trace.run_events.iter().find(|it| it.kind == RunEventKind::Replanned).expect("another plan");
    // The scenario's strategy gives both the same; spreading would have left the head most.
    assert!(renewed.what.starts_with("d0 4, d1 4; "), "{}", renewed.what);
    let renewed = fs::read_to_string(folder.path().join("run.plan-1.yaml")).expect("the new plan");
    assert!(renewed.contains("strategy: even"), "{renewed}");
    let alone = write(
        folder.path(),
        "alone.yaml",
        &text
            .replace("window: 5", "window: 8")
            .lines()
            .filter(|line| !line.contains("worker"))
            .collect::<Vec<_>>()
            .join("\n"),
    );
    let expected = watch(&self::arguments(&alone, &model, "60"), usize::MAX, || {});
    assert_eq!(seen.tokens, expected.tokens, "{}", expected.said);
}
