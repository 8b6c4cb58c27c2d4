//! Progress of long work, reported to the caller, who may cancel it.

/// Receives the progress of long work and may cancel it.
pub trait Progress: Sync {
    /// Reports that `done` of `total` units of work are done. A `total` of 0 means that the amount is unknown.
    fn report(&self, what: &str, done: u64, total: u64);

    /// Returns whether the work shall end early with what it has. Only work that can do so asks.
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// Ignores progress and never cancels.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn report(&self, _: &str, _: u64, _: u64) {}
}
