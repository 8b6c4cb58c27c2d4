//! Tests of `hearth plan`: comparison of strategies, search, and limits of devices.

use std::collections::BTreeMap;

use hearth_halda::registry::STRATEGY_NAMES;
use serde_json::Value;

use crate::folder::{Folder, scenario_yaml};
use crate::processes::{
    assert_rejected, expect_array, expect_number, hearth_command, integer_values, mean_tpot_ms, model_path,
    parse_json, run_command, run_json, run_successfully, run_with_code, scenario_path, string_values,
};

/// Writes a scenario of two desktops; `limits` is YAML for the second desktop, `more` is appended to the scenario.
fn two_desktops(folder: &Folder, limits: &str, more: &str) -> String {
    let devices = format!("  - {{name: a, profile: d2}}\n  - {{name: b, profile: d3{limits}}}");
    let text = scenario_yaml(&devices).replace("generate: 4", "generate: 12");
    folder.write("scenario.yaml", text + more)
}

fn windows(plan: &Value) -> BTreeMap<&str, u64> {
    let devices = &plan["devices"];
    string_values(devices, "name").into_iter().zip(integer_values(devices, "window")).collect()
}

#[test]
fn comparison_simulates_every_plan() {
    let folder = Folder::new();
    let file = two_desktops(&folder, "", "");
    let rows = run_json(&["plan", &file, "--compare", "--refine-evaluations", "20"]);
    let time = |row: &Value| row["simulated"]["tpot_ms"].as_f64();
    let fastest = expect_array(&rows).iter().filter_map(time).min_by(f64::total_cmp).expect("times");
    for row in expect_array(&rows) {
        assert_eq!(row["simulated"]["outcome"], "ok");
        assert!(row["predicted"]["tpot_ms"].is_number() && row["refused"].is_null());
        assert_eq!(row["best"], time(row) == Some(fastest), "{}", row["strategy"]);
    }
    // `hearth simulate` with the same plan and number of tokens gives the same time.
    let tokens = rows[0]["simulated"]["tokens"].to_string();
    let simulated =
        run_json(&["simulate", &file, "--strategy", "exact", "--tokens", &tokens, "--draws", "0"]);
    let exact = expect_array(&rows).iter().find(|row| row["strategy"] == "exact").expect("a row");
    assert_eq!(simulated["tpot_ms"]["mean"].as_f64(), time(exact));
}

#[test]
fn comparison_has_a_plan_or_a_reason_for_every_strategy() {
    let rows = run_json(&["plan", &scenario_path("home/llama-70b-on-four"), "--compare"]);
    let names = string_values(&rows, "strategy");
    let expected: Vec<&str> =
        STRATEGY_NAMES.into_iter().filter(|name| !["manual", "exhaustive"].contains(name)).collect();
    let (last, planners) = names.split_last().expect("rows");
    assert_eq!((planners, *last), (&expected[..], "refine"));
    for row in expect_array(&rows) {
        let reason = row["refused"].as_str().is_some_and(|reason| !reason.is_empty());
        let time = row["predicted"]["tpot_ms"].as_f64().is_some_and(|time| time > 0.0);
        assert!(time != reason, "{row}");
    }
    let row = expect_array(&rows).iter().find(|row| row["strategy"] == "mem-total").expect("a row");
    // 11 and 8 GiB on GPUs, 8 and 8 GiB of RAM: 80 layers * (11, 19, 27, 35) / 35 = 25.14, 43.43, 61.71, 80.
    assert_eq!(integer_values(&row["devices"], "window"), [25, 18, 19, 18]);
}

#[test]
fn head_of_the_scenario_is_the_head_of_every_plan() {
    let text = std::fs::read_to_string(scenario_path("home/llama-70b-on-four")).expect("the scenario");
    let swapped = text
        .replace("profile: d3, head: true", "profile: d3")
        .replace("{name: mac, profile: d1}", "{name: mac, profile: d1, head: true}");
    let folder = Folder::new();
    let rows = run_json(&["plan", &folder.write("mac.yaml", swapped), "--compare"]);
    for row in expect_array(&rows).iter().filter(|row| row["refused"].is_null()) {
        let first = &row["devices"][0];
        assert_eq!((first["name"].as_str(), first["role"].as_str()), (Some("mac"), Some("head")), "{row}");
    }
}

#[test]
fn comparison_table_shows_why_a_strategy_has_no_plan() {
    let folder = Folder::new();
    let file = two_desktops(&folder, "", "");
    let (text, stderr) = run_with_code(&["plan", &file, "--compare", "--rounds", "5"], 0);
    assert!(stderr.is_empty(), "{stderr}");
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].contains("simulated: the mean after the first of 8 generated tokens"), "{text}");
    assert!(lines[1].contains("expected") && lines[1].contains("windows (GPU layers)"), "{text}");
    let line = |name: &str| lines.iter().find(|line| line[1..].trim_start().starts_with(name));
    for name in ["exact", "even"] {
        let line = line(name).expect("a row");
        assert!(line.contains("refused: 32 layers cannot be divided into 5 rounds"), "{line}");
    }
    assert_eq!(lines.iter().filter(|line| line.starts_with('*')).count(), 1, "{text}");
    assert!(line("single").is_some_and(|line| line.contains("a 32")), "{text}");
}

#[test]
fn refine_is_deterministic_by_evaluations() {
    let folder = Folder::new();
    let file = two_desktops(&folder, "", "planner: {strategy: even}\n");
    let plan = |name: &str, evaluations: &str| {
        let path = folder.path_of(name);
        let flags = ["--windows", "16,16", "--strategy", "refine", "--refine-evaluations", evaluations];
        let text = run_successfully(&[&["plan", &file, "--output", &path], &flags[..]].concat());
        let simulated = run_json(&["simulate", &file, "--plan", &path, "--tokens", "8", "--draws", "0"]);
        (folder.read(name), text, mean_tpot_ms(&simulated))
    };
    let (_, text, start) = plan("start.yaml", "1");
    assert!(text.contains("the plan of `manual` takes") && text.contains("(1 evaluation;"), "{text}");
    assert!(text.contains("the evaluations were used up"), "{text}");
    let (document, _, better) = plan("better.yaml", "60");
    assert!(better < start, "{better} is not below {start}");
    assert!(document.contains("strategy: refine") && document.contains("start=manual"), "{document}");
    assert_eq!(plan("again.yaml", "60").0, document);
}

#[test]
fn refine_keeps_given_rounds() {
    let folder = Folder::new();
    let file = two_desktops(&folder, "", "");
    let flags = ["--strategy", "refine", "--rounds", "2", "--refine-evaluations", "30", "--json"];
    let (stdout, _) = run_with_code(&[&["plan", &file, "--output", "/dev/null"][..], &flags].concat(), 0);
    let plan = parse_json(&stdout);
    assert_eq!(plan["rounds"], 2);
    let sentence = plan["explanation"][0].as_str().expect("a sentence");
    assert!(sentence.starts_with("Refinement by simulation: the plan of `"), "{sentence}");
}

#[test]
fn planners_use_only_absolute_limits() {
    let folder = Folder::new();
    let plan = |limits: &str| run_json(&["plan", &two_desktops(&folder, limits, ""), "--strategy", "mem"]);
    let (free, limited) = (plan(""), plan(", limits: {memory: 1 GiB}"));
    assert!(windows(&limited)["b"] < windows(&free)["b"], "{limited} and {free}");
    assert_eq!(windows(&plan(", limits: {memory_share: 50 %}")), windows(&free));

    // Planning and simulating in two commands gives the same result as simulating in one.
    let file = two_desktops(&folder, ", limits: {memory: 4 GiB}", "");
    let plan = folder.path_of("plan.yaml");
    run_successfully(&["plan", &file, "--output", &plan]);
    assert_eq!(run_json(&["simulate", &file, "--plan", &plan]), run_json(&["simulate", &file]));
}

#[test]
fn wrong_search_flags_are_rejected() {
    let folder = Folder::new();
    let file = two_desktops(&folder, "", "");
    let expected = ["there is no strategy `refined`", "exhaustive, refine"];
    assert_rejected(&["plan", &file, "--strategy", "refined"], &expected);
    for seconds in ["0", "-1", "1e3", "999999"] {
        let seconds = format!("--refine-seconds={seconds}");
        assert_rejected(&["plan", &file, "--strategy", "refine", &seconds], &["refine-seconds"]);
    }
}

/// Maximum ratio of the simulated time of a plan to the simulated time of the best plan for a slower disk. It exceeds 1
/// because a plan is the fastest only by the planner's latency model, which differs from the simulator.
const TOLERANCE: f64 = 1.03;

/// Plans and simulates scenarios over a range of disk rates. If the simulator had a limit that the planner does not
/// know, the planner would assign more weights to a device with a faster disk than the device can read.
#[test]
fn faster_disk_never_makes_a_new_plan_slower() {
    let home = scenario_path("home/llama-70b-on-four");
    let all = ["desktop", "laptop", "mac", "phone"];
    let managed = ["--residency", "managed"];
    let full_laptop = [&managed[..], &["--vary", "devices.laptop.memory.available=3GiB"]].concat();
    let cases: [(&[&str], &[&str]); 4] = [
        (&all, &[]),
        (&all, &managed),
        (&["desktop"], &["--vary", "devices.desktop.memory.available=3GiB"]),
        (&["laptop", "desktop"], &full_laptop),
    ];
    for (devices, flags) in cases {
        for device in devices {
            let vary = format!("devices.{device}.disk.sequential=0.25GB/s..16GB/s/7/log");
            let table = run_json(&[&["sweep", &home, "--vary", &vary][..], flags].concat());
            let times: Vec<f64> =
                expect_array(&table["rows"]).iter().map(|row| expect_number(&row["tpot_ms"])).collect();
            let mut fastest = f64::INFINITY;
            for time in &times {
                assert!(*time <= fastest * TOLERANCE, "{device} {flags:?}: {times:?}");
                fastest = fastest.min(*time);
            }
        }
    }
}

#[test]
fn this_machine_is_measured_once() {
    let folder = Folder::new();
    let model = model_path("q4_k");
    let scenario = format!(
        "schema: scenario/1\nname: alone\nmodel: {{file: {model}}}\ncontext: 128\nworkload: {{prompt: 8, generate: 4}}\n\
         devices:\n  - {{name: here, profile: measured}}\n"
    );
    let scenario = folder.write("alone.yaml", scenario);
    let plan = || {
        let mut command = hearth_command(&["plan", &scenario]);
        run_command(command.env("XDG_CACHE_HOME", folder.path_of("cache")), 0).1
    };
    let (first, second) = (plan(), plan());
    assert!(first.contains("measuring this machine as `here`"), "{first}");
    assert!(second.contains("using the measurement of this machine"), "{second}");
    assert!(!second.contains("measuring this machine"), "{second}");
}

#[test]
fn exported_plan_is_a_script_of_commands() {
    let folder = Folder::new();
    let devices = "  - {name: a, profile: d3}\n  - {name: b c, profile: d2, address: '10.0.0.2:9001'}";
    let file = folder.write("scenario.yaml", scenario_yaml(devices));
    let plan = folder.path_of("plan.yaml");
    let windows = ["--windows", "20,12", "--gpu-layers", "8,0"];
    let export = |engine: &str, more: &[&str]| {
        run_with_code(&[&["plan", &file, "--export", engine][..], more].concat(), 0)
    };
    let (script, stderr) = export("llama.cpp", &[&windows[..], &["--output", &plan]].concat());
    assert!(stderr.is_empty(), "{stderr}");
    let commands: Vec<&str> =
        script.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    // 12 layers on the CPU of the head; 8 on its GPU, 12 and the output matrix on the other device.
    let expected = [
        "ggml-rpc-server -H 10.0.0.2 -p 9001 -d CPU -t 8",
        "llama-server -m MODEL.gguf -c 512 -np 1 -t 16 --rpc 10.0.0.2:9001 --device CUDA0,RPC0 -ngl 21 \
         --tensor-split 8,13 -ot '^output\\.weight$=CPU'",
    ];
    assert_eq!(commands, expected);
    assert!(script.contains("# a, the head: layers 0-11 on the CPU, 12-19 on the GPU\n"), "{script}");
    assert!(script.contains("# Replace: MODEL.gguf (the path of the model file).\n"), "{script}");
    assert!(script.contains("# Not expressed by the flags:\n# - "), "{script}");
    // The file has the plan, which gives the same commands.
    assert_eq!(folder.read_plan("plan.yaml").devices[0].gpu_layers, 8);
    assert_eq!(export("llama.cpp", &["--plan", &plan]).0, script);

    let (ring, _) = export("prima.cpp", &["--plan", &plan]);
    let rank = "llama-cli -m MODEL.gguf -c 512 -t 8 --world 2 --rank 1 --master A_ADDRESS --next A_ADDRESS -lw 20,12 -ngl 0 --prefetch";
    assert!(ring.lines().any(|line| line == rank), "{ring}");
    let script = folder.write("ring.sh", ring);
    let checked = std::process::Command::new("bash").args(["-n", &script]).status();
    assert!(checked.is_ok_and(|status| status.success()), "bash reads the script");
}

#[test]
fn plans_that_cannot_be_exported_are_rejected() {
    let folder = Folder::new();
    let file = two_desktops(&folder, "", "");
    let plan = folder.path_of("plan.yaml");
    run_successfully(&["plan", &file, "--output", &plan]);
    assert_rejected(&["plan", &file, "--plan", &plan], &["--export"]);
    assert_rejected(&["plan", &file, "--export", "vllm"], &["llama.cpp", "prima.cpp"]);
    let with_flags = ["plan", &file, "--export", "llama.cpp", "--plan", &plan];
    for flag in ["--compare", "--hash-weights", "--keep-all", "--output=p.yaml"] {
        assert_rejected(&[&with_flags[..], &[flag]].concat(), &["cannot be used with"]);
    }
    let tensor = ["plan", &file, "--strategy", "dllama", "--export", "llama.cpp"];
    assert_rejected(&tensor, &["`kind: tensor`", "--strategy overlap"]);
    let model = model_path("q4_k");
    let other = [&with_flags[..], &["--model", &model]].concat();
    assert_rejected(&other, &["the plan is for the model `llama-8b`", "plan again"]);
}
