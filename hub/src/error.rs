//! The error type of this crate: what is wrong, where, and how to fix it.

use std::fmt;
use std::io;
use std::path::Path;

/// The cause of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HubErrorKind {
    /// The input is invalid: the name of a repository or a model, a setting, or a token.
    Invalid,
    /// The hub cannot be reached, or cannot answer at the moment.
    Unreachable,
    /// The answer of the hub, the file or the disk is at fault.
    Failed,
    /// The caller cancelled the download.
    Cancelled,
}

/// An error with its location and a hint as separate fields.
#[derive(Debug, Clone)]
pub struct HubError {
    kind: HubErrorKind,
    what: String,
    location: Option<String>,
    hint: Option<String>,
}

impl HubError {
    pub(crate) fn new(kind: HubErrorKind, what: impl fmt::Display) -> Self {
        Self { kind, what: what.to_string(), location: None, hint: None }
    }

    pub(crate) fn invalid(what: impl fmt::Display) -> Self {
        Self::new(HubErrorKind::Invalid, what)
    }

    pub(crate) fn unreachable(what: impl fmt::Display) -> Self {
        Self::new(HubErrorKind::Unreachable, what)
    }

    pub(crate) fn failed(what: impl fmt::Display) -> Self {
        Self::new(HubErrorKind::Failed, what)
    }

    pub(crate) fn cancelled(what: impl fmt::Display) -> Self {
        Self::new(HubErrorKind::Cancelled, what)
    }

    /// Creates the error for a file or folder of the cache; `action` is a verb, such as `write`.
    pub(crate) fn from_io_error(path: &Path, action: &str, error: &io::Error) -> Self {
        let hint = match error.kind() {
            io::ErrorKind::StorageFull => "free some space, or set `HF_HOME` to a folder on another disk",
            io::ErrorKind::PermissionDenied => "check the permissions, or set `HF_HOME` to a folder of yours",
            _ => "check the disk and the path",
        };
        Self::failed(format!("cannot {action} the file: {error}"))
            .with_location(path.display())
            .with_hint(hint)
    }

    #[must_use]
    pub(crate) fn with_location(mut self, location: impl fmt::Display) -> Self {
        self.location = Some(location.to_string());
        self
    }

    #[must_use]
    pub(crate) fn with_hint(mut self, hint: impl fmt::Display) -> Self {
        self.hint = Some(hint.to_string());
        self
    }

    pub fn kind(&self) -> HubErrorKind {
        self.kind
    }

    pub fn location(&self) -> Option<&str> {
        self.location.as_deref()
    }

    pub fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }
}

impl fmt::Display for HubError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for HubError {}
