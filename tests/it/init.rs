//! Tests that `hearth init` writes valid scenarios and overwrites no files.

use std::io::Write;
use std::process::Stdio;

use crate::folder::Folder;
use crate::processes::{assert_rejected, hearth_command, model_path, run_json, run_successfully};

fn check(path: &str) {
    run_successfully(&["lint", path]);
    run_successfully(&["simulate", path]);
}

#[test]
fn flags_make_a_valid_scenario() {
    let folder = Folder::new();
    let [one, two, file] = ["one.yaml", "two.yaml", "file.yaml"].map(|name| folder.path_of(name));
    let devices = ["--device", "desktop=d3", "--device", "laptop=d2@192.168.1.7:9001"];
    run_successfully(&[&["init", &one], &devices[..]].concat());
    check(&one);
    let text = folder.read("one.yaml");
    assert!(text.starts_with("# llama-8b on desktop, laptop.") && text.matches('#').count() >= 5, "{text}");
    let more = ["--network", "cable", "--model", "qwen-1.5b", "--context", "512"];
    let summary = run_json(&[&["init", &two], &devices[..], &more].concat());
    assert_eq!((summary["name"].as_str(), summary["devices"][1].as_str()), (Some("two"), Some("laptop")));
    check(&two);
    run_successfully(&["init", &file, "--model", &model_path("q4_k"), "--device", "phone=d5"]);
    check(&file);
}

#[test]
fn file_is_replaced_only_with_force() {
    let folder = Folder::new();
    let path = folder.write("mine.yaml", "mine");
    let flags = ["init", path.as_str(), "--device", "laptop=d2"];
    assert_rejected(&flags, &["the file exists already", "--force"]);
    assert_eq!(folder.read("mine.yaml"), "mine");
    run_successfully(&[&flags[..], &["--force"]].concat());
    check(&path);
}

#[test]
fn wrong_flags_are_rejected_before_writing() {
    let folder = Folder::new();
    for (flags, part) in [
        (&[][..], "standard input is not a terminal"),
        (&["--device", "laptop"], "is not a device"),
        (&["--device", "laptop=d9"], "d9"),
        (&["--device", "laptop=d2", "--model", "llama-9b"], "llama-9b"),
        (&["--device", "a=d2", "--device", "a=d3"], "two devices have the name `a`"),
    ] {
        assert_rejected(&[&["init", &folder.path_of("new.yaml")], flags].concat(), &[part]);
    }
    assert!(!folder.has_file("new.yaml"));
    let missing = folder.path_of("no/such/folder.yaml");
    assert_rejected(&["init", &missing, "--device", "laptop=d2"], &["does not exist"]);
}

#[test]
fn questions_read_one_answer_per_line() {
    let folder = Folder::new();
    let path = folder.path_of("asked.yaml");
    let mut command = hearth_command(&["init", &path, "--ask", "--context", "256"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = command.spawn().expect("the program starts");
    let answers = "llama-9b\nqwen-0.5b\n\nd9\nd3\nphone\n\n\nwhat\ncable\n";
    process.stdin.take().expect("piped").write_all(answers.as_bytes()).expect("answers");
    let output = process.wait_with_output().expect("it ends");
    let questions = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{questions}");
    // A question is repeated after an invalid answer, and an empty answer selects the default.
    for repeated in ["Which model", "What is `this`", "wifi or by cable"] {
        assert_eq!(questions.matches(repeated).count(), 2, "{questions}");
    }
    check(&path);
    let text = folder.read("asked.yaml");
    for part in ["profile: qwen-0.5b", "{name: this, profile: d3}", "{name: phone, profile: d2}", "1 Gbit/s"]
    {
        assert!(text.contains(part), "{text}");
    }
}
