//! The examples of `hearth VERB --help` work.
//!
//! Each is run as it stands, in a folder that has what it names. Those that cannot be run everywhere are listed with
//! the reason; that they are understood is a test of the command line itself.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use crate::processes::{hearth, model, run};

/// Verbs whose examples are not run here, and why.
const NOT_RUN: [(&str, &str); 7] = [
    ("bench", "times a model for minutes"),
    ("lab", "needs control groups; its own tests run it where they are"),
    ("profile", "measures this machine for a minute"),
    ("reproduce", "with draws it takes minutes; its own tests run it without"),
    ("serve", "serves until it is ended; its own tests end it"),
    ("synth", "writes a gigabyte; its own tests write smaller models"),
    ("worker", "serves until it is ended; its own tests end it"),
];

/// Examples by verb, in the order of the help.
fn examples() -> Vec<(String, String)> {
    let text = |arguments: &[&str]| String::from_utf8(run(arguments).stdout).expect("text");
    let help = text(&["--help"]);
    let listed = help.lines().skip_while(|line| !line.starts_with("Commands:")).skip(1);
    let verbs = listed.take_while(|line| !line.is_empty()).filter_map(|line| {
        // A name stands two columns in; what it is about stands further.
        let name = line.strip_prefix("  ").filter(|rest| !rest.starts_with(' '))?;
        name.split_whitespace().next().filter(|name| *name != "help")
    });
    let mut found = Vec::new();
    for verb in verbs {
        // Wide, so that no example is broken in two.
        let output = hearth(&[verb, "--help"]).env("COLUMNS", "1000").output().expect("it runs");
        let help = String::from_utf8(output.stdout).expect("text");
        let lines = help.lines().filter_map(|line| line.trim().strip_prefix("Example: "));
        let before = found.len();
        found.extend(lines.map(|line| (verb.to_owned(), line.to_owned())));
        assert!(found.len() > before, "{verb} has no example");
    }
    found
}

/// What the examples name, in a folder of its own.
fn prepare(folder: &Path) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for name in ["scenarios", "reports"] {
        symlink(root.join(name), folder.join(name)).expect("a link");
    }
    for name in ["model.gguf", "small.gguf"] {
        symlink(model("q4_k"), folder.join(name)).expect("a link");
    }
    fs::write(folder.join("ring.key"), "0123456789abcdef".repeat(4)).expect("a key");
    fs::set_permissions(folder.join("ring.key"), fs::Permissions::from_mode(0o600)).expect("ours alone");
    let alone = "schema: scenario/1\nname: alone\nmodel: {file: model.gguf}\ncontext: 128\n\
                 workload: {prompt: 8, generate: 8}\ndevices: [{name: this, profile: d1}]\n\
                 links: {default: {latency: {value: 1 ms, source: a}, bandwidth: {value: 1 Gbit/s, source: a}}}\n";
    fs::write(folder.join("SCENARIO"), alone).expect("a scenario");
}

fn shell(folder: &Path, line: &str) {
    let program = hearth(&[]).get_program().to_string_lossy().into_owned();
    // The program's own name, wherever it lies.
    let script = format!("hearth() {{ '{program}' \"$@\"; }}\nset -e\n{line}\n");
    // None of them takes minutes.
    let output = std::process::Command::new("timeout")
        .args(["120", "bash", "-c", &script])
        .current_dir(folder)
        .env("HOME", folder)
        .env_remove("HEARTH_KEY")
        .env_remove("XDG_CACHE_HOME")
        .stdin(std::process::Stdio::null())
        .output()
        .expect("bash runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{line}\n{said}{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn examples_of_the_help_work() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    prepare(folder);
    // What an example needs that another verb makes.
    let plan = "hearth plan SCENARIO --model model.gguf -o plan.yaml";
    let mut ran = 0;
    for (verb, line) in examples() {
        if NOT_RUN.iter().any(|(name, _)| *name == verb) {
            continue;
        }
        let before = match verb.as_str() {
            "execute" => plan.to_owned(),
            "lint" => "hearth plan scenarios/home/llama-70b-on-four.yaml -o plan.yaml".to_owned(),
            "report" => "cp sim.trace run.trace".to_owned(),
            "sweep" if line.contains("merge") => {
                "hearth sweep SCENARIO --vary links.default.latency=1ms..100ms/5/log --shard 2/2 -o part-2.csv".into()
            }
            "init" => "rm -f home.yaml".to_owned(),
            "completions" => "mkdir -p .local/share/bash-completion/completions".to_owned(),
            "man" => "mkdir -p .local/share/man".to_owned(),
            _ => String::new(),
        };
        // Nobody announces anything here.
        if line.contains("init") && line.contains("--discover") {
            continue;
        }
        shell(folder, &format!("{before}\n{line}"));
        ran += 1;
    }
    assert!(ran >= 12, "only {ran} examples ran");
    for (verb, why) in NOT_RUN {
        println!("not run: {verb}, it {why}");
    }
}

#[test]
fn completions_and_man_pages_are_generated() {
    let folder = tempfile::tempdir().expect("a folder");
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = run(&["completions", shell]);
        let script = String::from_utf8(output.stdout).expect("text");
        assert!(
            output.status.success() && script.contains("whatif") && script.contains("published"),
            "{shell}"
        );
    }
    let script = folder.path().join("hearth.bash");
    fs::write(&script, run(&["completions", "bash"]).stdout).expect("written");
    let checked = std::process::Command::new("bash").arg("-n").arg(&script).status();
    assert!(checked.is_ok_and(|status| status.success()), "bash reads its script");
    let pages = folder.path().join("man1");
    let output = run(&["man", &pages.display().to_string(), "--json"]);
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(told["pages"].as_array().is_some_and(|pages| pages.len() > 14), "{told}");
    let page = fs::read_to_string(pages.join("hearth-sweep-merge.1")).expect("a page of a verb's verb");
    assert!(
        page.contains(".TH hearth\\-sweep\\-merge 1") || page.contains(".TH hearth-sweep-merge 1"),
        "{page}"
    );
    let page = fs::read_to_string(pages.join("hearth.1")).expect("the first page");
    assert!(page.contains("Exit codes: 0 success"), "{page}");
}

#[test]
fn errors_are_json_with_json() {
    for (arguments, code, place) in [
        (&["simulate", "nowhere.yaml", "--json"][..], 2, Some("nowhere.yaml")),
        (&["simulate", "--json", "--no-such-flag"], 2, None),
        (&["--json"], 2, None),
    ] {
        let output = run(arguments);
        let text = String::from_utf8(output.stderr).expect("text");
        let told: serde_json::Value = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text}"));
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert_eq!(told["error"]["code"].as_i64(), Some(i64::from(code)), "{text}");
        assert_eq!(told["error"]["where"].as_str(), place, "{text}");
        assert!(told["error"]["what"].as_str().is_some_and(|what| !what.is_empty()), "{text}");
        assert!(told["error"]["hint"].is_string(), "{text}");
    }
    let help = run(&["--json", "--help"]);
    assert!(help.status.success() && String::from_utf8_lossy(&help.stdout).contains("Exit codes"));
}
