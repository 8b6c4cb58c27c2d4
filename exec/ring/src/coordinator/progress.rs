//! The progress of what is under way in the ring: texts, passes, and when a pass is late.

use std::collections::BTreeMap;
use std::time::Duration;

use hearth_core::schedule::Generation;
use hearth_schema::pass::Pass;
use tokio::time::Instant;

use crate::execution::Lines;

/// For a deadline beyond what a clock holds. source: assumed, longer than any pass
pub(super) const LONGEST_WAIT: Duration = Duration::from_hours(24 * 365);

/// A sequence under way.
#[derive(Debug, Clone, Default)]
pub(super) struct Text {
    /// The prompt, and behind it the tokens that are out.
    pub(super) all: Vec<u32>,
    pub(super) prompt: usize,
}

/// What is under way in the ring.
pub(super) struct Progress {
    pub(super) generation: Generation,
    pub(super) texts: Vec<Text>,
    pub(super) stop: Vec<u32>,
    pub(super) passes: Vec<Pass>,
    /// Where traces go that were ordered meanwhile, each with its device; nowhere if nobody wants them.
    pub(super) reports: Option<Vec<(String, Lines)>>,
    /// When each pass under way entered.
    pub(super) under_way: BTreeMap<u32, Instant>,
    /// When a pass came out last.
    pub(super) last_out: Option<Instant>,
}

/// What the head has just done.
pub(super) enum Done {
    /// Something that gave no token.
    Work,
    /// These tokens of a sequence are out.
    Tokens(u32, Vec<u32>),
    /// Nothing: no pass can enter and no news is there.
    Nothing,
}

impl Progress {
    /// Nothing has entered yet.
    pub(super) fn new(generation: Generation, texts: Vec<Text>, stop: Vec<u32>) -> Self {
        let (passes, under_way) = (Vec::new(), BTreeMap::new());
        Self { generation, texts, stop, passes, reports: None, under_way, last_out: None }
    }

    /// When the pass that is to come out next takes too long. Passes do not overtake each other, so that in one round
    /// it had the ring to itself since it entered, or since the one before it was out; in every further round it may
    /// stand behind all that entered after it.
    pub(super) fn alarm(&self, limit: Duration, rounds: u32) -> Instant {
        let entered = self.under_way.values().next().copied();
        let before = if rounds > 1 { self.under_way.len().max(1) } else { 1 };
        let since = entered.max(self.last_out).unwrap_or_else(Instant::now);
        since.checked_add(limit.saturating_mul(before as u32)).unwrap_or(since + LONGEST_WAIT)
    }

    /// What was under way is given up.
    pub(super) fn begin_again(&mut self, generation: Generation) {
        self.generation = generation;
        self.under_way.clear();
        self.last_out = None;
    }
}
