//! Formats the metrics of a run as a table and as JSON.

use std::fmt::Write;

use hearth_core::metrics::sequences::{Percentiles, RequestMetrics, SpeculationMetrics};
use hearth_core::metrics::{self, Metrics};
use hearth_core::soc::SocMetrics;
use hearth_profiles::Bytes;
use hearth_reports::published_results::results::PredictionInterval;
use hearth_schema::Trace;
use hearth_schema::trace::{MemoryKind, Outcome};
use hearth_workflow::verdict::Verdict;
use serde::Serialize;

use super::escape_line;
use super::run_events::{self, EventSummary};

/// Maximum number of sequences that the table lists.
const MAX_SEQUENCES: usize = 16;

/// The metrics of a run as `--json` prints them.
#[derive(Serialize)]
pub struct RunSummary {
    #[serde(flatten)]
    pub metrics: Metrics,
    /// Number of steps and counter readings in the trace.
    #[serde(rename = "events")]
    pub event_count: usize,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub run_events: Vec<EventSummary>,
    /// The speed of a prediction beside other possibilities, and what it relies on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
    /// The uncertainty of the predicted time per token, if the flag `--draws` requests an estimate.
    #[serde(rename = "spread", skip_serializing_if = "Option::is_none")]
    pub prediction_interval: Option<PredictionInterval>,
    #[serde(rename = "soc", skip_serializing_if = "Option::is_none")]
    pub soc_metrics: Option<SocMetrics>,
}

impl RunSummary {
    pub fn from_trace(trace: &Trace) -> RunSummary {
        RunSummary {
            metrics: metrics::compute_metrics(trace),
            event_count: trace.records.len() + trace.readings.len(),
            run_events: run_events::summaries(trace),
            verdict: None,
            prediction_interval: None,
            soc_metrics: None,
        }
    }
}

/// Formats a number with one digit after the decimal point; a missing number is a dash.
fn number(value: Option<f64>) -> String {
    value.map_or("-".to_string(), |value| format!("{value:.1}"))
}

/// Adds the latency of requests that arrived during the run.
fn requests(text: &mut String, requests: &RequestMetrics) {
    let RequestMetrics { count, output_tokens_per_s, ttft_ms, itl_ms, queue_ms } = requests;
    let _ = writeln!(text, "  {count} requests, {output_tokens_per_s:.2} tokens/s from the first arrival on");
    let _ = writeln!(text, "  milliseconds               mean        p50        p95        p99");
    let rows = [
        ("first token", Some(ttft_ms)),
        ("between tokens", itl_ms.as_ref()),
        ("wait for a slot", Some(queue_ms)),
    ];
    for (name, times) in rows {
        let Some(Percentiles { mean, p50, p95, p99 }) = times else { continue };
        let _ = writeln!(text, "  {name:20} {mean:10.1} {p50:10.1} {p95:10.1} {p99:10.1}");
    }
}

fn sequences(text: &mut String, metrics: &Metrics) {
    if let Some(arrived) = &metrics.requests {
        requests(text, arrived);
    }
    let listed = if metrics.requests.is_some() { &[][..] } else { &metrics.sequences[..] };
    for sequence in listed.iter().take(MAX_SEQUENCES) {
        let _ = writeln!(
            text,
            "  sequence {}: {} ms per token, {} tokens after the first token, which took {:.1} ms",
            sequence.sequence,
            number(sequence.tpot_ms),
            sequence.decoded_tokens,
            sequence.ttft_ms
        );
    }
    if listed.len() > MAX_SEQUENCES {
        let _ = writeln!(text, "  and {} more sequences", listed.len() - MAX_SEQUENCES);
    }
    if let Some(drafting) = &metrics.speculation {
        let SpeculationMetrics { tokens_per_step, steps, acceptance, draft_ms, verify_ms, .. } = drafting;
        let _ = writeln!(
            text,
            "  drafting: {tokens_per_step:.2} tokens per step over {steps} steps, {:.0} % of the verified drafts \
             accepted; {draft_ms:.2} ms drafting and {verify_ms:.2} ms verifying per token",
            100.0 * acceptance
        );
    }
}

/// Returns the first line of the output: the outcome and the times of the run, or the reason why there are no times.
fn headline(metrics: &Metrics) -> String {
    let outcome = metrics.outcome.label();
    let has_failed = metrics.outcome != Outcome::Ok;
    let Some(tpot) = metrics.tpot_ms.as_ref() else {
        if let (true, None) = (has_failed, metrics.ttft_ms) {
            let why = shortages(metrics);
            let first = why.lines().next().map_or("the run ended before the first token", str::trim);
            return format!("{outcome}: {first}, so there are no times");
        }
        return format!(
            "{outcome}: only one token, so there is no time per token; the token took {} ms",
            number(metrics.ttft_ms)
        );
    };
    format!(
        "{outcome}: {:.1} ms per token (median {:.1}, p95 {:.1}), {} tokens/s, first token after {} ms",
        tpot.mean_ms,
        tpot.p50_ms,
        tpot.p95_ms,
        metrics.tokens_per_s.map_or("-".into(), |rate| format!("{rate:.2}")),
        number(metrics.ttft_ms),
    )
}

pub fn format_table(metrics: &Metrics) -> String {
    let mut text = format!("{}\n{}", headline(metrics), shortages(metrics));
    let terms = metrics.terms_ms.named_terms().into_iter().filter(|(_, ms)| *ms >= 0.005);
    let terms: Vec<String> = terms.map(|(name, ms)| format!("{} {ms:.2}", name.replace('_', " "))).collect();
    if !terms.is_empty() {
        let (terms, hidden) = (terms.join(", "), metrics.terms_ms.hidden_disk);
        let _ = writeln!(text, "  terms in ms: {terms}; hidden disk {hidden:.2}");
    }
    sequences(&mut text, metrics);
    text.push_str(&devices(metrics));
    text
}

/// Returns a line for each device that has too little memory.
fn shortages(metrics: &Metrics) -> String {
    let mut text = String::new();
    for short in &metrics.memory_shortages {
        let memory = match short.memory_kind {
            MemoryKind::Main => "memory",
            MemoryKind::Gpu => "GPU memory",
        };
        let (needed, available) = (Bytes(short.needed_bytes), Bytes(short.available_bytes));
        let name = &short.device;
        let _ = writeln!(text, "  {name} needs {needed} of {memory}, but only {available} are available");
    }
    text
}

fn devices(metrics: &Metrics) -> String {
    let mut text = String::from(
        "  device            busy ms disk wait ms    hidden ms  read MB/token  resident MB  pressure\n",
    );
    for device in &metrics.devices {
        let name = escape_line(&device.name);
        if device.trace_lost {
            let _ = writeln!(text, "  {name:<14} stopped responding; its part of the trace is lost");
            continue;
        }
        let _ = writeln!(
            text,
            "  {name:<14} {:>10.2} {:>12.2} {:>12.2} {:>14.2} {:>12.1} {:>8.1}%",
            device.busy_ms,
            device.demand_disk_ms,
            device.hidden_disk_ms,
            device.bytes_read_per_token / 1e6,
            device.resident_bytes as f64 / 1e6,
            device.memory_pressure * 100.0
        );
    }
    text
}
