//! Tests that Ctrl-C ends a command cleanly and leaves no incomplete files or busy workers.
//!
//! Not here: interrupted labs (`lab`).

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hearth_schema::trace::Outcome;

use crate::folder::Folder;
use crate::processes::{
    Head, Worker, assert_rejected, hearth_command, model_path, output_texts, program_path, run_successfully,
    send_signal, wait_until,
};

/// Starts a process that writes a large model into an empty folder, and waits until it has begun.
fn start_writer(folder: &Folder) -> Child {
    let mut command = hearth_command(&["synth", "--preset", "8b", "--output", &folder.path_of("8b.gguf")]);
    let writer = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
    assert!(wait_until(Duration::from_secs(10), || folder.file_names().len() == 1), "an unfinished file");
    writer
}

#[test]
fn unfinished_model_is_removed() {
    let folder = Folder::new();
    let mut writer = start_writer(&folder);
    send_signal(writer.id(), "INT");
    assert_eq!(writer.wait().expect("it ends").code(), Some(130));
    assert!(folder.file_names().is_empty());
}

#[test]
fn next_run_removes_the_partial_file_of_a_killed_run() {
    let folder = Folder::new();
    let mut writer = start_writer(&folder);
    let partial = folder.file_names();
    let synth = ["synth", "--preset", "tiny", "--output", &folder.path_of("tiny.gguf")];
    run_successfully(&synth);
    assert!(folder.has_file(&partial[0]), "the file of a running process stays");
    writer.kill().expect("it runs");
    writer.wait().expect("it ends");
    assert!(folder.has_file(&partial[0]), "a killed process cannot remove its file");
    run_successfully(&synth);
    assert_eq!(folder.file_names(), ["tiny.gguf"]);
}

#[test]
fn interrupted_sweep_keeps_its_rows() {
    let (folder, file) = Folder::with_two_device_scenario();
    let table = folder.path_of("table.csv");
    // Overlapping seeds are rejected, so a different way to get many rows is used.
    let overlapping = ["sweep", &file, "--vary", "seed=1,100000", "--repeat", "50000", "-o", &table];
    assert_rejected(&overlapping, &["seed"]);
    let arguments = ["sweep", &file, "--vary", "workload.prompt=4", "--repeat", "100000", "-o", &table];
    let mut command = hearth_command(&arguments);
    let sweep = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the sweep starts");
    std::thread::sleep(Duration::from_secs(2));
    send_signal(sweep.id(), "INT");
    let output = sweep.wait_with_output().expect("the sweep ends");
    let (_, stderr) = output_texts(&output);
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    assert!(stderr.contains("of 100000 rows were computed"), "{stderr}");
    let rows = folder.read("table.csv").lines().count() - 2;
    assert!((1..100_000).contains(&rows), "{rows}: {stderr}");
    assert!(stderr.contains(&format!("stopped: {rows} of")), "{rows}: {stderr}");
    assert_rejected(&["sweep", "merge", &table], &["rows are missing", "run it again"]);
}

#[test]
fn interrupted_run_frees_its_workers() {
    let (folder, worker) = (Folder::new(), Worker::start(&model_path("q4_k")));
    let plan = folder.write_plan(&[4, 4], &[&worker.address], 4096);
    for signal in ["INT", "TERM", "HUP"] {
        let mut head = Head::start(&plan, 4000, &["--trace", &folder.path_of("run.trace")]);
        head.wait_for_tokens(10);
        let start = Instant::now();
        head.send_signal(signal);
        let observed = head.finish();
        assert_eq!(observed.exit_code, Some(3), "{signal}: {}", observed.other_output);
        assert!(observed.other_output.contains("interrupted"), "{signal}: {}", observed.other_output);
        assert!(start.elapsed() < Duration::from_secs(10), "{signal}: {:?}", start.elapsed());
        let trace = folder.read_trace("run.trace");
        assert_eq!(trace.outcome, Outcome::Killed);
        let outputs = trace.passes.iter().filter(|pass| pass.has_output).count();
        assert!(outputs >= observed.tokens.len(), "{outputs} passes for {} tokens", observed.tokens.len());
    }
    // The worker accepts the next head immediately.
    let observed = Head::run(&plan, 4, &[]);
    assert_eq!(observed.tokens.len(), 4, "{}", observed.other_output);
}

#[test]
fn worker_under_nohup_ignores_hangup() {
    let (folder, mut command) = (Folder::new(), Command::new("sh"));
    command.args(["-c", "trap '' HUP; exec \"$@\"", "sh", &program_path(), "worker", "--threads", "1"]);
    command.args(["--listen", "127.0.0.1:0", "--model", &model_path("q4_k")]).env_remove("HEARTH_KEY");
    let worker = Worker::spawn(command.stdin(Stdio::null()));
    worker.send_signal("HUP");
    std::thread::sleep(Duration::from_millis(200));
    let plan = folder.write_plan(&[4, 4], &[&worker.address], 64);
    let observed = Head::run(&plan, 2, &[]);
    assert_eq!(observed.tokens.len(), 2, "{}", observed.other_output);
}

#[test]
fn interrupted_head_exits_although_a_worker_is_silent() {
    let (folder, worker) = (Folder::new(), Worker::start(&model_path("q4_k")));
    let plan = folder.write_plan(&[4, 4], &[&worker.address], 4096);
    let mut head = Head::start(&plan, 4000, &[]);
    head.wait_for_tokens(10);
    worker.send_signal("STOP");
    head.send_signal("INT");
    let start = Instant::now();
    let observed = head.finish();
    worker.send_signal("CONT");
    assert!(start.elapsed().as_secs() < 8, "it ended after {} s", start.elapsed().as_secs());
    assert!(observed.exit_code.is_some_and(|code| code != 0), "{}", observed.other_output);
}
