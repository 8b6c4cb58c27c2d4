//! How is a person told what is wrong?
//!
//! Three lines: what, where, and a hint; with `--json` one line of JSON. Exit codes: 0 done; 1 something failed while
//! running; 2 what was given cannot be used (arguments, documents, models); 3 the run ended, but not well (out of
//! memory, a device died), or a lint found an error.

use std::fmt;
use std::path::Path;

use hearth_profiles::DocumentError;
use hearth_ring::{KeyError, RingError};
use hearth_runtime::ExecError;

/// Something failed while running.
pub const FAILED: u8 = 1;
/// What was given cannot be used.
pub const UNUSABLE: u8 = 2;
/// The run ended, but not well.
pub const ENDED_BADLY: u8 = 3;

/// An error as a person reads it.
#[derive(Debug)]
pub struct Failure {
    what: String,
    place: Option<String>,
    hint: Option<String>,
    /// The process's exit code.
    pub code: u8,
}

impl Failure {
    /// Something failed while running.
    pub fn running(what: impl fmt::Display) -> Self {
        Self { what: what.to_string(), place: None, hint: None, code: FAILED }
    }

    /// What was given cannot be used.
    pub fn unusable(what: impl fmt::Display) -> Self {
        Self { code: UNUSABLE, ..Self::running(what) }
    }

    /// A document that cannot be used, with its place in the file.
    pub fn document(path: &Path, error: &DocumentError) -> Self {
        let at = error.location().map_or(String::new(), |(line, column)| format!(":{line}:{column}"));
        Self::unusable(error.what()).at(format!("{}{at}", path.display()))
    }

    /// A file that cannot be read or written.
    pub fn file(path: &Path, verb: &str, error: &std::io::Error) -> Self {
        let hint = match error.kind() {
            std::io::ErrorKind::NotFound => "check the path",
            std::io::ErrorKind::PermissionDenied => "check the file's permissions",
            std::io::ErrorKind::IsADirectory => "this is a folder: name a file in it",
            _ => "check the disk and the path",
        };
        Self::unusable(format!("cannot {verb} the file: {error}")).at(path.display()).hint(hint)
    }

    /// A command line that cannot be understood, as clap says it.
    pub fn usage(error: &clap::Error) -> Self {
        let text = error.render().to_string();
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        // What is missing is listed on lines of its own, before clap's advice.
        let told =
            lines.take_while(|line| !["Usage:", "tip:", "For more"].iter().any(|end| line.starts_with(end)));
        let what = told.collect::<Vec<_>>().join(" ").trim_start_matches("error: ").to_owned();
        Self::unusable(what).hint("see `hearth --help`, and `hearth VERB --help` for each verb")
    }

    /// One line of JSON: what a person reads, and the exit code.
    pub fn json(&self) -> String {
        let (what, inner) = self.parts();
        let error = serde_json::json!({
            "error": {
                "what": what,
                "where": self.place,
                "hint": self.hint.as_deref().or(inner),
                "code": self.code,
            }
        });
        error.to_string()
    }

    /// What is wrong, and the hint within it: a library's message may end in its own after a semicolon, which reads better on
    /// a line of its own.
    fn parts(&self) -> (&str, Option<&str>) {
        match (&self.hint, self.what.rsplit_once("; ")) {
            (None, Some((what, hint))) => (what, Some(hint)),
            _ => (self.what.as_str(), None),
        }
    }

    /// Adds where.
    #[must_use]
    pub fn at(mut self, place: impl fmt::Display) -> Self {
        self.place = Some(place.to_string());
        self
    }

    /// Adds how to mend it.
    #[must_use]
    pub fn hint(mut self, hint: impl fmt::Display) -> Self {
        self.hint = Some(hint.to_string());
        self
    }

    /// What is wrong, in one line, without where and a hint.
    pub fn reason(&self) -> String {
        self.what.replace('\n', " ")
    }

    /// How to mend it, if that is known.
    pub fn advice(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// With another exit code.
    #[must_use]
    pub fn code(mut self, code: u8) -> Self {
        self.code = code;
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, inner) = self.parts();
        writeln!(f, "error: {what}")?;
        if let Some(place) = &self.place {
            writeln!(f, "where: {place}")?;
        }
        if let Some(hint) = self.hint.as_deref().or(inner) {
            writeln!(f, "hint:  {hint}")?;
        }
        Ok(())
    }
}

impl From<RingError> for Failure {
    fn from(error: RingError) -> Self {
        let code = match &error {
            RingError::Gone { .. }
            | RingError::Deadline { .. }
            | RingError::CannotGoOn { .. }
            | RingError::Interrupted => ENDED_BADLY,
            RingError::AnotherModel { .. }
            | RingError::NoAddress { .. }
            | RingError::NotLoopback { .. }
            | RingError::Key { .. }
            | RingError::Plan(_) => UNUSABLE,
            _ => FAILED,
        };
        Failure::running(error).code(code)
    }
}

impl From<KeyError> for Failure {
    fn from(error: KeyError) -> Self {
        Failure::unusable(error)
    }
}

impl From<ExecError> for Failure {
    fn from(error: ExecError) -> Self {
        Failure::unusable(error)
    }
}
