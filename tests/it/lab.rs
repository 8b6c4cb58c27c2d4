//! Tests that the lab runs a scenario on this machine and cleans up after itself.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::folder::{Folder, fast_link_scenario_yaml};
use crate::processes::{
    Process, expect_array, expect_number, hearth_command, mean_tpot_ms, model_path, parse_json,
    run_successfully, send_signal, wait_until,
};

/// Writes a scenario of two measured devices; `limits` is YAML that is added to the limits of both devices.
fn write_scenario(folder: &Folder, limits: &str) -> String {
    let profile = format!("profile: measured, limits: {{threads: 1{limits}}}");
    let devices = format!("  - {{name: a, {profile}}}\n  - {{name: b, {profile}}}");
    let text = fast_link_scenario_yaml(&devices, 64, "prompt: 4, generate: 5");
    let text = text.replace("name: test", "name: lab-test").replace("llama-8b", "tiny");
    let planner = "planner: {strategy: manual, windows: [3, 2]}\n";
    folder.write("scenario.yaml", text + planner + "residency: {policy: windowed, prefetch: true}\n")
}

/// Runs `hearth lab` with a report in the folder `report`, and returns the JSON that it prints.
pub fn run_lab(folder: &Folder, scenario: &str, model: &str) -> Value {
    let (scratch, report) = (folder.path_of(""), folder.path_of("report"));
    let flags = ["--model", model, "--scratch", &scratch, "--report", &report, "--json"];
    parse_json(&run_successfully(&[&["lab", scenario], &flags[..]].concat()))
}

/// Runs `hearth lab`, checks its results, and returns the JSON that it prints.
fn check(folder: &Folder, limits: &str) -> Value {
    let result = run_lab(folder, &write_scenario(folder, limits), &model_path("q8_0"));
    for run in ["predicted", "measured"] {
        let run = &result[run];
        assert_eq!(run["outcome"], "ok");
        let tpot = mean_tpot_ms(run);
        assert!(tpot > 0.0 && expect_number(&run["ttft_ms"]) > 0.0);
        let terms = ["cpu", "gpu", "memory", "demand_disk", "network", "queue", "bubble"];
        let sum: f64 = terms.iter().map(|term| expect_number(&run["terms_ms"][term])).sum();
        assert!((sum - tpot).abs() < 1e-6 * tpot, "{sum} is not {tpot}");
        assert_eq!(expect_array(&run["devices"]).len(), 2);
    }
    assert!(result["error"]["tpot"].is_number());
    let machine = &result["steadiness"][0];
    let stolen = expect_number(&machine["stolen"]);
    assert!((0.0..=1.0).contains(&stolen) && machine["steady"].is_boolean(), "{machine}");
    assert!(folder.read("report/index.html").contains("lab-test"));
    let left = folder.file_names();
    assert!(left.iter().all(|name| !name.starts_with("hearth-lab-")), "left behind: {left:?}");
    result
}

/// Returns the folder of memory control groups; `None` if this process is not allowed to create groups.
pub fn memory_cgroup_folder(test: &str) -> Option<PathBuf> {
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

/// Starts `hearth lab` with a slow disk. Also returns the prefix of the names of its files and control groups.
fn start_slow_lab(folder: &Folder) -> (Child, String) {
    let file = write_scenario(folder, ", disk_read: 10 MB/s");
    let scratch = folder.path_of("");
    let lab = hearth_command(&["lab", &file, "--model", &model_path("q8_0"), "--scratch", &scratch])
        .args(["--report", &folder.path_of("report")])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the lab starts");
    let prefix = format!("hearth-lab-{}", lab.id());
    (lab, prefix)
}

fn groups_of(groups: &Path, prefix: &str) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(groups).expect("groups").flatten();
    let named =
        move |entry: &fs::DirEntry| entry.file_name().to_str().is_some_and(|name| name.starts_with(prefix));
    entries.filter(named).map(|entry| entry.path())
}

#[test]
fn interrupted_lab_leaves_nothing_behind() {
    let Some(groups) = memory_cgroup_folder("interrupted_lab_leaves_nothing_behind") else { return };
    for signal in ["TERM", "HUP"] {
        let folder = Folder::on_disk();
        let (mut lab, prefix) = start_slow_lab(&folder);
        let has_groups = || groups_of(&groups, &prefix).next().is_some();
        assert!(wait_until(Duration::from_secs(5), has_groups), "the lab makes its groups");
        send_signal(lab.id(), signal);
        assert_eq!(lab.wait().expect("it ends").code(), Some(130));
        assert!(!has_groups(), "groups are left behind");
        assert_eq!(folder.file_names(), ["scenario.yaml"]);
    }
}

/// Returns the processes in the control groups of a lab, with their command lines.
fn processes(groups: &Path, prefix: &str) -> Vec<(u32, String)> {
    let list = |group: PathBuf| fs::read_to_string(group.join("cgroup.procs")).ok();
    let lists: String = groups_of(groups, prefix).filter_map(list).collect();
    let ids = lists.split_ascii_whitespace().filter_map(|process| process.parse().ok());
    let command = |id: &u32| fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
    ids.map(|id| (id, String::from_utf8_lossy(&command(&id)).replace('\0', " "))).collect()
}

fn is_alive(process: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:") && !line.contains('Z') && !line.contains('X'))
}

#[test]
fn killed_lab_is_cleaned_up_by_the_next() {
    let Some(groups) = memory_cgroup_folder("killed_lab_is_cleaned_up_by_the_next") else { return };
    let folder = Folder::on_disk();
    let (mut first, prefix) = start_slow_lab(&folder);
    let find = |verb: &str| processes(&groups, &prefix).into_iter().find(|(_, line)| line.contains(verb));
    let is_executing = wait_until(Duration::from_mins(1), || find(" execute ").is_some());
    // A stopped worker cannot detect the end of the lab.
    let worker = find(" worker ").map(|(process, _)| process).filter(|_| is_executing);
    if let Some(worker) = worker {
        send_signal(worker, "STOP");
    }
    send_signal(first.id(), "KILL");
    first.wait().expect("it ends");
    let worker = worker.expect("the lab was executing");
    let others = || processes(&groups, &prefix).into_iter().filter(|(process, _)| *process != worker).count();
    let ended = wait_until(Duration::from_secs(10), || others() == 0);
    assert!(ended, "processes outlive their lab: {:?}", processes(&groups, &prefix));
    assert!(is_alive(worker) && folder.has_file(&prefix), "there is something to clean up");
    // The next lab cleans up, although it has no groups.
    check(&folder, "");
    assert!(wait_until(Duration::from_secs(5), || !is_alive(worker)), "the worker is left behind");
    assert!(!folder.has_file(&prefix), "copies are left behind");
    assert_eq!(groups_of(&groups, &prefix).count(), 0, "groups are left behind");
}

#[test]
fn stopped_worker_is_killed_by_the_next_lab() {
    let folder = Folder::new();
    // Uses the id of an exited process as that of a killed lab.
    let mut ended = std::process::Command::new("true").spawn().expect("a program that ends");
    ended.wait().expect("it ends");
    let copy = folder.path().join(format!("hearth-lab-{}", ended.id())).join("1/model.gguf");
    fs::create_dir_all(copy.parent().expect("a folder")).expect("the folder can be made");
    fs::copy(model_path("q8_0"), &copy).expect("the model can be copied");
    let copy = copy.display().to_string();
    let mut command = hearth_command(&["worker", "--listen", "127.0.0.1:0", "--model", &copy]);
    let mut worker = Process(command.stdout(Stdio::null()).spawn().expect("the worker starts"));
    send_signal(worker.0.id(), "STOP");
    check(&folder, "");
    let has_ended = || worker.0.try_wait().is_ok_and(|status| status.is_some());
    assert!(wait_until(Duration::from_secs(5), has_ended), "the worker is left behind");
}

#[test]
fn two_devices_with_limits() {
    let Some(_) = memory_cgroup_folder("two_devices_with_limits") else { return };
    let result = check(&Folder::on_disk(), ", memory: 48 MiB, disk_read: 100 MB/s");
    let devices = expect_array(&result["groups"]);
    assert_eq!(devices.len(), 2);
    for device in devices {
        let number = |name: &str| expect_number(&device[name]);
        assert_eq!(number("memory_limit"), f64::from(48 << 20), "{device}");
        assert_eq!(number("oom_kills"), 0.0, "{device}");
        assert!(number("peak_unreclaimable") > 0.0 && number("resident_before") < 7e6, "{device}");
        let (throttle, trace) = (number("throttle_bytes_per_token"), number("trace_bytes_per_token"));
        let difference = (throttle - trace).abs();
        assert!(difference <= 0.05 * throttle.max(trace) || difference < 1e6, "{device}");
    }
}
