//! A device with managed residency reads only what it must, and yields memory to other programs.
//!
//! A synthetic model of 64 MiB runs inside the limits of a control group, with memory for about three quarters of
//! the weights that a token touches. How long a token takes is not looked at, so that a busy machine does not
//! matter; what is read for it, and which token it is, are.

use std::fs::{self, File};
use std::io::BufReader;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use hearth_lab::limited::HOG;
use hearth_lab::{CommandUsage, DeviceLimits, LimitedCommand, MemoryHog};
use hearth_profiles::{Bytes, BytesPerSecond};
use hearth_schema::Trace;
use hearth_schema::trace::Counter;
use hearth_schema::trace::Kind;
use hearth_schema::trace::Outcome;

use crate::lab::{folder_on_disk, groups};
use crate::processes::{hearth, run};

/// Of the 64 MiB of the model a token touches 57. The process takes 9 MiB for itself, and the stream buffer 2.
const MEMORY: Bytes = Bytes::mib(54);
/// Half of that.
const HOGGED: Bytes = Bytes::mib(27);
/// What is streamed takes a token some 50 ms.
const DISK: BytesPerSecond = BytesPerSecond(300e6);
/// Enough to go on for some seconds after the hog has gone.
const TOKENS: &str = "100";
/// Tokens until all is kept again that there is room for: the kept set grows in four steps.
const SETTLING: usize = 12;

/// The groups of a process's limited runs are named after the process, so one runs at a time.
static LIMITED: Mutex<()> = Mutex::new(());

/// The program of a hog: this binary, told to run only this test, with a hog's arguments behind its name.
#[test]
fn a_hog() {
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(at) = arguments.iter().position(|word| word == HOG) {
        assert!(MemoryHog::run_if_asked(&arguments[at..]));
    }
}

/// Starts [`a_hog`]. A hog is given nothing but its own arguments, so a script adds the others.
fn hog_program(folder: &Path) -> PathBuf {
    let own = std::env::current_exe().expect("a path").display().to_string();
    let script = folder.join("hog.sh");
    let text = format!("#!/bin/sh\nexec '{own}' --exact residency::a_hog -- \"$@\" > /dev/null\n");
    fs::write(&script, text).expect("the folder can be written");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("it is ours");
    script
}

/// A model in a folder.
fn synthetic(folder: &Path) -> PathBuf {
    let model = folder.join("model.gguf");
    let made = hearth(&["synth", "--preset", "120m", "--quant", "q4_k_m", "--output"])
        .arg(&model)
        .output()
        .expect("the program starts");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    model
}

/// A scenario of these devices, given as lines of YAML.
fn scenario(folder: &Path, devices: &str, more: &str) -> String {
    let text = format!(
        "# Does it?\nschema: scenario/1\nname: residency-test\nseed: 1\nmodel: {{file: model.gguf}}\ncontext: 256\n\
         workload: {{prompt: 4, generate: 8}}\ndevices:\n{devices}\nlinks:\n  default:\n    \
         latency: {{value: 50 us, source: test}}\n    bandwidth: {{value: 1 GB/s, source: test}}\n{more}\n"
    );
    let file = folder.join("scenario.yaml");
    fs::write(&file, text).expect("the folder can be written");
    file.display().to_string()
}

/// The words that run a plan of one managed device, in a folder with a model.
fn execution(folder: &Path, tokens: &str) -> Vec<String> {
    let scenario = scenario(folder, "  - {name: a, profile: d3}", "");
    let path = |name: &str| folder.join(name).display().to_string();
    let (plan, model, trace) = (path("plan.yaml"), path("model.gguf"), path("run.trace"));
    let options = ["--windows", "12", "--residency", "managed", "--stream-buffer", "2 MiB", "--output"];
    let planned = hearth(&["plan", &scenario]).args(options).arg(&plan).output().expect("the program starts");
    assert!(planned.status.success(), "{}", String::from_utf8_lossy(&planned.stderr));
    let words = ["execute", &plan, "--model", &model, "--prompt-tokens", "4", "--tokens", tokens];
    let more = ["--ignore-end", "--threads", "1", "--json", "--trace", &trace];
    [&words[..], &more].concat().into_iter().map(String::from).collect()
}

fn limited(folder: &Path, hog: MemoryHog, deadline: Duration, words: &[String]) -> CommandUsage {
    let limits = DeviceLimits { memory: Some(MEMORY), disk_read: Some(DISK), ..DeviceLimits::default() };
    let limited = LimitedCommand { limits, files: vec![folder.join("model.gguf")], hog: Some(hog), deadline };
    limited.run(Path::new(env!("CARGO_BIN_EXE_hearth")), words, true).expect("control groups can be made")
}

fn token_ids(output: &str) -> serde_json::Value {
    let output: serde_json::Value = serde_json::from_str(output).expect("one JSON document");
    output["token_ids"].clone()
}

fn trace(path: &Path) -> Trace {
    let file = File::open(path).expect("a trace");
    let trace = Trace::read(&mut BufReader::new(file)).expect("a whole trace");
    assert_eq!(trace.outcome, Outcome::Ok);
    trace
}

/// A counter of a device, whenever it was read.
fn counted(trace: &Trace, device: u16, counter: Counter) -> Vec<u64> {
    let own = trace.readings.iter().filter(|it| (it.device, it.counter) == (device, counter));
    own.map(|reading| reading.value).collect()
}

/// A counter of a device after each pass, as it was when it was last read.
fn after_each_pass(trace: &Trace, device: u16, counter: Counter) -> Vec<u64> {
    let of = |counter| trace.readings.iter().filter(move |it| (it.device, it.counter) == (device, counter));
    let last = |pass| of(counter).rfind(|reading| reading.pass <= pass).map_or(0, |reading| reading.value);
    of(Counter::BytesRead).map(|reading| last(reading.pass)).collect()
}

/// Bytes that a device read for each pass after the first.
fn read(trace: &Trace, device: u16) -> Vec<u64> {
    counted(trace, device, Counter::BytesRead).windows(2).map(|pair| pair[1] - pair[0]).collect()
}

/// Bytes of the weights that a device uses for a token.
fn share(trace: &Trace, device: u16) -> u64 {
    let own = trace.records.iter().filter(|it| (it.device, it.pass) == (device, 1));
    own.filter(|it| matches!(it.kind, Kind::Compute | Kind::Output)).map(|it| it.bytes).sum()
}

fn median(numbers: &[u64]) -> u64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied().unwrap_or(0)
}

#[test]
fn managed_device_yields_memory_and_recovers() {
    if groups("managed_device_yields_memory_and_recovers").is_none() {
        return;
    }
    let folder = folder_on_disk();
    synthetic(folder.path());
    let words = execution(folder.path(), TOKENS);
    let free = run(&words.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(free.status.success(), "{}", String::from_utf8_lossy(&free.stderr));
    let hog = MemoryHog {
        program: hog_program(folder.path()),
        memory: HOGGED,
        after: Duration::from_secs(2),
        hold: Duration::from_secs(3),
    };
    let alone = LIMITED.lock().unwrap_or_else(PoisonError::into_inner);
    let usage = limited(folder.path(), hog, Duration::from_mins(5), &words);
    drop(alone);
    assert!(usage.status.is_some_and(|status| status.success()) && usage.oom_kills == 0, "{usage:?}");
    let expected = token_ids(&String::from_utf8_lossy(&free.stdout));
    assert_eq!(token_ids(&usage.output), expected, "the tokens of a run with all the memory there is");

    let trace = trace(&folder.path().join("run.trace"));
    let (read, held) = (read(&trace, 0), after_each_pass(&trace, 0, Counter::Unreclaimable));
    // The hog's memory is charged to the same group.
    let hogged: Vec<bool> = held[1..].iter().map(|&bytes| bytes > held[0] + HOGGED.0 / 2).collect();
    let first = hogged.iter().position(|&it| it).expect("tokens beside the hog");
    let gone = hogged.iter().rposition(|&it| it).expect("tokens beside the hog") + 1;
    let phases = (read.get(2..first), &read[first..gone], read.get(gone + SETTLING..));
    let (Some(before), beside, Some(after)) = phases else { panic!("{read:?}: {first}, {gone}") };
    let (share, counts) = (share(&trace, 0), (before.len(), beside.len(), after.len()));
    assert!(counts.0 > 2 && counts.1 > 2 && counts.2 > 9, "{counts:?}");
    let (before, beside, after) = (median(before), median(beside), median(after));
    println!(
        "read a token: {before} bytes before, {beside} beside the hog, {after} after, of {share}; {counts:?} tokens"
    );
    assert!(before > 0 && before < share * 2 / 5, "it keeps most of its share");
    assert!(beside > before * 3 / 2, "it gives memory up");
    assert!(after < before * 13 / 10, "it comes back");
}

#[test]
fn killed_managed_run_leaves_nothing_behind() {
    let Some(groups) = groups("killed_managed_run_leaves_nothing_behind") else { return };
    let folder = folder_on_disk();
    synthetic(folder.path());
    let words = execution(folder.path(), "200");
    let program = hog_program(folder.path());
    let hog =
        MemoryHog { program, memory: Bytes::mib(8), after: Duration::ZERO, hold: Duration::from_mins(5) };
    let files = || fs::read_dir(folder.path()).expect("the folder").count();
    let before = files();
    let own = format!("hearth-lab-{}-", std::process::id());
    let left = |folder: &Path| {
        let names = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
        names.filter(|name| name.to_str().is_some_and(|name| name.starts_with(&own))).count()
    };
    let alone = LIMITED.lock().unwrap_or_else(PoisonError::into_inner);
    let usage = limited(folder.path(), hog, Duration::from_millis(1500), &words);
    // A group with a process in it cannot be removed: none is left if its group is gone.
    let left: usize = [groups, "/sys/fs/cgroup/blkio".into()].iter().map(|folder| left(folder)).sum();
    drop(alone);
    assert!(usage.status.is_none(), "it was to be ended by its deadline: {usage:?}");
    assert_eq!((left, files()), (0, before), "groups or files are left behind");
}

#[test]
fn lab_runs_managed_devices() {
    if groups("lab_runs_managed_devices").is_none() {
        return;
    }
    let folder = folder_on_disk();
    let model = synthetic(folder.path()).display().to_string();
    let limits = "profile: measured, limits: {memory: 28 MiB, disk_read: 200 MB/s, threads: 1}";
    let devices = ["a", "b", "c"].map(|name| format!("  - {{name: {name}, {limits}}}")).join("\n");
    let more =
        "planner: {strategy: manual, windows: [3, 4, 5]}\nresidency: {policy: managed, stream_buffer: 4 MiB}";
    let scenario = scenario(folder.path(), &devices, more);
    let report = folder.path().join("report");
    let (scratch, out) = (folder.path().display().to_string(), report.display().to_string());
    let output =
        run(&["lab", &scenario, "--model", &model, "--scratch", &scratch, "--report", &out, "--json"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let result: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
    let groups = result["groups"].as_array().expect("the groups' counters");
    assert!(groups.iter().all(|group| group["oom_kills"] == 0), "{groups:?}");
    for name in ["predicted.trace", "measured.trace"] {
        let trace = trace(&report.join(name));
        assert_eq!(trace.header.devices.len(), 3);
        let mut streamed = 0;
        for device in 0..3 {
            let share = share(&trace, device);
            let ahead = trace.records.iter().filter(|it| it.device == device && it.kind == Kind::Prefetch);
            let ahead: u64 = ahead.map(|record| record.bytes).sum();
            // The first tokens load what is kept.
            let read = median(&read(&trace, device)[1..]);
            println!("{name}, device {device}: {read} bytes a token of {share}, {ahead} read ahead");
            assert!(ahead > 0, "{name}: device {device} reads ahead");
            assert!(read < share * 3 / 4, "{name}: device {device}: {read} of {share}");
            streamed += read;
            let resident = counted(&trace, device, Counter::Resident);
            assert!(resident.iter().all(|&bytes| bytes > 0 && bytes <= share), "{name}: {resident:?}");
            let refaults = counted(&trace, device, Counter::Refaults);
            assert_eq!(refaults.is_empty(), name == "predicted.trace", "only the kernel counts them");
        }
        assert!(streamed > 0, "{name}: the larger shares do not fit");
    }
}
