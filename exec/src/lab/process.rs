//! How is a device's process started inside its groups, watched, and ended?
//!
//! A shell joins the groups and then becomes the program, so that its first page is already counted. The
//! program ends when its standard input does; that pipe is held here, so no device outlives the lab,
//! whatever ends it.

use std::io::{BufRead, BufReader, Read};
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

/// Joins every group named up to `--`, then becomes the program.
const JOIN: &str = r#"while [ "$1" != -- ]; do echo $$ > "$1" || exit 125; shift; done; shift; exec "$@""#;

/// A command that joins a group, if there is one, before it becomes `program`.
pub(super) fn joined(group: Option<&Group>, program: &Path, arguments: &[String]) -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", JOIN, "sh"]);
    command.args(group.map(Group::entries).unwrap_or_default()).arg("--").arg(program).args(arguments);
    command
}

impl Child {
    /// Starts `program` with `arguments` inside a group, or outside of any.
    pub fn start(
        name: &str,
        group: Option<&Group>,
        program: &Path,
        arguments: &[String],
    ) -> Result<Child, LabError> {
        let failed = |error: std::io::Error| LabError::Process {
            name: name.into(),
            what: "does not start",
            why: error.to_string(),
        };
        let mut command = joined(group, program, arguments);
        // The lab's ring does not leave this machine and is measured unsealed.
        command.env_remove(crate::ring::key::VARIABLE);
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
