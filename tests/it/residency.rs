//! A device with managed residency reads only what it must, and yields memory to other programs.
//!
//! A synthetic model of 64 MiB runs inside the limits of a control group, with memory for about three quarters of the
//! weights that a token touches. The tests check tokens and bytes read, not times, so that a busy machine does not
//! matter.

use std::fs;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use hearth_lab::limited::HOG;
use hearth_lab::{CommandUsage, DeviceLimits, LimitedCommand, MemoryHog};
use hearth_profiles::{Bytes, BytesPerSecond};
use hearth_schema::Trace;
use hearth_schema::trace::Counter;
use hearth_schema::trace::Kind;
use hearth_schema::trace::Outcome;

use crate::folder::{Folder, scenario};
use crate::lab::groups;
use crate::processes::{execute, list, outputs, parse, succeed};

/// Of the 64 MiB of the model a token touches 57. The process takes 9 MiB for itself, and the stream buffer 2.
const MEMORY: Bytes = Bytes::mib(54);
/// Half of that.
const HOG_MEMORY: Bytes = Bytes::mib(27);
/// What is streamed takes a token some 50 ms.
const DISK: BytesPerSecond = BytesPerSecond(300e6);
/// Enough to go on for some seconds after the hog has gone.
const TOKENS: &str = "100";
/// Tokens until everything is kept again that fits: the kept set grows in four steps.
const SETTLING: usize = 12;

/// The groups of a process's limited runs are named after the process, so one runs at a time.
static LIMITED: Mutex<()> = Mutex::new(());

/// The program of a hog: this binary runs only this test, with the arguments of a hog.
#[test]
fn memory_hog() {
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(at) = arguments.iter().position(|word| word == HOG) {
        assert!(MemoryHog::run_if_asked(&arguments[at..]));
    }
}

/// Writes a script that starts [`memory_hog`] with the arguments that the lab gives it.
fn hog_program(folder: &Folder) -> String {
    let own = std::env::current_exe().expect("a path").display().to_string();
    let line = format!("exec '{own}' --exact residency::memory_hog -- \"$@\" > /dev/null");
    folder.write_script("hog.sh", &line)
}

/// Writes a model.
fn synthesize(folder: &Folder) -> String {
    let model = folder.at("model.gguf");
    succeed(&["synth", "--preset", "120m", "--quant", "q4_k_m", "--output", &model]);
    model
}

fn write_scenario(folder: &Folder, devices: &str, more: &str) -> String {
    let text = scenario(devices).replace("profile: llama-8b", "file: model.gguf");
    let text = text
        .replace("context: 512", "context: 256")
        .replace("prompt: 16, generate: 4", "prompt: 4, generate: 8");
    let fast = text.replace("2 ms", "50 us").replace("400 Mbit/s", "1 GB/s");
    folder.write("scenario.yaml", fast + more)
}

/// The arguments that run a plan of one managed device.
fn execution(folder: &Folder, tokens: &str) -> Vec<String> {
    let scenario = write_scenario(folder, "  - {name: a, profile: d3}", "");
    let [plan, model, trace] = ["plan.yaml", "model.gguf", "run.trace"].map(|name| folder.at(name));
    let flags = ["--windows", "12", "--residency", "managed", "--stream-buffer", "2 MiB"];
    succeed(&[&["plan", &scenario, "--output", &plan], &flags[..]].concat());
    execute(&plan, &model, &["--prompt-tokens", "4", "--tokens", tokens, "--json", "--trace", &trace])
}

/// Runs a command within limits, beside a hog.
fn limited(folder: &Folder, hog: MemoryHog, deadline: Duration, arguments: &[String]) -> CommandUsage {
    let limits = DeviceLimits { memory: Some(MEMORY), disk_read: Some(DISK), ..DeviceLimits::default() };
    let limited =
        LimitedCommand { limits, files: vec![folder.path().join("model.gguf")], hog: Some(hog), deadline };
    limited.run(Path::new(env!("CARGO_BIN_EXE_hearth")), arguments, true).expect("control groups can be made")
}

fn read_trace(folder: &Folder, name: &str) -> Trace {
    let trace = folder.read_trace(name);
    assert_eq!(trace.outcome, Outcome::Ok);
    trace
}

fn readings(trace: &Trace, device: u16, counter: Counter) -> Vec<u64> {
    let own = trace.readings.iter().filter(|it| (it.device, it.counter) == (device, counter));
    own.map(|reading| reading.value).collect()
}

/// The last reading of a counter of a device after each pass.
fn after_each_pass(trace: &Trace, device: u16, counter: Counter) -> Vec<u64> {
    let of = |counter| trace.readings.iter().filter(move |it| (it.device, it.counter) == (device, counter));
    let last = |pass| of(counter).rfind(|reading| reading.pass <= pass).map_or(0, |reading| reading.value);
    of(Counter::BytesRead).map(|reading| last(reading.pass)).collect()
}

/// Bytes that a device read for each pass after the first.
fn read(trace: &Trace, device: u16) -> Vec<u64> {
    readings(trace, device, Counter::BytesRead).windows(2).map(|pair| pair[1] - pair[0]).collect()
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
    let folder = Folder::on_disk();
    synthesize(&folder);
    let arguments = execution(&folder, TOKENS);
    let unlimited = succeed(&arguments);
    let hog = MemoryHog {
        program: hog_program(&folder).into(),
        memory: HOG_MEMORY,
        after: Duration::from_secs(2),
        hold: Duration::from_secs(3),
    };
    let guard = LIMITED.lock().unwrap_or_else(PoisonError::into_inner);
    let usage = limited(&folder, hog, Duration::from_mins(5), &arguments);
    drop(guard);
    assert!(usage.status.is_some_and(|status| status.success()) && usage.oom_kills == 0, "{usage:?}");
    assert_eq!(parse(&usage.output)["token_ids"], parse(&unlimited)["token_ids"]);

    let trace = read_trace(&folder, "run.trace");
    let (read, held) = (read(&trace, 0), after_each_pass(&trace, 0, Counter::Unreclaimable));
    // The hog's memory is charged to the same group.
    let beside_hog: Vec<bool> = held[1..].iter().map(|&bytes| bytes > held[0] + HOG_MEMORY.0 / 2).collect();
    let first = beside_hog.iter().position(|&it| it).expect("tokens beside the hog");
    let gone = beside_hog.iter().rposition(|&it| it).expect("tokens beside the hog") + 1;
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
    let folder = Folder::on_disk();
    synthesize(&folder);
    let arguments = execution(&folder, "200");
    let program = hog_program(&folder).into();
    let hog =
        MemoryHog { program, memory: Bytes::mib(8), after: Duration::ZERO, hold: Duration::from_mins(5) };
    let before = folder.names().len();
    let own = format!("hearth-lab-{}-", std::process::id());
    let left = |folder: &Path| {
        let names = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
        names.filter(|name| name.to_str().is_some_and(|name| name.starts_with(&own))).count()
    };
    let guard = LIMITED.lock().unwrap_or_else(PoisonError::into_inner);
    let usage = limited(&folder, hog, Duration::from_millis(1500), &arguments);
    // A group with a process in it cannot be removed: none is left if its group is gone.
    let left: usize = [groups, "/sys/fs/cgroup/blkio".into()].iter().map(|folder| left(folder)).sum();
    drop(guard);
    assert!(usage.status.is_none(), "its deadline did not end it: {usage:?}");
    assert_eq!((left, folder.names().len()), (0, before), "groups or files are left behind");
}

#[test]
fn lab_runs_managed_devices() {
    if groups("lab_runs_managed_devices").is_none() {
        return;
    }
    let folder = Folder::on_disk();
    let model = synthesize(&folder);
    let limits = "profile: measured, limits: {memory: 28 MiB, disk_read: 200 MB/s, threads: 1}";
    let devices = ["a", "b", "c"].map(|name| format!("  - {{name: {name}, {limits}}}")).join("\n");
    let more =
        "planner: {strategy: manual, windows: [3, 4, 5]}\nresidency: {policy: managed, stream_buffer: 4 MiB}";
    let scenario = write_scenario(&folder, &devices, more);
    let (scratch, report) = (folder.at(""), folder.at("report"));
    let arguments =
        ["lab", &scenario, "--model", &model, "--scratch", &scratch, "--report", &report, "--json"];
    let result = parse(&outputs(&arguments, 0).0);
    assert!(list(&result["groups"]).iter().all(|group| group["oom_kills"] == 0), "{}", result["groups"]);
    for name in ["predicted.trace", "measured.trace"] {
        let trace = read_trace(&folder, &format!("report/{name}"));
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
            let resident = readings(&trace, device, Counter::Resident);
            assert!(resident.iter().all(|&bytes| bytes > 0 && bytes <= share), "{name}: {resident:?}");
            let refaults = readings(&trace, device, Counter::Refaults);
            assert_eq!(refaults.is_empty(), name == "predicted.trace", "only the kernel counts them");
        }
        assert!(streamed > 0, "{name}: the larger shares do not fit");
    }
}
