//! What has a server done so far, for `/metrics` and for the page?
//!
//! Requests, tokens, times, and what each device of the ring was busy with, from the traces that it hands over now and
//! then. Counters only grow; nothing is kept of a request.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};

use hearth_schema::trace::Counter;
use hearth_schema::trace::Kind;
use hearth_schema::trace::Reading;
use hearth_schema::trace::Record;
use hearth_schema::trace::Resource;
use serde::Serialize;
use tokio::time::Instant;

use super::answer::Usage;

/// Upper bounds of the histogram of times to the first token, in seconds.
/// source: assumed, from a short prompt on a fast ring to a long one on a slow one
const FIRST_TOKEN_BOUNDS: [f64; 9] = [0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0];

/// What is counted.
#[derive(Debug)]
pub struct Counters {
    since: Instant,
    all: Mutex<All>,
}

#[derive(Debug, Clone, Default)]
struct All {
    /// Answered requests by endpoint and HTTP status.
    requests: BTreeMap<(&'static str, u16), u64>,
    /// Answers that were given up because nobody listened any more.
    cancelled: u64,
    /// Under way or waiting.
    active: u64,
    usage: [u64; 3],
    first_token: [u64; FIRST_TOKEN_BOUNDS.len()],
    first_tokens: u64,
    first_token_seconds: f64,
    rings: u64,
    is_up: bool,
    devices: BTreeMap<String, Work>,
}

/// What a device has been at.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Work {
    /// Seconds of the processor.
    pub computing_s: f64,
    /// Seconds for which weights came from disk while everybody waited.
    pub disk_wait_s: f64,
    /// Seconds of waiting for activations.
    pub waiting_s: f64,
    /// Bytes that came from disk.
    pub read_bytes: u64,
    /// Bytes of weights in memory, when it was looked at last.
    pub resident_bytes: u64,
}

/// What the page shows.
#[derive(Debug, Serialize)]
pub struct Seen {
    /// Whether the ring is up.
    pub is_up: bool,
    /// Requests under way or waiting.
    pub active: u64,
    /// Tokens generated so far.
    pub generated: u64,
    /// Seconds since the server began.
    pub uptime_s: f64,
    /// Devices by name.
    pub devices: BTreeMap<String, Work>,
}

impl Default for Counters {
    fn default() -> Self {
        Self { since: Instant::now(), all: Mutex::default() }
    }
}

impl Counters {
    fn all(&self) -> MutexGuard<'_, All> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request was answered.
    pub fn answered(&self, endpoint: &'static str, status: u16) {
        *self.all().requests.entry((endpoint, status)).or_default() += 1;
    }

    /// An answer begins; it is under way until what comes back is dropped.
    pub fn begin(self: &std::sync::Arc<Self>) -> UnderWay {
        self.all().active += 1;
        UnderWay { counters: self.clone(), begun: Instant::now(), is_first: true, is_over: false }
    }

    /// Answers under way or waiting.
    pub fn active(&self) -> u64 {
        self.all().active
    }

    /// The ring is up, or is not.
    pub fn ring(&self, is_up: bool) {
        let mut all = self.all();
        all.rings += u64::from(is_up);
        all.is_up = is_up;
    }

    /// Whether the ring is up.
    pub fn is_up(&self) -> bool {
        self.all().is_up
    }

    /// A device handed its trace over.
    pub fn worked(&self, device: &str, records: &[Record], readings: &[Reading]) {
        let mut all = self.all();
        let work = all.devices.entry(device.to_owned()).or_default();
        for record in records {
            let seconds = record.duration() as f64 * 1e-9;
            match (record.kind, record.cost) {
                (Kind::Receive, _) => work.waiting_s += seconds,
                (Kind::Prefetch, _) => work.read_bytes += record.bytes,
                (_, Some(cost)) => {
                    work.computing_s += cost.cpu as f64 * 1e-9;
                    let waited = record.duration().saturating_sub(cost.cpu.saturating_add(cost.queue));
                    work.disk_wait_s += waited as f64 * 1e-9;
                    work.read_bytes += cost.faulted;
                }
                _ if record.resource == Resource::Gpu => work.computing_s += seconds,
                _ => {}
            }
        }
        let resident = readings.iter().rev().find(|reading| reading.counter == Counter::Resident);
        if let Some(reading) = resident {
            work.resident_bytes = reading.value;
        }
    }

    /// What the page shows.
    pub fn seen(&self) -> Seen {
        let all = self.all();
        Seen {
            is_up: all.is_up,
            active: all.active,
            generated: all.usage[2],
            uptime_s: self.since.elapsed().as_secs_f64(),
            devices: all.devices.clone(),
        }
    }

    /// In Prometheus' text format, version 0.0.4.
    pub fn exposed(&self) -> String {
        let all = self.all().clone();
        let mut text = String::new();
        let mut family = |name: &str, sort: &str, help: &str, samples: Vec<(String, f64)>| {
            let _ = writeln!(text, "# HELP hearth_{name} {help}\n# TYPE hearth_{name} {sort}");
            for (labels, value) in samples {
                let _ = writeln!(text, "hearth_{labels} {value}");
            }
        };
        let one = |name: &str, value: f64| vec![(name.to_owned(), value)];
        let up = f64::from(u8::from(all.is_up));
        family("ring_up", "gauge", "Whether the ring takes requests.", one("ring_up", up));
        family("rings_total", "counter", "Rings that came up.", one("rings_total", all.rings as f64));
        let uptime = self.since.elapsed().as_secs_f64();
        family("uptime_seconds", "gauge", "Since the server began.", one("uptime_seconds", uptime));
        let requests = all.requests.iter().map(|((endpoint, status), count)| {
            (format!("requests_total{{endpoint=\"{endpoint}\",status=\"{status}\"}}"), *count as f64)
        });
        family("requests_total", "counter", "Requests answered.", requests.collect());
        let cancelled = one("requests_cancelled_total", all.cancelled as f64);
        family("requests_cancelled_total", "counter", "Answers nobody waited for any more.", cancelled);
        family(
            "requests_active",
            "gauge",
            "Under way or waiting.",
            one("requests_active", all.active as f64),
        );
        let sorts = ["prompt", "cached", "generated"];
        let tokens = sorts.iter().zip(all.usage);
        let tokens = tokens.map(|(sort, count)| (format!("tokens_total{{sort=\"{sort}\"}}"), count as f64));
        family(
            "tokens_total",
            "counter",
            "Tokens: of prompts, of these known before, and new.",
            tokens.collect(),
        );
        let mut buckets: Vec<(String, f64)> = FIRST_TOKEN_BOUNDS
            .iter()
            .zip(all.first_token)
            .map(|(bound, count)| (format!("first_token_seconds_bucket{{le=\"{bound}\"}}"), count as f64))
            .collect();
        buckets.push(("first_token_seconds_bucket{le=\"+Inf\"}".into(), all.first_tokens as f64));
        buckets.push(("first_token_seconds_sum".into(), all.first_token_seconds));
        buckets.push(("first_token_seconds_count".into(), all.first_tokens as f64));
        family("first_token_seconds", "histogram", "From a request to its first token.", buckets);
        let seconds = all.devices.iter().flat_map(|(name, work)| {
            let sorts =
                [("computing", work.computing_s), ("disk", work.disk_wait_s), ("waiting", work.waiting_s)];
            let name = escaped(name);
            sorts.map(|(sort, s)| (format!("device_seconds_total{{device=\"{name}\",sort=\"{sort}\"}}"), s))
        });
        family("device_seconds_total", "counter", "What a device was at.", seconds.collect());
        let read = all.devices.iter().map(|(name, work)| {
            (format!("device_read_bytes_total{{device=\"{}\"}}", escaped(name)), work.read_bytes as f64)
        });
        family("device_read_bytes_total", "counter", "Weights read from disk.", read.collect());
        text
    }
}

/// A label's value.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// An answer under way.
#[derive(Debug)]
pub struct UnderWay {
    counters: std::sync::Arc<Counters>,
    begun: Instant,
    is_first: bool,
    is_over: bool,
}

impl UnderWay {
    /// Text has come.
    pub fn text(&mut self) {
        if std::mem::replace(&mut self.is_first, false) {
            let seconds = self.begun.elapsed().as_secs_f64();
            let mut all = self.counters.all();
            all.first_tokens += 1;
            all.first_token_seconds += seconds;
            for (bound, count) in FIRST_TOKEN_BOUNDS.iter().zip(&mut all.first_token) {
                *count += u64::from(seconds <= *bound);
            }
        }
    }

    /// It has come to its end, whichever.
    pub fn over(&mut self) {
        self.is_over = true;
    }

    /// What it took, to be told once.
    pub fn took(&self, Usage { prompt, held, generated }: Usage) {
        let mut all = self.counters.all();
        for (sum, more) in all.usage.iter_mut().zip([prompt, held, generated]) {
            *sum += u64::from(more);
        }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut all = self.counters.all();
        all.active = all.active.saturating_sub(1);
        all.cancelled += u64::from(!self.is_over);
    }
}
