//! Progress and cancellation of a download.

use crate::HubError;

/// What a download does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// Another process downloads the file.
    Waiting,
    /// Hashing the bytes that an earlier download left.
    Verifying,
    Downloading,
}

/// The progress of a model in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    pub activity: Activity,
    pub done: u64,
    pub total: u64,
}

/// The functions by which a caller follows and cancels a download.
pub struct Monitor<'m> {
    pub on_progress: &'m (dyn Fn(Progress) + Sync),
    /// Is called several times a second, also from another thread.
    pub is_cancelled: &'m (dyn Fn() -> bool + Sync),
}

impl Monitor<'static> {
    /// Reports nothing and never cancels.
    pub const NONE: Monitor<'static> = Monitor { on_progress: &|_| {}, is_cancelled: &|| false };
}

impl Monitor<'_> {
    pub(crate) fn check_cancelled(&self) -> Result<(), HubError> {
        if !(self.is_cancelled)() {
            return Ok(());
        }
        Err(HubError::cancelled("the download was stopped")
            .with_hint("the received part is kept: run the command again to continue"))
    }
}
