//! Property tests with random traces: reports never panic, and printed terms sum to their total.

use hearth_reports::Report;
use hearth_schema::Trace;
use hearth_schema::pass::Pass;
use hearth_schema::plan::Parallelism;
use hearth_schema::trace::{
    Counter, CounterReading, Header, Origin, Outcome, Resource, StepCost, StepKind, StepRecord, TracedDevice,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

use crate::{columns_that_add_up, sample, trace_events};

fn resource() -> impl Strategy<Value = Resource> {
    select(vec![
        Resource::Cpu,
        Resource::Gpu,
        Resource::DiskDemand,
        Resource::DiskPrefetch,
        Resource::Tx,
        Resource::Rx,
    ])
}

fn kind() -> impl Strategy<Value = StepKind> {
    // Output steps are frequent, so that most traces have tokens.
    select(vec![
        StepKind::Output,
        StepKind::Output,
        StepKind::Embed,
        StepKind::Compute,
        StepKind::Receive,
        StepKind::Send,
        StepKind::Prefetch,
        StepKind::Copy,
    ])
}

/// Generates a time in nanoseconds, of any order of magnitude.
fn moment() -> impl Strategy<Value = u64> {
    prop_oneof![0..100_u64, 0..100_000_000_u64, (1_u64 << 52)..(1_u64 << 53)]
}

fn record(devices: u16) -> impl Strategy<Value = StepRecord> {
    let cost = option::of((any::<u64>(), any::<u64>(), any::<u64>()));
    let layers = option::of([0..100_u32, 0..100_u32]);
    let step = (0..devices, resource(), kind(), 0..4_u32, 0..3_u32);
    (step, layers, [moment(), moment()], option::of(0..70_u16), cost, any::<u64>()).prop_map(
        |((device_index, resource, kind, pass_index, round), layers, span, peer, cost, bytes)| {
            let cost = cost.map(|(cpu_ns, queue_ns, copy_ns)| {
                let no_cost = StepCost::default();
                StepCost { cpu_ns, queue_ns, copy_ns, ..no_cost }
            });
            let (start_ns, end_ns) = (span[0].min(span[1]), span[0].max(span[1]));
            let step =
                StepRecord { device_index, resource, kind, pass_index, round, ..StepRecord::default() };
            StepRecord { layers, start_ns, end_ns, bytes, peer, cost, ..step }
        },
    )
}

fn reading(devices: u16) -> impl Strategy<Value = CounterReading> {
    let counter =
        select(vec![Counter::BytesRead, Counter::Resident, Counter::Unreclaimable, Counter::Refaults]);
    (0..devices, counter, 0..4_u32, moment(), any::<u64>()).prop_map(|(device, counter, pass, at, value)| {
        CounterReading { device_index: device, counter, pass_index: pass, time_ns: at, value }
    })
}

fn trace() -> impl Strategy<Value = Trace> {
    let devices = prop_oneof![Just(1_u16), 2..4_u16, Just(64_u16)];
    let origin = select(vec![Origin::Simulated, Origin::Measured]);
    let outcome = select(vec![Outcome::Ok, Outcome::OutOfMemory, Outcome::Killed]);
    let body = devices.prop_flat_map(|devices| {
        let named = vec((".{0,12}", any::<u64>()), usize::from(devices));
        (named, vec(record(devices), 0..40), vec(reading(devices), 0..12))
    });
    (origin, outcome, "[ab]", 0..5_u32, body).prop_map(
        |(origin, outcome, plan, passes, (devices, records, readings))| {
            let device = |(name, memory_total): (String, u64)| TracedDevice {
                name,
                total_memory_bytes: memory_total,
                ..TracedDevice::default()
            };
            let pass = |index| Pass::new(index, index, 1, true);
            let sample = sample::trace(origin, 0);
            let header = Header {
                plan_digest: plan,
                // Any kind, because the other fields are also arbitrary.
                parallelism: if records.len() % 2 == 1 { Parallelism::Tensor } else { Parallelism::Ring },
                devices: devices.into_iter().map(device).collect(),
                ..sample.header
            };
            Trace { header, passes: (0..passes).map(pass).collect(), records, readings, outcome, ..sample }
        },
    )
}

/// Sorts the end times of the tokens of a trace, so that `Report::new` accepts their order.
fn in_order(mut trace: Trace) -> Trace {
    let is_output = |record: &&mut StepRecord| record.device_index == 0 && record.kind == StepKind::Output;
    let mut outputs: Vec<&mut StepRecord> = trace.records.iter_mut().filter(is_output).collect();
    let mut spans: Vec<(u64, u64)> = outputs.iter().map(|record| (record.end_ns, record.start_ns)).collect();
    spans.sort_unstable();
    outputs.sort_by_key(|record| record.pass_index);
    for (record, (end, start)) in outputs.into_iter().zip(spans) {
        (record.start_ns, record.end_ns) = (start, end);
    }
    trace
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn any_trace_makes_a_report_or_an_error(
        traces in vec(trace(), 1..4),
        ordered in any::<bool>(),
    ) {
        let traces = if ordered { traces.into_iter().map(in_order).collect() } else { traces };
        // Above this time, an `f64` in microseconds does not represent every nanosecond.
        let exact = traces.iter().flat_map(|trace| &trace.records).all(|record| record.end_ns < 1 << 51);
        let Ok(report) = Report::new(traces) else { return Ok(()) };
        for (sanitize_name, contents) in report.render_files() {
            prop_assert!(!contents.is_empty(), "{sanitize_name} is empty");
            let text = String::from_utf8(contents).expect(&sanitize_name);
            if sanitize_name.rsplit('.').next() == Some("json") {
                serde_json::from_str::<serde_json::Value>(&text).expect(&sanitize_name);
            }
            if exact && sanitize_name.ends_with(".perfetto.json") {
                trace_events::check(&text).expect(&sanitize_name);
            }
            if sanitize_name == "comparison.csv" {
                columns_that_add_up(&text, report.comparison.runs.len());
            }
        }
    }
}
