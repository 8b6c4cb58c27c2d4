//! What is wrong or doubtful about a scenario, or about a plan for it?
//!
//! A list of findings, each with a stable code, what is the matter, where, and what to do. Memory is counted as a run
//! counts it ([`hearth_schema::room`]), layer by layer, so an error about memory is a run that ends before it begins. Advice about
//! speed is a rule of thumb; what it is worth, the simulator says.
//!
//! | code | severity | finding |
//! | --- | --- | --- |
//! | `same-address` | error | two devices listen at one address |
//! | `more-devices-than-layers` | error, warning | some device cannot have a layer |
//! | `limit-above-memory` | warning | a limit gives a device memory that it does not have |
//! | `link-twice` | warning | a link that is never used |
//! | `event-after-end` | warning | an event that never happens |
//! | `absurd-number` | warning | a rate or a memory that nothing on sale has |
//! | `noisy-measurement` | warning | a profile's numbers that its repeats leave open |
//! | `threads-above-cores` | warning | a limit gives a device threads that wait for each other |
//! | `format-without-rate` | note | another format's rate stands for the model's |
//! | `model-too-small` | note | predictions of such models have not been compared with runs |
//! | `slow-link` | warning | a hop takes long whatever the plan |
//! | `memory-share-while-planning` | note | planners do not know this limit |
//! | `no-plan` | error | the strategy refuses (found by the caller) |
//! | `plan-invalid` | error | the plan contradicts itself, or does not cover the model |
//! | `other-model`, `unknown-device` | error | the plan is for another model, or other devices |
//! | `other-scenario`, `other-context` | warning | the scenario has changed since |
//! | `no-gpu`, `gpu-memory` | error | GPU layers without a GPU, or that do not fit it |
//! | `memory-exceeded` | error | key-value cache at full context and buffers do not fit |
//! | `head-over-memory` | warning | beside these the output head does not fit |
//! | `slow-disk-overloaded` | warning | a disk too slow for it is read for every token |
//! | `windows-evict-each-other` | warning | reading the next window ahead evicts the current one |
//! | `window-exceeds-memory` | warning | not even one window fits |
//! | `reads-without-prefetch` | warning | what does not fit is read while nobody computes |
//! | `stream-buffer-too-large` | warning | the buffer takes more than half of the room |
//! | `one-round-over-memory` | warning | with one round nothing hides the reading |
//! | `rounds-without-reading` | warning | more than one round, and nothing to read |
//! | `hops-dominate` | warning | most of a token's time is hops |
//! | `working-set-exceeded` | warning | Metal reads again what exceeds its working set |
//! | `draft-memory` | error | the head's memory does not hold the model that drafts |
//! | `other-draft` | error | the plan is for another draft model |
//! | `share-exceeds-memory` | note | a device reads from disk for every token |
//! | `partial-last-round` | note | the layers do not divide into whole rounds |
//! | `dropped-device-would-help` | note | by the latency model a device is left out wrongly |
//! | `weights-swapped` | warning | pinned weights exceed memory and are swapped |
//! | `gpu-uploads` | warning | converted weights exceed the GPU and are copied to it for every token |
//! | `simulated-only` | note | the plan of another system, which `execute` refuses |
//! | `no-address` | note | a worker that `execute` cannot reach |
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
