//! Every row of a sweep is what `hearth simulate` says, and the shards merge to the whole.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

use crate::processes::{error, hearth, run};
use crate::repository::root;

/// Two devices with documents of their own; the second's memory can be given.
fn scenario(folder: &Path, available: &str) -> String {
    for name in ["d2", "d3"] {
        let path = root().join(format!("profiles/devices/{name}.yaml"));
        let text = fs::read_to_string(path).expect("a shipped device");
        let text = text.replace("available: {value: 9.7 GiB", &format!("available: {{value: {available}"));
        fs::write(folder.join(format!("{name}.yaml")), text).expect("the temporary folder can be written");
    }
    let text = "# What varies?
schema: scenario/1
name: sweep-test
seed: 7
model: {profile: llama-30b}
context: 512
workload: {prompt: 4, generate: 4}
devices:
  - {name: a, profile: ./d2.yaml}
  - {name: b, profile: ./d3.yaml}
links:
  default:
    latency: {value: 2 ms, source: test}
    bandwidth: {value: 400 Mbit/s, source: test}
";
    let file = folder.join("scenario.yaml");
    fs::write(&file, text).expect("the temporary folder can be written");
    file.display().to_string()
}

/// Runs the program, which must end well, and reads its JSON.
fn json(arguments: &[&str]) -> Value {
    let output = run(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one JSON document")
}

fn succeed(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn row_equals_simulating_the_changed_document() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = scenario(folder.path(), "9.7 GiB");
    let memory = "devices.b.memory.available=3GiB,9.7GiB";
    let found =
        json(&["sweep", &file, "--vary", memory, "--vary", "links.default.latency=2ms,9ms", "--json"]);
    let rows = found["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 4);
    let mut times = Vec::new();
    for (row, (available, latency)) in
        rows.iter().zip([("3 GiB", "2 ms"), ("3 GiB", "9 ms"), ("9.7 GiB", "2 ms"), ("9.7 GiB", "9 ms")])
    {
        let file = scenario(folder.path(), available);
        let text = fs::read_to_string(&file).expect("a scenario");
        fs::write(&file, text.replace("value: 2 ms", &format!("value: {latency}"))).expect("written");
        let alone = json(&["simulate", &file, "--json"]);
        assert_eq!(row["values"], serde_json::json!([available, latency]));
        assert_eq!(row["tpot_ms"], alone["tpot_ms"]["mean"], "{available}, {latency}");
        assert_eq!(row["ttft_ms"], alone["ttft_ms"]);
        assert_eq!(row["tokens_per_s"], alone["tokens_per_s"]);
        let devices = alone["devices"].as_array().expect("devices");
        let read: f64 = devices.iter().filter_map(|device| device["bytes_read_per_token"].as_f64()).sum();
        assert_eq!(row["bytes_read_per_token"].as_f64(), Some(read));
        let plan = json(&["plan", &file, "-o", "/dev/null", "--json"]);
        assert_eq!((&row["rounds"], &row["strategy"]), (&plan["rounds"], &plan["strategy"]));
        assert_eq!((row["outcome"].as_str(), row["seed"].as_u64()), (Some("ok"), Some(7)));
        times.push(row["tpot_ms"].to_string());
    }
    times.dedup();
    assert_eq!(times.len(), 4, "both fields matter: {times:?}");
}

#[test]
fn shards_merge_byte_for_byte() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = scenario(folder.path(), "9.7 GiB");
    let at = |name: &str| folder.path().join(name).display().to_string();
    let vary = ["--vary", "devices.b.memory.available=2GiB..9GiB/3", "--vary", "seed=1,2"];
    let sweep = |more: &[&str]| succeed(&[&["sweep", &file][..], &vary, more].concat());
    let printed = sweep(&["--jobs", "1"]);
    sweep(&["--jobs", "3", "-o", &at("whole.csv"), "--chart", &at("whole.svg")]);
    let whole = fs::read_to_string(at("whole.csv")).expect("a table");
    assert_eq!(whole, printed, "the number of threads changes nothing");
    assert_eq!(whole.lines().count(), 2 + 6);
    for part in 1..=4 {
        let (name, shard) = (at(&format!("{part}.csv")), format!("{part}/4"));
        sweep(&["--shard", &shard, "-o", &name]);
    }
    let parts = [at("3.csv"), at("1.csv"), at("4.csv"), at("2.csv")];
    let merge = [&["sweep", "merge"][..], &parts.each_ref().map(String::as_str)].concat();
    succeed(&[&merge[..], &["-o", &at("merged.csv"), "--chart", &at("merged.svg")]].concat());
    assert_eq!(fs::read_to_string(at("merged.csv")).expect("a table"), whole);
    let drawing = fs::read_to_string(at("whole.svg")).expect("a drawing");
    assert_eq!(fs::read_to_string(at("merged.svg")).expect("a drawing"), drawing);
    assert_eq!((drawing.matches("<polyline").count(), drawing.matches("<circle").count()), (2, 6));
    let left: Vec<_> = fs::read_dir(folder.path()).expect("a folder").flatten().collect();
    assert!(left.iter().all(|entry| !entry.file_name().to_string_lossy().ends_with(".part")), "{left:?}");

    let text = error(&["sweep", "merge", &at("1.csv"), &at("2.csv"), &at("4.csv")], 2);
    assert!(text.contains("rows are missing: 2\n") && text.contains("--shard 3/4"), "{text}");
    let text = error(&[&merge[..], &[&at("1.csv")]].concat(), 2);
    assert!(text.contains("row 0 is present twice"), "{text}");
    let other = ["sweep", &file, "--vary", "seed=1,2", "-o", &at("other.csv")];
    succeed(&other);
    let text = error(&["sweep", "merge", &at("1.csv"), &at("other.csv")], 2);
    assert!(text.contains("another sweep"), "{text}");
    let text = error(&["sweep", "merge", &file], 2);
    assert!(text.contains("not the table of a sweep"), "{text}");
}

#[test]
fn failed_point_says_why_in_its_row() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = scenario(folder.path(), "9.7 GiB");
    let plan = folder.path().join("plan.yaml").display().to_string();
    succeed(&["plan", &file, "-o", &plan]);
    let outcomes = |vary: &str| {
        let found = json(&["sweep", &file, "--plan", &plan, "--vary", vary, "--json"]);
        let rows = found["rows"].as_array().expect("rows").clone();
        assert!(rows.iter().all(|row| row["tpot_ms"].is_number() == (row["outcome"] == "ok")), "{rows:?}");
        assert!(rows[0]["strategy"].is_string());
        rows.iter().map(|row| row["outcome"].as_str().expect("an outcome").to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(outcomes("devices.b.gpu.memory_available=64MiB,11GiB"), ["out of memory", "ok"]);
    let found = outcomes("devices.a.memory.available=4GiB,99GiB");
    assert_eq!(found[0], "ok");
    assert!(found[1].starts_with("refused: ") && found[1].contains("more than `memory.total`"), "{found:?}");
    let found = json(&["sweep", &file, "--vary", "planner.rounds=1,7", "--strategy", "even", "--json"]);
    let outcome = found["rows"][1]["outcome"].as_str().expect("an outcome");
    assert!(outcome.starts_with("no plan: ") && outcome.contains("7 rounds"), "{outcome}");
}

#[test]
fn interrupted_sweep_keeps_its_rows() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = scenario(folder.path(), "9.7 GiB");
    let table = folder.path().join("table.csv");
    let path = table.display().to_string();
    let arguments = ["sweep", &file, "--vary", "seed=1,100000", "--repeat", "50000", "-o", &path];
    // Seeds that overlap are refused, so the second form is what runs.
    assert!(error(&arguments, 2).contains("seed"));
    let arguments = ["sweep", &file, "--vary", "workload.prompt=4", "--repeat", "100000", "-o", &path];
    let sweep =
        hearth(&arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the sweep starts");
    std::thread::sleep(Duration::from_secs(2));
    let sent = std::process::Command::new("kill").args(["-INT", &sweep.id().to_string()]).status();
    assert!(sent.is_ok_and(|status| status.success()));
    let output = sweep.wait_with_output().expect("the sweep ends");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("of 100000 rows were computed"), "{said}");
    let rows = fs::read_to_string(&table).expect("a table").lines().count() - 2;
    assert!((1..100_000).contains(&rows) && said.contains(&format!("stopped: {rows} of")), "{rows}: {said}");
    let text = error(&["sweep", "merge", &path], 2);
    assert!(text.contains("rows are missing") && text.contains("run it again"), "{text}");
}

#[test]
fn wrong_fields_and_values_are_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = scenario(folder.path(), "9.7 GiB");
    let cases = [
        ("devices.b.memory.avail=1GiB", "did you mean `devices.b.memory.available`?"),
        ("planner.round=1,2", "did you mean `planner.rounds`?"),
        ("devices.b.disk.limits=1MB/s", "did you mean `devices.b.disk.limit`?"),
        ("devices.c.memory.total=1GiB", "there is no field `devices.c.memory.total`"),
        ("devices.b.memory.available=4", "a size in bytes with its unit"),
        ("devices.b.memory.available=4s", "`s` is not a unit of a size in bytes"),
        ("links.default.bandwidth=1GB..2GB/2", "`GB` is not a unit of a rate"),
        ("devices.b.memory.available=1GiB..2GiB/0", "at least 2"),
        ("devices.b.memory.available=NaN GiB..2GiB/2", "`NaN GiB` is neither a count"),
        ("devices.b.memory.available=", "a value is empty"),
        ("seed=1..1000000000/1000000000", "at most 100000"),
        ("seed=1,1", "has the value 1 twice"),
        ("context=-5", "cannot be -5"),
        ("context=5000000000", "cannot be 5000000000"),
        ("name=other", "`name` has no effect"),
        ("devices.b.profile=d99", "no device `d99`"),
        ("devices.b.gpu.kv_copy.latency.value.x=1s", "there is no field"),
        ("planner.strategy=exact,refine", "ends after a time"),
        ("devices", "has no values"),
    ];
    for (vary, expected) in cases {
        let text = error(&["sweep", &file, "--vary", vary], 2);
        assert!(text.contains(expected), "{vary}: {text}");
    }
    let same = "devices.b.memory.available.value=1GiB";
    let pairs: [(&[&str], &str); 5] = [
        (&["devices.b.memory.available=2GiB", same], "are one field"),
        (&["links.default.latency=1ms", "links.default=2"], "links.default"),
        (&["seed=1..400/400", "context=128..600/400"], "160000 rows"),
        (&["seed=1", "context=512", "workload.prompt=4"], "3 fields vary"),
        (&["seed=1", "seed=2"], "are one field"),
    ];
    for (fields, expected) in pairs {
        let vary = fields.iter().flat_map(|field| ["--vary", field]);
        let text = error(&["sweep", &file].into_iter().chain(vary).collect::<Vec<_>>(), 2);
        assert!(text.contains(expected), "{fields:?}: {text}");
    }
}

#[test]
fn field_that_a_limit_replaces_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = scenario(folder.path(), "9.7 GiB");
    let text = fs::read_to_string(&file).expect("the scenario");
    let limits = "./d3.yaml, limits: {memory: 8 GiB, disk_read: 1 GB/s, cpu: 4}}";
    fs::write(&file, text.replace("./d3.yaml}", limits)).expect("the temporary folder can be written");
    for (vary, limit) in [
        ("devices.b.memory.available=4GiB,6GiB", "devices.b.limits.memory"),
        ("devices.b.disk.limit=1GB/s,2GB/s", "devices.b.limits.disk_read"),
    ] {
        let text = error(&["sweep", &file, "--vary", vary], 2);
        assert!(text.contains(&format!("`{limit}` of the scenario replaces")), "{vary}: {text}");
    }
    assert!(run(&["sweep", &file, "--vary", "devices.a.memory.available=4GiB,6GiB"]).status.success());
}

#[test]
fn flags_without_effect_are_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = scenario(folder.path(), "9.7 GiB");
    let plan = folder.path().join("plan.yaml").display().to_string();
    succeed(&["plan", &file, "-o", &plan]);
    let refused = |vary: &str, more: &[&str]| {
        let text = error(&[&["sweep", &file, "--vary", vary][..], more].concat(), 2);
        println!("{text}");
        text
    };
    assert!(refused("context=512,600", &["--plan", &plan]).contains("is fixed by the plan"));
    assert!(refused("residency.policy=os", &["--plan", &plan]).contains("is fixed by the plan"));
    assert!(refused("planner.rounds=1", &["--rounds", "2"]).contains("--rounds and `planner.rounds`"));
    assert!(refused("seed=1", &["--strategy", "refine"]).contains("ends after a time"));
    assert!(refused("seed=1", &["--repeat", "2"]).contains("seed"));
    for shard in ["0/2", "3/2", "1", "a/b"] {
        let output = run(&["sweep", &file, "--vary", "seed=1", "--shard", shard]);
        assert_eq!(output.status.code(), Some(2));
    }
    // A refusal leaves what is there.
    let table = folder.path().join("table.csv");
    fs::write(&table, "mine").expect("the temporary folder can be written");
    let path = table.display().to_string();
    assert!(refused("sede=1", &["-o", &path]).contains("did you mean `seed`?"));
    assert_eq!(fs::read_to_string(&table).expect("a file"), "mine");
    assert!(refused("seed=1", &["-o", &folder.path().display().to_string()]).contains("this is a folder"));
}
