//! Printed errors: three lines (what, where, hint) or one line of JSON, and the exit code.
//!
//! Exit codes: 0 success; 1 something failed while running; 2 the input cannot be used (arguments, documents,
//! models); 3 the run did not complete (out of memory, a lost device), or a lint found an error.

use std::fmt;

use hearth_ring::{KeyError, RingError};
use hearth_runtime::ExecError;
use hearth_workflow::{Error, ErrorKind};

/// Exit code if something failed while running.
pub const FAILED: u8 = 1;
/// Exit code if the input cannot be used.
pub const UNUSABLE: u8 = 2;
/// Exit code if the run did not complete.
pub const INCOMPLETE: u8 = 3;

/// An error with the exit code of the process.
#[derive(Debug)]
pub struct Failure {
    error: Error,
    pub code: u8,
}

impl Failure {
    /// Creates an error with exit code [`FAILED`].
    pub fn running(what: impl fmt::Display) -> Self {
        Error::failed(what).into()
    }

    /// Creates an error with exit code [`UNUSABLE`].
    pub fn unusable(what: impl fmt::Display) -> Self {
        Error::invalid(what).into()
    }

    /// Creates an error for a command line that clap cannot parse.
    pub fn usage(error: &clap::Error) -> Self {
        let text = error.render().to_string();
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        // clap lists missing arguments on separate lines before its advice.
        let message =
            lines.take_while(|line| !["Usage:", "tip:", "For more"].iter().any(|end| line.starts_with(end)));
        let what = message.collect::<Vec<_>>().join(" ").trim_start_matches("error: ").to_owned();
        Self::unusable(what).hint("see `hearth --help`, or `hearth COMMAND --help` for one command")
    }

    /// Returns the error as one line of JSON.
    pub fn json(&self) -> String {
        let (what, inner) = self.parts();
        let error = serde_json::json!({
            "error": {
                "what": what,
                "where": self.error.place(),
                "hint": self.error.fix().or(inner),
                "code": self.code,
            }
        });
        error.to_string()
    }

    /// Splits the message into what is wrong and a hint: the message of a library may end with a hint after a
    /// semicolon, which is printed on a separate line.
    fn parts(&self) -> (&str, Option<&str>) {
        match (self.error.fix(), self.error.text().rsplit_once("; ")) {
            (None, Some((what, hint))) => (what, Some(hint)),
            _ => (self.error.text(), None),
        }
    }

    /// Adds the place of the error, such as a file.
    #[must_use]
    pub fn at(self, place: impl fmt::Display) -> Self {
        Self { error: self.error.at(place), ..self }
    }

    /// Adds a hint on how to fix the error.
    #[must_use]
    pub fn hint(self, hint: impl fmt::Display) -> Self {
        Self { error: self.error.hint(hint), ..self }
    }

    #[must_use]
    pub fn code(self, code: u8) -> Self {
        Self { code, ..self }
    }

    /// Returns the error without its exit code.
    pub fn into_error(self) -> Error {
        self.error
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, inner) = self.parts();
        writeln!(f, "error: {what}")?;
        if let Some(place) = self.error.place() {
            writeln!(f, "where: {place}")?;
        }
        if let Some(hint) = self.error.fix().or(inner) {
            writeln!(f, "hint:  {hint}")?;
        }
        Ok(())
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match error.kind() {
            ErrorKind::Invalid => UNUSABLE,
            ErrorKind::Failed => FAILED,
        };
        Self { error, code }
    }
}

impl From<RingError> for Failure {
    fn from(error: RingError) -> Self {
        let code = match &error {
            RingError::Disconnected { .. }
            | RingError::Deadline { .. }
            | RingError::CannotRecover { .. }
            | RingError::Interrupted => INCOMPLETE,
            RingError::ModelMismatch { .. }
            | RingError::NoAddress { .. }
            | RingError::KeyRequired { .. }
            | RingError::KeyMismatch { .. }
            | RingError::Plan { .. } => UNUSABLE,
            _ => FAILED,
        };
        let failure = Failure::running(error.what()).code(code);
        let failure = match error.place() {
            Some(place) => failure.at(place),
            None => failure,
        };
        match error.hint() {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    }
}

impl From<KeyError> for Failure {
    fn from(error: KeyError) -> Self {
        let (place, hint) = (error.place(), error.hint());
        Failure::unusable(error).at(place).hint(hint)
    }
}

impl From<ExecError> for Failure {
    fn from(error: ExecError) -> Self {
        Failure::unusable(error)
    }
}
