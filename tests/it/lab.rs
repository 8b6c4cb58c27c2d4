//! The lab runs a scenario on this machine and leaves nothing behind.

use std::fs;
use std::path::{Path, PathBuf};

use crate::processes::{hearth, model, run};

/// A scenario of two devices; `limits` as YAML for each.
fn scenario(limits: &str) -> String {
    format!(
        "# Does the lab work?
schema: scenario/1
name: lab-test
seed: 1
model: {{profile: tiny}}
context: 64
workload: {{prompt: 6, generate: 5}}
devices:
  - {{name: a, profile: measured, limits: {{threads: 1{limits}}}}}
  - {{name: b, profile: measured, limits: {{threads: 1{limits}}}}}
links:
  default:
    latency: {{value: 50 us, source: test}}
    bandwidth: {{value: 1 GB/s, source: test}}
planner: {{strategy: manual, windows: [3, 2]}}
residency: {{policy: windowed, prefetch: true}}
"
    )
}

/// Runs the lab and gives its JSON.
fn lab(folder: &Path, limits: &str) -> serde_json::Value {
    let file = folder.join("scenario.yaml");
    fs::write(&file, scenario(limits)).expect("the temporary folder can be written");
    let (file, report) = (file.display().to_string(), folder.join("report").display().to_string());
    let scratch = folder.display().to_string();
    let model = model("q8_0");
    let output =
        run(&["lab", &file, "--model", &model, "--scratch", &scratch, "--report", &report, "--json"]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    serde_json::from_slice(&output.stdout).expect("one JSON document")
}

fn check(folder: &Path, result: &serde_json::Value) {
    for run in ["predicted", "measured"] {
        let run = &result[run];
        assert_eq!(run["outcome"], "ok");
        let tpot = run["tpot_ms"]["mean"].as_f64().expect("a time");
        assert!(tpot > 0.0 && run["ttft_ms"].as_f64().expect("a time") > 0.0);
        let terms = &run["terms_ms"];
        let sum: f64 = ["cpu", "gpu", "memory", "demand_disk", "network", "queue", "bubble"]
            .iter()
            .map(|term| terms[term].as_f64().expect("a term"))
            .sum();
        assert!((sum - tpot).abs() < 1e-6 * tpot, "{sum} is not {tpot}");
        assert_eq!(run["devices"].as_array().map(Vec::len), Some(2));
    }
    assert!(result["error"]["tpot"].is_number());
    let machine = &result["steadiness"][0];
    let stolen = machine["stolen"].as_f64().expect("a share");
    assert!((0.0..=1.0).contains(&stolen) && machine["steady"].is_boolean(), "{machine}");
    let html = fs::read_to_string(folder.join("report/index.html")).expect("a report");
    assert!(html.contains("lab-test"));
    let left = fs::read_dir(folder).expect("the folder").flatten();
    let left: Vec<_> = left.map(|entry| entry.file_name().into_string().expect("a name")).collect();
    assert!(left.iter().all(|name| !name.starts_with("hearth-lab-")), "left behind: {left:?}");
}

#[test]
fn two_devices_without_limits() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let result = lab(folder.path(), "");
    check(folder.path(), &result);
}

/// Where memory groups are made, if this process may.
pub fn groups(test: &str) -> Option<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let groups = root.join(if root.join("memory").exists() { "memory" } else { "" });
    let probe = groups.join(format!("hearth-{test}"));
    if fs::create_dir(&probe).is_err() {
        eprintln!("SKIPPED {test}: control groups cannot be made here; run as root");
        return None;
    }
    fs::remove_dir(&probe).expect("just made");
    Some(groups)
}

/// On a memory file system there is no disk to limit, so the copies lie beside the program.
pub fn folder_on_disk() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary folder")
}

/// Starts a lab that takes a while; and the first part of the name of all that it makes.
fn slow_lab(folder: &Path) -> (std::process::Child, String) {
    let file = folder.join("scenario.yaml");
    fs::write(&file, scenario(", memory: 40 MiB, disk_read: 10 MB/s")).expect("the folder can be written");
    let (file, scratch) = (file.display().to_string(), folder.display().to_string());
    let lab = hearth(&["lab", &file, "--model", &model("q8_0"), "--scratch", &scratch])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("the lab starts");
    let own = format!("hearth-lab-{}", lab.id());
    (lab, own)
}

/// The groups that a lab has made.
fn groups_of(groups: &Path, lab: &str) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(groups).expect("groups").flatten();
    let named =
        move |entry: &fs::DirEntry| entry.file_name().to_str().is_some_and(|name| name.starts_with(lab));
    entries.filter(named).map(|entry| entry.path())
}

#[test]
fn interrupted_lab_leaves_nothing_behind() {
    let Some(groups) = groups("interrupted_lab_leaves_nothing_behind") else { return };
    let folder = folder_on_disk();
    let (mut lab, own) = slow_lab(folder.path());
    let made = || groups_of(&groups, &own).next().is_some();
    assert!(soon(5, made), "the lab makes its groups");
    let killed = std::process::Command::new("kill").arg(lab.id().to_string()).status();
    assert!(killed.is_ok_and(|status| status.success()));
    assert_eq!(lab.wait().expect("it ends").code(), Some(130));
    assert!(!made(), "groups are left behind");
    assert!(!folder.path().join(&own).exists(), "copies are left behind");
}

/// The processes in a lab's groups, with what they were started with.
fn members(groups: &Path, lab: &str) -> Vec<(String, String)> {
    let own = groups_of(groups, lab);
    let processes = own.filter_map(|group| fs::read_to_string(group.join("cgroup.procs")).ok());
    let processes: Vec<String> = processes.flat_map(|text| words(&text)).collect();
    let arguments = |process: &str| fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
    let line = |process: &str| String::from_utf8_lossy(&arguments(process)).replace('\0', " ");
    processes.into_iter().map(|process| (process.clone(), line(&process))).collect()
}

fn words(text: &str) -> Vec<String> {
    text.split_ascii_whitespace().map(String::from).collect()
}

/// Whether a process runs or could; one that nobody has waited for does not.
fn lives(process: &str) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:") && !line.contains('Z') && !line.contains('X'))
}

fn signal(name: &str, process: &str) {
    let sent = std::process::Command::new("kill").args([name, process]).status();
    assert!(sent.is_ok_and(|status| status.success()), "{name} {process}");
}

/// Whether something becomes true in time.
fn soon(seconds: u64, mut is_so: impl FnMut() -> bool) -> bool {
    (0..seconds * 100).any(|_| {
        let now = is_so();
        if !now {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        now
    })
}

#[test]
fn killed_lab_is_cleaned_up_by_the_next() {
    let Some(groups) = groups("killed_lab_is_cleaned_up_by_the_next") else { return };
    let folder = folder_on_disk();
    let (mut first, own) = slow_lab(folder.path());
    let of_verb = |verb: &str| members(&groups, &own).into_iter().find(|(_, line)| line.contains(verb));
    let executing = soon(60, || of_verb(" execute ").is_some());
    // A stopped worker cannot notice that the lab is gone, as one that hangs could not.
    let worker = of_verb(" worker ").map(|(process, _)| process).filter(|_| executing);
    if let Some(worker) = &worker {
        signal("-STOP", worker);
    }
    signal("-KILL", &first.id().to_string());
    first.wait().expect("it ends");
    let worker = worker.expect("the lab was executing");
    let others = || members(&groups, &own).into_iter().filter(|(process, _)| *process != worker).count();
    assert!(soon(10, || others() == 0), "devices outlive their lab: {:?}", members(&groups, &own));
    assert!(lives(&worker) && folder.path().join(&own).exists(), "there is something to clean up");
    // The next one needs no groups itself.
    let result = lab(folder.path(), "");
    check(folder.path(), &result);
    assert!(soon(5, || !lives(&worker)), "the worker is left behind");
    assert!(!folder.path().join(&own).exists(), "copies are left behind");
    assert_eq!(groups_of(&groups, &own).count(), 0, "groups are left behind");
}

#[test]
fn stopped_worker_is_killed_by_the_next_lab() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    // A lab that is gone: the number of a process that has ended.
    let mut gone = std::process::Command::new("true").spawn().expect("a program that ends");
    gone.wait().expect("it ends");
    let copy = folder.path().join(format!("hearth-lab-{}", gone.id())).join("1/model.gguf");
    fs::create_dir_all(copy.parent().expect("a folder")).expect("the folder can be made");
    fs::copy(model("q8_0"), &copy).expect("the model can be copied");
    let copy = copy.display().to_string();
    let mut worker = hearth(&["worker", "--listen", "127.0.0.1:0", "--model", &copy])
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("the worker starts");
    signal("-STOP", &worker.id().to_string());
    let result = lab(folder.path(), "");
    let ended = soon(5, || worker.try_wait().is_ok_and(|status| status.is_some()));
    let _ = worker.kill();
    let _ = worker.wait();
    assert!(ended, "the worker is left behind");
    check(folder.path(), &result);
}

#[test]
fn two_devices_with_limits() {
    if groups("two_devices_with_limits").is_none() {
        return;
    }
    let folder = folder_on_disk();
    let result = lab(folder.path(), ", memory: 26 MiB, disk_read: 100 MB/s");
    check(folder.path(), &result);
    let devices = result["groups"].as_array().expect("the groups' counters");
    assert_eq!(devices.len(), 2);
    for device in devices {
        let number = |name: &str| device[name].as_f64().expect(name);
        assert_eq!(number("memory_limit"), f64::from(26 << 20), "{device}");
        assert_eq!(number("oom_kills"), 0.0, "{device}");
        assert!(number("peak_unreclaimable") > 0.0 && number("resident_before") < 7e6, "{device}");
        let (throttle, trace) = (number("throttle_bytes_per_token"), number("trace_bytes_per_token"));
        let apart = (throttle - trace).abs();
        assert!(apart <= 0.05 * throttle.max(trace) || apart < 1e6, "{device}");
    }
}
