//! A device's process: started inside its groups, watched, and ended.
//!
//! A shell joins the groups and then becomes the program, so that its first page is already counted. The
//! program ends when its standard input does; that pipe is held here, so no device outlives the lab,
//! whatever ends it.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use super::{Group, LabError};

/// A device's process.
#[derive(Debug)]
pub struct Child {
    name: String,
    process: std::process::Child,
    lines: mpsc::Receiver<String>,
    errors: Option<std::thread::JoinHandle<String>>,
}

/// A handle that freezes a device's process. The process must not be reaped while its [`Child`] exists.
#[derive(Debug, Clone, Copy)]
pub struct ProcessStopper {
    process: u32,
}

impl ProcessStopper {
    /// Freezes the process with SIGSTOP: it neither sends nor receives, but its connections stay open.
    pub fn stop(self) {
        // SAFETY: kill takes two numbers and touches no memory of this process.
        unsafe { libc::kill(self.process as libc::pid_t, libc::SIGSTOP) };
    }
}

/// Joins every group named up to `--`, then becomes the program.
const JOIN_SCRIPT: &str =
    r#"while [ "$1" != -- ]; do echo $$ > "$1" || exit 125; shift; done; shift; exec "$@""#;

/// The processors that this process may run on, by number.
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

/// Pins the process of a command to these processors; leaves it alone if there is none.
fn set_affinity(command: &mut Command, processors: &[u32]) {
    if processors.is_empty() {
        return;
    }
    // SAFETY: zero is a valid set, and numbers beyond its size are left out.
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
    /// Its control group, if it has one.
    pub group: Option<&'a Group>,
    /// Its processors; all if there is none.
    pub processors: &'a [u32],
}

/// A command that joins a group, if there is one, before it becomes `program`.
pub(super) fn command_in_group(group: Option<&Group>, program: &Path, arguments: &[String]) -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", JOIN_SCRIPT, "sh"]);
    command.args(group.map(Group::entries).unwrap_or_default()).arg("--").arg(program).args(arguments);
    command
}

impl Child {
    /// Starts `program` with `arguments` in its placement.
    pub fn start(
        name: &str,
        placement: Placement,
        program: &Path,
        arguments: &[String],
    ) -> Result<Child, LabError> {
        let failed = |error: std::io::Error| LabError::Process {
            name: name.into(),
            what: "does not start",
            why: error.to_string(),
        };
        let mut command = command_in_group(placement.group, program, arguments);
        set_affinity(&mut command, placement.processors);
        // The lab's ring does not leave this machine and is measured unsealed.
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
        Ok(Child { name: name.into(), process, lines, errors })
    }

    /// Returns a handle that can stop the process while another thread reads its output.
    pub fn stopper(&self) -> ProcessStopper {
        ProcessStopper { process: self.process.id() }
    }

    /// The next line it prints.
    pub fn line(&mut self, limit: Duration) -> Result<String, LabError> {
        self.lines.recv_timeout(limit).map_err(|error| match error {
            mpsc::RecvTimeoutError::Timeout => {
                let why = format!("nothing within {} s", limit.as_secs());
                LabError::Process { name: self.name.clone(), what: "is silent", why }
            }
            mpsc::RecvTimeoutError::Disconnected => self.ended("ended"),
        })
    }

    /// Takes every line it prints until it ends, which must be in order and in time.
    pub fn each_line(mut self, limit: Duration, mut take: impl FnMut(&str)) -> Result<(), LabError> {
        let step = Duration::from_millis(100);
        let mut waited = Duration::ZERO;
        loop {
            match self.lines.recv_timeout(step) {
                Ok(line) => {
                    take(&line);
                    waited = Duration::ZERO;
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Err(mpsc::RecvTimeoutError::Timeout) if waited < limit => waited += step,
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    let why = format!("more than {} s without a word", limit.as_secs());
                    return Err(LabError::Process { name: self.name.clone(), what: "does not end", why });
                }
            }
        }
        match self.process.wait() {
            Ok(status) if status.success() => Ok(()),
            _ => Err(self.ended("failed")),
        }
    }

    /// What its end looks like from outside.
    fn ended(&mut self, what: &'static str) -> LabError {
        let status = self.process.wait().map_or_else(|error| error.to_string(), told);
        let printed = self.errors.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
        let why =
            if printed.trim().is_empty() { status } else { format!("{status}\n{}", printed.trim_end()) };
        LabError::Process { name: self.name.clone(), what, why }
    }
}

/// An exit status in words.
fn told(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    let killed = status.signal() == Some(libc::SIGKILL);
    let hint =
        if killed { ": killed, as the kernel does when a limit of memory is met; allow it more" } else { "" };
    format!("{status}{hint}")
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
