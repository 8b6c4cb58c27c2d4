//! Errors of commands, printed as lines of text (what, where, hint) or as one line of JSON, and exit codes.
//!
//! Exit codes: 0 success; 1 a failure at run time; 2 invalid input (flags, documents or models); 3 the run did not
//! complete (out of memory, a lost device), or `hearth lint` found an error.

use std::fmt;

use hearth_ring::{KeyError, RingError};
use hearth_runtime::ExecError;
use hearth_workflow::{Error, ErrorKind};

use crate::interruption::EXIT_INTERRUPTED;
use crate::output::escape_line;

pub const EXIT_FAILED: u8 = 1;
pub const EXIT_INVALID: u8 = 2;
pub const EXIT_INCOMPLETE: u8 = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExitCode(pub u8);

impl ExitCode {
    pub const SUCCESS: ExitCode = ExitCode(0);

    /// Ends the process immediately, without running the destructors of loaded libraries. These
    /// destructors can hang if another thread is loading a GPU driver.
    pub fn exit(self) -> ! {
        // SAFETY: the process ends, so nothing can observe what the destructors would have changed.
        unsafe { libc::_exit(i32::from(self.0)) }
    }
}

/// An error of a command, with the exit code of the process.
#[derive(Debug)]
pub struct Failure {
    error: Error,
    pub exit_code: u8,
}

impl Failure {
    /// Creates an error with exit code [`EXIT_FAILED`].
    pub fn failed(what: impl fmt::Display) -> Self {
        Error::failed(what).into()
    }

    /// Creates an error with exit code [`EXIT_INVALID`].
    pub fn invalid(what: impl fmt::Display) -> Self {
        Error::invalid(what).into()
    }

    /// Creates an error for work that Ctrl-C stopped, with the exit code of Ctrl-C.
    pub fn interrupted(what: impl fmt::Display) -> Self {
        Self { exit_code: EXIT_INTERRUPTED.0, ..Self::failed(what) }
    }

    /// Converts the error of clap for an invalid command line.
    pub fn from_clap(error: &clap::Error) -> Self {
        let text = error.render().to_string();
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        // clap lists missing arguments on separate lines before its advice.
        let message =
            lines.take_while(|line| !["Usage:", "tip:", "For more"].iter().any(|end| line.starts_with(end)));
        let what = message.collect::<Vec<_>>().join(" ").trim_start_matches("error: ").to_owned();
        Self::invalid(what)
            .with_hint("run `hearth --help`, or `hearth COMMAND --help` for the flags of one command")
    }

    pub fn to_json(&self) -> String {
        let (what, hint) = self.parts();
        let error = serde_json::json!({ "what": what, "where": self.error.location(), "hint": hint, "code": self.exit_code });
        serde_json::json!({ "error": error }).to_string()
    }

    /// Returns what is wrong, and the hint. In the message of a library error, the hint may follow what is wrong after
    /// a semicolon.
    fn parts(&self) -> (&str, Option<&str>) {
        match (self.error.hint_text(), self.error.message().rsplit_once("; ")) {
            (None, Some((what, hint))) => (what, Some(hint)),
            (hint, _) => (self.error.message(), hint),
        }
    }

    #[must_use]
    pub fn with_location(self, location: impl fmt::Display) -> Self {
        Self { error: self.error.with_location(location), ..self }
    }

    #[must_use]
    pub fn with_hint(self, hint: impl fmt::Display) -> Self {
        Self { error: self.error.with_hint(hint), ..self }
    }

    pub fn into_error(self) -> Error {
        self.error
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, hint) = self.parts();
        // Indented, so that text of documents and other devices cannot look like another error.
        writeln!(f, "error: {}", what.replace('\n', "\n       "))?;
        if let Some(location) = self.error.location() {
            writeln!(f, "where: {}", escape_line(location))?;
        }
        if let Some(hint) = hint {
            writeln!(f, "hint:  {}", hint.replace('\n', "\n       "))?;
        }
        Ok(())
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let exit_code = match error.kind() {
            ErrorKind::Invalid => EXIT_INVALID,
            ErrorKind::Failed => EXIT_FAILED,
        };
        Self { error, exit_code }
    }
}

impl From<RingError> for Failure {
    fn from(error: RingError) -> Self {
        let exit_code = match &error {
            RingError::Disconnected { .. }
            | RingError::Deadline { .. }
            | RingError::CannotRecover { .. }
            | RingError::Interrupted => EXIT_INCOMPLETE,
            RingError::ModelMismatch { .. }
            | RingError::DamagedWeights { .. }
            | RingError::NoAddress { .. }
            | RingError::KeyRequired { .. }
            | RingError::KeyMismatch { .. }
            | RingError::InvalidPlan { .. } => EXIT_INVALID,
            _ => EXIT_FAILED,
        };
        let failure = Failure { exit_code, ..Failure::failed(error.what()) };
        let failure = error.path().into_iter().fold(failure, Failure::with_location);
        error.hint().into_iter().fold(failure, Failure::with_hint)
    }
}

impl From<KeyError> for Failure {
    fn from(error: KeyError) -> Self {
        let (location, hint) = (error.location(), error.hint());
        Failure::invalid(error).with_location(location).with_hint(hint)
    }
}

impl From<ExecError> for Failure {
    fn from(error: ExecError) -> Self {
        Failure::invalid(error)
    }
}
