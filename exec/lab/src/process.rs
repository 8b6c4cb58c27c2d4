//! The process of a device: starts it inside its control groups, reads its output, and kills it.
//!
//! A shell joins the groups and then executes the program, so that all pages of the program are counted. The program
//! exits when its standard input is closed. The lab holds the other end of that pipe, so no device outlives the lab,
//! even if the lab is killed.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use super::{Group, LabError};

/// A process on a device, which is killed when this is dropped.
#[derive(Debug)]
pub struct DeviceProcess {
    name: String,
    process: std::process::Child,
    lines: mpsc::Receiver<String>,
    errors: Option<std::thread::JoinHandle<String>>,
}

/// A handle that freezes the process of a device. It must only be used while the [`DeviceProcess`] exists, because
/// the process ID is reused later.
#[derive(Debug, Clone, Copy)]
pub struct ProcessStopper {
    process: u32,
}

impl ProcessStopper {
    /// Freezes the process with SIGSTOP: it neither sends nor receives, but its connections remain open.
    pub fn stop(self) {
        // SAFETY: kill takes two numbers and touches no memory of this process.
        unsafe { libc::kill(self.process as libc::pid_t, libc::SIGSTOP) };
    }
}

/// A shell script that joins the groups in its arguments before `--`, then executes the command after it.
const JOIN_SCRIPT: &str =
    r#"while [ "$1" != -- ]; do echo $$ > "$1" || exit 125; shift; done; shift; exec "$@""#;

/// Returns the indices of the processors that this process is allowed to run on.
pub fn processors() -> Vec<u32> {
    // SAFETY: the set is a plain bit mask, zero is a valid one, and the call only fills it.
    let allowed = unsafe {
        let mut allowed: libc::cpu_set_t = std::mem::zeroed();
        let failed = libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut allowed) != 0;
        if failed { None } else { Some(allowed) }
    };
    // SAFETY: the number is below the size of the set.
    let has = |set: &libc::cpu_set_t, cpu: u32| unsafe { libc::CPU_ISSET(cpu as usize, set) };
    allowed.map_or(Vec::new(), |set| (0..libc::CPU_SETSIZE as u32).filter(|&cpu| has(&set, cpu)).collect())
}

/// Pins the process of a command to these processors. Does nothing if the list is empty.
fn set_affinity(command: &mut Command, processors: &[u32]) {
    if processors.is_empty() {
        return;
    }
    // SAFETY: zero is a valid set, and indices beyond its size are filtered out.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for &cpu in processors.iter().filter(|&&cpu| cpu < libc::CPU_SETSIZE as u32) {
            libc::CPU_SET(cpu as usize, &mut set);
        }
        set
    };
    let restrict = move || {
        // SAFETY: the call reads the set, which the closure owns.
        let failed = unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) } != 0;
        if failed { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: between fork and exec only one system call is made, and nothing is allocated.
    unsafe { command.pre_exec(restrict) };
}

/// The control group that a device's process joins and the processors that it runs on.
#[derive(Debug, Clone, Copy, Default)]
pub struct Placement<'a> {
    /// The control group, if the device has one.
    pub group: Option<&'a Group>,
    /// The processors that it is allowed to run on; empty for all.
    pub processors: &'a [u32],
}

/// Returns a command that joins a group, if there is one, and then executes `program`.
pub(super) fn command_in_group(group: Option<&Group>, program: &Path, arguments: &[String]) -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", JOIN_SCRIPT, "sh"]);
    command.args(group.map(Group::procs_files).unwrap_or_default()).arg("--").arg(program).args(arguments);
    command
}

impl DeviceProcess {
    /// Starts `program` with `arguments` in a control group and on the processors of `placement`.
    pub fn start(
        name: &str,
        placement: Placement,
        program: &Path,
        arguments: &[String],
    ) -> Result<DeviceProcess, LabError> {
        let failed = |error: std::io::Error| LabError::Process {
            name: name.into(),
            what: "cannot be started",
            why: error.to_string(),
        };
        let mut command = command_in_group(placement.group, program, arguments);
        set_affinity(&mut command, placement.processors);
        // The ring of the lab is on one machine and is measured without encryption.
        command.env_remove(hearth_ring::KEY_VARIABLE);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().map_err(failed)?;
        let (sender, lines) = mpsc::channel();
        if let Some(out) = process.stdout.take() {
            std::thread::spawn(move || {
                for line in BufReader::new(out).lines().map_while(Result::ok) {
                    if sender.send(line).is_err() {
                        return;
                    }
                }
            });
        }
        let errors = process.stderr.take().map(|mut err| {
            std::thread::spawn(move || {
                let mut text = String::new();
                let _ = err.read_to_string(&mut text);
                text
            })
        });
        Ok(DeviceProcess { name: name.into(), process, lines, errors })
    }

    /// Returns a handle that can freeze the process while another thread reads its output.
    pub fn stopper(&self) -> ProcessStopper {
        ProcessStopper { process: self.process.id() }
    }

    /// Returns the next line of the process's output. Returns an error if it prints none within `limit`, or exits.
    pub fn next_line(&mut self, limit: Duration) -> Result<String, LabError> {
        self.lines.recv_timeout(limit).map_err(|error| match error {
            mpsc::RecvTimeoutError::Timeout => {
                let why = format!("no output within {} s", limit.as_secs());
                LabError::Process { name: self.name.clone(), what: "does not respond", why }
            }
            mpsc::RecvTimeoutError::Disconnected => self.exit_error("exited"),
        })
    }

    /// Calls `on_line` for each line of the process's output until it exits. Returns an error if it prints nothing
    /// for longer than `limit`, or exits with a failure.
    pub fn for_each_line(mut self, limit: Duration, mut on_line: impl FnMut(&str)) -> Result<(), LabError> {
        let step = Duration::from_millis(100);
        let mut waited = Duration::ZERO;
        loop {
            match self.lines.recv_timeout(step) {
                Ok(line) => {
                    on_line(&line);
                    waited = Duration::ZERO;
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Err(mpsc::RecvTimeoutError::Timeout) if waited < limit => waited += step,
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    let why = format!("no output for {} s", limit.as_secs());
                    return Err(LabError::Process { name: self.name.clone(), what: "does not respond", why });
                }
            }
        }
        match self.process.wait() {
            Ok(status) if status.success() => Ok(()),
            _ => Err(self.exit_error("failed")),
        }
    }

    /// Waits for the process to exit, and returns an error with its exit status and its standard error.
    fn exit_error(&mut self, what: &'static str) -> LabError {
        let status = self.process.wait().map_or_else(|error| error.to_string(), describe);
        let printed = self.errors.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
        let why =
            if printed.trim().is_empty() { status } else { format!("{status}\n{}", printed.trim_end()) };
        LabError::Process { name: self.name.clone(), what, why }
    }
}

/// Describes an exit status, with a hint if the process was killed.
fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    let killed = status.signal() == Some(libc::SIGKILL);
    let hint = if killed {
        "; the kernel kills a process that exceeds its memory limit: increase the limit"
    } else {
        ""
    };
    format!("{status}{hint}")
}

impl Drop for DeviceProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
