//! Lint: findings about a scenario, or about a plan for it.
//!
//! The codes of findings are stable and listed in `docs/reference/lint.md`. Memory is counted layer by layer as in a
//! run ([`hearth_core::memory`]), so a memory error means that a run would fail before it starts. Findings about speed
//! are rules of thumb; the simulator computes the effect.

mod devices;
mod pinned;
mod profiles;
mod rates;
mod ring;
mod scenario;
mod speed;

use serde::Serialize;

pub use profiles::uncertain_rates;
pub use ring::check_plan;
pub use scenario::{check_event_times, check_scenario};

/// The severity of a finding. The variants are in descending order of severity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The plan or scenario cannot run, or takes at least twice as long as the best plan.
    Error,
    /// The plan runs, but probably not as intended.
    Warning,
    Note,
}

impl std::fmt::Display for Severity {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.pad(&format!("{self:?}").to_lowercase())
    }
}

/// A problem in a scenario or plan, and what the user can do about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub severity: Severity,
    pub code: &'static str,
    pub what: String,
    /// The document and the key with the problem, such as `scenario events[0].at`.
    #[serde(rename = "where")]
    pub location: String,
    #[serde(rename = "fix")]
    pub hint: String,
}

impl Finding {
    pub fn error(
        code: &'static str,
        location: impl Into<String>,
        what: String,
        fix: impl Into<String>,
    ) -> Self {
        Self { severity: Severity::Error, code, what, location: location.into(), hint: fix.into() }
    }

    pub fn warning(code: &'static str, location: impl Into<String>, what: String, fix: &str) -> Self {
        Self { severity: Severity::Warning, ..Self::error(code, location, what, fix) }
    }

    pub fn note(code: &'static str, location: impl Into<String>, what: String, fix: &str) -> Self {
        Self { severity: Severity::Note, ..Self::error(code, location, what, fix) }
    }
}
