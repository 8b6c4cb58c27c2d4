//! The error type of this crate: what is wrong, where, and how to fix it.

use std::fmt;
use std::path::Path;

use hearth_profiles::DocumentError;

/// The cause of an error: an invalid input or a failed operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The input is invalid, for example an argument, a document or a model.
    Invalid,
    /// An operation on valid input failed.
    Failed,
}

/// An error with its location and a hint as separate fields.
#[derive(Debug, Clone)]
pub struct Error {
    kind: ErrorKind,
    what: String,
    location: Option<String>,
    hint: Option<String>,
}

impl Error {
    pub fn failed(what: impl fmt::Display) -> Self {
        Self { kind: ErrorKind::Failed, what: what.to_string(), location: None, hint: None }
    }

    pub fn invalid(what: impl fmt::Display) -> Self {
        Self { kind: ErrorKind::Invalid, ..Self::failed(what) }
    }

    /// Creates the error for an invalid document. The location is the path of the file with the line and column.
    pub fn from_document_error(path: &Path, error: &DocumentError) -> Self {
        let position = error.location().map_or(String::new(), |(line, column)| format!(":{line}:{column}"));
        Self::invalid(error.message()).with_location(format!("{}{position}", path.display()))
    }

    /// Creates the error for a file that cannot be opened, read or written; `action` is this verb, such as `open`.
    pub fn from_io_error(path: &Path, action: &str, error: &std::io::Error) -> Self {
        Self::access(path, &format!("{action} the file"), error)
    }

    /// Creates the error for a folder that cannot be opened or created; `action` is this verb, such as `create`.
    pub fn from_folder_error(path: &Path, action: &str, error: &std::io::Error) -> Self {
        Self::access(path, &format!("{action} the folder"), error)
    }

    fn access(path: &Path, action: &str, error: &std::io::Error) -> Self {
        let hint = match error.kind() {
            std::io::ErrorKind::NotFound => "check the path",
            std::io::ErrorKind::PermissionDenied => "check the permissions",
            std::io::ErrorKind::IsADirectory => "this is a folder: name a file in it",
            _ => "check the disk and the path",
        };
        Self::invalid(format!("cannot {action}: {error}")).with_location(path.display()).with_hint(hint)
    }

    /// Sets the location of the error, for example a file, a line of a file, or a flag.
    #[must_use]
    pub fn with_location(mut self, location: impl fmt::Display) -> Self {
        self.location = Some(location.to_string());
        self
    }

    #[must_use]
    pub fn with_hint(mut self, hint: impl fmt::Display) -> Self {
        self.hint = Some(hint.to_string());
        self
    }

    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Returns the message with line breaks replaced by spaces.
    pub fn one_line_message(&self) -> String {
        self.what.replace('\n', " ")
    }

    /// Returns the message, which may have several lines.
    pub fn message(&self) -> &str {
        &self.what
    }

    pub fn location(&self) -> Option<&str> {
        self.location.as_deref()
    }

    pub fn hint_text(&self) -> Option<&str> {
        self.hint.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Error {}
