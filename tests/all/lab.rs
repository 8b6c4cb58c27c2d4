//! Does the lab run a scenario on this machine, and leave nothing behind?

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
        let sum: f64 = ["cpu", "gpu", "memory", "demand_disk", "air", "queue", "bubble"]
            .iter()
            .map(|term| terms[term].as_f64().expect("a term"))
            .sum();
        assert!((sum - tpot).abs() < 1e-6 * tpot, "{sum} is not {tpot}");
        assert_eq!(run["devices"].as_array().map(Vec::len), Some(2));
    }
    assert!(result["error"]["tpot"].is_number());
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
fn groups(test: &str) -> Option<PathBuf> {
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
fn folder_on_disk() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary folder")
}

#[test]
fn an_interrupted_lab_leaves_nothing_behind() {
    let Some(groups) = groups("an_interrupted_lab_leaves_nothing_behind") else { return };
    let folder = folder_on_disk();
    let file = folder.path().join("scenario.yaml");
    fs::write(&file, scenario(", memory: 24 MiB, disk_read: 10 MB/s")).expect("the folder can be written");
    let (file, scratch) = (file.display().to_string(), folder.path().display().to_string());
    let model = model("q8_0");
    let mut lab = hearth(&["lab", &file, "--model", &model, "--scratch", &scratch])
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("the lab starts");
    let own = format!("hearth-lab-{}", lab.id());
    let made = || {
        fs::read_dir(&groups)
            .expect("groups")
            .flatten()
            .any(|entry| entry.file_name().to_str().is_some_and(|name| name.starts_with(&own)))
    };
    for _ in 0..500 {
        if made() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert!(made(), "the lab makes its groups");
    let killed = std::process::Command::new("kill").arg(lab.id().to_string()).status();
    assert!(killed.is_ok_and(|status| status.success()));
    assert_eq!(lab.wait().expect("it ends").code(), Some(130));
    assert!(!made(), "groups are left behind");
    assert!(!folder.path().join(&own).exists(), "copies are left behind");
}

#[test]
fn two_devices_with_limits() {
    if groups("two_devices_with_limits").is_none() {
        return;
    }
    let folder = folder_on_disk();
    let result = lab(folder.path(), ", memory: 24 MiB, disk_read: 100 MB/s");
    check(folder.path(), &result);
}
