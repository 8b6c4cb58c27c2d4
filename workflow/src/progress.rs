//! Progress of long work, which is reported to the caller and can be cancelled by it.

/// Receives the progress of long work and can cancel it.
pub trait Progress: Sync {
    /// Reports that `done` of `total` units of work are done. A `total` of 0 means that the amount is unknown.
    fn report(&self, what: &str, done: u64, total: u64);

    /// Returns whether the work is cancelled, so that it ends early with the results so far. Only work that supports
    /// cancellation calls this.
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// Ignores progress and never cancels.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn report(&self, _: &str, _: u64, _: u64) {}
}
