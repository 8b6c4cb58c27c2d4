//! Run events: events that happened to the ring during a run, and the reactions of the ring.
//!
//! They are the `event` lines of a trace: the events of the scenario, and their consequences, such as a lost device
//! or a new plan. `hearth_core::metrics::event_impact` computes the time per token and the memory pressure before,
//! during and after a run event from the trace alone.
//!
//! Not here: the events of a scenario ([`crate::events`]).

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunEventKind {
    /// Other programs used CPU and GPU.
    Load,
    /// Other programs allocated memory.
    Memory,
    /// The system swapped out memory of other programs.
    Swap,
    /// The clock rate of CPU and GPU was reduced.
    Slow,
    /// Other programs used the disk.
    DiskLoad,
    /// Messages on links were delayed until the end of the event.
    Stalls,
    /// A device had left the ring.
    Away,
    /// A device did not respond, until the head detected the loss.
    Silent,
    /// The ring adopted a new plan. The event ends with the first token of the new ring.
    Replanned,
    /// The ring needed a new plan, but the planner found none.
    NotReplanned,
    /// A device had too little memory for its part of the model.
    OutOfMemory,
}

impl RunEventKind {
    /// Returns the kind as a phrase for users, such as `links stall`.
    pub fn description(self) -> &'static str {
        match self {
            RunEventKind::Load => "other programs compute",
            RunEventKind::Memory => "other programs take memory",
            RunEventKind::Swap => "other programs are swapped out",
            RunEventKind::Slow => "the clock rate is reduced",
            RunEventKind::DiskLoad => "other programs use the disk",
            RunEventKind::Stalls => "links stall",
            RunEventKind::Away => "away",
            RunEventKind::Silent => "no response, until the loss was detected",
            RunEventKind::Replanned => "the ring was planned again and restarted",
            RunEventKind::NotReplanned => "the ring was not planned again",
            RunEventKind::OutOfMemory => "out of memory",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunEvent {
    #[serde(alias = "sort")]
    pub kind: RunEventKind,
    /// The name of the affected device; absent if all devices are affected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Start in nanoseconds from the start of the run.
    #[serde(rename = "start")]
    pub start_ns: u64,
    /// End in nanoseconds from the start of the run; absent if the event lasted until the end of the run.
    #[serde(rename = "end", default, skip_serializing_if = "Option::is_none")]
    pub end_ns: Option<u64>,
    /// Details of the event as text for users, such as the allocated memory or the cause of a loss.
    #[serde(rename = "what", default, skip_serializing_if = "String::is_empty")]
    pub details: String,
    /// Digest of the new plan, if the ring was planned again.
    #[serde(default, rename = "plan", skip_serializing_if = "Option::is_none")]
    pub plan_digest: Option<String>,
}
