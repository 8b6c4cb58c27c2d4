//! Tests that `hearth init` writes valid scenarios and overwrites no files.

use std::io::Write;
use std::process::Stdio;

use crate::folder::Folder;
use crate::processes::{assert_refused, hearth, json, model, succeed};

/// Checks that a scenario has no errors and can be simulated.
fn check(path: &str) {
    succeed(&["lint", path]);
    succeed(&["simulate", path]);
}

#[test]
fn flags_make_a_valid_scenario() {
    let folder = Folder::new();
    let [one, two, file] = ["one.yaml", "two.yaml", "file.yaml"].map(|name| folder.path_of(name));
    let devices = ["--device", "desktop=d3", "--device", "laptop=d2@192.168.1.7:9001"];
    succeed(&[&["init", &one], &devices[..]].concat());
    check(&one);
    let text = folder.read("one.yaml");
    assert!(text.starts_with("# llama-8b on desktop, laptop.") && text.matches('#').count() >= 5, "{text}");
    let more = ["--network", "cable", "--model", "qwen-1.5b", "--context", "512"];
    let summary = json(&[&["init", &two], &devices[..], &more].concat());
    assert_eq!((summary["name"].as_str(), summary["devices"][1].as_str()), (Some("two"), Some("laptop")));
    check(&two);
    succeed(&["init", &file, "--model", &model("q4_k"), "--device", "phone=d5"]);
    check(&file);
}

#[test]
fn file_is_replaced_only_with_force() {
    let folder = Folder::new();
    let path = folder.write("mine.yaml", "mine");
    let flags = ["init", path.as_str(), "--device", "laptop=d2"];
    assert_refused(&flags, &["the file exists already", "--force"]);
    assert_eq!(folder.read("mine.yaml"), "mine");
    succeed(&[&flags[..], &["--force"]].concat());
    check(&path);
}

#[test]
fn wrong_flags_are_refused_before_writing() {
    let folder = Folder::new();
    for (flags, part) in [
        (&[][..], "standard input is not a terminal"),
        (&["--device", "laptop"], "is not a device"),
        (&["--device", "laptop=d9"], "d9"),
        (&["--device", "laptop=d2", "--model", "llama-9b"], "llama-9b"),
        (&["--device", "a=d2", "--device", "a=d3"], "used twice"),
    ] {
        assert_refused(&[&["init", &folder.path_of("new.yaml")], flags].concat(), &[part]);
    }
    assert!(!folder.has("new.yaml"));
    let missing = folder.path_of("no/such/folder.yaml");
    assert_refused(&["init", &missing, "--device", "laptop=d2"], &["does not exist"]);
}

#[test]
fn prompts_read_one_answer_per_line() {
    let folder = Folder::new();
    let path = folder.path_of("asked.yaml");
    let mut command = hearth(&["init", &path, "--ask", "--context", "256"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = command.spawn().expect("the program starts");
    let answers = "qwen-0.5b\ndesk\nd3\nphone\nd4\n\nwifi\n";
    process.stdin.take().expect("piped").write_all(answers.as_bytes()).expect("answers");
    let output = process.wait_with_output().expect("it ends");
    let questions = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{questions}");
    assert!(questions.contains("Which model") && questions.contains("wifi or by cable"), "{questions}");
    check(&path);
    let text = folder.read("asked.yaml");
    assert!(
        text.contains("{name: desk, profile: d3}") && text.contains("{name: phone, profile: d4}"),
        "{text}"
    );
}
