//! The program under test, its workers and heads, and the test models.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::namespace::Namespace;
use crate::repository::root;

/// The prompt of a [`Head`].
pub const PROMPT: &str = "The Lord is my";

/// The program under test: this build's, or the one that `HEARTH_PROGRAM` names, as a release build for long trials.
pub fn program() -> String {
    std::env::var("HEARTH_PROGRAM").unwrap_or_else(|_| env!("CARGO_BIN_EXE_hearth").into())
}

/// The program under test, without the key of the user who runs the tests.
pub fn hearth<S: AsRef<OsStr>>(arguments: &[S]) -> Command {
    let mut command = Command::new(program());
    command.args(arguments).stdin(Stdio::null()).env_remove("HEARTH_KEY").env_remove("HEARTH_TOKEN");
    command
}

/// Runs the program to its end.
pub fn run<S: AsRef<OsStr>>(arguments: &[S]) -> Output {
    hearth(arguments).output().expect("the program starts")
}

/// Runs a command, checks its exit code, and returns standard output and standard error.
pub fn finish(command: &mut Command, code: i32) -> (String, String) {
    let output = command.output().expect("the program starts");
    let [stdout, stderr] =
        [&output.stdout, &output.stderr].map(|it| String::from_utf8_lossy(it).into_owned());
    assert_eq!(output.status.code(), Some(code), "{command:?}: {stdout}{stderr}");
    (stdout, stderr)
}

/// Standard output and standard error after ending with this code.
pub fn outputs<S: AsRef<OsStr>>(arguments: &[S], code: i32) -> (String, String) {
    finish(&mut hearth(arguments), code)
}

/// Standard output after success.
pub fn succeed<S: AsRef<OsStr>>(arguments: &[S]) -> String {
    outputs(arguments, 0).0
}

/// The document that `--json` prints, after ending with this code and with nothing on standard error.
pub fn json_with_code<S: AsRef<OsStr>>(arguments: &[S], code: i32) -> Value {
    let (stdout, stderr) = finish(hearth(arguments).arg("--json"), code);
    assert!(stderr.is_empty(), "{stderr}");
    parse(&stdout)
}

/// The document that `--json` prints, after success and with nothing on standard error.
pub fn json<S: AsRef<OsStr>>(arguments: &[S]) -> Value {
    json_with_code(arguments, 0)
}

/// Parses the only JSON document of an output.
pub fn parse(stdout: &str) -> Value {
    serde_json::from_str(stdout).unwrap_or_else(|error| panic!("{error}: {stdout}"))
}

/// The elements of a list in JSON.
pub fn list(value: &Value) -> &Vec<Value> {
    value.as_array().unwrap_or_else(|| panic!("not a list: {value}"))
}

/// A text of every element of a list in JSON, where it has one.
pub fn texts<'a>(value: &'a Value, key: &str) -> Vec<&'a str> {
    list(value).iter().filter_map(|element| element[key].as_str()).collect()
}

/// Standard error after failing with this code.
pub fn error<S: AsRef<OsStr>>(arguments: &[S], code: i32) -> String {
    let text = outputs(arguments, code).1;
    assert!(text.starts_with("error: ") && !text.contains("panicked"), "{text}");
    println!("{text}");
    text
}

/// Checks that the program refuses its input with a message that has all these parts.
pub fn assert_refused<S: AsRef<OsStr>>(arguments: &[S], parts: &[&str]) {
    let text = error(arguments, 2);
    for part in parts {
        let arguments: Vec<&OsStr> = arguments.iter().map(AsRef::as_ref).collect();
        assert!(text.contains(part), "{arguments:?}: no `{part}` in {text}");
    }
}

/// A file of the repository's test data.
pub fn data(name: &str) -> PathBuf {
    root().join("tests/data").join(name)
}

/// A shipped scenario, such as `home/phone-leaves`.
pub fn shipped(name: &str) -> String {
    root().join(format!("scenarios/{name}.yaml")).display().to_string()
}

/// A trained model by its weight format.
pub fn model(format: &str) -> String {
    data(&format!("models/psalm-7m-{format}.gguf")).display().to_string()
}

pub fn signal(process: u32, name: &str) {
    let sent = Command::new("kill").args([format!("-{name}"), process.to_string()]).status();
    assert!(sent.is_ok_and(|status| status.success()), "{name} {process}");
}

pub fn becomes_true(timeout: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    loop {
        let holds = condition();
        if holds || start.elapsed() > timeout {
            return holds;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A process that ends with the test.
pub struct Process(pub Child);

impl Process {
    /// Starts a process and waits for the first line of its standard output.
    pub fn until_ready(command: &mut Command) -> (Process, String) {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("it starts");
        let (mut line, out) = (String::new(), child.stdout.take().expect("piped"));
        BufReader::new(out).read_line(&mut line).expect("it prints that it is ready");
        (Process(child), line)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A worker process at a free port.
pub struct Worker {
    process: Process,
    pub address: String,
}

impl Worker {
    pub fn start(model: &str) -> Worker {
        Self::with(&["--listen", "127.0.0.1:0", "--model", model])
    }

    /// Starts a worker of one thread with these flags.
    pub fn with(flags: &[&str]) -> Worker {
        Self::spawn(hearth(&["worker", "--threads", "1"]).args(flags))
    }

    /// Starts a worker with flags in a network namespace.
    pub fn inside(namespace: &Namespace, flags: &[&str]) -> Worker {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &namespace.name, &program(), "worker", "--threads", "1"]).args(flags);
        command.args(["--listen", &format!("{}:0", namespace.inside)]);
        Self::spawn(command.stdin(Stdio::null()).env_remove("HEARTH_KEY"))
    }

    fn spawn(command: &mut Command) -> Worker {
        let (process, line) = Process::until_ready(command);
        let address = line.split_ascii_whitespace().nth(2).expect("listening at ADDRESS").to_string();
        Worker { process, address }
    }

    pub fn id(&self) -> u32 {
        self.process.0.id()
    }

    pub fn signal(&self, name: &str) {
        signal(self.id(), name);
    }

    /// Kills it without warning.
    pub fn kill(&mut self) {
        self.process.0.kill().expect("it runs");
        self.process.0.wait().expect("it ends");
    }
}

/// The arguments that execute a plan with one thread.
pub fn execute(plan: &str, model: &str, more: &[&str]) -> Vec<String> {
    let words = ["execute", plan, "--model", model, "--threads", "1", "--ignore-end"];
    words.iter().chain(more).map(|&word| word.to_owned()).collect()
}

/// What a head printed.
#[derive(Debug, Default)]
pub struct Observation {
    pub tokens: Vec<u32>,
    /// The longest time between two tokens.
    pub max_gap: Duration,
    /// It did not end.
    pub timed_out: bool,
    /// Its other lines on standard output, and standard error.
    pub text: String,
    pub code: Option<i32>,
}

/// A head of the model of q4_k whose tokens are observed as they are printed.
pub struct Head {
    process: Child,
    lines: mpsc::Receiver<(Instant, String)>,
    last_token: Option<Instant>,
    observed: Observation,
}

impl Head {
    /// Starts a plan for a number of tokens after [`PROMPT`].
    pub fn start(plan: &str, tokens: usize, more: &[&str]) -> Head {
        let flags = ["--prompt", PROMPT, "--tokens", &tokens.to_string(), "--json", "--mark-tokens"];
        let mut command = hearth(&execute(plan, &model("q4_k"), &[&flags[..], more].concat()));
        let mut process =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the head starts");
        let (line_tx, lines) = mpsc::channel();
        let out = process.stdout.take().expect("piped");
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                let _ = line_tx.send((Instant::now(), line));
            }
        });
        Head { process, lines, last_token: None, observed: Observation::default() }
    }

    pub fn run(plan: &str, tokens: usize, more: &[&str]) -> Observation {
        Head::start(plan, tokens, more).finish()
    }

    /// Waits until this many tokens are printed, or the head has exited.
    pub fn wait_for_tokens(&mut self, count: usize) {
        while self.observed.tokens.len() < count {
            match self.lines.recv_timeout(Duration::from_mins(1)) {
                Ok((now, line)) => self.observe(now, &line),
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    self.observed.timed_out = true;
                    let _ = self.process.kill();
                    return;
                }
            }
        }
    }

    fn observe(&mut self, now: Instant, line: &str) {
        let Some(token) = line.strip_prefix("token ").and_then(|token| token.trim().parse().ok()) else {
            self.observed.text += line;
            return;
        };
        let gap = self.last_token.replace(now).map_or(Duration::ZERO, |last| now - last);
        self.observed.max_gap = self.observed.max_gap.max(gap);
        self.observed.tokens.push(token);
    }

    pub fn signal(&self, name: &str) {
        signal(self.process.id(), name);
    }

    /// Waits for its end.
    pub fn finish(mut self) -> Observation {
        self.wait_for_tokens(usize::MAX);
        let output = self.process.wait_with_output().expect("the head ends");
        self.observed.text += &String::from_utf8_lossy(&output.stderr);
        self.observed.code = output.status.code();
        self.observed
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
