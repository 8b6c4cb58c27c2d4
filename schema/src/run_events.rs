//! Run events: what happened to the ring during a run, and how it reacted.
//!
//! The `event` lines of a trace: a scenario's events, and their consequences, such as a lost device or a new plan.
//! `hearth_core::metrics::event_impact` computes the time of a token before, during and after one of them, and the
//! memory pressure of its device, from the trace alone.
//!
//! Not here: the events of a scenario ([`crate::events`]).

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunEventKind {
    /// Other programs computed.
    Load,
    /// Other programs took memory.
    Memory,
    /// The system swapped other programs' memory out.
    Swap,
    /// The clock was slower.
    Slow,
    /// Other programs used the disk.
    DiskLoad,
    /// Links stood still.
    Stalls,
    Away,
    /// A device was silent, until the head saw it.
    Silent,
    /// The ring planned again; it ends with the first token of the new ring.
    Replanned,
    /// The ring had to plan again and did not.
    NotReplanned,
    /// A device had no memory left for its part.
    OutOfMemory,
}

impl RunEventKind {
    pub fn phrase(self) -> &'static str {
        match self {
            RunEventKind::Load => "other programs compute",
            RunEventKind::Memory => "other programs take memory",
            RunEventKind::Swap => "other programs are swapped out",
            RunEventKind::Slow => "the clock is slower",
            RunEventKind::DiskLoad => "other programs use the disk",
            RunEventKind::Stalls => "links stand still",
            RunEventKind::Away => "away",
            RunEventKind::Silent => "silent, until it was missed",
            RunEventKind::Replanned => "the ring planned again and began again",
            RunEventKind::NotReplanned => "the ring did not plan again",
            RunEventKind::OutOfMemory => "out of memory",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunEvent {
    #[serde(alias = "sort")]
    pub kind: RunEventKind,
    /// The device by name; absent if all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Nanoseconds from the run's start.
    pub start: u64,
    /// Nanoseconds from the run's start; absent if it lasted to the run's end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<u64>,
    /// For people: how much, or why.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub what: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<String>,
}
