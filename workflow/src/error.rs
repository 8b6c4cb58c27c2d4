//! The error of every workflow: what is wrong, where, and how to fix it.

use std::fmt;
use std::path::Path;

use hearth_profiles::DocumentError;

/// Whose fault an error is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The input cannot be used: an argument, a document or a model.
    Invalid,
    /// Something failed while running.
    Failed,
}

/// An error with its place and a hint as separate fields.
#[derive(Debug, Clone)]
pub struct Error {
    kind: ErrorKind,
    what: String,
    place: Option<String>,
    hint: Option<String>,
}

impl Error {
    /// Something failed while running.
    pub fn failed(what: impl fmt::Display) -> Self {
        Self { kind: ErrorKind::Failed, what: what.to_string(), place: None, hint: None }
    }

    /// The input cannot be used.
    pub fn invalid(what: impl fmt::Display) -> Self {
        Self { kind: ErrorKind::Invalid, ..Self::failed(what) }
    }

    /// A document that cannot be used, with its place in the file.
    pub fn document(path: &Path, error: &DocumentError) -> Self {
        let position = error.location().map_or(String::new(), |(line, column)| format!(":{line}:{column}"));
        Self::invalid(error.what()).at(format!("{}{position}", path.display()))
    }

    /// A file that cannot be read or written; `action` is a verb, such as `open`.
    pub fn file(path: &Path, action: &str, error: &std::io::Error) -> Self {
        let hint = match error.kind() {
            std::io::ErrorKind::NotFound => "check the path",
            std::io::ErrorKind::PermissionDenied => "check the file's permissions",
            std::io::ErrorKind::IsADirectory => "this is a folder: name a file in it",
            _ => "check the disk and the path",
        };
        Self::invalid(format!("cannot {action} the file: {error}")).at(path.display()).hint(hint)
    }

    /// Adds the place: a file, a line, a flag.
    #[must_use]
    pub fn at(mut self, place: impl fmt::Display) -> Self {
        self.place = Some(place.to_string());
        self
    }

    /// Adds how to fix it.
    #[must_use]
    pub fn hint(mut self, hint: impl fmt::Display) -> Self {
        self.hint = Some(hint.to_string());
        self
    }

    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// What is wrong, in one line.
    pub fn what(&self) -> String {
        self.what.replace('\n', " ")
    }

    /// The message as it was given, which may have several lines.
    pub fn text(&self) -> &str {
        &self.what
    }

    pub fn place(&self) -> Option<&str> {
        self.place.as_deref()
    }

    /// A hint for a fix, if known.
    pub fn fix(&self) -> Option<&str> {
        self.hint.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Error {}
