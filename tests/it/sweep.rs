//! Tests that rows of a sweep equal the results of `hearth simulate`, and that merged shards equal the whole sweep.

use std::fs;

use serde_json::{Value, json};

use crate::folder::{Folder, scenario_yaml};
use crate::processes::{assert_rejected, expect_array, run_json, run_successfully, string_values};
use crate::repository::repository_root;

/// Writes a scenario and the documents of its two devices; `available` is the available memory of the device `d3`.
fn write_scenario(folder: &Folder, available: &str) -> String {
    for name in ["d2", "d3"] {
        let path = repository_root().join(format!("profiles/devices/{name}.yaml"));
        let text = fs::read_to_string(path).expect("a shipped device");
        let text = text.replace("available: {value: 9.7 GiB", &format!("available: {{value: {available}"));
        folder.write(&format!("{name}.yaml"), text);
    }
    let text = scenario_yaml("  - {name: a, profile: ./d2.yaml}\n  - {name: b, profile: ./d3.yaml}");
    let text = text.replace("llama-8b", "llama-30b").replace("prompt: 16", "prompt: 4");
    folder.write("scenario.yaml", text.replace("seed: 1", "seed: 7"))
}

#[test]
fn row_equals_simulating_the_changed_document() {
    let folder = Folder::new();
    let file = write_scenario(&folder, "9.7 GiB");
    let memory = "devices.b.memory.available=3GiB,9.7GiB";
    let table = run_json(&["sweep", &file, "--vary", memory, "--vary", "links.default.latency=2ms,9ms"]);
    let rows = expect_array(&table["rows"]);
    assert_eq!(rows.len(), 4);
    let mut times = Vec::new();
    let points = [("3 GiB", "2 ms"), ("3 GiB", "9 ms"), ("9.7 GiB", "2 ms"), ("9.7 GiB", "9 ms")];
    for (row, (available, latency)) in rows.iter().zip(points) {
        write_scenario(&folder, available);
        let text = folder.read("scenario.yaml").replace("value: 2 ms", &format!("value: {latency}"));
        let file = folder.write("scenario.yaml", text);
        let alone = run_json(&["simulate", &file]);
        assert_eq!(row["values"], json!([available, latency]));
        assert_eq!(row["tpot_ms"], alone["tpot_ms"]["mean"], "{available}, {latency}");
        assert_eq!(row["ttft_ms"], alone["ttft_ms"]);
        assert_eq!(row["tokens_per_s"], alone["tokens_per_s"]);
        let read = |value: &Value| value["bytes_read_per_token"].as_f64();
        assert_eq!(read(row), Some(expect_array(&alone["devices"]).iter().filter_map(read).sum()));
        let plan = run_json(&["plan", &file, "-o", &folder.path_of("plan.yaml")]);
        assert_eq!((&row["rounds"], &row["strategy"]), (&plan["rounds"], &plan["strategy"]));
        assert_eq!((row["outcome"].as_str(), row["seed"].as_u64()), (Some("ok"), Some(7)));
        times.push(row["tpot_ms"].to_string());
    }
    times.dedup();
    assert_eq!(times.len(), 4, "both fields change the time: {times:?}");
}

#[test]
fn shards_merge_byte_for_byte() {
    let folder = Folder::new();
    let file = write_scenario(&folder, "9.7 GiB");
    let vary = ["--vary", "devices.b.memory.available=2GiB..9GiB/3", "--vary", "seed=1,2"];
    let sweep = |more: &[&str]| run_successfully(&[&["sweep", &file][..], &vary, more].concat());
    let printed = sweep(&["--jobs", "1"]);
    sweep(&["--jobs", "3", "-o", &folder.path_of("whole.csv"), "--chart", &folder.path_of("whole.svg")]);
    let whole = folder.read("whole.csv");
    assert_eq!(whole, printed, "the number of threads changes nothing");
    assert_eq!(whole.lines().count(), 2 + 6);
    let [first, second, third, fourth] = [1, 2, 3, 4].map(|part| folder.path_of(&format!("{part}.csv")));
    for (shard, name) in [("1/4", &first), ("2/4", &second), ("3/4", &third), ("4/4", &fourth)] {
        sweep(&["--shard", shard, "-o", name]);
    }
    let merge = ["sweep", "merge", &third, &first, &fourth, &second];
    let (table, chart) = (folder.path_of("merged.csv"), folder.path_of("merged.svg"));
    run_successfully(&[&merge[..], &["-o", &table, "--chart", &chart]].concat());
    assert_eq!(folder.read("merged.csv"), whole);
    let chart = folder.read("whole.svg");
    assert_eq!(folder.read("merged.svg"), chart);
    assert_eq!((chart.matches("<polyline").count(), chart.matches("<circle").count()), (2, 6));
    assert!(!folder.file_names().concat().contains(".part"), "{:?}", folder.file_names());

    let other = folder.path_of("other.csv");
    run_successfully(&["sweep", &file, "--vary", "seed=1,2", "-o", &other]);
    let cases: [(&[&str], &[&str]); 4] = [
        (&[&first, &second, &fourth], &["rows are missing: 2\n", "--shard 3/4"]),
        (&[&third, &first, &fourth, &second, &first], &["row 0 is present twice"]),
        (&[&first, &other], &["a different sweep"]),
        (&[&file], &["not the table of a sweep"]),
    ];
    for (tables, parts) in cases {
        assert_rejected(&[&["sweep", "merge"], tables].concat(), parts);
    }
}

#[test]
fn row_of_a_failed_point_has_the_reason() {
    let folder = Folder::new();
    let (file, plan) = (write_scenario(&folder, "9.7 GiB"), folder.path_of("plan.yaml"));
    run_successfully(&["plan", &file, "-o", &plan]);
    let outcomes = |vary: &str| {
        let rows = run_json(&["sweep", &file, "--plan", &plan, "--vary", vary])["rows"].take();
        let has_time = |row: &Value| row["tpot_ms"].is_number() == (row["outcome"] == "ok");
        assert!(expect_array(&rows).iter().all(has_time), "{rows}");
        assert!(rows[0]["strategy"].is_string());
        string_values(&rows, "outcome").into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(outcomes("devices.b.gpu.memory_available=64MiB,11GiB"), ["out of memory", "ok"]);
    let found = outcomes("devices.a.memory.available=4GiB,99GiB");
    assert_eq!(found[0], "ok");
    assert!(found[1].starts_with("refused: ") && found[1].contains("more than `memory.total`"), "{found:?}");
    let table = run_json(&["sweep", &file, "--vary", "planner.rounds=1,7", "--strategy", "even"]);
    let outcome = table["rows"][1]["outcome"].as_str().expect("an outcome");
    assert!(outcome.starts_with("no plan: ") && outcome.contains("7 rounds"), "{outcome}");
}

#[test]
fn wrong_fields_values_and_flags_are_rejected() {
    let folder = Folder::new();
    let file = write_scenario(&folder, "9.7 GiB");
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
    let same = "devices.b.memory.available.value=1GiB";
    let several: [(&[&str], &str); 5] = [
        (&["devices.b.memory.available=2GiB", same], "are the same field"),
        (&["links.default.latency=1ms", "links.default=2"], "links.default"),
        (&["seed=1..400/400", "context=128..600/400"], "160000 rows"),
        (&["seed=1", "context=512", "workload.prompt=4"], "3 fields are varied"),
        (&["seed=1", "seed=2"], "are the same field"),
    ];
    let (plan, table) = (folder.path_of("plan.yaml"), folder.write("table.csv", "mine"));
    run_successfully(&["plan", &file, "-o", &plan]);
    let with_flags: [(&str, &[&str], &str); 11] = [
        ("context=512,600", &["--plan", &plan], "is fixed by the plan"),
        ("residency.policy=os", &["--plan", &plan], "is fixed by the plan"),
        ("planner.rounds=1", &["--rounds", "2"], "`--rounds` and `planner.rounds`"),
        ("seed=1", &["--strategy", "refine"], "ends after a time"),
        ("seed=1", &["--repeat", "2"], "seed"),
        ("seed=1", &["--shard", "0/2"], "--shard"),
        ("seed=1", &["--shard", "3/2"], "--shard"),
        ("seed=1", &["--shard", "1"], "--shard"),
        ("seed=1", &["--shard", "a/b"], "--shard"),
        ("sede=1", &["-o", &table], "did you mean `seed`?"),
        ("seed=1", &["-o", &folder.path_of("")], "this is a folder"),
    ];
    let single = cases.iter().map(|(vary, part)| (vec!["--vary", *vary], *part));
    let several = several
        .into_iter()
        .map(|(fields, part)| (fields.iter().flat_map(|field| ["--vary", *field]).collect(), part));
    let with_flags =
        with_flags.into_iter().map(|(vary, flags, part)| ([&["--vary", vary], flags].concat(), part));
    for (flags, part) in single.chain(several).chain(with_flags) {
        assert_rejected(&[&["sweep", &file][..], &flags].concat(), &[part]);
    }
    assert_eq!(folder.read("table.csv"), "mine", "a rejected command overwrites nothing");
}

#[test]
fn field_that_a_limit_replaces_is_rejected() {
    let folder = Folder::new();
    write_scenario(&folder, "9.7 GiB");
    let limits = "./d3.yaml, limits: {memory: 8 GiB, disk_read: 1 GB/s, cpu: 4}}";
    let file = folder.write("s.yaml", folder.read("scenario.yaml").replace("./d3.yaml}", limits));
    for (vary, limit) in [
        ("devices.b.memory.available=4GiB,6GiB", "devices.b.limits.memory"),
        ("devices.b.disk.limit=1GB/s,2GB/s", "devices.b.limits.disk_read"),
    ] {
        let reason = format!("`{limit}` of the scenario replaces");
        assert_rejected(&["sweep", &file, "--vary", vary], &[&reason]);
    }
    run_successfully(&["sweep", &file, "--vary", "devices.a.memory.available=4GiB,6GiB"]);
}
