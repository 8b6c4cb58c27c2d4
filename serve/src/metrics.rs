//! Metrics of a server: Prometheus metrics for `/metrics`, and a snapshot for the chat page.
//!
//! The device times come from the traces that the running ring reports. No data of individual requests are stored.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hearth_schema::trace::{Counter as TraceCounter, CounterReading, Resource, StepKind, StepRecord};
use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry, Unit};
use serde::Serialize;
use tokio::time::Instant;

/// The token counts of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u32,
    pub generated_tokens: u32,
}

impl std::iter::Sum for Usage {
    fn sum<I: Iterator<Item = Usage>>(usages: I) -> Usage {
        usages.fold(Usage::default(), |sum, more| Usage {
            prompt_tokens: sum.prompt_tokens + more.prompt_tokens,
            generated_tokens: sum.generated_tokens + more.generated_tokens,
        })
    }
}

/// Upper bounds of the histogram buckets for the time to first token, in seconds.
/// source: assumed, from a short prompt on a fast ring to a long prompt on a slow ring
const TTFT_BUCKETS: [f64; 9] = [0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0];
/// Upper bounds of the histogram buckets for the time between two tokens, in seconds.
/// source: assumed, from a small model in memory to a large one that is read from disk
const ITL_BUCKETS: [f64; 11] = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0];

type FloatCounter = Counter<f64, AtomicU64>;

/// Names and values of the labels of a metric.
type Labels<const N: usize> = [(&'static str, String); N];

#[derive(Debug)]
pub struct Metrics {
    started: Instant,
    registry: Registry,
    requests: Family<Labels<2>, Counter>,
    cancelled: Counter,
    active: Gauge<i64, AtomicI64>,
    running: Gauge<i64, AtomicI64>,
    /// Positions of the KV cache that running requests use.
    kv_tokens: Gauge<i64, AtomicI64>,
    pub kv_capacity: Gauge<i64, AtomicI64>,
    itl: Histogram,
    tokens: Family<Labels<1>, Counter>,
    ttft: Histogram,
    rings: Counter,
    ring_up: Gauge<i64, AtomicI64>,
    uptime: Gauge<f64, AtomicU64>,
    device_seconds: Family<Labels<2>, FloatCounter>,
    device_read_bytes: Family<Labels<1>, Counter>,
    device_available: Family<Labels<1>, Gauge<i64, AtomicI64>>,
    device_slowdown: Family<Labels<1>, Gauge<f64, AtomicU64>>,
    plan_changes: Counter,
    devices: Mutex<BTreeMap<String, DeviceActivity>>,
}

/// The activity of a device since the server started, and its weights in memory.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct DeviceActivity {
    /// Time for which the CPU or the GPU computed, in seconds.
    pub computing_s: f64,
    /// Time for which computations waited for weights from disk, in seconds.
    pub disk_wait_s: f64,
    /// Time for which the device waited for activations from its predecessor in the ring, in seconds.
    #[serde(rename = "waiting_s")]
    pub receive_wait_s: f64,
    pub read_bytes: u64,
    /// Weights in memory at the last counter sample, in bytes.
    pub resident_bytes: u64,
    /// How many times as long as its profile says the device computes; `null` without a profile.
    pub slowdown: Option<f64>,
    /// Memory that the device has for the run at the last counter sample, in bytes; `null` if it does not report it.
    pub available_bytes: Option<u64>,
}

/// The state of a server at one moment, for the chat page.
#[derive(Debug, Serialize)]
pub struct Snapshot {
    #[serde(rename = "is_up")]
    pub is_ring_up: bool,
    /// Number of running and waiting requests.
    #[serde(rename = "active")]
    pub active_requests: u64,
    /// Number of tokens generated since the server started.
    #[serde(rename = "generated")]
    pub generated_tokens: u64,
    /// Time since the server started, in seconds.
    pub uptime_s: f64,
    pub devices: BTreeMap<String, DeviceActivity>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("hearth");
        let all = &mut registry;
        let states = "Time of a device by state: computing, waiting for the disk, waiting for activations";
        let available = "Memory that a device has for its part of the model, the KV caches and buffers";
        let slowdown = "Computing time of a device, relative to its profile";
        let token_kinds = "Tokens by kind: prompt tokens, prompt tokens found in the cache, generated tokens";
        let cancelled = "Requests whose client disconnected before the response was complete";
        let ttft = Histogram::new(TTFT_BUCKETS);
        let help = "Time from a request to its first token";
        all.register_with_unit("time_to_first_token", help, Unit::Seconds, ttft.clone());
        let itl = Histogram::new(ITL_BUCKETS);
        let help = "Time between two tokens of a request";
        all.register_with_unit("inter_token_latency", help, Unit::Seconds, itl.clone());
        Self {
            started: Instant::now(),
            requests: metric(all, "requests", "Requests that were answered", None),
            cancelled: metric(all, "requests_cancelled", cancelled, None),
            active: metric(all, "requests_active", "Requests that are running or waiting", None),
            running: metric(all, "requests_running", "Requests that are in the ring; others wait", None),
            kv_tokens: metric(all, "kv_cache_tokens", "Tokens of running requests in KV caches", None),
            kv_capacity: metric(
                all,
                "kv_cache_capacity_tokens",
                "Tokens for which KV caches have room",
                None,
            ),
            itl,
            tokens: metric(all, "tokens", token_kinds, None),
            ttft,
            rings: metric(all, "rings", "Number of times that the ring of devices was connected", None),
            ring_up: metric(all, "ring_up", "Whether the ring of devices accepts requests", None),
            uptime: metric(all, "uptime", "Time since the server started", Some(Unit::Seconds)),
            device_seconds: metric(all, "device", states, Some(Unit::Seconds)),
            device_read_bytes: metric(all, "device_read", "Weights read from disk", Some(Unit::Bytes)),
            device_available: metric(all, "device_available", available, Some(Unit::Bytes)),
            device_slowdown: metric(all, "device_slowdown_ratio", slowdown, None),
            plan_changes: metric(
                all,
                "plan_changes",
                "Number of times that a running ring was built again, with another or the same plan",
                None,
            ),
            devices: Mutex::default(),
            registry,
        }
    }
}

fn metric<M: Metric + Clone + Default>(all: &mut Registry, name: &str, help: &str, unit: Option<Unit>) -> M {
    let metric = M::default();
    match unit {
        Some(unit) => all.register_with_unit(name, help, unit, metric.clone()),
        None => all.register(name, help, metric.clone()),
    }
    metric
}

impl Metrics {
    fn devices(&self) -> MutexGuard<'_, BTreeMap<String, DeviceActivity>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn record_response(&self, endpoint: &str, status: u16) {
        self.requests.get_or_create(&[("endpoint", endpoint.into()), ("status", status.to_string())]).inc();
    }

    /// Counts a request as active until the returned guard is dropped.
    pub fn start_request(self: &Arc<Self>) -> ActiveRequest {
        self.active.inc();
        ActiveRequest {
            metrics: self.clone(),
            started: Instant::now(),
            kv_tokens: None,
            has_text: false,
            is_finished: false,
        }
    }

    /// Returns a stopwatch that records the times between the tokens of a request.
    pub fn start_token_clock(&self) -> TokenClock {
        TokenClock { histogram: self.itl.clone(), last: None }
    }

    /// Returns the number of running and waiting requests.
    pub fn active_requests(&self) -> u64 {
        u64::try_from(self.active.get()).unwrap_or(0)
    }

    /// Records whether the ring accepts requests from now on.
    pub fn set_ring_up(&self, is_up: bool) {
        self.ring_up.set(i64::from(is_up));
        if is_up {
            self.rings.inc();
        }
    }

    pub fn is_ring_up(&self) -> bool {
        self.ring_up.get() != 0
    }

    /// Adds the times and the read bytes of the steps in `records` to the totals of a device, and updates its resident
    /// bytes from `readings`.
    pub fn record_device_activity(&self, device: &str, records: &[StepRecord], readings: &[CounterReading]) {
        let mut added = DeviceActivity::default();
        for record in records {
            let seconds = record.duration_ns() as f64 * 1e-9;
            match (record.kind, record.cost) {
                (StepKind::Receive, _) => added.receive_wait_s += seconds,
                (StepKind::Prefetch, _) => added.read_bytes += record.bytes,
                (_, Some(cost)) => {
                    added.computing_s += cost.cpu_ns as f64 * 1e-9;
                    let waited =
                        record.duration_ns().saturating_sub(cost.cpu_ns.saturating_add(cost.queue_ns));
                    added.disk_wait_s += waited as f64 * 1e-9;
                    added.read_bytes += cost.faulted_bytes;
                }
                _ if record.resource == Resource::Gpu => added.computing_s += seconds,
                _ => {}
            }
        }
        let mut devices = self.devices();
        let total = devices.entry(device.to_owned()).or_default();
        for (state, seconds, total_seconds) in [
            ("computing", added.computing_s, &mut total.computing_s),
            ("disk", added.disk_wait_s, &mut total.disk_wait_s),
            ("waiting", added.receive_wait_s, &mut total.receive_wait_s),
        ] {
            let labels = [("device", device.to_owned()), ("state", state.to_owned())];
            self.device_seconds.get_or_create(&labels).inc_by(seconds);
            *total_seconds += seconds;
        }
        self.device_read_bytes.get_or_create(&[("device", device.to_owned())]).inc_by(added.read_bytes);
        total.read_bytes += added.read_bytes;
        let resident = readings.iter().rev().find(|reading| reading.counter == TraceCounter::Resident);
        if let Some(reading) = resident {
            total.resident_bytes = reading.value;
        }
        let available = readings.iter().rev().find(|reading| reading.counter == TraceCounter::Available);
        if let Some(reading) = available {
            total.available_bytes = Some(reading.value);
            let gauge = self.device_available.get_or_create(&[("device", device.to_owned())]);
            gauge.set(i64::try_from(reading.value).unwrap_or(i64::MAX));
        }
    }

    /// Records how many times as long as its profile says a device computes.
    pub fn record_slowdown(&self, device: &str, slowdown: f64) {
        self.devices().entry(device.to_owned()).or_default().slowdown = Some(slowdown);
        self.device_slowdown.get_or_create(&[("device", device.to_owned())]).set(slowdown);
    }

    /// Counts that a running ring was built again, with another or the same plan.
    pub fn record_plan_change(&self) {
        self.plan_changes.inc();
    }

    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            is_ring_up: self.is_ring_up(),
            active_requests: self.active_requests(),
            generated_tokens: self.tokens.get_or_create(&[("kind", "generated".to_owned())]).get(),
            uptime_s: self.started.elapsed().as_secs_f64(),
            devices: self.devices().clone(),
        }
    }

    /// Encodes all metrics in the OpenMetrics text format, version 1.0.0.
    pub fn encode(&self) -> String {
        self.uptime.set(self.started.elapsed().as_secs_f64());
        let mut encoded = String::new();
        // Writing to a string cannot fail.
        let _ = text::encode(&mut encoded, &self.registry);
        encoded
    }
}

/// Records the times between the tokens of a request.
pub struct TokenClock {
    histogram: Histogram,
    last: Option<Instant>,
}

impl TokenClock {
    /// Records that a token was sampled.
    pub fn tick(&mut self) {
        let now = Instant::now();
        if let Some(last) = self.last.replace(now) {
            self.histogram.observe(now.duration_since(last).as_secs_f64());
        }
    }
}

/// A request that is running or waiting.
#[derive(Debug)]
pub struct ActiveRequest {
    metrics: Arc<Metrics>,
    started: Instant,
    /// The number of tokens in KV caches; `None` while the request waits.
    kv_tokens: Option<i64>,
    has_text: bool,
    is_finished: bool,
}

impl ActiveRequest {
    /// Records the time to first token on the first call. Further calls have no effect.
    pub fn observe_ttft(&mut self) {
        if !std::mem::replace(&mut self.has_text, true) {
            self.metrics.ttft.observe(self.started.elapsed().as_secs_f64());
        }
    }

    /// Records that the request runs from now on, with a prompt of `prompt_tokens` tokens.
    pub fn record_running(&mut self, prompt_tokens: u32) {
        if self.kv_tokens.replace(i64::from(prompt_tokens)).is_none() {
            self.metrics.running.inc();
            self.metrics.kv_tokens.inc_by(i64::from(prompt_tokens));
        }
    }

    /// Records that a token was generated.
    pub fn record_token(&mut self) {
        if let Some(tokens) = &mut self.kv_tokens {
            *tokens += 1;
            self.metrics.kv_tokens.inc();
        }
    }

    /// Marks the request as finished, whether it succeeded or failed. A request that is dropped without this mark
    /// counts as cancelled.
    pub fn finish(&mut self) {
        self.is_finished = true;
    }

    /// Adds the token counts of a finished request to the metrics.
    pub fn record_usage(&self, Usage { prompt_tokens, generated_tokens }: Usage) {
        for (kind, count) in [("prompt", prompt_tokens), ("generated", generated_tokens)] {
            self.metrics.tokens.get_or_create(&[("kind", kind.to_owned())]).inc_by(u64::from(count));
        }
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.metrics.active.dec();
        if let Some(tokens) = self.kv_tokens {
            self.metrics.running.dec();
            self.metrics.kv_tokens.dec_by(tokens);
        }
        if !self.is_finished {
            self.metrics.cancelled.inc();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_in_openmetrics_format() {
        let metrics = Arc::new(Metrics::default());
        metrics.set_ring_up(true);
        metrics.record_response("chat", 200);
        metrics.kv_capacity.set(64);
        let mut clock = metrics.start_token_clock();
        (0..3).for_each(|_| clock.tick());
        let mut running = metrics.start_request();
        running.record_running(10);
        running.record_token();
        let mut finished = metrics.start_request();
        finished.record_running(5);
        finished.observe_ttft();
        finished.finish();
        finished.record_usage(Usage { prompt_tokens: 3, generated_tokens: 2 });
        drop(finished);
        drop(metrics.start_request());
        metrics.record_device_activity("a \"b\"", &[], &[]);
        let encoded = metrics.encode();
        for line in [
            "hearth_ring_up 1",
            "hearth_rings_total 1",
            "hearth_requests_total{endpoint=\"chat\",status=\"200\"} 1",
            "hearth_requests_cancelled_total 1",
            "hearth_requests_active 1",
            "hearth_requests_running 1",
            "hearth_kv_cache_tokens 11",
            "hearth_kv_cache_capacity_tokens 64",
            "hearth_inter_token_latency_seconds_count 2",
            "hearth_tokens_total{kind=\"generated\"} 2",
            "hearth_time_to_first_token_seconds_count 1",
            "hearth_device_seconds_total{device=\"a \\\"b\\\"\",state=\"disk\"} 0.0",
            "# EOF",
        ] {
            assert!(encoded.lines().any(|found| found == line), "no line `{line}` in\n{encoded}");
        }
        assert_eq!(metrics.snapshot().generated_tokens, 2);
    }
}
