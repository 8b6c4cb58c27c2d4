//! Tests of `hearth run`, and of `execute` and `serve` with a model instead of a plan.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::{Mode, OFlags, open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::chat::write_model_with_template;
use crate::folder::Folder;
use crate::processes::{
    assert_rejected, hearth_command, integer_values, model_path, output_texts, run_command, run_json,
    run_script, send_signal, wait_until,
};

const GREEDY: [&str; 2] = ["--temperature", "0"];

fn chat_model(folder: &Folder) -> String {
    let path = folder.path_of("chat.gguf");
    write_model_with_template(Path::new(&path));
    path
}

#[test]
fn text_is_answered_with_the_chat_template_and_continued_without() {
    let folder = Folder::new();
    let (with, without) = (chat_model(&folder), model_path("q4_k"));
    let ids = |arguments: &[&str]| run_json(&[arguments, &["--tokens", "8"]].concat())["token_ids"].clone();
    let formatted = "SYSTEM: Speak as a king.\nUSER: Who art thou?\nANSWER:";
    let continued = ids(&["execute", &with, "--prompt", formatted]);
    let run = |text: &str, more: &[&str]| ids(&[&["run", &with, text], &GREEDY[..], more].concat());
    assert_eq!(run("Who art thou?", &["--system", "Speak as a king."]), continued);
    assert_eq!(run(formatted, &["--complete"]), continued);
    let plain = |arguments: &[&str]| ids(&[arguments, &GREEDY[..]].concat());
    assert_eq!(plain(&["run", &without, formatted]), continued, "a model without a template");
    let mut command =
        hearth_command(&["run", &with, "--complete", "--json", "--tokens", "8", "--temperature", "0"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
    child.stdin.take().expect("a pipe").write_all(formatted.as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    let piped: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(piped["token_ids"], continued, "a text from standard input");
}

#[test]
fn answers_are_text_on_standard_output_and_statistics_on_standard_error() {
    let folder = Folder::new();
    let mut command = hearth_command(&["run", &model_path("q4_k"), "The Lord is my", "--tokens", "4"]);
    let (stdout, stderr) = run_command(command.args(GREEDY).current_dir(folder.path()), 0);
    assert_eq!(stdout, " God, and the\n");
    assert!(stderr.contains(" prompt tokens, 4 generated; first after 0."), "{stderr}");
    assert!(stderr.contains("tokens/s; stopped at the maximum number of tokens]"), "{stderr}");
    assert!(folder.file_names().is_empty(), "{:?}", folder.file_names());
    let sampled = |seed: &str| {
        let json = run_json(&["run", &model_path("q4_k"), "The Lord", "--tokens", "12", "--seed", seed]);
        assert_eq!(json["finish_reason"], "length");
        json["text"].as_str().expect("text").to_owned()
    };
    assert_eq!(sampled("1"), sampled("1"));
    assert_ne!(sampled("1"), sampled("2"));
}

#[test]
fn wrong_uses_are_explained() {
    let folder = Folder::new();
    let (model, chat) = (model_path("q4_k"), chat_model(&folder));
    let text = folder.write("text.txt", "plain");
    let plan = folder.write_plan(&[8], &[], 128);
    let scenario = Folder::with_two_device_scenario();
    let cases: [(&[&str], &[&str]); 9] = [
        (&["run", "missing.gguf", "x"], &["missing.gguf", "\nhint:  "]),
        (&["run", &text, "x"], &["text.txt"]),
        (&["run", &model, "x", "--system", "y"], &["no chat template"]),
        (&["run", &chat, "x", "--temperature", "-1"], &["temperature"]),
        (
            &["run", &model, "one two three", "--context", "2"],
            &["leaves no room in the context of 2", "--context"],
        ),
        (
            &["run", &model, "x", "--context", "1000000000"],
            &["a KV cache for 1000000000 tokens", "--context"],
        ),
        (&["execute", &plan, "--prompt", "x"], &["the plan needs a model file", "--model"]),
        (
            &["execute", &plan, "--model", &model, "--context", "64", "--prompt", "x"],
            &["`--context` is for a model"],
        ),
        (&["execute", &model, "--model", &model, "--prompt", "x"], &["is a second one"]),
    ];
    for (arguments, parts) in cases {
        assert_rejected(arguments, parts);
    }
    assert_rejected(
        &["execute", &scenario.1, "--model", &model, "--prompt", "x"],
        &["scenario", "hearth plan"],
    );
}

#[test]
fn model_without_a_plan_is_executed_for_several_prompts() {
    let model = model_path("q4_k");
    let arguments = ["execute", &model, "--prompt", "The Lord is", "--prompt", "And God", "--tokens", "6"];
    let both = run_json(&arguments);
    let alone = run_json(&["execute", &model, "--prompt", "And God", "--tokens", "6", "--context", "32"]);
    assert_eq!(both["sequences"][1]["token_ids"], alone["token_ids"]);
    assert_eq!(integer_values(&both["sequences"], "sequence"), [0, 1]);
}

/// A program that runs in a terminal of its own.
struct TerminalSession {
    child: std::process::Child,
    keyboard: File,
    /// What the terminal has shown.
    screen: Arc<Mutex<String>>,
}

impl TerminalSession {
    fn start(mut command: Command) -> TerminalSession {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
        grantpt(&master).and_then(|()| unlockpt(&master)).expect("a terminal");
        let name = ptsname(&master, Vec::new()).expect("a name");
        let terminal = || {
            let path = Path::new(std::ffi::OsStr::from_bytes(name.as_bytes()));
            File::from(open(path, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).expect("a terminal"))
        };
        command.stdin(terminal()).stdout(terminal()).stderr(terminal()).env("TERM", "xterm");
        let child = command.spawn().expect("it starts");
        let keyboard = File::from(master);
        let screen = Arc::new(Mutex::new(String::new()));
        let (mut output, shown) = (keyboard.try_clone().expect("a descriptor"), screen.clone());
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                let text = String::from_utf8_lossy(&bytes[..count]).into_owned();
                shown.lock().unwrap_or_else(PoisonError::into_inner).push_str(&text);
            }
        });
        TerminalSession { child, keyboard, screen }
    }

    fn screen(&self) -> String {
        self.screen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn type_keys(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).expect("the terminal is open");
    }

    /// Waits until the terminal has shown `text` `count` times.
    fn expect(&self, text: &str, count: usize) {
        let shown = || self.screen().matches(text).count() >= count;
        assert!(wait_until(Duration::from_secs(30), shown), "no {count} x {text:?} in {}", self.screen());
    }
}

impl TerminalSession {
    /// Waits until the terminal has shown 100 more bytes, which is more than what is typed.
    fn expect_more_text(&self) {
        let before = self.screen().len();
        assert!(
            wait_until(Duration::from_secs(30), || self.screen().len() > before + 100),
            "{}",
            self.screen()
        );
    }
}

impl Drop for TerminalSession {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn chat_in_a_terminal_answers_remembers_and_is_interrupted() {
    let folder = Folder::new();
    let model = chat_model(&folder);
    // A context in which an answer takes longer than the test.
    let mut command = hearth_command(&["run", &model, "--temperature", "0", "--context", "60000"]);
    command.env("XDG_STATE_HOME", folder.path());
    let mut session = TerminalSession::start(command);
    session.expect(">>> ", 1);
    session.type_keys("/help\r");
    session.expect("forget the conversation", 1);
    session.type_keys("/nonsense\r");
    session.expect("There is no command /nonsense", 1);
    for (count, text) in [(1, "Who art thou?\r"), (2, "\"\"\"Two\rlines\"\"\"\r")] {
        session.type_keys(text);
        session.expect_more_text();
        send_signal(session.child.id(), "INT");
        session.expect("; interrupted]", count);
    }
    session.type_keys("/clear\r");
    session.expect("/clear", 2);
    // One prompt for each of the six entries, counting this one.
    session.expect(">>> ", 6);
    session.type_keys("\u{4}");
    let mut status = None;
    assert!(wait_until(Duration::from_secs(10), || {
        status = session.child.try_wait().expect("a child");
        status.is_some()
    }));
    assert_eq!(status.and_then(|status| status.code()), Some(0), "{}", session.screen());
    let history = folder.read("hearth/history");
    assert!(history.contains("Who art thou?") && history.contains("/nonsense"), "{history}");
}

#[test]
fn interrupted_text_keeps_what_was_written() {
    let arguments =
        ["run", &model_path("q4_k"), "The Lord is my", "--temperature", "0", "--context", "60000"];
    let mut command = hearth_command(&arguments);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let mut first = [0; 4];
    child.stdout.as_mut().expect("a pipe").read_exact(&mut first).expect("text");
    send_signal(child.id(), "INT");
    let output = child.wait_with_output().expect("it ends");
    let (stdout, stderr) = output_texts(&output);
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    assert!(stderr.contains("; interrupted]"), "{stderr}");
    // The signal may arrive before the second token.
    let continues = stdout == "\n" || stdout.starts_with(',') && stdout.ends_with('\n');
    assert!(first == *b" God" && continues, "{stdout}");
}

#[test]
fn chat_ends_at_a_termination_signal_even_during_an_answer() {
    let folder = Folder::new();
    let model = chat_model(&folder);
    for answers in [false, true] {
        let mut command = hearth_command(&["run", &model, "--context", "60000"]);
        command.env("XDG_STATE_HOME", folder.path());
        let mut session = TerminalSession::start(command);
        session.expect(">>> ", 1);
        if answers {
            session.type_keys("Who art thou?\r");
            session.expect_more_text();
        }
        send_signal(session.child.id(), "TERM");
        let mut status = None;
        let has_ended = wait_until(Duration::from_secs(10), || {
            status = session.child.try_wait().expect("a child");
            status.is_some()
        });
        assert!(has_ended, "{}", session.screen());
        assert_eq!(status.and_then(|status| status.code()), Some(130), "{}", session.screen());
    }
}

#[test]
fn plan_from_a_pipe_is_read() {
    let (folder, model) = (Folder::new(), model_path("q4_k"));
    let plan = folder.write_plan(&[8], &[], 128);
    let script = format!("hearth execute <(cat {plan}) --model {model} --prompt 'The Lord' --tokens 2");
    run_script(&folder, "a plan from a pipe", 60, &script);
}
