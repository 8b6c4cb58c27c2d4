//! Tests that control characters of documents and other devices do not reach the terminal.
//!
//! Not here: escaping of each character (`src/output/escape.rs`), and the files of a report (`hearth-reports`).

use std::io::{Read, Write};
use std::net::TcpListener;

use crate::folder::{Folder, scenario_yaml};
use crate::processes::{execute_arguments, model_path, output_texts, run};

/// Sets a colour and the title of the terminal, begins a control sequence in one character, reverses the direction of
/// the text, and returns to the start of the line.
const HOSTILE: &str = "\u{1b}[31mred\u{1b}]0;title\u{7}\u{9b}2J\u{202e}gnp\r";

/// Runs the program and checks that its output has `part` and no control characters except for line feeds.
fn check(arguments: &[&str], part: &str) {
    let (stdout, stderr) = output_texts(&run(arguments));
    let text = stdout + &stderr;
    assert!(text.contains(part), "{arguments:?}: no {part} in {text:?}");
    let is_obeyed = |c: char| c != '\n' && (c.is_control() || ('\u{202a}'..='\u{202e}').contains(&c));
    assert!(!text.contains(is_obeyed), "{arguments:?}: {text:?}");
}

#[test]
fn names_in_documents_are_escaped() {
    let folder = Folder::new();
    let escapes: Vec<String> = HOSTILE.chars().map(|c| format!("\\u{:04x}", u32::from(c))).collect();
    let name = format!("\"a{}\"", escapes.concat());
    let scenario = folder.write("s.yaml", scenario_yaml(&format!("  - {{name: {name}, profile: d3}}")));
    let unknown = folder.write("unknown.yaml", format!("schema: scenario/1\n{name}: 1\n"));
    let (trace, report) = (folder.path_of("s.trace"), folder.path_of(&format!("report{HOSTILE}")));
    for json in [&[][..], &["--json"]] {
        let check = |arguments: &[&str], part| check(&[arguments, json].concat(), part);
        check(&["plan", &scenario], "a\\u001b[31mred\\u001b]0;title\\u0007\\u009b2J\\u202egnp");
        check(&["plan", &scenario, "--export", "llama.cpp"], "a\\u001b[31mred");
        check(&["simulate", &scenario, "--trace", &trace], "\\u001b[31m");
        check(&["report", &trace, "-o", &report], "[31mred");
        check(&["lint", &unknown], "\\u001b[31m");
        check(&["lint", HOSTILE], "\\u001b[31m");
        check(&["plan", &scenario, &format!("--{HOSTILE}")], "\\u202egnp");
        check(&["plan", &scenario, "--log", &format!("x=={HOSTILE}")], "\\u001b[31m");
    }
    check(&["lint", &scenario], "");
}

#[test]
fn reason_of_a_refusing_worker_is_escaped() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound").to_string();
    std::thread::spawn(move || {
        while let Ok((mut head, _)) = listener.accept() {
            let _ = head.read(&mut [0; 256]);
            // `Refuse { reason }`: the lengths of header and payload, the number of the message, and the reason.
            let reason = format!("{HOSTILE}\nerror: forged");
            let header = [&[2, reason.len() as u8], reason.as_bytes()].concat();
            let lengths = [header.len() as u32, 0].map(u32::to_le_bytes).concat();
            let _ = head.write_all(&[lengths, header].concat());
        }
    });
    let folder = Folder::new();
    let plan = folder.write_plan(&[4, 4], &[&address], 64);
    for more in [&[][..], &["--json"], &["--log-format", "json"]] {
        let arguments = execute_arguments(&plan, &model_path("q4_k"), &[&["--prompt", "a"], more].concat());
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        check(&arguments, "refused the request: \\u001b[31mred");
        let (_, stderr) = output_texts(&run(&arguments));
        assert!(!stderr.lines().any(|line| line.starts_with("error: forged")), "{stderr}");
    }
}
