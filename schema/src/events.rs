//! Events of a scenario: changes to the devices during a run.
//!
//! Each event has a time (`at`, from the start of the run, or after the k-th `token`), optionally a duration (`for`),
//! and exactly one change. Overlapping `load` and `memory` events add up. Other events with the same change of a device
//! must not overlap.
//!
//! ```
//! use hearth_schema::events::Event;
//!
//! let game: Event = serde_yaml::from_str("{at: 3 s, for: 10 s, device: laptop, load: 4 threads}").unwrap();
//! assert_eq!(game.load.unwrap().threads, 4);
//! ```
//!
//! Not here: the effect of an event (`hearth_sim`), and the events of a trace ([`crate::run_events`]).

use std::collections::{BTreeMap, BTreeSet};

use hearth_profiles::document::DocumentError;
use hearth_profiles::units::UnitError;
use hearth_profiles::{Bytes, BytesPerSecond, Fraction, Seconds};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::editor::allow_string;
use crate::shorthand::map_or_string;

/// Maximum number of events in a scenario: more than a person writes, and few enough to scan all for every change.
const MAX_EVENTS: usize = 1000;
/// Maximum start time or duration of an event: longer than any request, and short enough that sums do not overflow.
const MAX_TIME: Seconds = Seconds(30.0 * 86_400.0);
/// Maximum number of threads of a CPU load, larger than the number of threads of the programs on any device.
const MAX_THREADS: u32 = 1024;
/// Minimum share of a clock rate, a GPU or a disk that remains for the run. With a share of 0 the run would never end.
const MIN_SHARE_LEFT: f64 = 0.01;

/// A change to a device or its links during a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[serde(expecting = "an event, such as `{at: 3 s, for: 10 s, device: laptop, load: 4 threads}`")]
pub struct Event {
    /// The start time of the event, measured from the start of the run.
    #[serde(rename = "at", default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Seconds>,
    /// The number of generated tokens, over all sequences, after which the event starts.
    #[serde(rename = "token", default, skip_serializing_if = "Option::is_none")]
    pub after_tokens: Option<u32>,
    /// The duration of the event; until the end of the run if absent.
    #[serde(default, rename = "for", skip_serializing_if = "Option::is_none")]
    pub duration: Option<Seconds>,
    /// The name of the affected device. It can be omitted only with `stalls`: then the links of all devices stall.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Other programs use CPU and GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load: Option<ProcessorLoad>,
    /// Other programs allocate memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryLoad>,
    /// The operating system swaps out memory of other programs, which frees memory.
    #[serde(rename = "swap", default, skip_serializing_if = "Option::is_none")]
    pub compressed_swap: Option<CompressedSwap>,
    /// The share of the clock rate of CPU and GPU that remains, for example during thermal throttling.
    #[serde(default, rename = "slow", skip_serializing_if = "Option::is_none")]
    pub clock_rate_fraction: Option<Fraction>,
    /// The share of the disk's bandwidth that other programs use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_load: Option<Fraction>,
    /// Whether the device leaves: from then on it neither sends nor receives messages.
    #[serde(rename = "leaves", default, skip_serializing_if = "std::ops::Not::not")]
    pub leaves_ring: bool,
    /// A device that has left returns. The value says when the device rejoins the ring.
    #[serde(rename = "returns", default, skip_serializing_if = "Option::is_none")]
    pub rejoin_time: Option<RejoinTime>,
    /// Whether messages to and from the device are delayed until the event ends.
    #[serde(rename = "stalls", default, skip_serializing_if = "std::ops::Not::not")]
    pub stalls_links: bool,
}

/// CPU and GPU load of other programs. A document may give the number of threads alone: `load: 4 threads`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, remote = "Self")]
#[schemars(!remote, transform = or_threads)]
pub struct ProcessorLoad {
    /// The number of threads of other programs that are always runnable.
    pub threads: u32,
    /// The share of the GPU that remains for the run; 100 % if absent.
    #[serde(default, rename = "gpu", skip_serializing_if = "Option::is_none")]
    pub available_gpu_fraction: Option<Fraction>,
}

/// The memory that other programs allocate. A document may give the size alone: `memory: 2 GiB`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, remote = "Self")]
#[schemars(!remote, transform = or_size)]
pub struct MemoryLoad {
    /// The size of the allocated memory.
    #[serde(rename = "taken")]
    pub size: Bytes,
    /// The time over which the memory is allocated at a constant rate (a ramp). If absent, all memory is allocated at
    /// once (a step). The memory is freed at the end of the event.
    #[serde(default, rename = "over", skip_serializing_if = "Option::is_none")]
    pub ramp_time: Option<Seconds>,
}

/// Compressed swap in memory (zram).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "compressed swap, such as `{rate: 200 MB/s, compression: 3}`")]
pub struct CompressedSwap {
    /// The rate at which memory is swapped out.
    #[serde(rename = "rate")]
    pub swap_out_rate: BytesPerSecond,
    /// The compression ratio r: s bytes of swapped memory occupy s/r bytes, so s (1 - 1/r) bytes are freed.
    #[serde(rename = "compression")]
    pub compression_ratio: f64,
}

/// The time at which a returned device rejoins the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RejoinTime {
    /// The ring is planned again before the next token, and all tokens so far are recomputed.
    BetweenTokens,
    /// The ring is planned again before the next request.
    NextRequest,
}

/// The change of an event. An event has exactly one change.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Change {
    Load(ProcessorLoad),
    Memory(MemoryLoad),
    Swap(CompressedSwap),
    Slow(Fraction),
    DiskLoad(Fraction),
    Leaves,
    Returns(RejoinTime),
    Stalls,
}

impl Change {
    /// Returns the key of the change in a document.
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
    /// Returns the change of the event; `None` if the event does not have exactly one change.
    pub fn change(&self) -> Option<Change> {
        let changes = [
            self.load.map(Change::Load),
            self.memory.map(Change::Memory),
            self.compressed_swap.map(Change::Swap),
            self.clock_rate_fraction.map(Change::Slow),
            self.disk_load.map(Change::DiskLoad),
            self.leaves_ring.then_some(Change::Leaves),
            self.rejoin_time.map(Change::Returns),
            self.stalls_links.then_some(Change::Stalls),
        ];
        let mut changes = changes.into_iter().flatten();
        let first = changes.next();
        first.filter(|_| changes.next().is_none())
    }

    /// Returns the change of the event if the event is valid; the error says what is wrong with the event.
    fn validate(&self) -> Result<Change, String> {
        let Some(change) = self.change() else {
            let known =
                "`load`, `memory`, `swap`, `slow`, `disk_load`, `leaves: true`, `returns` or `stalls: true`";
            return Err(format!("give exactly one of {known}"));
        };
        let key = change.key();
        if self.start_time.is_some() == self.after_tokens.is_some() {
            return Err("give either `at` (a time) or `token` (a number of generated tokens)".into());
        }
        if self.after_tokens == Some(0) {
            return Err("`token` counts from 1; use `at: 0 s` for the start of the run".into());
        }
        if self.device.is_none() && change != Change::Stalls {
            return Err(format!("`{key}` needs a `device`"));
        }
        for (name, time) in [("at", self.start_time), ("for", self.duration)] {
            if time.is_some_and(|time| time > MAX_TIME) {
                return Err(format!("`{name}` must be at most {MAX_TIME}"));
            }
        }
        let has_no_duration = matches!(change, Change::Leaves | Change::Returns(_) | Change::Swap(_));
        match self.duration {
            Some(_) if has_no_duration => {
                Err(format!("`{key}` cannot have `for`: end its effect with a later event"))
            }
            None if change == Change::Stalls => Err(format!("`{key}` needs `for`, a duration")),
            Some(duration) if duration.0 <= 0.0 => Err("`for` is 0 s: give a longer duration".into()),
            _ => self.check_values(change).map(|()| change),
        }
    }

    fn check_values(&self, change: Change) -> Result<(), String> {
        let within = |share: Fraction| (MIN_SHARE_LEFT..=1.0).contains(&share.0);
        match change {
            Change::Load(load) if load.threads > MAX_THREADS => {
                Err(format!("`load` must be at most {MAX_THREADS} threads"))
            }
            Change::Load(ProcessorLoad { available_gpu_fraction: Some(left), .. }) if !within(left) => {
                Err("`load.gpu` is the share of the GPU that remains: it must be 1 % to 100 %".into())
            }
            Change::Slow(left) if !within(left) => {
                Err("`slow` is the share of the clock rate that remains: it must be 1 % to 100 %".into())
            }
            Change::DiskLoad(taken) if !within(Fraction(1.0 - taken.0)) => {
                Err("`disk_load` is the share that other programs use: it must be 0 % to 99 %".into())
            }
            Change::Memory(MemoryLoad { ramp_time: Some(ramp), .. })
                if ramp > self.duration.unwrap_or(MAX_TIME) || ramp > MAX_TIME =>
            {
                Err("`memory.over` is longer than the event: it must be at most as long as `for`".into())
            }
            Change::Swap(swap) if swap.swap_out_rate.0 <= 0.0 => {
                Err("`swap.rate` must be more than 0".into())
            }
            Change::Swap(swap) if !(1.0..=1000.0).contains(&swap.compression_ratio) => {
                Err("`swap.compression` (original size divided by compressed size) must be 1 to 1000".into())
            }
            _ => Ok(()),
        }
    }

    /// Returns start and end in seconds from the start of the run; `None` for an event that starts after a token.
    fn span(&self) -> Option<(f64, f64)> {
        let at = self.start_time?.0;
        Some((at, self.duration.map_or(f64::INFINITY, |duration| at + duration.0)))
    }
}

/// Checks the events of a scenario whose devices have the names `device_names`.
pub fn validate(events: &[Event], device_names: &BTreeSet<&str>) -> Result<(), DocumentError> {
    let reject = |what: String| Err(DocumentError::invalid_document(what));
    if events.len() > MAX_EVENTS {
        return reject(format!("`events` has {} entries; the maximum is {MAX_EVENTS}", events.len()));
    }
    let mut changes = Vec::new();
    for (index, event) in events.iter().enumerate() {
        if let Some(name) = event.device.as_deref().filter(|name| !device_names.contains(name)) {
            return reject(format!("events[{index}] names `{name}`, which is not a device of this scenario"));
        }
        match event.validate() {
            Ok(change) => changes.push(change),
            Err(what) => return reject(format!("events[{index}]: {what}")),
        }
    }
    validate_overlaps(events, &changes)?;
    validate_presence(events, &changes)
}

/// Checks that changes of the same kind do not overlap on a device, except `load` and `memory`, which add up.
/// [`validate_presence`] checks `leaves` and `returns`.
fn validate_overlaps(events: &[Event], changes: &[Change]) -> Result<(), DocumentError> {
    let adds_up = |change: &Change| {
        matches!(change, Change::Load(_) | Change::Memory(_) | Change::Leaves | Change::Returns(_))
    };
    for (index, (event, change)) in events.iter().zip(changes).enumerate() {
        let Some((from, to)) = event.span().filter(|_| !adds_up(change)) else { continue };
        for (earlier, (other, their)) in events.iter().zip(changes).enumerate().take(index) {
            let same_device =
                event.device == other.device || event.device.is_none() || other.device.is_none();
            let is_same = same_device && their.key() == change.key();
            if is_same && other.span().is_some_and(|(begins, ends)| from < ends && begins < to) {
                return Err(DocumentError::invalid_document(format!(
                    "events[{index}]: `{}` overlaps the same change in events[{earlier}]: shorten one event (`for`) or \
                     merge the events",
                    change.key()
                )));
            }
        }
    }
    Ok(())
}

/// Checks that a device leaves only while it is present and returns only after it has left. The order of events by time
/// and events by token is not known, so devices with both are not checked.
fn validate_presence(events: &[Event], changes: &[Change]) -> Result<(), DocumentError> {
    let mut moves: BTreeMap<&str, Vec<(f64, usize)>> = BTreeMap::new();
    for (index, (event, change)) in events.iter().zip(changes).enumerate() {
        if let (Change::Leaves | Change::Returns(_), Some(device)) = (change, &event.device) {
            let when = event.start_time.map_or_else(|| f64::from(event.after_tokens.unwrap_or(0)), |at| at.0);
            moves.entry(device).or_default().push((when, index));
        }
    }
    for (device, mut moves) in moves {
        let by_time = moves.iter().filter(|(_, index)| events[*index].start_time.is_some()).count();
        if by_time != 0 && by_time != moves.len() {
            continue;
        }
        moves.sort_by(|one, other| one.0.total_cmp(&other.0));
        let mut is_present = true;
        for (_, index) in moves {
            let leaves = changes[index] == Change::Leaves;
            if leaves != is_present {
                let state = if is_present { "has not left yet" } else { "has already left" };
                return Err(DocumentError::invalid_document(format!(
                    "events[{index}]: `{}` is impossible, because `{device}` {state} at that time: remove \
                     the event or change its time",
                    changes[index].key()
                )));
            }
            is_present = !leaves;
        }
    }
    Ok(())
}

fn or_threads(map: &mut Schema) {
    allow_string(map, &json_schema!({"type": "string", "pattern": r"^[0-9]+\s*threads?$"}));
}

fn or_size(map: &mut Schema) {
    allow_string(map, &Bytes::json_schema(&mut SchemaGenerator::default()));
}

map_or_string!(ProcessorLoad, "threads, such as `4 threads`, or a map such as `{threads: 4, gpu: 50 %}`");
map_or_string!(MemoryLoad, "a size, such as `2 GiB`, or a map such as `{taken: 2 GiB, over: 5 s}`");

impl ProcessorLoad {
    fn from_text(words: &str) -> Result<ProcessorLoad, String> {
        let count = words.strip_suffix("threads").or_else(|| words.strip_suffix("thread"));
        let threads = count.and_then(|count| count.trim().parse().ok());
        let threads =
            threads.ok_or_else(|| format!("`{words}` is not a number of threads, such as `4 threads`"))?;
        Ok(ProcessorLoad { threads, available_gpu_fraction: None })
    }
}

impl MemoryLoad {
    fn from_text(size: &str) -> Result<MemoryLoad, UnitError> {
        Ok(MemoryLoad { size: size.parse()?, ramp_time: None })
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
        check(yaml).expect("valid events");
        let events: Vec<Event> = serde_yaml::from_str(yaml).expect("events");
        let again: Vec<Event> =
            serde_yaml::from_str(&serde_yaml::to_string(&events).expect("text")).expect("events");
        assert_eq!(events, again);
    }

    #[test]
    fn invalid_events_are_rejected() {
        for (yaml, complaint) in [
            ("- {at: 1 s, device: a}", "exactly one of"),
            ("- {at: 1 s, device: a, slow: 50 %, stalls: true}", "exactly one of"),
            ("- {device: a, slow: 50 %}", "either `at`"),
            ("- {at: 1 s, token: 2, device: a, slow: 50 %}", "either `at`"),
            ("- {token: 0, device: a, slow: 50 %}", "counts from 1"),
            ("- {at: 1 s, slow: 50 %}", "needs a `device`"),
            ("- {at: 1 s, device: c, slow: 50 %}", "`c`, which is not a device of this scenario"),
            ("- {at: 1 s, device: a, slow: 0 %}", "1 % to 100 %"),
            ("- {at: 1 s, device: a, disk_load: 100 %}", "0 % to 99 %"),
            ("- {at: 1 s, device: a, load: 9999 threads}", "at most 1024"),
            ("- {at: 1 s, device: a, load: 4}", "threads, such as `4 threads`"),
            ("- {at: 1 s, device: a, load: 4 cores}", "not a number of threads"),
            ("- {at: 1 s, device: a, memory: 4}", "a size, such as `2 GiB`"),
            ("- {at: 1 s, for: 1 s, device: a, memory: {taken: 1 B, over: 2 s}}", "longer than the event"),
            ("- {at: 1 s, device: a, swap: {rate: 1 MB/s, compression: 0.5}}", "1 to 1000"),
            ("- {at: 1 s, device: a, stalls: true}", "needs `for`"),
            ("- {at: 1 s, for: 1 s, device: a, leaves: true}", "cannot have `for`"),
            ("- {at: 1e300 s, device: a, slow: 50 %}", "`at` must be at most"),
            ("- {at: 1 s, for: 0 s, device: a, slow: 50 %}", "`for` is 0 s"),
            (
                "- {at: 1 s, device: a, slow: 50 %}\n- {at: 2 s, device: a, slow: 30 %}",
                "overlaps the same change in events[0]",
            ),
            (
                "- {at: 1 s, for: 2 s, stalls: true}\n- {at: 2 s, for: 1 s, device: a, stalls: true}",
                "events[0]",
            ),
            ("- {at: 1 s, device: a, returns: next-request}", "has not left"),
            (
                "- {at: 2 s, device: a, leaves: true}\n- {at: 1 s, device: a, leaves: true}",
                "has already left",
            ),
            ("- {at: 1 s, device: a, level: 3}", "unknown field `level`"),
        ] {
            let error = check(yaml).expect_err(yaml);
            assert!(error.contains(complaint), "{yaml}: {error}");
        }
        check("- {at: 1 s, for: 1 s, device: a, slow: 50 %}\n- {at: 2 s, device: a, slow: 30 %}")
            .expect("one after the other");
    }
}
