//! Shared by the tests of the command line: the program, the test models, and workers that end with the test.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// The program under test: this build's, or the one that `HEARTH_PROGRAM` names, as a release build for long trials.
fn program() -> String {
    std::env::var("HEARTH_PROGRAM").unwrap_or_else(|_| env!("CARGO_BIN_EXE_hearth").into())
}

/// The program under test with arguments.
pub fn hearth(arguments: &[&str]) -> Command {
    let mut command = Command::new(program());
    // A key of whoever runs the tests is none of their business.
    command.args(arguments).stdin(Stdio::null()).env_remove("HEARTH_KEY");
    command
}

/// Runs the program to its end.
pub fn run(arguments: &[&str]) -> Output {
    hearth(arguments).output().expect("the program starts")
}

/// What it wrote to standard error, after failing with this code.
pub fn error(arguments: &[&str], code: i32) -> String {
    let output = run(arguments);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {text}");
    assert!(text.starts_with("error: ") && !text.contains("panicked"), "{text}");
    println!("$ hearth {}\n{text}", arguments.join(" "));
    text
}

/// A file of the repository's test data.
pub fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// A trained model by its weight format.
pub fn model(format: &str) -> String {
    data(&format!("models/psalm-7m-{format}.gguf")).display().to_string()
}

/// Sends a process a signal by name.
pub fn signal(process: u32, name: &str) {
    let sent = Command::new("kill").args([format!("-{name}"), process.to_string()]).status();
    assert!(sent.is_ok_and(|status| status.success()));
}

/// A worker process at a free port.
pub struct Worker {
    process: Child,
    /// Where it listens.
    pub address: String,
}

impl Worker {
    /// Starts a worker with a model.
    pub fn start(model: &str) -> Worker {
        Self::spawn(&mut hearth(&["worker", "--listen", "127.0.0.1:0", "--threads", "1", "--model", model]))
    }

    /// Starts a worker that fetches its layers into a folder.
    pub fn fetching(folder: &str) -> Worker {
        let arguments = ["worker", "--listen", "127.0.0.1:0", "--threads", "1", "--fetch", folder];
        Self::spawn(&mut hearth(&arguments))
    }

    /// Starts a worker that takes only those with a key.
    pub fn with_key(model: &str, listen: &str, key: &str) -> Worker {
        let arguments = ["worker", "--listen", listen, "--threads", "1", "--model", model, "--key", key];
        Self::spawn(&mut hearth(&arguments))
    }

    /// Starts a worker with a model at an address where one was before.
    pub fn again(model: &str, address: &str) -> Worker {
        Self::spawn(&mut hearth(&["worker", "--listen", address, "--threads", "1", "--model", model]))
    }

    /// Starts a worker in a network namespace.
    pub fn inside(namespace: &str, model: &str, listen: &str, key: &str) -> Worker {
        Self::inside_as(namespace, model, listen, key, "far")
    }

    /// Starts a worker in a network namespace, of this name.
    pub fn inside_as(namespace: &str, model: &str, listen: &str, key: &str, name: &str) -> Worker {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", namespace, &program(), "worker", "--threads", "1"]);
        command.args(["--listen", listen, "--model", model, "--key", key, "--name", name]);
        Self::spawn(command.stdin(Stdio::null()).env_remove("HEARTH_KEY"))
    }

    fn spawn(command: &mut Command) -> Worker {
        let mut process =
            command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("the worker starts");
        let mut line = String::new();
        let out = process.stdout.take().expect("piped");
        BufReader::new(out).read_line(&mut line).expect("the worker says where it listens");
        let address = line.split_ascii_whitespace().nth(2).expect("listening at ADDRESS").to_string();
        Worker { process, address }
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Sends it a signal by name.
    pub fn signal(&self, name: &str) {
        signal(self.process.id(), name);
    }

    /// Kills it without warning.
    pub fn kill(&mut self) {
        self.process.kill().expect("it runs");
        self.process.wait().expect("it ends");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A plan of these windows for the trained model in a weight format; the first device is the head.
pub fn plan(format: &str, windows: &[u32], addresses: &[&str], context: u32) -> String {
    use std::fmt::Write;
    let model = hearth_ring::LocalModel::open(Path::new(&model(format))).expect("a test model");
    let rounds = 8u32.div_ceil(windows.iter().sum());
    let mut text = format!(
        "schema: plan/1\nscenario: {{name: test, digest: 'sha256:0'}}\nmodel: {{name: psalm, digest: '{}', \
         shape_digest: '{}', layers: 8}}\nplanner: {{strategy: manual}}\nrounds: {rounds}\ncontext: {context}\n\
         kv_cache: f32\ndevices:\n",
        model.profile.digest,
        model.profile.shape_digest()
    );
    for (place, window) in windows.iter().enumerate() {
        let role = if place == 0 { "head" } else { "worker" };
        let address =
            place.checked_sub(1).map_or(String::new(), |at| format!("address: '{}', ", addresses[at]));
        let _ = writeln!(
            text,
            "- {{name: d{place}, {address}role: {role}, window: {window}, gpu_layers: 0, residency: {{policy: os}}}}"
        );
    }
    text
}
