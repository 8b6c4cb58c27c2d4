//! Events of a scenario: what happens to the devices while a ring runs.
//!
//! Each of the `events` has a moment, `at` a simulated time from the run's start or after the k-th `token`, perhaps a
//! duration (`for`), and one change. Loads and memory of several programs add up. A clock, the share of a disk and
//! the stall of a link have one value at a time.
//!
//! ```
//! use hearth_schema::events::Event;
//!
//! let game: Event = serde_yaml::from_str("{at: 3 s, for: 10 s, device: laptop, load: 4 threads}").unwrap();
//! assert_eq!(game.load.unwrap().threads, 4);
//! ```
//!
//! Not here: their effect (`hearth_sim`), and the events of a trace ([`crate::run_events`]).

use std::collections::{BTreeMap, BTreeSet};

use hearth_profiles::document::DocumentError;
use hearth_profiles::{Bytes, BytesPerSecond, Fraction, Seconds};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::editor::or_text;

/// Above what a person writes, and few enough to scan for every change.
const MAX_EVENTS: usize = 1000;
/// Longer than any request; keeps sums of nanoseconds far from overflow.
const MAX_TIME: Seconds = Seconds(30.0 * 86_400.0);
/// More runnable threads than any device's programs have.
const MAX_THREADS: u32 = 1024;
/// The minimum remaining share of a clock, a GPU or a disk: with 0 a run would never end.
const MIN_SHARE_LEFT: f64 = 0.01;

/// Something that happens during a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "an event, such as `{at: 3 s, for: 10 s, device: laptop, load: 4 threads}`"
)]
pub struct Event {
    /// The time from the run's start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<Seconds>,
    /// The number of tokens, of all sequences together, after which it happens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<u32>,
    /// The duration; to the run's end if absent.
    #[serde(default, rename = "for", skip_serializing_if = "Option::is_none")]
    pub lasts: Option<Seconds>,
    /// The device. Only `stalls` can be without one: every link stalls then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Other programs compute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load: Option<Load>,
    /// Other programs take memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Taken>,
    /// The system swaps other programs' memory out, which makes room.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub swap: Option<Swap>,
    /// The remaining share of the clock of CPU and GPU, for example under thermal throttling.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slow: Option<Fraction>,
    /// The share of the disk's bandwidth that other programs use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_load: Option<Fraction>,
    /// Whether the device leaves: it neither receives nor sends messages.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leaves: bool,
    /// A device that left is back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub returns: Option<Return>,
    /// Whether messages to and from the device stall, and continue afterwards.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stalls: bool,
}

/// Other programs' threads that are always runnable. A document may give the number alone:
/// `load: 4 threads`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, remote = "Self")]
#[schemars(!remote, transform = or_threads)]
pub struct Load {
    pub threads: u32,
    /// The share of the GPU that other programs leave; all of it if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<Fraction>,
}

/// Memory that other programs take. A document may give the size alone: `memory: 2 GiB`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, remote = "Self")]
#[schemars(!remote, transform = or_size)]
pub struct Taken {
    pub taken: Bytes,
    /// Evenly over this time (a ramp); all at once (a step) if absent. Either with `for` is a burst.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over: Option<Seconds>,
}

/// Compressed swap in memory (zram).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "compressed swap, such as `{rate: 200 MB/s, compression: 3}`")]
pub struct Swap {
    /// How fast memory is swapped out.
    pub rate: BytesPerSecond,
    /// r: what is swapped out takes 1/r of its size, so that swapping s bytes makes room for s (1 - 1/r).
    pub compression: f64,
}

/// When a device that is back is taken into the ring again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Return {
    /// The ring plans again before the next token and recomputes all tokens so far.
    BetweenTokens,
    /// The plan of the next request changes.
    NextRequest,
}

/// The change of an event.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Change {
    Load(Load),
    Memory(Taken),
    Swap(Swap),
    Slow(Fraction),
    DiskLoad(Fraction),
    Leaves,
    Returns(Return),
    Stalls,
}

impl Change {
    /// Its key in a document.
    pub fn key(&self) -> &'static str {
        match self {
            Change::Load(_) => "load",
            Change::Memory(_) => "memory",
            Change::Swap(_) => "swap",
            Change::Slow(_) => "slow",
            Change::DiskLoad(_) => "disk_load",
            Change::Leaves => "leaves",
            Change::Returns(_) => "returns",
            Change::Stalls => "stalls",
        }
    }
}

impl Event {
    /// The change, if the event has exactly one.
    pub fn change(&self) -> Option<Change> {
        let changes = [
            self.load.map(Change::Load),
            self.memory.map(Change::Memory),
            self.swap.map(Change::Swap),
            self.slow.map(Change::Slow),
            self.disk_load.map(Change::DiskLoad),
            self.leaves.then_some(Change::Leaves),
            self.returns.map(Change::Returns),
            self.stalls.then_some(Change::Stalls),
        ];
        let mut changes = changes.into_iter().flatten();
        let first = changes.next();
        first.filter(|_| changes.next().is_none())
    }

    fn validate(&self, place: &str) -> Result<Change, DocumentError> {
        let refuse = |what: String| Err(DocumentError::invalid(format!("{place}: {what}")));
        let Some(change) = self.change() else {
            return refuse(
                "say one of `load`, `memory`, `swap`, `slow`, `disk_load`, `leaves: true`, `returns` and `stalls: true`"
                    .into(),
            );
        };
        let key = change.key();
        if self.at.is_some() == self.token.is_some() {
            return refuse("give one of `at` (a time) and `token` (how many are out)".into());
        }
        if self.token == Some(0) {
            return refuse("`token` counts from 1: `at: 0 s` is before the first".into());
        }
        if self.device.is_none() && change != Change::Stalls {
            return refuse(format!("`{key}` needs a `device`"));
        }
        for (name, time) in [("at", self.at), ("for", self.lasts)] {
            if time.is_some_and(|time| time > MAX_TIME) {
                return refuse(format!("`{name}` is longer than {MAX_TIME}"));
            }
        }
        let wants_length = change == Change::Stalls;
        let no_length = matches!(change, Change::Leaves | Change::Returns(_) | Change::Swap(_));
        match self.lasts {
            Some(_) if no_length => return refuse(format!("`{key}` has no `for`: a later event ends it")),
            None if wants_length => return refuse(format!("`{key}` needs `for`: how long it lasts")),
            Some(lasts) if lasts.0 <= 0.0 => return refuse("`for` is zero: nothing would happen".into()),
            _ => {}
        }
        self.check_numbers(change, place)?;
        Ok(change)
    }

    fn check_numbers(&self, change: Change, place: &str) -> Result<(), DocumentError> {
        let refuse = |what: String| Err(DocumentError::invalid(format!("{place}: {what}")));
        let within = |share: Fraction| (MIN_SHARE_LEFT..=1.0).contains(&share.0);
        match change {
            Change::Load(load) if load.threads > MAX_THREADS => {
                refuse(format!("`load` is at most {MAX_THREADS} threads"))
            }
            Change::Load(Load { gpu: Some(left), .. }) if !within(left) => {
                refuse("`load.gpu` is what is left of the GPU: 1 % to 100 %".into())
            }
            Change::Slow(left) if !within(left) => {
                refuse("`slow` is what is left of the clock: 1 % to 100 %".into())
            }
            Change::DiskLoad(taken) if !within(Fraction(1.0 - taken.0)) => {
                refuse("`disk_load` is what others use of the disk: 0 % to 99 %".into())
            }
            Change::Memory(Taken { over: Some(over), .. })
                if over > self.lasts.unwrap_or(MAX_TIME) || over > MAX_TIME =>
            {
                refuse("`memory.over` is longer than the event: it would not be over when it ends".into())
            }
            Change::Swap(swap) if swap.rate.0 <= 0.0 => refuse("`swap.rate` is zero".into()),
            Change::Swap(swap) if !(1.0..=1000.0).contains(&swap.compression) => {
                refuse("`swap.compression` is how many times smaller memory becomes: 1 to 1000".into())
            }
            _ => Ok(()),
        }
    }

    /// Returns start and end in seconds, `None` for an event that follows a token.
    fn span(&self) -> Option<(f64, f64)> {
        let at = self.at?.0;
        Some((at, self.lasts.map_or(f64::INFINITY, |lasts| at + lasts.0)))
    }
}

/// Checks the events of a scenario with devices of these names.
pub fn validate(events: &[Event], names: &BTreeSet<&str>) -> Result<(), DocumentError> {
    if events.len() > MAX_EVENTS {
        return Err(DocumentError::invalid(format!(
            "`events` has {} entries; at most {MAX_EVENTS}",
            events.len()
        )));
    }
    let mut changes = Vec::new();
    for (index, event) in events.iter().enumerate() {
        let place = format!("events[{index}]");
        if let Some(name) = event.device.as_deref().filter(|name| !names.contains(name)) {
            return Err(DocumentError::invalid(format!(
                "{place} names `{name}`, which is not a device here"
            )));
        }
        changes.push(event.validate(&place)?);
    }
    validate_overlaps(events, &changes)?;
    validate_presence(events, &changes)
}

/// Checks that changes of one kind do not overlap on a device, except loads and memory, which add up.
fn validate_overlaps(events: &[Event], changes: &[Change]) -> Result<(), DocumentError> {
    let adds_up = |change: &Change| {
        matches!(change, Change::Load(_) | Change::Memory(_) | Change::Leaves | Change::Returns(_))
    };
    for (index, (event, change)) in events.iter().zip(changes).enumerate() {
        let Some((from, to)) = event.span().filter(|_| !adds_up(change)) else { continue };
        for (earlier, (other, their)) in events.iter().zip(changes).enumerate().take(index) {
            let same_device =
                event.device == other.device || event.device.is_none() || other.device.is_none();
            let Some((begins, ends)) = other.span().filter(|_| same_device && their.key() == change.key())
            else {
                continue;
            };
            if from < ends && begins < to {
                return Err(DocumentError::invalid(format!(
                    "events[{index}]: `{}` while that of events[{earlier}] lasts: shorten one (`for`) or join the two",
                    change.key()
                )));
            }
        }
    }
    Ok(())
}

/// Checks that a device that leaves was there, and one that returns was not. Times and tokens cannot be ordered, so
/// this covers devices that use only one of the two.
fn validate_presence(events: &[Event], changes: &[Change]) -> Result<(), DocumentError> {
    let mut moves: BTreeMap<&str, Vec<(f64, usize)>> = BTreeMap::new();
    for (index, (event, change)) in events.iter().zip(changes).enumerate() {
        if let (Change::Leaves | Change::Returns(_), Some(device)) = (change, &event.device) {
            let when = event.at.map_or_else(|| f64::from(event.token.unwrap_or(0)), |at| at.0);
            moves.entry(device).or_default().push((when, index));
        }
    }
    for (device, mut moves) in moves {
        let by_time = moves.iter().filter(|(_, index)| events[*index].at.is_some()).count();
        if by_time != 0 && by_time != moves.len() {
            continue;
        }
        moves.sort_by(|one, other| one.0.total_cmp(&other.0));
        let mut there = true;
        for (_, index) in moves {
            let leaves = changes[index] == Change::Leaves;
            if leaves != there {
                let state = if there { "has not left" } else { "has left already" };
                return Err(DocumentError::invalid(format!(
                    "events[{index}]: `{}` although `{device}` {state} at that time: remove the event or change its time",
                    changes[index].key()
                )));
            }
            there = !leaves;
        }
    }
    Ok(())
}

fn or_threads(map: &mut Schema) {
    or_text(map, &json_schema!({"type": "string", "pattern": r"^[0-9]+\s*threads?$"}));
}

fn or_size(map: &mut Schema) {
    or_text(map, &Bytes::json_schema(&mut SchemaGenerator::default()));
}

impl Serialize for Load {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Load::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for Load {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct WordsOrMap;
        impl<'de> Visitor<'de> for WordsOrMap {
            type Value = Load;

            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("threads, as `4 threads`, or a map such as `{threads: 4, gpu: 50 %}`")
            }

            fn visit_str<E: serde::de::Error>(self, words: &str) -> Result<Self::Value, E> {
                let count = words.strip_suffix("threads").or_else(|| words.strip_suffix("thread"));
                let threads = count.and_then(|count| count.trim().parse().ok());
                let threads = threads
                    .ok_or_else(|| E::custom(format!("`{words}` is no number of threads: `4 threads`")))?;
                Ok(Load { threads, gpu: None })
            }

            fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<Self::Value, M::Error> {
                Load::deserialize(MapAccessDeserializer::new(map))
            }
        }
        deserializer.deserialize_any(WordsOrMap)
    }
}

impl Serialize for Taken {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Taken::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for Taken {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SizeOrMap;
        impl<'de> Visitor<'de> for SizeOrMap {
            type Value = Taken;

            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("a size, as `2 GiB`, or a map such as `{taken: 2 GiB, over: 5 s}`")
            }

            fn visit_str<E: serde::de::Error>(self, size: &str) -> Result<Self::Value, E> {
                Ok(Taken { taken: size.parse().map_err(E::custom)?, over: None })
            }

            fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<Self::Value, M::Error> {
                Taken::deserialize(MapAccessDeserializer::new(map))
            }
        }
        deserializer.deserialize_any(SizeOrMap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(yaml: &str) -> Result<(), String> {
        let events: Vec<Event> = serde_yaml::from_str(yaml).map_err(|error| error.to_string())?;
        validate(&events, &BTreeSet::from(["a", "b"])).map_err(|error| error.to_string())
    }

    #[test]
    fn every_event_can_be_written_and_read_back() {
        let yaml = "
- {at: 3 s, for: 10 s, device: a, load: 4 threads}
- {token: 5, device: a, load: {threads: 2, gpu: 50 %}}
- {at: 0 s, device: a, memory: 2 GiB}
- {at: 1 s, for: 9 s, device: a, memory: {taken: 1 GiB, over: 5 s}}
- {at: 2 s, device: b, slow: 50 %}
- {at: 2 s, device: b, disk_load: 60 %}
- {at: 2 s, device: b, swap: {rate: 100 MB/s, compression: 3}}
- {at: 4 s, device: b, leaves: true}
- {at: 9 s, device: b, returns: between-tokens}
- {at: 9 s, for: 2 s, stalls: true}
";
        check(yaml).expect("events that make sense");
        let events: Vec<Event> = serde_yaml::from_str(yaml).expect("events");
        let again: Vec<Event> =
            serde_yaml::from_str(&serde_yaml::to_string(&events).expect("text")).expect("events");
        assert_eq!(events, again);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (yaml, complaint) in [
            ("- {at: 1 s, device: a}", "say one of"),
            ("- {at: 1 s, device: a, slow: 50 %, stalls: true}", "say one of"),
            ("- {device: a, slow: 50 %}", "one of `at`"),
            ("- {at: 1 s, token: 2, device: a, slow: 50 %}", "one of `at`"),
            ("- {token: 0, device: a, slow: 50 %}", "counts from 1"),
            ("- {at: 1 s, slow: 50 %}", "needs a `device`"),
            ("- {at: 1 s, device: c, slow: 50 %}", "`c`, which is not a device here"),
            ("- {at: 1 s, device: a, slow: 0 %}", "1 % to 100 %"),
            ("- {at: 1 s, device: a, disk_load: 100 %}", "0 % to 99 %"),
            ("- {at: 1 s, device: a, load: 9999 threads}", "at most 1024"),
            ("- {at: 1 s, device: a, load: 4}", "threads, as `4 threads`"),
            ("- {at: 1 s, device: a, load: 4 cores}", "no number of threads"),
            ("- {at: 1 s, device: a, memory: 4}", "a size, as `2 GiB`"),
            ("- {at: 1 s, for: 1 s, device: a, memory: {taken: 1 B, over: 2 s}}", "longer than the event"),
            ("- {at: 1 s, device: a, swap: {rate: 1 MB/s, compression: 0.5}}", "1 to 1000"),
            ("- {at: 1 s, device: a, stalls: true}", "needs `for`"),
            ("- {at: 1 s, for: 1 s, device: a, leaves: true}", "has no `for`"),
            ("- {at: 1e300 s, device: a, slow: 50 %}", "longer than"),
            ("- {at: 1 s, for: 0 s, device: a, slow: 50 %}", "nothing would happen"),
            (
                "- {at: 1 s, device: a, slow: 50 %}\n- {at: 2 s, device: a, slow: 30 %}",
                "while that of events[0]",
            ),
            (
                "- {at: 1 s, for: 2 s, stalls: true}\n- {at: 2 s, for: 1 s, device: a, stalls: true}",
                "events[0]",
            ),
            ("- {at: 1 s, device: a, returns: next-request}", "has not left"),
            (
                "- {at: 2 s, device: a, leaves: true}\n- {at: 1 s, device: a, leaves: true}",
                "has left already",
            ),
            ("- {at: 1 s, device: a, level: 3}", "unknown field `level`"),
        ] {
            let error = check(yaml).expect_err(yaml);
            assert!(error.contains(complaint), "{yaml}: {error}");
        }
        check("- {at: 1 s, for: 1 s, device: a, slow: 50 %}\n- {at: 2 s, device: a, slow: 30 %}")
            .expect("in turn");
    }
}
