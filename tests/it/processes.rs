//! Runs the program under test, its workers and heads, and finds test data.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use hearth_ring::{EncryptedTransport, Key, TcpTransport};
use serde_json::Value;

use crate::folder::Folder;
use crate::namespace::NetworkNamespace;
use crate::repository::repository_root;

pub const PROMPT: &str = "The Lord is my";

/// The environment variable that shortens measurements: the tests need no exact rates of this machine.
const MINIMAL_MEASUREMENTS: (&str, &str) = ("HEARTH_MINIMAL_MEASUREMENTS", "1");

/// Returns the path of the program under test: `HEARTH_PROGRAM` if it is set, else the `hearth` of this build.
pub fn program_path() -> String {
    std::env::var("HEARTH_PROGRAM").unwrap_or_else(|_| env!("CARGO_BIN_EXE_hearth").into())
}

/// Returns a command that runs the program under test, without the user's `HEARTH_KEY`, `HEARTH_TOKEN` and cache.
pub fn hearth_command<S: AsRef<OsStr>>(arguments: &[S]) -> Command {
    let mut command = Command::new(program_path());
    command.args(arguments).stdin(Stdio::null()).env_remove("HEARTH_KEY").env_remove("HEARTH_TOKEN");
    command.env(MINIMAL_MEASUREMENTS.0, MINIMAL_MEASUREMENTS.1);
    command.env("XDG_CACHE_HOME", concat!(env!("CARGO_TARGET_TMPDIR"), "/cache"));
    command
}

pub fn run<S: AsRef<OsStr>>(arguments: &[S]) -> Output {
    hearth_command(arguments).output().expect("the program starts")
}

pub fn output_texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

/// Runs a command, checks its exit code, and returns standard output and standard error.
pub fn run_command(command: &mut Command, code: i32) -> (String, String) {
    let output = command.output().expect("the program starts");
    let (stdout, stderr) = output_texts(&output);
    assert_eq!(output.status.code(), Some(code), "{command:?}: {stdout}{stderr}");
    (stdout, stderr)
}

/// Runs a bash script in a folder and checks that it succeeds. In the script `hearth` is the program under test.
pub fn run_script(folder: &Folder, name: &str, limit_seconds: u32, script: &str) {
    // A link in PATH instead of a shell function, so that a process started with `&` is the program and ends with the
    // script.
    let link =
        format!("mkdir -p bin && ln -sf '{}' bin/hearth && export PATH=\"$PWD/bin:$PATH\"", program_path());
    // The output goes to a file, because a process that outlives the script would keep a pipe open.
    let log = File::create(folder.path_of("log")).expect("a file");
    let mut command = Command::new("timeout");
    command.arg(limit_seconds.to_string());
    command.args(["bash", "-euo", "pipefail", "-c", &format!("{link}\n{script}")]);
    command.current_dir(folder.path()).env("HOME", folder.path());
    command.env_remove("HEARTH_KEY").env_remove("XDG_CACHE_HOME").stdin(Stdio::null());
    command.env(MINIMAL_MEASUREMENTS.0, MINIMAL_MEASUREMENTS.1);
    command.stdout(log.try_clone().expect("a file")).stderr(log);
    let status = command.status().expect("bash runs");
    assert!(status.success(), "{name}: {status}\n{}", folder.read("log"));
}

/// Runs the program, checks its exit code, and returns standard output and standard error.
pub fn run_with_code<S: AsRef<OsStr>>(arguments: &[S], code: i32) -> (String, String) {
    run_command(&mut hearth_command(arguments), code)
}

/// Runs the program, checks that it succeeds, and returns standard output.
pub fn run_successfully<S: AsRef<OsStr>>(arguments: &[S]) -> String {
    run_with_code(arguments, 0).0
}

/// Runs the program with `--json`, checks the exit code and that standard error is empty, and returns the JSON.
pub fn run_json_with_code<S: AsRef<OsStr>>(arguments: &[S], code: i32) -> Value {
    let (stdout, stderr) = run_command(hearth_command(arguments).arg("--json"), code);
    assert!(stderr.is_empty(), "{stderr}");
    parse_json(&stdout)
}

pub fn run_json<S: AsRef<OsStr>>(arguments: &[S]) -> Value {
    run_json_with_code(arguments, 0)
}

pub fn parse_json(stdout: &str) -> Value {
    serde_json::from_str(stdout).unwrap_or_else(|error| panic!("{error}: {stdout}"))
}

pub fn expect_array(value: &Value) -> &Vec<Value> {
    value.as_array().unwrap_or_else(|| panic!("not a list: {value}"))
}

pub fn expect_number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("not a number: {value}"))
}

/// Returns the mean time per token in the JSON of a run, in milliseconds.
pub fn mean_tpot_ms(run: &Value) -> f64 {
    expect_number(&run["tpot_ms"]["mean"])
}

/// Returns the strings under `key` in the elements of a JSON list. Elements without a string under `key` are left out.
pub fn string_values<'a>(value: &'a Value, key: &str) -> Vec<&'a str> {
    expect_array(value).iter().filter_map(|element| element[key].as_str()).collect()
}

/// Returns the integers under `key` in the elements of a JSON list. Each element must have one.
pub fn integer_values(value: &Value, key: &str) -> Vec<u64> {
    let integer = |element: &Value| element[key].as_u64().unwrap_or_else(|| panic!("no `{key}`: {element}"));
    expect_array(value).iter().map(integer).collect()
}

/// Runs the program, checks that it fails with this exit code, and returns standard error.
pub fn run_failing_with_code<S: AsRef<OsStr>>(arguments: &[S], code: i32) -> String {
    let text = run_with_code(arguments, code).1;
    assert!(text.starts_with("error: ") && !text.contains("panicked"), "{text}");
    println!("{text}");
    text
}

/// Checks that the program rejects its input (exit code 2) with a message that contains all the given parts.
pub fn assert_rejected<S: AsRef<OsStr>>(arguments: &[S], parts: &[&str]) {
    let text = run_failing_with_code(arguments, 2);
    for part in parts {
        let arguments: Vec<&OsStr> = arguments.iter().map(AsRef::as_ref).collect();
        assert!(text.contains(part), "{arguments:?}: no `{part}` in {text}");
    }
}

pub fn test_data_path(name: &str) -> PathBuf {
    repository_root().join("tests/data").join(name)
}

/// Returns the path of a scenario in `scenarios`, such as `home/phone-leaves`.
pub fn scenario_path(name: &str) -> String {
    repository_root().join(format!("scenarios/{name}.yaml")).display().to_string()
}

/// Returns the path of the trained test model in a weight format.
pub fn model_path(format: &str) -> String {
    test_data_path(&format!("models/psalm-7m-{format}.gguf")).display().to_string()
}

pub fn send_signal(process: u32, name: &str) {
    let sent = Command::new("kill").args([format!("-{name}"), process.to_string()]).status();
    assert!(sent.is_ok_and(|status| status.success()), "{name} {process}");
}

/// Returns whether a condition becomes true within a time limit.
pub fn wait_until(timeout: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    loop {
        let holds = condition();
        if holds || start.elapsed() > timeout {
            return holds;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A process that is killed on drop.
pub struct Process(pub Child);

impl Process {
    /// Starts a process and waits for the first line of its standard output.
    pub fn spawn_until_ready(command: &mut Command) -> (Process, String) {
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

/// A worker process that listens on a free port.
pub struct Worker {
    process: Process,
    pub address: String,
}

impl Worker {
    pub fn start(model: &str) -> Worker {
        Self::with_flags(&["--listen", "127.0.0.1:0", "--model", model])
    }

    /// Starts a worker with one thread and the given flags.
    pub fn with_flags(flags: &[&str]) -> Worker {
        Self::spawn(hearth_command(&["worker", "--threads", "1"]).args(flags))
    }

    /// Starts a worker with the given flags in a network namespace.
    pub fn in_namespace(namespace: &NetworkNamespace, flags: &[&str]) -> Worker {
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &namespace.name, &program_path(), "worker", "--threads", "1"])
            .args(flags);
        command.args(["--listen", &format!("{}:0", namespace.namespace_address)]);
        Self::spawn(command.stdin(Stdio::null()).env_remove("HEARTH_KEY"))
    }

    pub fn spawn(command: &mut Command) -> Worker {
        let (process, line) = Process::spawn_until_ready(command);
        let address = line.split_ascii_whitespace().nth(2).expect("listening on ADDRESS").to_string();
        Worker { process, address }
    }

    pub fn id(&self) -> u32 {
        self.process.0.id()
    }

    pub fn send_signal(&self, name: &str) {
        send_signal(self.id(), name);
    }

    pub fn kill(&mut self) {
        self.process.0.kill().expect("it runs");
        self.process.0.wait().expect("it ends");
    }
}

/// Returns the arguments of `hearth` that execute a plan with one thread.
pub fn execute_arguments(plan: &str, model: &str, more: &[&str]) -> Vec<String> {
    let words = ["execute", plan, "--model", model, "--threads", "1", "--ignore-end"];
    words.iter().chain(more).map(|&word| word.to_owned()).collect()
}

/// Returns a TCP transport that encrypts with the key in the file `key`.
pub fn encrypted_transport(key: &str) -> EncryptedTransport<TcpTransport> {
    let key = Key::from_file_or_env(Some(key.as_ref())).expect("a key").expect("ours");
    EncryptedTransport::new(TcpTransport, key)
}

/// The tokens, other output and exit code of a head process.
#[derive(Debug, Default)]
pub struct HeadOutput {
    pub tokens: Vec<u32>,
    pub max_token_gap: Duration,
    /// Whether the head was killed because it printed no token for too long.
    pub timed_out: bool,
    /// The lines of standard output that are not tokens, then standard error.
    pub other_output: String,
    pub exit_code: Option<i32>,
}

/// A head with the q4_k test model, whose tokens are recorded when they are printed.
pub struct Head {
    process: Child,
    lines: mpsc::Receiver<(Instant, String)>,
    last_token: Option<Instant>,
    observed: HeadOutput,
}

impl Head {
    /// Starts a head that generates `tokens` tokens after [`PROMPT`].
    pub fn start(plan: &str, tokens: usize, more: &[&str]) -> Head {
        Head::with_model(&model_path("q4_k"), plan, tokens, more)
    }

    pub fn with_model(model: &str, plan: &str, tokens: usize, more: &[&str]) -> Head {
        let flags = ["--prompt", PROMPT, "--tokens", &tokens.to_string(), "--json", "--mark-tokens"];
        let mut command = hearth_command(&execute_arguments(plan, model, &[&flags[..], more].concat()));
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().expect("the head starts");
        let (line_tx, lines) = mpsc::channel();
        let out = process.stdout.take().expect("piped");
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                let _ = line_tx.send((Instant::now(), line));
            }
        });
        Head { process, lines, last_token: None, observed: HeadOutput::default() }
    }

    pub fn run(plan: &str, tokens: usize, more: &[&str]) -> HeadOutput {
        Head::start(plan, tokens, more).finish()
    }

    /// Waits until `count` tokens are printed or the head has exited.
    pub fn wait_for_tokens(&mut self, count: usize) {
        while self.observed.tokens.len() < count {
            match self.lines.recv_timeout(Duration::from_mins(1)) {
                Ok((now, line)) => self.observe(now, &line),
                Err(error) => {
                    if error == RecvTimeoutError::Timeout {
                        self.observed.timed_out = true;
                        let _ = self.process.kill();
                    }
                    return;
                }
            }
        }
    }

    fn observe(&mut self, now: Instant, line: &str) {
        let Some(token) = line.strip_prefix("token ").and_then(|token| token.trim().parse().ok()) else {
            self.observed.other_output += line;
            return;
        };
        let gap = self.last_token.replace(now).map_or(Duration::ZERO, |last| now - last);
        self.observed.max_token_gap = self.observed.max_token_gap.max(gap);
        self.observed.tokens.push(token);
    }

    pub fn send_signal(&self, name: &str) {
        send_signal(self.process.id(), name);
    }

    pub fn finish(mut self) -> HeadOutput {
        self.wait_for_tokens(usize::MAX);
        let output = self.process.wait_with_output().expect("the head ends");
        self.observed.other_output += &String::from_utf8_lossy(&output.stderr);
        self.observed.exit_code = output.status.code();
        self.observed
    }
}

/// Returns a plan with these windows for the test model in a weight format, as [`plan_yaml_for_model`] does.
pub fn plan_yaml(format: &str, windows: &[u32], addresses: &[&str], context: u32) -> String {
    plan_yaml_for_model(&model_path(format), windows, addresses, context)
}

/// Returns a plan with these windows for a model file. The first device is the head; workers listen at `addresses`.
pub fn plan_yaml_for_model(model: &str, windows: &[u32], addresses: &[&str], context: u32) -> String {
    let profile = hearth_ring::LocalModel::open(Path::new(model)).expect("a model").profile;
    let (digest, shape_digest, layers) = (&profile.digest, profile.shape_digest(), profile.shape.layers.0);
    let rounds = layers.div_ceil(windows.iter().sum());
    let mut text = format!(
        "schema: plan/1\nscenario: {{name: test, digest: 'sha256:0'}}\nmodel: {{name: test, digest: '{digest}', \
         shape_digest: '{shape_digest}', layers: {layers}}}\nplanner: {{strategy: manual}}\nrounds: {rounds}\n\
         context: {context}\nkv_cache: f32\ndevices:\n"
    );
    assert!(windows.len() <= addresses.len() + 1, "each worker has an address");
    let workers = addresses.iter().map(|address| format!("address: '{address}', role: worker"));
    let roles = std::iter::once("role: head".to_owned()).chain(workers);
    for ((index, window), role) in windows.iter().enumerate().zip(roles) {
        let device = format!("- {{name: d{index}, {role}, window: {window}, gpu_layers: 0");
        text.extend([&device, ", residency: {policy: os}}\n"]);
    }
    text
}
