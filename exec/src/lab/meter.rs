//! What does each device read for a token, by the counter of its own throttle?
//!
//! The executor counts what its process reads; the kernel's throttle counts what passes it. The two are
//! independent, so that one can be checked by the other. All counters are read when a token is out, so that a
//! token's bytes are those between two readings; what the first token took is the prompt's.

use serde::{Deserialize, Serialize};

use super::Group;
use crate::memory::GroupMemory;

/// Counts that differ by more than this share are worth a warning.
pub const TOLERANCE: f64 = 0.05;
/// Below this many bytes for a token, pages of the program itself are a large share.
const WORTH_COMPARING: f64 = (1 << 20) as f64;

/// Reads the counters of all devices of a lab, in ring order.
#[derive(Debug)]
pub struct Meter<'g> {
    devices: Vec<Option<&'g Group>>,
    /// When the first token was out, and now.
    read: Vec<(u64, u64)>,
    /// Refaults and kills before the run.
    before: Vec<(u64, u64)>,
    peaks: Vec<u64>,
    tokens: u32,
}

/// What was seen of one device.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Metered {
    /// Its name.
    pub name: String,
    /// The limit of its memory, as the system has it.
    pub memory_limit: Option<u64>,
    /// Bytes of its copy of the model that were in memory before the run.
    pub resident_before: u64,
    /// Bytes read for each token after the first by the throttle's counter; absent without a throttle.
    pub throttle_bytes_per_token: Option<f64>,
    /// The same by the trace.
    pub trace_bytes_per_token: f64,
    /// The most memory that could not be taken back, of those seen when a token was out.
    pub peak_unreclaimable: Option<u64>,
    /// Bytes of files that had to be read again during the run.
    pub refaults: Option<u64>,
    /// Processes killed because memory ran out.
    pub oom_kills: Option<u64>,
}

impl<'g> Meter<'g> {
    /// For devices with their groups, or outside of any.
    pub fn new(devices: Vec<Option<&'g Group>>) -> Self {
        let count = |group: Option<&Group>| {
            let memory = group.map(Group::memory);
            let read =
                |number: fn(&GroupMemory) -> Option<u64>| memory.as_ref().and_then(number).unwrap_or(0);
            (read(GroupMemory::refaults), read(GroupMemory::oom_kills))
        };
        let before = devices.iter().copied().map(count).collect();
        let (read, peaks) = (vec![(0, 0); devices.len()], vec![0; devices.len()]);
        Self { devices, read, before, peaks, tokens: 0 }
    }

    /// A token is out.
    pub fn token(&mut self) {
        self.tokens += 1;
        for (place, group) in self.devices.iter().enumerate() {
            let Some(group) = group else { continue };
            let now = group.bytes_read().unwrap_or(0);
            let first = if self.tokens == 1 { now } else { self.read[place].0 };
            self.read[place] = (first, now);
            self.peaks[place] = self.peaks[place].max(group.memory().unreclaimable().unwrap_or(0));
        }
    }

    /// What was seen of the device at a place. `throttled` tells whether it has a throttle: without one nothing
    /// is counted.
    pub fn device(&self, place: usize, throttled: bool) -> Metered {
        let memory = self.devices[place].map(Group::memory);
        let since = |number: fn(&GroupMemory) -> Option<u64>, before: u64| {
            Some(number(memory.as_ref()?)?.saturating_sub(before))
        };
        let (first, last) = self.read[place];
        let tokens = self.tokens.checked_sub(1).filter(|&tokens| tokens > 0);
        let per_token = |tokens: u32| last.saturating_sub(first) as f64 / f64::from(tokens);
        Metered {
            name: String::new(),
            memory_limit: memory.as_ref().and_then(GroupMemory::limit),
            resident_before: 0,
            throttle_bytes_per_token: tokens.filter(|_| throttled && memory.is_some()).map(per_token),
            trace_bytes_per_token: 0.0,
            peak_unreclaimable: memory.as_ref().map(|_| self.peaks[place]),
            refaults: since(GroupMemory::refaults, self.before[place].0),
            oom_kills: since(GroupMemory::oom_kills, self.before[place].1),
        }
    }
}

impl Metered {
    /// By what share the trace differs from the throttle, where that is more than can be expected.
    pub fn difference(&self) -> Option<f64> {
        let (throttle, trace) = (self.throttle_bytes_per_token?, self.trace_bytes_per_token);
        let apart = (trace - throttle).abs();
        let differs = apart > TOLERANCE * throttle.max(trace) && apart > WORTH_COMPARING;
        differs.then(|| trace / throttle.max(1.0) - 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_that_differ_are_told() {
        let difference = |throttle: Option<f64>, trace: f64| {
            let throttle_bytes_per_token = throttle;
            Metered { throttle_bytes_per_token, trace_bytes_per_token: trace, ..Metered::default() }
                .difference()
        };
        assert_eq!(difference(Some(100e6), 104e6), None);
        assert_eq!(difference(Some(100e6), 150e6), Some(0.5));
        assert_eq!(difference(Some(100e6), 0.0), Some(-1.0));
        assert_eq!(difference(Some(100e3), 0.0), None, "pages of the program");
        assert_eq!(difference(None, 100e6), None, "no throttle");
    }
}
