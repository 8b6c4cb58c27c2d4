//! What happened to the ring during a run, and what did it make of it?
//!
//! The `event` lines of a trace: a scenario's events as they came, and what followed from them: that a device was
//! missed, that the ring planned again. [`around`] computes the time of a token before, beside and after one of them,
//! and the memory pressure of its device, from the trace and nothing else.
//!
//! Not here: what a scenario says is to happen ([`crate::events`]).

use serde::{Deserialize, Serialize};

use crate::metrics::outputs::Outputs;
use crate::trace::{Counter, Trace};

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sort {
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
    /// A device was away.
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

impl Sort {
    /// For people.
    pub fn phrase(self) -> &'static str {
        match self {
            Sort::Load => "other programs compute",
            Sort::Memory => "other programs take memory",
            Sort::Swap => "other programs are swapped out",
            Sort::Slow => "the clock is slower",
            Sort::DiskLoad => "other programs use the disk",
            Sort::Stalls => "links stand still",
            Sort::Away => "away",
            Sort::Silent => "silent, until it was missed",
            Sort::Replanned => "the ring planned again and began again",
            Sort::NotReplanned => "the ring did not plan again",
            Sort::OutOfMemory => "out of memory",
        }
    }
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Happening {
    /// What.
    pub sort: Sort,
    /// To which device, by name; absent if to all.
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
    /// Digest of the new plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<String>,
}

/// Something before, beside and after a happening; absent where there is no token.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Phases {
    /// Of tokens that were out before it began.
    pub before: Option<f64>,
    /// Of tokens of which a part lay within it.
    pub beside: Option<f64>,
    /// Of tokens begun after it ended.
    pub after: Option<f64>,
}

/// What a happening did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Around {
    /// Mean time per output token after the first, in milliseconds.
    pub tpot_ms: Phases,
    /// The longest of these tokens, in milliseconds.
    pub longest_ms: Phases,
    /// The highest memory pressure of its device: what cannot be taken back, over the memory it has.
    pub pressure: Phases,
}

/// The times of tokens around a happening of a trace.
pub fn around(trace: &Trace, happening: &Happening) -> Around {
    let (from, to) = (happening.start, happening.end.unwrap_or(u64::MAX));
    let mut phases = [const { Vec::new() }; 3];
    for turn in Outputs::of(trace).turns {
        let phase = if turn.end <= from { 0 } else { 1 + usize::from(turn.start >= to) };
        // The tokens of a turn share its time.
        phases[phase].extend(std::iter::repeat_n(turn.pace(), turn.tokens() as usize));
    }
    let each = |of: &dyn Fn(&[f64]) -> f64| {
        let [before, beside, after] =
            [0, 1, 2].map(|phase: usize| Some(of(&phases[phase])).filter(|_| !phases[phase].is_empty()));
        Phases { before, beside, after }
    };
    let mean = |times: &[f64]| times.iter().sum::<f64>() / times.len() as f64;
    let longest = |times: &[f64]| times.iter().copied().fold(0.0, f64::max);
    Around {
        tpot_ms: each(&mean),
        longest_ms: each(&longest),
        pressure: pressure(trace, happening, from, to),
    }
}

fn pressure(trace: &Trace, happening: &Happening, from: u64, to: u64) -> Phases {
    let place =
        trace.header.devices.iter().position(|device| Some(&device.name) == happening.device.as_ref());
    let Some(place) = place else { return Phases::default() };
    let total = trace.header.devices[place].memory_total.max(1) as f64;
    let highest = |within: &dyn Fn(u64) -> bool| {
        let own = trace.readings.iter().filter(|reading| {
            (usize::from(reading.device), reading.counter) == (place, Counter::Unreclaimable)
                && within(reading.at)
        });
        own.map(|reading| reading.value as f64 / total).reduce(f64::max)
    };
    Phases {
        before: highest(&|at| at < from),
        beside: highest(&|at| (from..=to).contains(&at)),
        after: highest(&|at| at > to),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Parallelism;
    use crate::schedule::Pass;
    use crate::trace::{Header, Kind, Origin, Outcome, Reading, Record, Resource, TracedDevice};

    const MS: u64 = 1_000_000;

    /// Tokens that are out at these milliseconds, on one device of 1000 bytes.
    fn trace(ends: &[u64], happening: Happening) -> Trace {
        let pass = |index| Pass::plain(index, index, 1, true);
        let output = |(pass, end): (u32, &u64)| Record {
            device: 0,
            resource: Resource::Cpu,
            kind: Kind::Output,
            pass,
            round: 1,
            layers: None,
            start: end * MS - 1,
            end: end * MS,
            bytes: 0,
            peer: None,
            cost: None,
        };
        let reading = |(pass, end): (u32, &u64)| Reading {
            device: 0,
            counter: Counter::Unreclaimable,
            pass,
            at: end * MS,
            value: if (25..=60).contains(end) { 500 } else { 100 },
        };
        Trace {
            header: Header {
                schema: Trace::SCHEMA.into(),
                origin: Origin::Simulated,
                scenario: "s".into(),
                plan: "p".into(),
                model: "m".into(),
                kind: Parallelism::Ring,
                seed: 1,
                version: "0".into(),
                devices: vec![TracedDevice {
                    name: "a".into(),
                    profile: None,
                    memory_total: 1000,
                    kernel: None,
                    unvalidated: None,
                    policy: None,
                }],
            },
            passes: (0..ends.len() as u32).map(pass).collect(),
            records: (0..).zip(ends).map(output).collect(),
            readings: (0..).zip(ends).map(reading).collect(),
            shortages: vec![],
            happenings: vec![happening],
            outcome: Outcome::Ok,
        }
    }

    #[test]
    fn tokens_are_told_by_when_they_were_made() {
        let game = Happening {
            sort: Sort::Load,
            device: Some("a".into()),
            start: 25 * MS,
            end: Some(60 * MS),
            what: "4 threads".into(),
            plan: None,
        };
        // Tokens of 10 ms, then 20, 20 and 10 ms of which some part is beside the game, then 10 ms.
        let trace = trace(&[10, 20, 40, 60, 70, 80], game.clone());
        let around = around(&trace, &game);
        let phases =
            |before, beside, after| Phases { before: Some(before), beside: Some(beside), after: Some(after) };
        assert_eq!(around.tpot_ms, phases(10.0, 20.0, 10.0));
        assert_eq!(around.longest_ms, phases(10.0, 20.0, 10.0));
        assert_eq!(around.pressure, phases(0.1, 0.5, 0.1));
        let mut text = Vec::new();
        trace.write(&mut text).expect("memory");
        assert_eq!(Trace::read(&mut text.as_slice()).expect("a trace"), trace);
        let endless = Happening { end: None, ..game };
        assert_eq!(super::around(&trace, &endless).tpot_ms.after, None);
    }
}
