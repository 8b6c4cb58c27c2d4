//! `hearth init` writes scenarios that `hearth lint` and `hearth simulate` accept, and overwrites nothing.

use std::fs;
use std::io::Write;
use std::process::Stdio;

use serde_json::Value;

use crate::processes::{error, hearth, model, run};

fn at(folder: &tempfile::TempDir, name: &str) -> String {
    folder.path().join(name).display().to_string()
}

/// It can be linted without an error, and simulated.
fn works(path: &str) {
    for verb in ["lint", "simulate"] {
        let output = run(&[verb, path]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{verb}: {said}{}", String::from_utf8_lossy(&output.stdout));
    }
}

#[test]
fn flags_make_a_valid_scenario() {
    let folder = tempfile::tempdir().expect("a folder");
    let (one, two, file) = (at(&folder, "one.yaml"), at(&folder, "two.yaml"), at(&folder, "file.yaml"));
    let devices = ["--device", "desktop=d3", "--device", "laptop=d2@192.168.1.7:9001"];
    let output = run(&[&["init", &one], &devices[..]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    works(&one);
    let text = fs::read_to_string(&one).expect("the scenario");
    assert!(text.starts_with("# llama-8b on desktop, laptop."), "{text}");
    assert!(text.matches('#').count() >= 5, "{text}");
    let more = ["--network", "cable", "--model", "qwen-1.5b", "--context", "512", "--json"];
    let output = run(&[&["init", &two], &devices[..], &more[..]].concat());
    let told: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((told["name"].as_str(), told["devices"][1].as_str()), (Some("two"), Some("laptop")));
    works(&two);
    // A model in a file.
    let output = run(&["init", &file, "--model", &model("q4_k"), "--device", "phone=d5"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    works(&file);
}

#[test]
fn file_is_replaced_only_with_force() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = at(&folder, "mine.yaml");
    fs::write(&path, "mine").expect("written");
    let flags = ["init", path.as_str(), "--device", "laptop=d2"];
    let text = error(&flags, 2);
    assert!(text.contains("the file exists already") && text.contains("--force"), "{text}");
    assert_eq!(fs::read_to_string(&path).expect("still there"), "mine");
    assert!(run(&[&flags[..], &["--force"]].concat()).status.success());
    works(&path);
}

#[test]
fn wrong_flags_are_refused_before_writing() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = at(&folder, "new.yaml");
    for (flags, expected) in [
        (&[][..], "standard input is not a terminal"),
        (&["--device", "laptop"], "is not a device"),
        (&["--device", "laptop=d9"], "d9"),
        (&["--device", "laptop=d2", "--model", "llama-9b"], "llama-9b"),
        (&["--device", "a=d2", "--device", "a=d3"], "used twice"),
    ] {
        let text = error(&[&["init", &path], flags].concat(), 2);
        assert!(text.contains(expected), "{flags:?}: {text}");
    }
    assert!(!folder.path().join("new.yaml").exists());
    let text = error(&["init", &at(&folder, "no/such/folder.yaml"), "--device", "laptop=d2"], 2);
    assert!(text.contains("does not exist"), "{text}");
}

#[test]
fn questions_are_answered_line_by_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = at(&folder, "asked.yaml");
    let mut command = hearth(&["init", &path, "--ask", "--context", "256"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = command.spawn().expect("the program starts");
    let answers = "qwen-0.5b\ndesk\nd3\nphone\nd4\n\nwifi\n";
    process.stdin.take().expect("piped").write_all(answers.as_bytes()).expect("answers");
    let output = process.wait_with_output().expect("it ends");
    let asked = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.success() && asked.contains("Which model") && asked.contains("wifi or by cable"),
        "{asked}"
    );
    works(&path);
    let text = fs::read_to_string(&path).expect("the scenario");
    assert!(
        text.contains("{name: desk, profile: d3}") && text.contains("{name: phone, profile: d4}"),
        "{text}"
    );
}
