//! Lint: findings about a scenario, or about a plan for it.
//!
//! A list of findings, each with a stable code, what is the matter, where, and what to do. Memory is counted as a run
//! counts it ([`hearth_core::memory`]), layer by layer, so an error about memory is a run that ends before it begins.
//! Advice about speed is a rule of thumb; what it is worth, the simulator says.
//!
//! The codes stand in `docs/reference/lint.md`.
//!
//! Not here: what documents refuse by themselves when they are read.

mod devices;
mod held;
mod profiles;
mod rates;
mod ring;
mod scenario;

use serde::Serialize;

pub use profiles::spread_widely;
pub use ring::plan;
pub use scenario::{late, scenario};

/// How much a finding matters, the worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// It cannot be run so.
    Error,
    /// It can be run, and probably not as meant.
    Warning,
    /// Worth knowing.
    Note,
}

impl std::fmt::Display for Severity {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.pad(match self {
            Severity::Error => "error",
            Severity::Warning => "warning",
            Severity::Note => "note",
        })
    }
}

/// Something wrong or doubtful.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How much it matters.
    pub severity: Severity,
    /// Which rule; never changes its meaning.
    pub code: &'static str,
    /// What is the matter.
    pub what: String,
    /// In which part of which document.
    #[serde(rename = "where")]
    pub place: String,
    /// What to do.
    pub fix: String,
}

impl Finding {
    /// A finding that it cannot be run so.
    pub fn error(code: &'static str, place: impl Into<String>, what: String, fix: impl Into<String>) -> Self {
        Self { severity: Severity::Error, code, what, place: place.into(), fix: fix.into() }
    }

    /// A finding that it probably does not run as meant.
    pub fn warning(
        code: &'static str,
        place: impl Into<String>,
        what: String,
        fix: impl Into<String>,
    ) -> Self {
        Self { severity: Severity::Warning, ..Self::error(code, place, what, fix) }
    }

    /// A finding that is worth knowing.
    pub fn note(code: &'static str, place: impl Into<String>, what: String, fix: impl Into<String>) -> Self {
        Self { severity: Severity::Note, ..Self::error(code, place, what, fix) }
    }
}
