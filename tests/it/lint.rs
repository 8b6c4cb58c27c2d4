//! Tests that `hearth lint` finds the errors with which a run would end, and returns the right exit code.

use hearth_schema::digest::digest_text;
use serde_json::Value;

use crate::folder::{Folder, TWO_DEVICES_YAML, scenario_yaml};
use crate::processes::{
    assert_rejected, parse_json, run, run_failing_with_code, run_json_with_code, run_successfully,
    string_values,
};

fn lint(arguments: &[&str], code: i32) -> Value {
    run_json_with_code(&[&["lint"], arguments].concat(), code)
}

/// Returns the codes of findings, without the note that the devices of these tests are those of a paper.
fn codes(findings: &Value) -> Vec<&str> {
    let mut codes = string_values(findings, "code");
    codes.retain(|code| *code != "stand-in");
    codes
}

#[test]
fn own_plan_has_no_findings() {
    let (_folder, file) = Folder::with_two_device_scenario();
    assert!(codes(&lint(&[&file], 0)).is_empty());
    let text = run_successfully(&["lint", &file]);
    assert!(text.starts_with("note[stand-in]: described by a device that a paper measured: "), "{text}");
    assert!(text.ends_with("\n0 errors, 0 warnings, 1 note\n"), "{text}");
}

#[test]
fn finding_has_code_place_and_hint() {
    let (_folder, file) = Folder::with_two_device_scenario();
    let arguments = [file.as_str(), "--windows", "6,2"];
    // Without GPU layers the plan is also much slower than the best one, which is an error.
    let findings = lint(&arguments, 3);
    assert_eq!(codes(&findings), ["far-above-optimum", "rounds-without-reading"]);
    for key in ["severity", "code", "what", "where", "fix"] {
        assert!(findings[0][key].as_str().is_some_and(|text| !text.is_empty()), "{key}: {findings}");
    }
    let output = run(&[&["lint"][..], &arguments].concat());
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(text.starts_with("error[far-above-optimum]: "), "{text}");
    assert!(text.contains("\nwarning[rounds-without-reading]: "), "{text}");
    assert!(text.contains("\n  where: plan rounds\n  hint:  "), "{text}");
    assert!(text.ends_with("1 error, 1 warning, 1 note\n"), "{text}");
}

#[test]
fn memory_errors_predict_runs_out_of_memory() {
    let folder = Folder::new();
    let (mut fitting, mut failing) = (0, 0);
    // Planners refuse plans that do not fit, so the plans are made for more memory and then changed.
    let ample = scenario_yaml(TWO_DEVICES_YAML);
    let ample_file = folder.write("ample.yaml", &ample);
    for context in [512, 8192, 65_536, 262_144, 1_048_576] {
        for limit in ["300 MiB", "700 MiB", "2 GiB", "9 GiB"] {
            for gpu in ["0,0", "8,8", "16,16"] {
                let limited = TWO_DEVICES_YAML.replace("d2}", &format!("d2, limits: {{memory: {limit}}}}}"));
                let text = scenario_yaml(&limited).replace("context: 512", &format!("context: {context}"));
                let file = folder.write("s.yaml", &text);
                let plan =
                    run_successfully(&["plan", &ample_file, "--windows", "16,16", "--gpu-layers", gpu]);
                let plan = plan.replace("context: 512", &format!("context: {context}"));
                let plan = plan.replace(&digest_text(&ample), &digest_text(&text));
                let plan = folder.write("p.yaml", plan);
                let simulate =
                    ["simulate", &file, "--plan", &plan, "--tokens", "2", "--draws", "0", "--json"];
                let fails = run(&simulate).status.code() == Some(3);
                let arguments = [file.as_str(), "--plan", &plan];
                // A plan that fits may still be much slower than the best one, which is an error too.
                let code = run(&[&["lint"], &arguments[..]].concat()).status.code().expect("an exit code");
                assert!(code == 3 || !fails, "{context}, {limit}, {gpu}: {code}");
                let findings = lint(&arguments, code);
                let is_memory = |code: &&str| matches!(*code, "memory-exceeded" | "gpu-memory");
                let predicted = codes(&findings).iter().any(is_memory);
                assert_eq!(predicted, fails, "{context}, {limit}, {gpu}: {findings}");
                *(if fails { &mut failing } else { &mut fitting }) += 1;
            }
        }
    }
    println!("{fitting} runs fit, {failing} do not");
    assert!(fitting > 5 && failing > 5);
}

#[test]
fn plan_of_another_model_is_a_finding() {
    let folder = Folder::new();
    let (file, plan) = (folder.write("s.yaml", scenario_yaml(TWO_DEVICES_YAML)), folder.path_of("p.yaml"));
    run_successfully(&["plan", &file, "--windows", "16,16", "--gpu-layers", "16,16", "--output", &plan]);
    assert!(codes(&lint(&[&file, "--plan", &plan], 0)).is_empty());
    let twice = folder.write("twice.yaml", folder.read("p.yaml").replace("rounds: 1", "rounds: 2"));
    let findings = lint(&[&file, "--plan", &twice], 3);
    assert_eq!(codes(&findings), ["plan-invalid"]);
    assert!(findings[0]["what"].as_str().is_some_and(|what| what.contains("set `rounds: 1`")), "{findings}");
    let other = folder.write("other.yaml", scenario_yaml(TWO_DEVICES_YAML).replace("llama-8b", "1b"));
    assert_eq!(codes(&lint(&[&other, "--plan", &plan], 3)), ["other-model", "other-scenario"]);
    // A missing file, or one that is not a plan, is rejected as by other commands.
    assert_rejected(&["lint", &file, "--plan", &file], &["this is not a plan/1 document"]);
    run_failing_with_code(&["lint", &file, "--plan", "nowhere.yaml"], 2);
}

#[test]
fn failed_strategy_is_a_finding() {
    let (_folder, file) = Folder::with_two_device_scenario();
    let findings = lint(&[&file, "--strategy", "even", "--rounds", "5"], 3);
    assert_eq!(codes(&findings), ["no-plan"]);
    assert!(findings[0]["what"].as_str().is_some_and(|what| what.contains("5 rounds")), "{findings}");
}

#[test]
fn implausible_numbers_are_findings() {
    let folder = Folder::new();
    let file = folder.write("s.yaml", scenario_yaml("  - {name: a, profile: d3, limits: {memory: 1 TiB}}"));
    assert_eq!(codes(&lint(&[&file], 0)), ["limit-above-memory"]);
    let slow = folder.write("s.yaml", scenario_yaml(TWO_DEVICES_YAML).replace("400 Mbit/s", "0.002 Mbit/s"));
    let findings = lint(&[&slow], 0);
    let implausible = |(code, place)| (code == "absurd-number").then_some(place);
    let pairs = codes(&findings).into_iter().zip(string_values(&findings, "where"));
    assert_eq!(pairs.filter_map(implausible).collect::<Vec<_>>(), ["scenario links.default.bandwidth"]);
    let device = hearth_profiles::device::shipped_yaml("d3").expect("d3 is shipped");
    let implausible = device.replace("3.17 GB/s", "500 GB/s").replace("{value: 9.7 GiB", "{value: 3 MiB");
    folder.write("d.yaml", implausible);
    let devices = "  - {name: a, profile: d.yaml}\n  - {name: b, profile: d2, head: true}";
    let file = folder.write("t.yaml", scenario_yaml(devices));
    let findings = parse_json(&run_successfully(&["lint", &file, "--json"]));
    for place in ["device `a` disk.sequential", "device `a` memory.available"] {
        assert!(string_values(&findings, "where").contains(&place), "{findings}");
    }
}
