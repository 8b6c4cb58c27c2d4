//! Tests that a managed device reads only weights that it does not keep, and yields memory to other programs.
//!
//! A synthetic model of 64 MiB runs within the limits of a control group, with memory for about three quarters of the
//! weights that a token uses. The tests check tokens and bytes read, which do not depend on the load of the machine.

use std::fs;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use hearth_lab::{CommandRunner, CommandUsage, DeviceLimits, MemoryHog};
use hearth_profiles::{Bytes, BytesPerSecond};
use hearth_schema::Trace;
use hearth_schema::trace::{Counter, CounterReading, Outcome, StepKind};

use crate::folder::{Folder, fast_link_scenario_yaml};
use crate::lab::{memory_cgroup_folder, run_lab};
use crate::processes::{execute_arguments, expect_array, parse_json, run_successfully};

/// Memory limit of the run. A token uses 57 MiB of the model; the process needs 9 MiB, and the stream buffer 2 MiB.
const MEMORY_LIMIT: Bytes = Bytes::from_mib(54);
const HOG_MEMORY: Bytes = Bytes::from_mib(27);
/// Limit of the disk's read rate, at which the streamed weights of a token take about 50 ms.
const DISK_RATE_LIMIT: BytesPerSecond = BytesPerSecond(300e6);
/// Number of generated tokens, enough that the run continues for some seconds after [`MemoryHog`] has exited.
const TOKENS: &str = "100";
/// Number of tokens from the exit of [`MemoryHog`] until the kept set has grown back to its full size, in four steps.
const SETTLING_TOKENS: usize = 12;

/// Serialises runs with limits, because their control groups are named after the test process.
static LIMITED_RUN: Mutex<()> = Mutex::new(());

fn hog(memory: Bytes, [delay, duration]: [Duration; 2]) -> MemoryHog {
    MemoryHog { program: env!("CARGO_BIN_EXE_hearth").into(), memory, delay, duration }
}

fn synthesize(folder: &Folder) -> String {
    let model = folder.path_of("model.gguf");
    run_successfully(&["synth", "--preset", "120m", "--quant", "q4_k_m", "--output", &model]);
    model
}

fn write_scenario(folder: &Folder, devices: &str, more: &str) -> String {
    let text = fast_link_scenario_yaml(devices, 256, "prompt: 4, generate: 8");
    folder.write("scenario.yaml", text.replace("profile: llama-8b", "file: model.gguf") + more)
}

/// Writes a plan of one device with managed residency and returns the arguments that execute the plan.
fn execution(folder: &Folder, tokens: &str) -> Vec<String> {
    let scenario = write_scenario(folder, "  - {name: a, profile: d3}", "");
    let [plan, model, trace] = ["plan.yaml", "model.gguf", "run.trace"].map(|name| folder.path_of(name));
    let flags = ["--windows", "12", "--residency", "managed", "--stream-buffer", "2 MiB"];
    run_successfully(&[&["plan", &scenario, "--output", &plan], &flags[..]].concat());
    let flags = ["--prompt-tokens", "4", "--tokens", tokens, "--json", "--trace", &trace];
    execute_arguments(&plan, &model, &flags)
}

fn run_limited(folder: &Folder, hog: MemoryHog, deadline: Duration, arguments: &[String]) -> CommandUsage {
    let limits = DeviceLimits {
        memory: Some(MEMORY_LIMIT),
        disk_read: Some(DISK_RATE_LIMIT),
        ..DeviceLimits::default()
    };
    let files = vec![folder.path().join("model.gguf")];
    let command = CommandRunner { limits, cold_files: files, memory_hog: Some(hog), timeout: deadline };
    command.run(Path::new(env!("CARGO_BIN_EXE_hearth")), arguments, true).expect("control groups can be made")
}

fn read_trace(folder: &Folder, name: &str) -> Trace {
    let trace = folder.read_trace(name);
    assert_eq!(trace.outcome, Outcome::Ok);
    trace
}

fn readings(
    trace: &Trace,
    device: u16,
    counter: Counter,
) -> impl DoubleEndedIterator<Item = &CounterReading> {
    trace.readings.iter().filter(move |it| (it.device_index, it.counter) == (device, counter))
}

/// Returns the value of a counter of a device after each pass.
fn after_each_pass(trace: &Trace, device: u16, counter: Counter) -> Vec<u64> {
    let last = |pass| readings(trace, device, counter).rfind(|reading| reading.pass_index <= pass);
    let passes = readings(trace, device, Counter::BytesRead).map(|reading| reading.pass_index);
    passes.map(|pass| last(pass).map_or(0, |reading| reading.value)).collect()
}

/// Returns the bytes that a device read during each pass after the first.
fn bytes_read(trace: &Trace, device: u16) -> Vec<u64> {
    let totals: Vec<u64> = readings(trace, device, Counter::BytesRead).map(|reading| reading.value).collect();
    totals.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

/// Returns the size in bytes of the weights that a device uses for one token.
fn share(trace: &Trace, device: u16) -> u64 {
    let own = trace.records.iter().filter(|it| (it.device_index, it.pass_index) == (device, 1));
    own.filter(|it| matches!(it.kind, StepKind::Compute | StepKind::Output)).map(|it| it.bytes).sum()
}

fn median(numbers: &[u64]) -> u64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied().unwrap_or(0)
}

#[test]
fn managed_device_yields_memory_and_recovers() {
    let Some(_) = memory_cgroup_folder("managed_device_yields_memory_and_recovers") else { return };
    let folder = Folder::on_disk();
    synthesize(&folder);
    let arguments = execution(&folder, TOKENS);
    let unlimited = run_successfully(&arguments);
    let hog = hog(HOG_MEMORY, [2, 3].map(Duration::from_secs));
    let guard = LIMITED_RUN.lock().unwrap_or_else(PoisonError::into_inner);
    let usage = run_limited(&folder, hog, Duration::from_mins(5), &arguments);
    drop(guard);
    assert!(usage.status.is_some_and(|status| status.success()) && usage.oom_kills == 0, "{usage:?}");
    assert_eq!(parse_json(&usage.stdout)["token_ids"], parse_json(&unlimited)["token_ids"]);

    let trace = read_trace(&folder, "run.trace");
    let (read, unreclaimable) = (bytes_read(&trace, 0), after_each_pass(&trace, 0, Counter::Unreclaimable));
    // The memory of the hog is charged to the same group.
    let with_hog: Vec<bool> =
        unreclaimable[1..].iter().map(|&bytes| bytes > unreclaimable[0] + HOG_MEMORY.0 / 2).collect();
    let start = with_hog.iter().position(|&it| it).expect("tokens with the hog");
    let end = with_hog.iter().rposition(|&it| it).expect("tokens with the hog") + 1;
    let phases = (read.get(2..start), &read[start..end], read.get(end + SETTLING_TOKENS..));
    let (Some(before), during, Some(after)) = phases else { panic!("{read:?}: {start}, {end}") };
    let (share, counts) = (share(&trace, 0), (before.len(), during.len(), after.len()));
    assert!(counts.0 > 2 && counts.1 > 2 && counts.2 > 9, "{counts:?}");
    let (before, during, after) = (median(before), median(during), median(after));
    println!(
        "read per token: {before} bytes before, {during} during, {after} after the hog, of {share}; {counts:?} tokens"
    );
    assert!(before > 0 && before < share * 2 / 5, "the device keeps most of its weights");
    assert!(during > before * 3 / 2, "the device yields memory");
    assert!(after < before * 13 / 10, "the device keeps the same weights again");
}

#[test]
fn killed_managed_run_leaves_nothing_behind() {
    let Some(groups) = memory_cgroup_folder("killed_managed_run_leaves_nothing_behind") else { return };
    let folder = Folder::on_disk();
    synthesize(&folder);
    let arguments = execution(&folder, "200");
    let hog = hog(Bytes::from_mib(8), [Duration::ZERO, Duration::from_mins(5)]);
    let before = folder.file_names().len();
    let own = format!("hearth-lab-{}-", std::process::id());
    let left = |folder: &Path| {
        let names = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
        names.filter(|name| name.to_str().is_some_and(|name| name.starts_with(&own))).count()
    };
    let guard = LIMITED_RUN.lock().unwrap_or_else(PoisonError::into_inner);
    let usage = run_limited(&folder, hog, Duration::from_millis(1500), &arguments);
    // A group with a process cannot be removed, so if no group is left, no process is left either.
    let left: usize = [groups, "/sys/fs/cgroup/blkio".into()].iter().map(|folder| left(folder)).sum();
    drop(guard);
    assert!(usage.status.is_none(), "the run was not ended by its deadline: {usage:?}");
    assert_eq!((left, folder.file_names().len()), (0, before), "groups or files are left behind");
}

#[test]
fn lab_runs_managed_devices() {
    let Some(_) = memory_cgroup_folder("lab_runs_managed_devices") else { return };
    let folder = Folder::on_disk();
    let model = synthesize(&folder);
    let limits = "profile: measured, limits: {memory: 28 MiB, disk_read: 200 MB/s, threads: 1}";
    let devices = ["a", "b", "c"].map(|name| format!("  - {{name: {name}, {limits}}}")).join("\n");
    let more =
        "planner: {strategy: manual, windows: [3, 4, 5]}\nresidency: {policy: managed, stream_buffer: 4 MiB}";
    let result = run_lab(&folder, &write_scenario(&folder, &devices, more), &model);
    let groups = expect_array(&result["groups"]);
    assert!(groups.iter().all(|group| group["oom_kills"] == 0), "{groups:?}");
    for name in ["predicted.trace", "measured.trace"] {
        let trace = read_trace(&folder, &format!("report/{name}"));
        assert_eq!(trace.header.devices.len(), 3);
        let mut streamed = 0;
        for device in 0..3 {
            let share = share(&trace, device);
            let ahead =
                trace.records.iter().filter(|it| it.device_index == device && it.kind == StepKind::Prefetch);
            let ahead: u64 = ahead.map(|record| record.bytes).sum();
            // The first tokens load the weights that are kept.
            let read = median(&bytes_read(&trace, device)[1..]);
            println!("{name}, device {device}: {read} bytes per token of {share}, {ahead} read ahead");
            assert!(ahead > 0, "{name}: device {device} reads ahead");
            assert!(read < share * 3 / 4, "{name}: device {device}: {read} of {share}");
            streamed += read;
            let mut resident = readings(&trace, device, Counter::Resident).map(|reading| reading.value);
            assert!(resident.all(|bytes| bytes > 0 && bytes <= share), "{name}: device {device}");
            let refaults = readings(&trace, device, Counter::Refaults).count();
            assert_eq!(refaults == 0, name == "predicted.trace", "only the kernel counts refaults");
        }
        assert!(streamed > 0, "{name}: the larger shares do not fit");
    }
}
