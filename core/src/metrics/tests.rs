//! Tests of the metrics on small traces whose terms are computed by hand.

use super::*;
use hearth_schema::pass::Pass;
use hearth_schema::plan::Parallelism;
use hearth_schema::run_events::RunEvent;
use hearth_schema::trace::{Header, Origin, StepCost};

pub const MS: u64 = 1_000_000;

pub fn record(device_index: u16, kind: StepKind, pass_index: u32, round: u32, span: [u64; 2]) -> StepRecord {
    let resource = match kind {
        StepKind::Send => Resource::Tx,
        StepKind::Receive => Resource::Rx,
        StepKind::Prefetch => Resource::DiskPrefetch,
        _ => Resource::Cpu,
    };
    let [start_ns, end_ns] = span.map(|ms| ms * MS);
    StepRecord { device_index, resource, kind, pass_index, round, start_ns, end_ns, ..StepRecord::default() }
}

pub fn reading(device_index: u16, counter: Counter, pass_index: u32, value: u64) -> CounterReading {
    CounterReading { device_index, counter, pass_index, time_ns: 0, value }
}

pub fn with_cpu(mut record: StepRecord, cpu_ms: u64) -> StepRecord {
    record.cost = Some(StepCost { cpu_ns: cpu_ms * MS, ..StepCost::default() });
    record
}

pub fn run_event(kind: RunEventKind, device: &str, [start, end]: [u64; 2]) -> RunEvent {
    let (device, end) = (Some(device.into()), Some(end * MS));
    RunEvent { kind, device, start_ns: start * MS, end_ns: end, details: String::new(), plan_digest: None }
}

/// Returns a trace of a ring of two devices with a prompt pass that ends at 100 ms and one decode pass. The clock of
/// the worker is 5 seconds ahead, so only the durations of its steps are meaningful.
pub fn trace() -> Trace {
    let device =
        |name: &str| TracedDevice { name: name.into(), total_memory_bytes: 1000, ..TracedDevice::default() };
    let pass = |index, tokens| Pass::new(index, 0, tokens, true);
    Trace {
        header: Header {
            schema: Trace::SCHEMA.into(),
            origin: Origin::Simulated,
            scenario_name: "s".into(),
            plan_digest: "p".into(),
            model_name: "m".into(),
            parallelism: Parallelism::Ring,
            seed: 1,
            program_version: "0".into(),
            devices: vec![device("head"), device("worker")],
        },
        passes: vec![pass(0, 4), pass(1, 1)],
        admissions: vec![],
        records: vec![
            with_cpu(record(0, StepKind::Embed, 0, 0, [0, 10]), 10),
            with_cpu(record(0, StepKind::Output, 0, 0, [90, 100]), 10),
            with_cpu(record(0, StepKind::Compute, 1, 0, [101, 121]), 12),
            record(0, StepKind::Send, 1, 0, [121, 122]),
            record(1, StepKind::Receive, 1, 0, [5000, 5125]),
            with_cpu(record(1, StepKind::Compute, 1, 0, [5126, 5156]), 30),
            record(1, StepKind::Send, 1, 0, [5156, 5157]),
            record(1, StepKind::Prefetch, 1, 0, [5150, 5170]),
            record(0, StepKind::Receive, 1, 1, [122, 160]),
            with_cpu(record(0, StepKind::Output, 1, 1, [160, 170]), 10),
        ],
        readings: vec![reading(1, Counter::BytesRead, 0, 500), reading(1, Counter::BytesRead, 1, 1500)],
        shortages: vec![],
        run_events: vec![],
        outcome: Outcome::Ok,
    }
}

#[test]
fn the_terms_sum_to_the_token_time() {
    let metrics = compute_metrics(&trace());
    assert_eq!(metrics.ttft_ms, Some(100.0));
    // From the end of the first output, 100 ms, to the second, 170 ms.
    assert_eq!(metrics.tpot_ms.unwrap().mean_ms, 70.0);
    let terms = metrics.terms_ms;
    assert_eq!(terms.cpu, 12.0 + 30.0 + 10.0);
    assert_eq!(terms.demand_disk, 8.0);
    // The round trip takes 160 - 121 = 39 ms, of which the message spends 5156 - 5125 = 31 ms on the worker.
    assert_eq!(terms.network, 8.0);
    // 1 ms before the head began, 1 ms before the worker did.
    assert_eq!(terms.queue, 2.0);
    assert_eq!(terms.bubble, 0.0);
    assert!((terms.sum() - 70.0).abs() < 1e-9);
    // 20 ms of read-ahead; 6 ms of them overlap the worker's computation, which did not wait.
    assert_eq!(terms.hidden_disk, 20.0);
    assert_eq!(metrics.devices[1].bytes_read_per_token, 1000.0);
}

#[test]
fn trace_is_unchanged_by_writing_and_reading() {
    let trace = Trace { run_events: vec![run_event(RunEventKind::Load, "head", [25, 60])], ..trace() };
    let mut text = Vec::new();
    trace.write(&mut text).unwrap();
    assert_eq!(Trace::read(&mut text.as_slice()).unwrap(), trace);
    let cut = &text[..text.len() - 6];
    assert!(Trace::read(&mut &cut[..]).is_err());
}

#[test]
fn a_run_without_tokens_has_no_times() {
    let mut trace = trace();
    trace.records.clear();
    let metrics = compute_metrics(&trace);
    assert_eq!((metrics.tpot_ms, metrics.ttft_ms), (None, None));
}

#[test]
fn disk_wait_is_subtracted_from_hidden_disk() {
    // Of its 30 ms the worker waits for 2 ms, or for 10; 6 ms of the step overlap the 20 ms of read-ahead.
    for (cpu, hidden) in [(28, 18.0), (20, 14.0)] {
        let mut trace = trace();
        trace.records[5] = with_cpu(trace.records[5].clone(), cpu);
        assert_eq!(compute_metrics(&trace).devices[1].hidden_disk_ms, hidden);
        // The same read-ahead in two records.
        let mut second = trace.records[7].clone();
        trace.records[7].end_ns = 5153 * MS;
        second.start_ns = 5153 * MS;
        trace.records.insert(8, second);
        assert_eq!(compute_metrics(&trace).devices[1].hidden_disk_ms, hidden);
    }
}

#[test]
fn overlapping_steps_do_not_panic() {
    let mut trace = trace();
    // A long step on one processor overlaps a short one on another, which ends before the prefetch begins.
    trace.records.insert(8, with_cpu(record(1, StepKind::Compute, 1, 0, [5151, 5300]), 10));
    trace.records.insert(9, with_cpu(record(1, StepKind::Compute, 1, 0, [5140, 5149]), 9));
    let hidden = compute_metrics(&trace).devices[1].hidden_disk_ms;
    assert!((0.0..=20.0).contains(&hidden));
}

#[test]
fn tokens_of_one_pass_share_its_time() {
    let mut trace = trace();
    trace.passes[1].tokens = 4;
    trace.passes[1].drafted = 3;
    trace.records.insert(2, with_cpu(record(0, StepKind::Draft, 1, 0, [100, 101]), 1));
    let accepted = |value| reading(0, Counter::Accepted, 1, value);
    trace.readings.push(accepted(2));
    let metrics = compute_metrics(&trace);
    // Two accepted drafts and a token of the target model in 70 ms, of which 1 ms is drafting.
    let (tpot, drafting) = (metrics.tpot_ms.unwrap(), metrics.speculation.unwrap());
    assert!((tpot.mean_ms - 70.0 / 3.0).abs() < 1e-9 && (tpot.p95_ms - 70.0 / 3.0).abs() < 1e-9);
    assert_eq!((drafting.steps, drafting.drafted, drafting.accepted_drafts), (1, 3, 2));
    assert!((drafting.tokens_per_step - 3.0).abs() < 1e-9);
    // The third draft was verified and rejected.
    assert!((drafting.acceptance - 2.0 / 3.0).abs() < 1e-9);
    assert!((drafting.draft_ms - 1.0 / 3.0).abs() < 1e-9);
    assert!((drafting.draft_ms + drafting.verify_ms - tpot.mean_ms).abs() < 1e-9);
    assert!((metrics.terms_ms.sum() - tpot.mean_ms).abs() < 1e-9);
    assert!((metrics.terms_ms.cpu - 53.0 / 3.0).abs() < 1e-9, "drafting is CPU time");
    // A pass cannot accept more drafts than it has.
    trace.readings.pop();
    trace.readings.push(accepted(u64::MAX));
    assert_eq!(compute_metrics(&trace).speculation.unwrap().accepted_drafts, 3);
}

#[test]
fn each_sequence_has_its_own_times() {
    let mut trace = trace();
    // A second sequence with one token of the prompt and one after it, at 130 and 190 ms.
    let second =
        |index, first_position| Pass { sequence_index: 1, ..Pass::new(index, first_position, 1, true) };
    trace.passes.extend([second(2, 0), second(3, 1)]);
    trace.records.push(with_cpu(record(0, StepKind::Output, 2, 1, [125, 130]), 5));
    trace.records.push(with_cpu(record(0, StepKind::Output, 3, 1, [185, 190]), 5));
    let metrics = compute_metrics(&trace);
    let own: Vec<_> = metrics.sequences.iter().map(|one| (one.sequence, one.ttft_ms, one.tpot_ms)).collect();
    assert_eq!(own, [(0, 100.0, Some(70.0)), (1, 130.0, Some(60.0))]);
    assert_eq!((metrics.ttft_ms, metrics.tpot_ms.map(|tpot| tpot.mean_ms)), (Some(115.0), Some(65.0)));
    // Three tokens after the first one of the run, in 90 ms.
    assert!((metrics.tokens_per_s.unwrap() - 3.0 / 0.09).abs() < 1e-9);
    assert!((metrics.terms_ms.sum() - 65.0).abs() < 1e-9);
}

#[test]
fn device_terms_are_the_sums_of_their_steps() {
    let terms = device_terms(&trace());
    assert_eq!((terms[0].cpu, terms[0].demand_disk), (12.0 + 10.0, 8.0));
    assert_eq!((terms[1].cpu, terms[1].sum()), (30.0, 30.0));
}

#[test]
fn device_without_a_trace_is_lost_and_not_idle() {
    let mut trace = trace();
    trace.run_events = vec![run_event(RunEventKind::Silent, "worker", [0, 1])];
    let before = compute_metrics(&trace);
    assert!(!before.devices[1].trace_lost && before.bytes_read_per_token().is_some(), "it has records");
    trace.records.retain(|record| record.device_index == 0);
    trace.readings.retain(|reading| reading.device_index == 0);
    let lost = compute_metrics(&trace);
    assert!(!lost.devices[0].trace_lost && lost.devices[1].trace_lost);
    assert_eq!(lost.bytes_read_per_token(), None);
}
