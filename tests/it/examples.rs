//! Tests that the examples in `hearth COMMAND --help` work.
//!
//! Each example runs in a folder with the files that it names.
//!
//! Not here: whether the examples of the other commands can be parsed (`src/cli/tests.rs`).

use std::os::unix::fs::symlink;
use std::path::Path;

use crate::chat::write_model_with_template;
use crate::folder::{Folder, scenario_yaml};
use crate::processes::{
    expect_array, hearth_command, model_path, run_command, run_json, run_script, run_successfully,
};
use crate::repository::repository_root;

/// Commands whose examples are not run here, with the reason.
const NOT_RUN: [(&str, &str); 8] = [
    ("bench", "times a model for minutes"),
    ("lab", "needs control groups; separate tests run it if they are available"),
    ("profile", "measures this machine for a minute"),
    ("pull", "needs the internet; separate tests pull from a server on this machine"),
    ("reproduce", "takes minutes with draws; separate tests run it without draws"),
    ("serve", "serves until it is terminated; tested separately"),
    ("synth", "writes a gigabyte; other tests write smaller models"),
    ("worker", "serves until it is terminated; tested separately"),
];

fn examples() -> Vec<(String, String)> {
    let help = run_successfully(&["--help"]);
    let listed = help.lines().skip_while(|line| !line.starts_with("Commands:")).skip(1);
    let verbs = listed.take_while(|line| !line.is_empty()).filter_map(|line| {
        // Names are indented by two columns, descriptions by more.
        let name = line.strip_prefix("  ").filter(|rest| !rest.starts_with(' '))?;
        name.split_whitespace().next().filter(|name| *name != "help")
    });
    let mut found = Vec::new();
    for verb in verbs {
        // A wide terminal, so that each example is one line.
        let (help, _) = run_command(hearth_command(&[verb, "--help"]).env("COLUMNS", "1000"), 0);
        let lines = help.lines().filter_map(|line| line.trim().strip_prefix("Example: "));
        let before = found.len();
        found.extend(lines.map(|line| (verb.to_owned(), line.to_owned())));
        assert!(found.len() > before, "{verb} has no example");
    }
    found
}

fn prepare(folder: &Folder) {
    for name in ["scenarios", "reports", "tests"] {
        symlink(repository_root().join(name), folder.path_of(name)).expect("a link");
    }
    write_model_with_template(Path::new(&folder.path_of("model.gguf")));
    symlink(model_path("q4_k"), folder.path_of("small.gguf")).expect("a link");
    folder.write_key("ring.key", &"0123456789abcdef".repeat(4));
    let alone =
        scenario_yaml("  - {name: this, profile: d1}").replace("profile: llama-8b", "file: model.gguf");
    folder.write("SCENARIO", alone);
}

#[test]
fn examples_in_the_help_work() {
    let folder = Folder::new();
    prepare(&folder);
    let mut ran = 0;
    for (verb, line) in examples() {
        if NOT_RUN.iter().any(|(name, _)| *name == verb) {
            continue;
        }
        // There are no workers to discover.
        if line.contains("init") && line.contains("--discover") {
            continue;
        }
        // Some examples need the output of another command.
        let before = match verb.as_str() {
            "execute" => "hearth plan SCENARIO --model model.gguf -o plan.yaml",
            "lint" => "hearth plan scenarios/home/llama-70b-on-four.yaml -o plan.yaml",
            "report" => "cp sim.trace run.trace",
            "sweep" if line.contains("merge") => {
                "hearth sweep SCENARIO --vary links.default.latency=1ms..100ms/5/log --shard 2/2 -o part-2.csv"
            }
            "init" => "rm -f home.yaml",
            "completions" => "mkdir -p .local/share/bash-completion/completions",
            "man" => "mkdir -p .local/share/man",
            _ => "",
        };
        run_script(&folder, "examples", 120, &format!("{before}\n{line}"));
        ran += 1;
    }
    assert!(ran >= 12, "only {ran} examples ran");
    for (verb, why) in NOT_RUN {
        println!("not run: {verb}, because it {why}");
    }
}

#[test]
fn completions_and_man_pages_are_generated() {
    let folder = Folder::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = run_successfully(&["completions", shell]);
        assert!(script.contains("whatif") && script.contains("published"), "{shell}");
    }
    let script = folder.write("hearth.bash", run_successfully(&["completions", "bash"]));
    let checked = std::process::Command::new("bash").args(["-n", &script]).status();
    assert!(checked.is_ok_and(|status| status.success()), "bash reads its script");
    let summary = run_json(&["man", &folder.path_of("man1")]);
    assert!(expect_array(&summary["pages"]).len() > 14, "{summary}");
    let page = folder.read("man1/hearth-sweep-merge.1").replace("\\-", "-");
    assert!(page.contains(".TH hearth-sweep-merge 1"), "{page}");
    assert!(folder.read("man1/hearth.1").contains("Exit codes: 0 success"));
}
