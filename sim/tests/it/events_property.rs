//! Property tests: random rings under random events keep the invariants of a run.
//!
//! Every run ends with all its tokens or with a reason; records and events do not end before they start; the counted
//! bytes are the bytes that were read; the terms of a token sum to the time of the token; and two runs with the same
//! input give identical traces.

use hearth_core::cluster::Cluster;
use hearth_core::metrics;
use hearth_core::metrics::token_times::TokenTimes;
use hearth_core::recovery::{ReplanError, Replanner};
use hearth_profiles::{Bytes, Fraction, Seconds};
use hearth_schema::events::{Event, MemoryLoad, ProcessorLoad, RejoinTime};
use hearth_schema::plan::Plan;
use hearth_schema::residency::{Residency, ResidencyOptions};
use hearth_schema::run_events::RunEventKind;
use hearth_schema::trace::{Counter, Outcome, StepKind, Trace};
use hearth_sim::{Input, Options, ScenarioEvents, simulate_with_events};
use proptest::prelude::*;

use crate::small_rings::{
    cluster, memories, planned, reading_time, readings, replanned, use_wifi, with_drafts,
};

/// A replanner that gives every device a window of two layers in each round.
#[derive(Debug)]
struct TwoLayerWindows(ResidencyOptions);

impl Replanner for TwoLayerWindows {
    fn replan(&self, reachable: &Cluster) -> Result<Plan, ReplanError> {
        Ok(replanned(reachable, &vec![2; reachable.members.len()], self.0))
    }

    fn predict(&self, plan: &Plan, cluster: &Cluster) -> Option<Seconds> {
        Some(reading_time(plan, cluster))
    }
}

/// Generates an event on one of three devices that begins early enough to affect the run.
fn event() -> impl Strategy<Value = Event> {
    let seconds = |ms: u32| Some(Seconds(f64::from(ms) / 1e3));
    let when = prop_oneof![
        (0u32..6000).prop_map(move |ms| (seconds(ms), None)),
        (1u32..6).prop_map(|token| (None, Some(token))),
    ];
    let duration = prop_oneof![Just(None), (1u32..4000).prop_map(seconds)];
    (when, duration, 0usize..3, 0u32..8, 1u32..100).prop_map(|(when, duration, device, what, size)| {
        let share = Some(Fraction(f64::from(size) / 100.0));
        let ((start_time, after_tokens), device) = (when, Some(format!("d{device}")));
        let event = Event { start_time, after_tokens, duration, device, ..Event::default() };
        let endless = Event { duration: None, ..event.clone() };
        match what {
            0 => Event { load: Some(ProcessorLoad { threads: size, available_gpu_fraction: None }), ..event },
            1 | 2 => {
                let over = event.duration.map_or(Seconds(1.0), |duration| Seconds(duration.0 / 2.0));
                let (size, ramp_time) =
                    (Bytes::from_mib(u64::from(size) * 3), Some(over).filter(|_| what == 2));
                Event { memory: Some(MemoryLoad { size, ramp_time }), ..event }
            }
            3 => Event { clock_rate_fraction: share, ..event },
            4 => Event { disk_load: Some(Fraction(f64::from(size) / 101.0)), ..event },
            5 => Event { leaves_ring: true, ..endless },
            6 if size % 2 == 0 => Event { rejoin_time: Some(RejoinTime::BetweenTokens), ..endless },
            6 => Event { rejoin_time: Some(RejoinTime::NextRequest), ..endless },
            _ => Event { stalls_links: true, duration: duration.or(Some(Seconds(1.0))), ..endless },
        }
    })
}

/// Maximum number of bytes that one page fault reads.
const WINDOW: u64 = 64 << 20;
const CHUNK: u64 = 2 << 20;

fn check_invariants(trace: &Trace, tokens: u32, managed: bool) -> Result<(), TestCaseError> {
    if trace.outcome == Outcome::Ok {
        let times = TokenTimes::from_trace(trace);
        let outputs = times.first_tokens.len() + times.decoded_tokens();
        prop_assert_eq!(outputs, tokens as usize, "every token is output once");
    } else if !trace.records.is_empty() {
        let is_reason = |kind| matches!(kind, RunEventKind::NotReplanned | RunEventKind::OutOfMemory);
        let has_reason = trace.run_events.iter().any(|it| is_reason(it.kind));
        prop_assert!(has_reason, "no reason for its end: {:?}", trace.run_events);
    }
    for record in &trace.records {
        prop_assert!(record.start_ns <= record.end_ns, "{:?}", record);
    }
    prop_assert!(trace.records.is_sorted_by_key(|record| record.start_ns));
    for run_event in &trace.run_events {
        prop_assert!(run_event.end_ns.is_none_or(|end| run_event.start_ns <= end), "{:?}", run_event);
    }
    for device in 0..trace.header.devices.len() as u16 {
        let read = readings(trace, device, Counter::BytesRead);
        prop_assert!(read.is_sorted(), "device {device}: bytes read never decrease");
        let own = || trace.records.iter().filter(move |record| record.device_index == device);
        let last = read.last().copied().unwrap_or(0);
        // Every byte is read for a step, ahead of a step, or around a fault of a step.
        let ahead = own().filter(|record| record.kind == StepKind::Prefetch);
        let ahead: u64 = ahead.map(|record| record.bytes).sum();
        let used: u64 =
            own().filter_map(|record| record.cost).map(|cost| cost.faulted_bytes + cost.resident_bytes).sum();
        let around =
            own().filter_map(|it| it.cost).filter(|cost| cost.faulted_bytes > 0).count() as u64 * WINDOW;
        prop_assert!(last <= ahead + used + around, "device {device}: {last} of {ahead} + {used} + {around}");
        // The bytes at which a step faulted have been read, except one fault in each cancelled step. Under managed
        // residency a step may also wait for a helper that then finds the piece in memory.
        let own_readings = trace.readings.iter().filter(|it| it.device_index == device);
        let at = own_readings.map(|it| it.time_ns).max().unwrap_or(0);
        let before = own().filter(|record| record.end_ns <= at).filter_map(|record| record.cost);
        let faulted: u64 = before.map(|cost| cost.faulted_bytes).sum();
        let replans = trace.run_events.iter().filter(|it| it.kind == RunEventKind::Replanned).count() as u64;
        let max = last + replans * CHUNK;
        prop_assert!(managed || faulted <= max, "device {device}: {faulted} faulted, {last} read");
    }
    let metrics = metrics::compute_metrics(trace);
    if let Some(tpot) = metrics.tpot_ms {
        let sum = metrics.terms_ms.sum();
        prop_assert!((sum - tpot.mean_ms).abs() <= 1e-9 * tpot.mean_ms, "{sum} and {}", tpot.mean_ms);
        let terms = metrics.terms_ms;
        prop_assert!(terms.named_terms().iter().all(|(_, ms)| *ms > -1e-6), "{:?}", terms);
    }
    Ok(())
}

proptest! {
    #![proptest_config(crate::cases(200))]

    #[test]
    fn every_run_ends_and_keeps_invariants(
        windows in prop::collection::vec(1u32..5, 1..4),
        memory_mib in prop::collection::vec(64u64..1500, 3),
        events in prop::collection::vec(event(), 0..6),
        policy in prop_oneof![Just(Residency::Os), Just(Residency::Windowed), Just(Residency::Managed)],
        replans: bool,
        adapts: bool,
        warm: bool,
        generate in 1u32..8,
        (sequences, micro_batch, drafts, wifi) in (1u32..4, 1u32..6, 0u32..4, any::<bool>()),
    ) {
        let mut cluster = cluster("1b", &memories(&memory_mib, 3), generate);
        (cluster.workload.sequences, cluster.workload.micro_batch) = (sequences, micro_batch);
        if wifi {
            use_wifi(&mut cluster, "", "");
        }
        if drafts > 0 {
            cluster = with_drafts(cluster, drafts, 0.5);
        }
        let residency = ResidencyOptions::with_policy(policy);
        let plan = planned(&cluster, &windows, residency);
        prop_assume!(hearth_profiles::Document::validate(&plan).is_ok());
        let replanner = TwoLayerWindows(residency);
        let replanner: Option<&dyn Replanner> = if replans { Some(&replanner) } else { None };
        let options = Options { starts_warm: warm, ..Options::default() };
        let run = || {
            let input = Input { cluster: &cluster, plan: &plan, options: &options };
            simulate_with_events(&input, &ScenarioEvents { events: &events, replanner, adapts }).expect("a run that ends").trace
        };
        let trace = run();
        check_invariants(&trace, generate * sequences, policy == Residency::Managed)?;
        prop_assert_eq!(trace, run(), "a second run is the same");
    }
}
