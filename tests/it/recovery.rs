//! Tests that a ring of processes recovers from the loss of a worker and generates the same tokens.
//!
//! Each trial injects a fault at a random token, and every third trial the same fault into two workers. By default
//! there are five trials; `HEARTH_RECOVERIES` sets their number and adds slow faults, `HEARTH_RECOVERY` is the seed of
//! the first trial (`scripts/recovery-trials.sh`).
//!
//! Not here: which devices are in the ring afterwards (`rejoining`).

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use hearth_schema::Trace;
use hearth_schema::run_events::{RunEvent, RunEventKind};
use hearth_schema::trace::Outcome;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::folder::{Folder, scenario_yaml};
use crate::namespace::{LinkEnd, NetworkNamespace};
use crate::processes::{
    Head, HeadOutput, Worker, assert_rejected, execute_arguments, model_path, run_failing_with_code,
};
use crate::proxy::Proxy;
use crate::rejoining::suspend_worker;

/// A fault of a worker or of its link. A stopped worker is resumed after the run, a suspended worker during the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Killed,
    Stopped,
    /// All messages of the worker are dropped.
    Dropped,
    Disconnected,
    /// The link of the worker is taken down.
    Unplugged,
    Suspended,
}

const FAULTS: [Fault; 6] =
    [Fault::Killed, Fault::Stopped, Fault::Dropped, Fault::Disconnected, Fault::Unplugged, Fault::Suspended];

const TOKENS: usize = 160;
const SUSPENSION: Duration = Duration::from_secs(10);

/// Injects a fault into a ring of four devices at a random token. Returns `None` if this machine cannot inject it.
fn trial(seed: u64, fault: Fault, expected: &[u32]) -> Option<HeadOutput> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let victim = random.next_u32() as usize % 3;
    let at = 1 + random.next_u32() as usize % (expected.len() - 2);
    if fault == Fault::Unplugged {
        return unplug((victim, at, seed), expected);
    }
    if fault == Fault::Suspended {
        let (mut observed, rejoined) = suspend_worker(victim, at, SUSPENSION, expected);
        observed.timed_out |= !rejoined;
        return Some(observed);
    }
    let mut workers: Vec<Worker> = (0..3).map(|_| Worker::start(&model_path("q4_k"))).collect();
    let proxies: Vec<Proxy> = workers.iter().map(|worker| Proxy::new(&worker.address)).collect();
    let addresses: Vec<&str> = proxies.iter().map(|proxy| proxy.address.as_str()).collect();
    let folder = Folder::new();
    let mut head = Head::start(&folder.write_plan(&[1, 2, 1, 2], &addresses, 512), expected.len(), &[]);
    head.wait_for_tokens(at);
    let second = seed.is_multiple_of(3).then_some((victim + 1) % 3);
    let victims: Vec<usize> = [Some(victim), second].into_iter().flatten().collect();
    for &victim in &victims {
        match fault {
            Fault::Killed => workers[victim].kill(),
            Fault::Dropped => proxies[victim].drop_all_bytes(),
            Fault::Disconnected => proxies[victim].disconnect(),
            _ => workers[victim].send_signal("STOP"),
        }
    }
    let observed = head.finish();
    if fault == Fault::Stopped {
        for victim in victims {
            workers[victim].send_signal("CONT");
        }
    }
    Some(observed)
}

/// Runs a trial in which the link to a worker in a network namespace is taken down.
fn unplug((victim, at, seed): (usize, usize, u64), expected: &[u32]) -> Option<HeadOutput> {
    let namespace = NetworkNamespace::for_test("unplug")?;
    let (folder, q4_k) = (Folder::new(), model_path("q4_k"));
    let key = folder.write_ring_key();
    let flags = ["--model", &q4_k, "--key", &key];
    let worker = |index: usize| {
        if index == victim {
            return Worker::in_namespace(&namespace, &flags);
        }
        Worker::with_flags(&[&flags[..], &["--listen", &format!("{}:0", namespace.host_address)]].concat())
    };
    let workers: Vec<Worker> = (0..3).map(worker).collect();
    let addresses: Vec<&str> = workers.iter().map(|worker| worker.address.as_str()).collect();
    let plan = folder.write_plan(&[1, 2, 1, 2], &addresses, 512);
    let mut head = Head::start(&plan, expected.len(), &["--key", &key]);
    head.wait_for_tokens(at);
    namespace.set_link_up(if seed.is_multiple_of(2) { LinkEnd::Namespace } else { LinkEnd::Host }, false);
    Some(head.finish())
}

pub fn single_process_tokens(count: usize) -> Vec<u32> {
    let observed = Head::run(&Folder::new().write_plan(&[8], &[], 512), count, &[]);
    assert_eq!(observed.tokens.len(), count, "{}", observed.other_output);
    observed.tokens
}

/// Runs `plan.yaml` in a folder and kills the worker `victim` after 20 tokens.
fn run_with_loss(folder: &Folder, tokens: usize, flags: &[&str], mut victim: Worker) -> (HeadOutput, Trace) {
    let [plan, trace] = ["plan.yaml", "run.trace"].map(|name| folder.path_of(name));
    let mut head = Head::start(&plan, tokens, &[&["--trace", &trace], flags].concat());
    head.wait_for_tokens(20);
    let killed = Instant::now();
    victim.kill();
    let observed = head.finish();
    if flags.contains(&"--give-up") {
        assert!(killed.elapsed().as_secs() < 10, "the deadline is 2 s");
    }
    (observed, folder.read_trace("run.trace"))
}

/// Returns the run event in a trace that says that the ring adopted a new plan.
pub fn replanned_event(trace: &Trace) -> &RunEvent {
    trace.run_events.iter().find(|it| it.kind == RunEventKind::Replanned).expect("another plan")
}

/// Runs trials that cycle through the faults, and checks that no token is wrong, lost or duplicated.
fn trials(seeds: std::ops::Range<u64>, faults: &[Fault]) {
    let expected = single_process_tokens(TOKENS);
    let (mut wrong, mut lost, mut doubled, mut timeouts) = (0, 0, 0, 0);
    let mut gaps: Vec<(Fault, Duration)> = Vec::new();
    for seed in seeds {
        let fault = faults[(seed % faults.len() as u64) as usize];
        let Some(observed) = trial(seed, fault, &expected) else { continue };
        let tokens = &observed.tokens;
        timeouts += u32::from(observed.timed_out);
        lost += expected.len().saturating_sub(tokens.len());
        doubled += tokens.len().saturating_sub(expected.len());
        let differing = tokens.iter().zip(&expected).filter(|(own, expected)| own != expected).count();
        wrong += differing;
        if differing > 0 || tokens.len() != expected.len() || observed.timed_out {
            let (count, output) = (tokens.len(), &observed.other_output);
            println!("seed {seed}, {fault:?}: {count} tokens, {differing} wrong: {output}");
        }
        gaps.push((fault, observed.max_token_gap));
    }
    let count = gaps.len();
    println!("{count} trials: {wrong} wrong, {lost} lost, {doubled} doubled tokens, {timeouts} timeouts");
    for &fault in faults {
        let mut own: Vec<u128> = gaps.iter().filter(|it| it.0 == fault).map(|it| it.1.as_millis()).collect();
        own.sort_unstable();
        if let (Some(worst), Some(median)) = (own.last(), own.get(own.len() / 2)) {
            let count = own.len();
            println!("{fault:?}: {count} times, to the next token {median} ms (median), {worst} ms (worst)");
        }
    }
    assert_eq!((wrong, lost, doubled, timeouts), (0, 0, 0, 0));
}

#[test]
fn ring_recovers_with_the_same_tokens() {
    match trial_seeds() {
        // The suspension, which would take ten seconds, is tested in `rejoining`.
        None => trials(0..5, &FAULTS[..5]),
        Some(seeds) => trials(seeds, &FAULTS),
    }
}

/// Returns the seeds of the trials that the environment sets; `None` if it sets none.
pub fn trial_seeds() -> Option<std::ops::Range<u64>> {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let first = number("HEARTH_RECOVERY").unwrap_or(1000);
    number("HEARTH_RECOVERIES").map(|count| first..first + count)
}

#[test]
fn changed_model_file_is_named_and_the_ring_goes_on() {
    let expected = single_process_tokens(TOKENS);
    let folder = Folder::new();
    let change = |path: &str, size: Option<u64>| {
        let file = std::fs::File::options().write(true).open(path).expect("a copy of the model");
        match size {
            Some(size) => file.set_len(size).expect("truncated"),
            None => file.write_all_at(&[0xff; 4096], 3_000_000).expect("overwritten"),
        }
    };
    for (size, what) in [(Some(0), "truncated"), (Some(3_000_000), "truncated"), (None, "changed")] {
        let copy = folder.path_of("copy.gguf");
        std::fs::copy(model_path("q4_k"), &copy).expect("copied");
        let worker = Worker::start(&copy);
        let plan = folder.write_plan(&[4, 4], &[&worker.address], 512);
        let trace = folder.path_of("run.trace");
        let mut head = Head::start(&plan, TOKENS, &["--trace", &trace]);
        head.wait_for_tokens(10);
        change(&copy, size);
        let observed = head.finish();
        assert_eq!(observed.tokens, expected, "{}", observed.other_output);
        let trace = folder.read_trace("run.trace");
        let details = trace.run_events.iter().map(|it| it.details.as_str()).collect::<Vec<_>>().join("; ");
        assert!(details.contains("copy.gguf") && details.contains(what), "{details}");
        // Nobody computes with the changed file.
        let error =
            run_failing_with_code(&execute_arguments(&plan, &model_path("q4_k"), &["--prompt", "a"]), 1);
        assert!(error.contains("copy.gguf"), "{error}");
        drop(worker);
        // On the head, the run ends with an error.
        std::fs::copy(model_path("q4_k"), &copy).expect("copied");
        let mut head = Head::with_model(&copy, &folder.write_plan(&[8], &[], 512), 400, &[]);
        head.wait_for_tokens(10);
        change(&copy, size);
        let observed = head.finish();
        assert!(observed.exit_code == Some(1), "{}: {observed:?}", observed.other_output);
        assert!(observed.other_output.contains("copy.gguf"), "{}", observed.other_output);
        let right = observed.tokens.iter().zip(&expected).all(|(own, expected)| own == expected);
        assert!(right, "no token is computed from the changed file");
    }
}

#[test]
fn recovery_is_in_the_trace_and_its_plan_is_written() {
    let folder = Folder::new();
    let (first, second) = (Worker::start(&model_path("q4_k")), Worker::start(&model_path("q4_k")));
    folder.write_plan(&[2, 1, 1], &[&first.address, &second.address], 512);
    let (observed, trace) = run_with_loss(&folder, 60, &[], second);
    assert_eq!(observed.tokens.len(), 60, "{}", observed.other_output);
    let kinds: Vec<RunEventKind> = trace.run_events.iter().map(|it| it.kind).collect();
    assert_eq!((trace.outcome, kinds), (Outcome::Ok, vec![RunEventKind::Silent, RunEventKind::Replanned]));
    let replanned = &trace.run_events[1];
    assert_eq!(replanned.device.as_deref(), Some("d2"));
    assert!(replanned.end_ns.is_some() && replanned.details.starts_with("d0 3, d1 1; "), "{replanned:?}");
    let digest = hearth_schema::digest::digest_text(&folder.read("run.plan-1.yaml"));
    assert_eq!(replanned.plan_digest, Some(digest));
    let has_records = |device: u16| trace.records.iter().any(|record| record.device_index == device);
    assert!(has_records(0) && has_records(1), "the remaining devices send their traces");
    assert!(observed.other_output.contains("\"trace_lost\": true"), "{}", observed.other_output);
}

#[test]
fn failed_run_keeps_its_tokens() {
    let folder = Folder::new();
    let (first, second) = (Worker::start(&model_path("q4_k")), Worker::start(&model_path("q4_k")));
    folder.write_plan(&[2, 1, 1], &[&first.address, &second.address], 512);
    let (observed, trace) = run_with_loss(&folder, 400, &["--give-up"], second);
    assert_eq!(observed.exit_code, Some(3), "{}", observed.other_output);
    let progress = format!("after token {} of 400", observed.tokens.len());
    for part in ["lost the connection to `d2`", "recovery is disabled", &progress] {
        assert!(observed.other_output.contains(part), "no `{part}`: {}", observed.other_output);
    }
    assert_eq!(trace.outcome, Outcome::Killed);
    assert!(trace.passes.len() >= 20);
    assert!(trace.run_events.iter().any(|it| it.kind == RunEventKind::NotReplanned));
}

#[test]
fn suspended_head_loses_no_worker() {
    let (folder, worker) = (Folder::new(), Worker::start(&model_path("q4_k")));
    let plan = folder.write_plan(&[4, 4], &[&worker.address], 512);
    let mut head = Head::start(&plan, 60, &["--trace", &folder.path_of("run.trace")]);
    head.wait_for_tokens(10);
    head.send_signal("STOP");
    std::thread::sleep(Duration::from_secs(3));
    head.send_signal("CONT");
    let observed = head.finish();
    assert_eq!((observed.tokens.len(), observed.exit_code), (60, Some(0)));
    let trace = folder.read_trace("run.trace");
    assert_eq!((trace.outcome, trace.run_events), (Outcome::Ok, vec![]));
}

#[test]
fn worker_without_the_model_fetches_its_layers() {
    let (folder, cache) = (Folder::new(), Folder::new());
    let worker = Worker::with_flags(&["--listen", "127.0.0.1:0", "--fetch", &cache.path_of("")]);
    let plan = folder.write_plan(&[4, 4], &[&worker.address], 512);
    let expected = single_process_tokens(8);
    for session in ["fetched", "cached"] {
        let observed = Head::run(&plan, 8, &[]);
        assert_eq!(observed.tokens, expected, "{}", observed.other_output);
        let has_fetched = observed.other_output.contains("d1 has fetched");
        assert_eq!(has_fetched, session == "fetched", "{}", observed.other_output);
    }
    let partial = cache.path_of(&format!("{}/model.gguf", cache.file_names()[0]));
    assert_rejected(&["worker", "--listen", "127.0.0.1:0", "--model", &partial], &["only some layers"]);
}

#[test]
fn scenario_planner_replans_during_a_run() {
    let folder = Folder::new();
    let (first, second) = (Worker::start(&model_path("q4_k")), Worker::start(&model_path("q4_k")));
    folder.write_plan(&[5, 1, 2], &[&first.address, &second.address], 512);
    let text = folder.read("plan.yaml").replace("kv_cache: f32", "kv_cache: f16");
    folder.write("plan.yaml", &text);
    // The strategy `even` assigns the same number of layers to each device.
    let devices = ["d0", "d1", "d2"].map(|name| format!("  - {{name: {name}, profile: d4}}")).join("\n");
    let even = scenario_yaml(&devices).replace("llama-8b", "tiny") + "planner: {strategy: even}\n";
    let even = folder.write("scenario.yaml", even);
    let (observed, trace) = run_with_loss(&folder, 60, &["--scenario", &even], second);
    assert_eq!(observed.tokens.len(), 60, "{}", observed.other_output);
    assert_eq!(trace.outcome, Outcome::Ok);
    // The default, distribution in proportion, would have assigned most layers to the head.
    let what = &replanned_event(&trace).details;
    assert!(what.starts_with("d0 4, d1 4; "), "{what}");
    assert!(folder.read("run.plan-1.yaml").contains("strategy: even"));
    let alone: Vec<&str> = text.lines().filter(|line| !line.contains("worker")).collect();
    let alone = folder.write("alone.yaml", alone.join("\n").replace("window: 5", "window: 8"));
    let expected = Head::run(&alone, 60, &[]);
    assert_eq!(observed.tokens, expected.tokens, "{}", expected.other_output);
}
