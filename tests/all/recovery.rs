//! Does a ring of processes survive the loss of a worker, with the tokens of an undisturbed run?
//!
//! Workers stand behind a gate of this test, which carries bytes until it is told to drop or to break them. At a random
//! token a worker is killed, stopped, or its link is dropped or broken; the head has to go on with the same tokens.
//! `HEARTH_RECOVERIES` is how many trials the ignored test makes.

#![allow(clippy::disallowed_methods)] // how long a ring stands still is what these tests are about

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use hearth_schema::Trace;
use hearth_schema::happenings::Sort;
use hearth_schema::trace::Outcome;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::processes::{Worker, error, hearth, model, plan};

/// A link that can be broken.
struct Gate {
    address: String,
    dropped: Arc<AtomicBool>,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Gate {
    /// Before an address.
    fn before(address: &str) -> Gate {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let own = listener.local_addr().expect("bound").to_string();
        let (dropped, open) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let (target, drops, streams) = (address.to_owned(), dropped.clone(), open.clone());
        std::thread::spawn(move || {
            while let Ok((near, _)) = listener.accept() {
                // What is dropped is neither answered nor refused.
                let far = if drops.load(Ordering::SeqCst) { None } else { TcpStream::connect(&target).ok() };
                let mut streams = streams.lock().expect("no panic");
                streams.push(near.try_clone().expect("a socket"));
                let Some(far) = far else {
                    if !drops.load(Ordering::SeqCst) {
                        let _ = near.shutdown(Shutdown::Both);
                    }
                    continue;
                };
                streams.push(far.try_clone().expect("a socket"));
                let (near_too, far_too) =
                    (near.try_clone().expect("a socket"), far.try_clone().expect("a socket"));
                for (from, to) in [(near, far_too), (far, near_too)] {
                    let drops = drops.clone();
                    let _ = from.set_nodelay(true);
                    std::thread::spawn(move || carry(from, to, &drops));
                }
            }
        });
        Gate { address: own, dropped, open }
    }

    /// From now on nothing passes.
    fn drop_all(&self) {
        self.dropped.store(true, Ordering::SeqCst);
    }

    /// Breaks the connections that are open.
    fn break_off(&self) {
        for stream in self.open.lock().expect("no panic").drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, dropped: &AtomicBool) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if !dropped.load(Ordering::SeqCst) && to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

/// What happens to a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Blow {
    Killed,
    Stopped,
    Dropped,
    Broken,
}

/// Tokens of a trial.
const TOKENS: usize = 160;

fn arguments<'a>(plan: &'a str, model: &'a str, tokens: &'a str) -> Vec<&'a str> {
    vec![
        "execute",
        plan,
        "--model",
        model,
        "--prompt",
        "The Lord is my",
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
struct Seen {
    tokens: Vec<u32>,
    /// The longest time between two tokens.
    longest: Duration,
    hung: bool,
    said: String,
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
    loop {
        match lines.recv_timeout(Duration::from_mins(1)) {
            Ok((now, line)) => {
                let Some(token) = token(&line) else { continue };
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
    Seen { tokens, longest, hung, said: String::from_utf8_lossy(&output.stderr).into_owned() }
}

/// One blow to a ring of four at a random token.
fn trial(seed: u64, blow: Blow, expected: &[u32]) -> Seen {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut workers: Vec<Worker> = (0..3).map(|_| Worker::start(&model("q4_k"))).collect();
    let gates: Vec<Gate> = workers.iter().map(|worker| Gate::before(&worker.address)).collect();
    let addresses: Vec<&str> = gates.iter().map(|gate| gate.address.as_str()).collect();
    let folder = tempfile::tempdir().expect("a folder");
    let file = write(folder.path(), "plan.yaml", &plan("q4_k", &[1, 2, 1, 2], &addresses, 512));
    let victim = random.next_u32() as usize % 3;
    let at = 1 + random.next_u32() as usize % (expected.len() - 2);
    let count = expected.len().to_string();
    let seen = watch(&arguments(&file, &model("q4_k"), &count), at, || match blow {
        Blow::Killed => workers[victim].kill(),
        Blow::Stopped => workers[victim].signal("STOP"),
        Blow::Dropped => gates[victim].drop_all(),
        Blow::Broken => gates[victim].break_off(),
    });
    if blow == Blow::Stopped {
        workers[victim].signal("CONT");
    }
    seen
}

fn write(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    fs::write(&path, text).expect("the folder can be written");
    path.display().to_string()
}

/// The tokens of one process.
fn undisturbed(count: usize) -> Vec<u32> {
    let folder = tempfile::tempdir().expect("a folder");
    let file = write(folder.path(), "plan.yaml", &plan("q4_k", &[8], &[], 512));
    let seen = watch(&arguments(&file, &model("q4_k"), &count.to_string()), usize::MAX, || {});
    assert_eq!(seen.tokens.len(), count, "{}", seen.said);
    seen.tokens
}

/// Trials with one blow after the other, and what they came to.
fn trials(count: u64, first: u64) {
    let expected = undisturbed(TOKENS);
    let (mut wrong, mut lost, mut doubled, mut hung) = (0, 0, 0, 0);
    let mut times: Vec<(Blow, Duration)> = Vec::new();
    for seed in first..first + count {
        let blow = [Blow::Killed, Blow::Stopped, Blow::Dropped, Blow::Broken][(seed % 4) as usize];
        let seen = trial(seed, blow, &expected);
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
    println!("{count} trials: {wrong} wrong, {lost} lost, {doubled} doubled tokens, {hung} hangs");
    for blow in [Blow::Killed, Blow::Stopped, Blow::Dropped, Blow::Broken] {
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
fn a_ring_of_processes_goes_on_with_the_same_tokens() {
    trials(4, 0);
}

#[test]
#[ignore = "minutes: 200 trials, or HEARTH_RECOVERIES"]
fn a_ring_of_processes_goes_on_two_hundred_times() {
    let count = std::env::var("HEARTH_RECOVERIES").ok().and_then(|text| text.parse().ok()).unwrap_or(200);
    trials(count, 1000);
}

#[test]
fn the_trace_tells_what_happened_and_the_plan_is_kept() {
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
    let sorts: Vec<Sort> = trace.happenings.iter().map(|it| it.sort).collect();
    assert_eq!((trace.outcome, sorts), (Outcome::Ok, vec![Sort::Silent, Sort::Replanned]));
    let renewed = &trace.happenings[1];
    assert_eq!(renewed.device.as_deref(), Some("d2"));
    assert!(renewed.end.is_some() && renewed.what.starts_with("d0 3, d1 1; "), "{}", renewed.what);
    let text = fs::read_to_string(folder.path().join("run.plan-1.yaml")).expect("the new plan");
    assert_eq!(renewed.plan, Some(hearth_schema::digest::of(&text)));
    let layers = |device: u16| trace.records.iter().any(|record| record.device == device);
    assert!(layers(0) && layers(1), "those who are left hand their traces over");
}

#[test]
fn a_run_that_cannot_go_on_keeps_its_tokens_and_says_why() {
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
    assert!(trace.passes.len() >= 20 && trace.happenings.iter().any(|it| it.sort == Sort::NotReplanned));
}

#[test]
fn an_interrupted_run_frees_its_workers_and_keeps_what_there_is() {
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
        lines.by_ref().nth(9).expect("ten tokens");
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
fn a_head_that_stood_still_misses_nobody() {
    let folder = tempfile::tempdir().expect("a folder");
    let worker = Worker::start(&model("q4_k"));
    let file = write(folder.path(), "plan.yaml", &plan("q4_k", &[4, 4], &[&worker.address], 512));
    let (model, trace) = (model("q4_k"), folder.path().join("run.trace").display().to_string());
    let mut arguments = arguments(&file, &model, "60");
    arguments.extend(["--trace", &trace]);
    let mut head = hearth(&arguments);
    let mut head = head.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the head starts");
    let mut lines = BufReader::new(head.stdout.take().expect("piped")).lines().map_while(Result::ok);
    lines.by_ref().nth(9).expect("ten tokens");
    for (signal, pause) in [("-STOP", 3), ("-CONT", 0)] {
        let sent = Command::new("kill").args([signal, &head.id().to_string()]).status();
        assert!(sent.is_ok_and(|status| status.success()));
        std::thread::sleep(Duration::from_secs(pause));
    }
    assert_eq!(10 + lines.filter(|line| token(line).is_some()).count(), 60);
    assert!(head.wait().expect("the head ends").success());
    let trace = Trace::read(&mut fs::read(&trace).expect("a trace").as_slice()).expect("a trace");
    assert_eq!((trace.outcome, trace.happenings), (Outcome::Ok, vec![]));
}

#[test]
fn a_worker_without_the_model_fetches_its_layers() {
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
fn a_scenario_that_is_none_is_refused_before_anything_runs() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = write(folder.path(), "plan.yaml", &plan("q4_k", &[8], &[], 512));
    let text =
        error(&["execute", &file, "--model", &model("q4_k"), "--prompt", "And", "--scenario", &file], 2);
    assert!(text.contains("this is not a scenario/1 document"), "{text}");
}
