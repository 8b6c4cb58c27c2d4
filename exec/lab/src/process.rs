//! The process of a device: starts it inside its control groups, reads its output, and kills it.
//!
//! A shell joins the groups and then executes the program, so that all pages of the program are charged to the groups.
//! The program exits when its standard input is closed. The lab has the other end of this pipe, so the processes of the
//! devices exit when the lab is killed.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::network::Namespace;
use super::{Cgroup, LabError};

/// The process that emulates a device. It is killed when this value is dropped.
#[derive(Debug)]
pub struct DeviceProcess {
    name: String,
    process: Child,
    lines: mpsc::Receiver<String>,
    errors: Option<JoinHandle<String>>,
}

/// A handle to freeze the process of a device. Invalid after the [`DeviceProcess`] is dropped: its ID may be reused.
#[derive(Debug, Clone, Copy)]
pub struct FreezeHandle(Pid);

impl FreezeHandle {
    /// Freezes the process with SIGSTOP. It then neither sends nor receives, but its connections remain open.
    pub fn freeze(self) {
        // It fails only for a process that has exited.
        let _ = kill_process(self.0, Signal::STOP);
    }
}

/// A shell script that joins the control groups in its arguments before `--`, and executes the command after `--`.
const JOIN_SCRIPT: &str =
    r#"while [ "$1" != -- ]; do echo $$ > "$1" || exit 125; shift; done; shift; exec "$@""#;

/// Pins the process of a command to `cpus`. Does nothing if the list is empty.
fn set_affinity(command: &mut Command, cpus: &[u32]) {
    if cpus.is_empty() {
        return;
    }
    let mut set = CpuSet::new();
    cpus.iter().filter(|&&cpu| cpu < CpuSet::MAX_CPU as u32).for_each(|&cpu| set.set(cpu as usize));
    let restrict = move || Ok(sched_setaffinity(None, &set)?);
    // SAFETY: between fork and exec only one system call is made, and nothing is allocated.
    unsafe { command.pre_exec(restrict) };
}

/// Where the process of a device runs: its control group, CPUs and network.
#[derive(Debug, Clone, Copy, Default)]
pub struct Placement<'a> {
    pub cgroup: Option<&'a Cgroup>,
    /// The CPUs that the process is allowed to run on; empty for all.
    pub cpus: &'a [u32],
    /// The host of the emulated network that the process runs on.
    pub host: Option<&'a Namespace>,
}

/// Returns a command that joins `cgroup`, if there is one, and then executes `program`.
pub(super) fn command_in_group(cgroup: Option<&Cgroup>, program: &Path, arguments: &[String]) -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", JOIN_SCRIPT, "sh"]);
    command.args(cgroup.map(Cgroup::procs_files).unwrap_or_default()).arg("--").arg(program).args(arguments);
    command
}

/// Starts the process of a command. `name` is the name of the device or program in the error.
pub(super) fn spawn(command: &mut Command, name: &str) -> Result<Child, LabError> {
    command.spawn().map_err(|error| LabError::Process {
        name: name.into(),
        what: "cannot be started",
        why: error.to_string(),
    })
}

pub(super) fn kill(process: &mut Child) {
    let _ = process.kill();
    let _ = process.wait();
}

/// Reads a stream to its end on another thread.
pub(super) fn read_all(mut stream: impl Read + Send + 'static) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut text = String::new();
        let _ = stream.read_to_string(&mut text);
        text
    })
}

impl DeviceProcess {
    /// Starts `program` with `arguments` in the control group and on the CPUs of `placement`.
    pub fn start(
        name: &str,
        placement: Placement,
        program: &Path,
        arguments: &[String],
    ) -> Result<DeviceProcess, LabError> {
        let mut command = command_in_group(placement.cgroup, program, arguments);
        set_affinity(&mut command, placement.cpus);
        if let Some(host) = placement.host {
            host.hold(&mut command);
        }
        // On one network host the ring is measured without encryption; several hosts get a key file.
        command.env_remove(hearth_ring::KEY_VARIABLE);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = spawn(&mut command, name)?;
        let (sender, lines) = mpsc::channel();
        if let Some(out) = process.stdout.take() {
            let mut lines = BufReader::new(out).lines().map_while(Result::ok);
            std::thread::spawn(move || lines.try_for_each(|line| sender.send(line)));
        }
        let errors = process.stderr.take().map(read_all);
        Ok(DeviceProcess { name: name.into(), process, lines, errors })
    }

    pub fn freeze_handle(&self) -> FreezeHandle {
        FreezeHandle(Pid::from_child(&self.process))
    }

    /// Waits for the next line of output. Returns an error if there is none within `timeout`, or if the process exits.
    pub fn next_line(&mut self, timeout: Duration) -> Result<String, LabError> {
        self.receive_line(timeout)?.ok_or_else(|| self.exit_error("exited"))
    }

    /// Calls `on_line` for each line of output. Returns an error if the process fails, or prints no line for `timeout`.
    pub fn for_each_line(mut self, timeout: Duration, mut on_line: impl FnMut(&str)) -> Result<(), LabError> {
        while let Some(line) = self.receive_line(timeout)? {
            on_line(&line);
        }
        match self.process.wait() {
            Ok(status) if status.success() => Ok(()),
            _ => Err(self.exit_error("failed")),
        }
    }

    /// Waits for the next line of the process's output. Returns `None` if the process has closed its output.
    fn receive_line(&self, timeout: Duration) -> Result<Option<String>, LabError> {
        match self.lines.recv_timeout(timeout) {
            Ok(line) => Ok(Some(line)),
            Err(mpsc::RecvTimeoutError::Disconnected) => Ok(None),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                Err(self.error("does not respond", format!("no output for {} s", timeout.as_secs())))
            }
        }
    }

    /// Waits for the process to exit. Returns an error with its exit status and its error output.
    fn exit_error(&mut self, what: &'static str) -> LabError {
        let status = self.process.wait().map_or_else(|error| error.to_string(), describe);
        let printed = self.errors.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
        self.error(what, format!("{status}\n{printed}").trim_end().into())
    }

    fn error(&self, what: &'static str, why: String) -> LabError {
        LabError::Process { name: self.name.clone(), what, why }
    }
}

fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match status.signal() {
        Some(signal) if signal == Signal::KILL.as_raw() => {
            format!("{status}; the kernel kills a process that exceeds its memory limit: increase the limit")
        }
        _ => status.to_string(),
    }
}

impl Drop for DeviceProcess {
    fn drop(&mut self) {
        kill(&mut self.process);
    }
}
