//! Tests of scenario events: the effects of loads, losses and stalls on a simulated ring, against closed forms.
//!
//! In the rings of [`crate::small_rings`] a token takes only the time of its hops and of reading weights from memory.

use hearth_core::cluster::Cluster;
use hearth_core::metrics::event_impact::{EventImpact, event_impact};
use hearth_core::metrics::token_times::TokenTimes;
use hearth_core::metrics::{self, Metrics};
use hearth_core::recovery::{ReplanError, Replanner};
use hearth_profiles::device::PageCachePolicy;
use hearth_profiles::{Bytes, BytesPerSecond, Fraction, Seconds, Sourced};
use hearth_schema::events::{CompressedSwap, Event, MemoryLoad, ProcessorLoad, RejoinTime};
use hearth_schema::plan::Plan;
use hearth_schema::residency::{Residency, ResidencyOptions};
use hearth_schema::run_events::RunEventKind;
use hearth_schema::trace::{Counter, Outcome, StepKind, Trace};
use hearth_sim::{Input, Options, ScenarioEvents, SimError, SimulationResult, simulate_with_events};

use crate::small_rings::{
    OS, PLENTY, assert_near, count, layers, llama_8b, reading_time, readings, records, replanned, ring, tpot,
    use_wifi,
};

/// A replanner that distributes the layers evenly over the reachable devices.
#[derive(Debug)]
struct EvenSplit;

impl Replanner for EvenSplit {
    fn replan(&self, reachable: &Cluster) -> Result<Plan, ReplanError> {
        let (count, layers) = (reachable.members.len() as u32, reachable.model.shape.layers.0);
        let windows: Vec<u32> =
            (0..count).map(|place| layers * (place + 1) / count - layers * place / count).collect();
        Ok(replanned(reachable, &windows, OS))
    }

    fn predict(&self, _: &Plan, _: &Cluster) -> Option<Seconds> {
        None
    }
}

#[derive(Debug)]
struct NoPlanFound;

impl Replanner for NoPlanFound {
    fn replan(&self, _: &Cluster) -> Result<Plan, ReplanError> {
        Err(ReplanError { reason: "too little memory".into() })
    }

    fn predict(&self, _: &Plan, _: &Cluster) -> Option<Seconds> {
        None
    }
}

pub fn run_with(
    cluster: &Cluster,
    plan: &Plan,
    events: &[Event],
    replanner: Option<&dyn Replanner>,
) -> SimulationResult {
    let options = Options { starts_warm: true, ..Options::default() };
    let input = Input { cluster, plan, options: &options };
    simulate_with_events(&input, &ScenarioEvents { events, replanner, adapts: false })
        .expect("a run that ends")
}

fn simulation_error(cluster: &Cluster, plan: &Plan, events: &[Event]) -> SimError {
    let input = Input { cluster, plan, options: &Options::default() };
    simulate_with_events(&input, &ScenarioEvents { events, replanner: None, adapts: false })
        .expect_err("an error")
}

/// Simulates a ring of two devices, each with half of the layers and enough memory. Returns the trace and its metrics.
fn halves(events: &[Event]) -> (Trace, Metrics) {
    let (cluster, plan) = ring(&[PLENTY, PLENTY], 12, &[16, 16], OS);
    let trace = run_with(&cluster, &plan, events, None).trace;
    let metrics = metrics::compute_metrics(&trace);
    (trace, metrics)
}

/// Returns an event on a device that begins after `token` tokens; the caller adds the effect of the event.
fn on(device: &str, token: u32) -> Event {
    Event { after_tokens: Some(token), device: Some(device.into()), ..Event::default() }
}

/// Returns a stall of all links, from the fourth token on for 1.5 s.
fn stall() -> Event {
    Event { after_tokens: Some(4), duration: Some(Seconds(1.5)), stalls_links: true, ..Event::default() }
}

fn first(trace: &Trace) -> EventImpact {
    event_impact(trace, &trace.run_events[0])
}

/// Returns the milliseconds per token before the first run event and during this event.
fn before_and_during(trace: &Trace) -> (f64, f64) {
    let phases = first(trace).tpot_ms;
    (phases.before.expect("tokens before"), phases.during.expect("tokens during"))
}

/// Returns the milliseconds to read the second half of the layers once from memory, at 10 GB/s.
fn half() -> f64 {
    layers(&llama_8b(), 16..32).as_f64() / 10e9 * 1e3
}

/// Maximum relative difference between a simulated time and the closed-form time.
const WITHIN: f64 = 0.005;

/// A replanner that gives each of two devices a share of the layers by its speed.
#[derive(Debug)]
struct BySpeed;

impl Replanner for BySpeed {
    fn replan(&self, reachable: &Cluster) -> Result<Plan, ReplanError> {
        let speed = |index: usize| reachable.members[index].device.cpu.read_bandwidth.value.0;
        let own = (32.0 * speed(0) / (speed(0) + speed(1))).round() as u32;
        Ok(replanned(reachable, &[own, 32 - own], OS))
    }

    fn predict(&self, plan: &Plan, cluster: &Cluster) -> Option<Seconds> {
        Some(reading_time(plan, cluster))
    }
}

#[test]
fn adapting_ring_moves_layers_away_from_a_slow_device() {
    let (cluster, plan) = ring(&[PLENTY; 2], 400, &[16, 16], OS);
    let slow = Event { clock_rate_fraction: Some(Fraction(0.25)), ..on("d1", 2) };
    let run = |adapts| {
        let options = Options { starts_warm: true, ..Options::default() };
        let input = Input { cluster: &cluster, plan: &plan, options: &options };
        let events =
            ScenarioEvents { events: std::slice::from_ref(&slow), replanner: Some(&BySpeed), adapts };
        simulate_with_events(&input, &events).expect("a run that ends")
    };
    let (fixed, adapted) = (run(false), run(true));
    assert_eq!(fixed.new_plans.len(), 0);
    // Four times as slow: a fifth of the layers.
    let windows: Vec<Vec<u32>> = adapted
        .new_plans
        .iter()
        .map(|plan| plan.devices.iter().map(|device| device.window).collect())
        .collect();
    assert_eq!(windows, [[26, 6]]);
    let event = adapted.trace.run_events.iter().find(|event| event.kind == RunEventKind::Replanned);
    let event = event.expect("a new plan");
    assert!(
        event.details.contains("; d1 computes 3.") || event.details.contains("; d1 computes 4.0"),
        "{}",
        event.details
    );
    let end = |result: &SimulationResult| result.trace.records.iter().map(|record| record.end_ns).max();
    assert!(end(&adapted) < end(&fixed), "{:?} and {:?}", end(&adapted), end(&fixed));
}

#[test]
fn load_on_half_the_cores_doubles_computing() {
    // Four more threads with the device's own four on four cores, from the fourth token on.
    let game =
        Event { load: Some(ProcessorLoad { threads: 4, available_gpu_fraction: None }), ..on("d1", 4) };
    let (trace, _) = halves(std::slice::from_ref(&game));
    let (quiet, busy) = before_and_during(&trace);
    assert_near(busy - quiet, half(), WITHIN, "more ms");
    let (trace, metrics) = halves(&[Event { duration: Some(Seconds(2.5 * busy / 1e3)), ..game }]);
    assert_near(first(&trace).tpot_ms.after.expect("after the game"), quiet, WITHIN, "ms after the game");
    // The time for which the device waits for a core is queueing, not computing: in two and a half tokens of eleven.
    let queue = metrics.terms_ms.queue * 11.0;
    assert!((2.0 * half()..3.0 * half()).contains(&queue), "{queue} ms of queueing");
    assert_near(metrics.terms_ms.cpu, halves(&[]).1.terms_ms.cpu, WITHIN, "ms of computing");
}

#[test]
fn half_the_clock_doubles_computing() {
    let (trace, metrics) = halves(&[Event { clock_rate_fraction: Some(Fraction(0.5)), ..on("d1", 1) }]);
    let (quiet, slow) = (halves(&[]).1, first(&trace).tpot_ms.during.expect("all"));
    assert_near(slow - tpot(&quiet), half(), WITHIN, "more ms");
    assert_near(metrics.terms_ms.cpu - quiet.terms_ms.cpu, half(), WITHIN, "more ms of computing");
    assert!(metrics.terms_ms.queue < 0.001 * slow);
}

#[test]
fn disk_load_slows_reading() {
    // The second half is read from disk for every token, at 1 GB/s, or at 0.25 GB/s under load.
    let (mut cluster, plan) = ring(&[PLENTY, Bytes(1 << 30)], 6, &[16, 16], OS);
    cluster.members[1].device.disk.latency = None;
    let event = Event { disk_load: Some(Fraction(0.75)), ..on("d1", 3) };
    let (before, during) = before_and_during(&run_with(&cluster, &plan, &[event], None).trace);
    // Three times the time of reading is added, and a tenth of that time was hidden behind computing before.
    let (more, half) = (during - before, half());
    assert!((29.0 * half..31.0 * half).contains(&more), "{more} ms more, half a model is {} ms", 10.0 * half);
}

#[test]
fn stall_adds_to_token_time() {
    let (trace, metrics) = halves(&[stall()]);
    assert_eq!((trace.outcome, trace.run_events.len()), (Outcome::Ok, 1), "no device is lost within 1.5 s");
    let phases = first(&trace);
    let (before, longest) = (phases.tpot_ms.before.expect("three"), phases.max_tpot_ms.during.expect("one"));
    // The head computes its half during the stall, so the stall adds 1.5 s less the time of that half.
    assert_near(longest, 1500.0 + before - half(), WITHIN, "ms of the longest token");
    assert_near(metrics.terms_ms.sum(), tpot(&metrics), WITHIN, "the sum of the terms");
}

#[test]
fn lost_device_is_replanned_around() {
    let (cluster, plan) = ring(&[PLENTY; 3], 12, &[10, 11, 11], OS);
    let run = run_with(&cluster, &plan, &[Event { leaves_ring: true, ..on("d2", 4) }], Some(&EvenSplit));
    let trace = &run.trace;
    assert_eq!(trace.outcome, Outcome::Ok);
    assert_eq!(count(trace, StepKind::Output), 12, "every token is output once");
    let kinds: Vec<RunEventKind> = trace.run_events.iter().map(|it| it.kind).collect();
    assert_eq!(kinds, [RunEventKind::Away, RunEventKind::Silent, RunEventKind::Replanned]);
    let [away, silent, replanned] = [0, 1, 2].map(|at| &trace.run_events[at]);
    assert_eq!((away.start_ns, away.end_ns), (silent.start_ns, None));
    // The loss is detected after 1.5 to 2.0 s, at a heartbeat of the head.
    let detected = silent.end_ns.expect("a detected loss");
    let silence = detected - silent.start_ns;
    assert!((1_500_000_000..2_000_000_001).contains(&silence) && detected.is_multiple_of(500_000_000));
    assert_eq!((replanned.start_ns, run.new_plans.len()), (detected, 1));
    assert_eq!(replanned.plan_digest.as_deref(), Some(run.new_plans[0].digest().as_str()));
    assert!(replanned.details.contains("d0 16, d1 16; 8 tokens computed again"), "{}", replanned.details);

    // The round trip of the plan (8 ms), a batch of 8 tokens on both halves, and reading the new layers from disk.
    let again = (replanned.end_ns.expect("a token") - replanned.start_ns) as f64 * 1e-6;
    let model = &cluster.model;
    let new: Bytes = (10..16).chain(21..32).map(|layer| model.layer_bytes(layer)).sum();
    let disk = new.as_f64() / 1e9 * 1e3;
    let computing = (model.all_layers_bytes() + model.output_head_bytes()).as_f64() / 10e9 * 1e3;
    let expected = 8.0 + 0.9 * disk..8.0 + disk + computing + 30.0;
    assert!(expected.contains(&again), "{again} ms, {disk} ms of reading");
    let metrics = metrics::compute_metrics(trace);
    assert_near(metrics.terms_ms.sum(), tpot(&metrics), WITHIN, "the sum of the terms");
    // The bubble is the time until the detection, and the transfer of the plan.
    let lost = metrics.terms_ms.bubble * 11.0;
    assert!(lost >= silence as f64 * 1e-6 && lost < silence as f64 * 1e-6 + 50.0, "{lost} ms in the bubble");
}

#[test]
fn sequences_are_recomputed_after_a_loss() {
    let (mut cluster, mut plan) = ring(&[PLENTY; 3], 6, &[10, 11, 11], OS);
    (cluster.workload.sequences, plan.sequences) = (3, 3);
    let run = run_with(&cluster, &plan, &[Event { leaves_ring: true, ..on("d2", 7) }], Some(&EvenSplit));
    let trace = &run.trace;
    assert_eq!((trace.outcome, run.new_plans.len()), (Outcome::Ok, 1));
    let times = TokenTimes::from_trace(trace);
    let ends: Vec<u64> = times
        .first_tokens
        .iter()
        .map(|first| first.end_ns)
        .chain(times.decode_steps.iter().map(|step| step.end_ns))
        .collect();
    assert_eq!(ends.len(), 18, "every token is output once");
    // Prompts of 4 tokens; 7 tokens are complete when the device leaves, and the tokens on the other two devices are
    // still output.
    let replanned = trace.run_events.iter().find(|it| it.kind == RunEventKind::Replanned).expect("a plan");
    let out = ends.iter().filter(|end| **end <= replanned.start_ns);
    let again = format!("; {} tokens computed again", 3 * 4 + out.count());
    assert!(replanned.details.ends_with(&again), "{} and {again}", replanned.details);
    let metrics = metrics::compute_metrics(trace);
    let decoded: Vec<_> = metrics.sequences.iter().map(|it| it.decoded_tokens).collect();
    assert_eq!(decoded, [5, 5, 5], "{metrics:?}");
    assert_near(metrics.terms_ms.sum(), tpot(&metrics), WITHIN, "the sum of the terms");
}

#[test]
fn wifi_stall_holds_all_messages() {
    let quiet = |events: &[Event]| {
        let (mut cluster, plan) = ring(&[PLENTY, PLENTY], 12, &[16, 16], OS);
        use_wifi(&mut cluster, "", "");
        run_with(&cluster, &plan, events, None).trace
    };
    let (without, with) = (quiet(&[]), quiet(&[stall()]));
    let end = |trace: &Trace| {
        trace.records.iter().map(|record| record.end_ns).max().expect("records") as f64 * 1e-6
    };
    // The head computes its half during the stall.
    assert_near(end(&with) - end(&without), 1500.0 - half(), 0.02, "more ms");
    let network = |trace| metrics::compute_metrics(trace).terms_ms.network;
    assert!(network(&with) > network(&without) + 100.0);
}

#[test]
fn android_kill_is_reported() {
    let (mut cluster, plan) = ring(&[PLENTY, Bytes(1 << 30)], 4, &[16, 16], OS);
    cluster.members[1].device.memory.page_cache = PageCachePolicy::Android;
    // Less than 72 MiB remain for files, and other programs have no memory to give up.
    let memory = Some(MemoryLoad { size: Bytes(1 << 30) - Bytes::from_mib(64), ramp_time: None });
    let trace = run_with(&cluster, &plan, &[Event { memory, ..on("d1", 2) }], None).trace;
    let last = trace.run_events.last().expect("a reason");
    assert_eq!((trace.outcome, last.kind), (Outcome::Killed, RunEventKind::OutOfMemory));
    assert_eq!(last.device.as_deref(), Some("d1"));
    let swap = Some(CompressedSwap { swap_out_rate: BytesPerSecond(40e6), compression_ratio: 4.0 });
    let memory = &mut cluster.members[1].device.memory;
    memory.can_swap = Some(Sourced::new(Bytes::from_mib(64), "test"));
    memory.swap_available = Some(Sourced::new(Bytes(4 << 30), "test"));
    let error = simulation_error(&cluster, &plan, &[Event { compressed_swap: swap, ..on("d1", 1) }]);
    assert!(matches!(error, SimError::AutomaticSwap { .. }), "{error:?}");
}

#[test]
fn events_need_a_ring_plan() {
    let pinned = ResidencyOptions::with_policy(Residency::Pinned);
    let (cluster, plan) = ring(&[PLENTY, PLENTY], 4, &[16, 16], pinned);
    let slow = Event { clock_rate_fraction: Some(Fraction(0.5)), ..on("d1", 2) };
    assert_eq!(run_with(&cluster, &plan, &[], None).trace.outcome, Outcome::Ok);
    let error = simulation_error(&cluster, &plan, &[slow]);
    assert!(matches!(error, SimError::NotExecutable { key: "events", .. }), "{error:?}");
}

#[test]
fn run_ends_without_a_new_plan() {
    let leaves = [Event { leaves_ring: true, ..on("d1", 4) }];
    let (cluster, plan) = ring(&[PLENTY, PLENTY], 12, &[16, 16], OS);
    let none: Option<&dyn Replanner> = None;
    for (replanner, reason) in [(none, "no replanner"), (Some(&NoPlanFound as _), "too little memory")] {
        let trace = run_with(&cluster, &plan, &leaves, replanner).trace;
        assert_eq!(trace.outcome, Outcome::Killed);
        let last = trace.run_events.last().expect("a reason");
        assert!(last.kind == RunEventKind::NotReplanned && last.details.contains(reason), "{last:?}");
        assert!(metrics::compute_metrics(&trace).tpot_ms.is_some(), "the tokens until then count");
    }
    let head_leaves = [Event { leaves_ring: true, ..on("d0", 4) }];
    let trace = run_with(&cluster, &plan, &head_leaves, Some(&EvenSplit)).trace;
    assert_eq!(trace.outcome, Outcome::Killed, "the head cannot be replaced");
}

#[test]
fn returning_device_rejoins_between_tokens() {
    let (cluster, plan) = ring(&[PLENTY; 3], 20, &[10, 11, 11], OS);
    let leaves = Event { leaves_ring: true, ..on("d2", 3) };
    let back = |when| Event { rejoin_time: Some(when), ..on("d2", 8) };
    let run = run_with(&cluster, &plan, &[leaves.clone(), back(RejoinTime::BetweenTokens)], Some(&EvenSplit));
    assert_eq!((run.trace.outcome, run.new_plans.len()), (Outcome::Ok, 2));
    assert_eq!(run.new_plans[1].devices.len(), 3);
    assert_eq!(count(&run.trace, StepKind::Output), 20);
    assert!(run.trace.run_events[0].end_ns.is_some(), "the device has returned");
    let run = run_with(&cluster, &plan, &[leaves.clone(), back(RejoinTime::NextRequest)], Some(&EvenSplit));
    assert_eq!((run.trace.outcome, run.new_plans.len()), (Outcome::Ok, 1));
    // The device returns before its loss is detected: held messages continue, and nothing is computed again.
    let short = [
        Event { start_time: Some(Seconds(1.0)), after_tokens: None, ..leaves },
        Event { start_time: Some(Seconds(2.9)), after_tokens: None, ..back(RejoinTime::BetweenTokens) },
    ];
    let run = run_with(&cluster, &plan, &short, Some(&EvenSplit));
    assert_eq!((run.trace.outcome, run.new_plans.len()), (Outcome::Ok, 0));
    assert_eq!(run.trace.passes.len(), 20);
}

#[test]
fn spare_device_joins_after_a_loss() {
    let (cluster, plan) = ring(&[PLENTY; 3], 8, &[16, 16], OS);
    let run = run_with(&cluster, &plan, &[Event { leaves_ring: true, ..on("d1", 3) }], Some(&EvenSplit));
    assert_eq!(run.trace.outcome, Outcome::Ok);
    let names: Vec<&str> = run.trace.header.devices.iter().map(|device| device.name.as_str()).collect();
    assert_eq!(names, ["d0", "d1", "d2"], "device indices in the trace do not change");
    let on_third = records(&run.trace, StepKind::Compute).filter(|it| it.device_index == 2);
    assert_eq!(on_third.count(), 5, "one for each token after the third");
    assert!(run.trace.records.iter().filter(|it| it.device_index == 1).all(|it| it.pass_index <= 3));
}

#[test]
fn memory_pressure_by_residency() {
    // Memory for all of the second half, and from the fourth token on for about 0.75 of it.
    let share = layers(&llama_8b(), 16..32);
    let taken = Bytes(share.0 / 4);
    // Residency `os` without prefetching: a helper would evict pages that have arrived for the reader, so that some
    // are read twice.
    let managed = ResidencyOptions::with_policy(Residency::Managed);
    for (residency, expected) in [(OS, 0.98..1.03), (managed, 0.25..0.32)] {
        let policy = residency.policy;
        let memory_budget = share + Bytes::from_mib(64) + Bytes::from_mib(32);
        let (cluster, plan) = ring(&[PLENTY, memory_budget], 16, &[16, 16], residency);
        let memory = Some(MemoryLoad { size: taken + Bytes::from_mib(64), ramp_time: None });
        let trace = run_with(&cluster, &plan, &[Event { memory, ..on("d1", 4) }], None).trace;
        assert_eq!(trace.outcome, Outcome::Ok);
        let total = readings(&trace, 1, Counter::BytesRead);
        let read =
            |from: usize, to: usize| (total[to] - total[from]) as f64 / (to - from) as f64 / share.as_f64();
        let (before, during) = (read(1, 3), read(10, 15));
        assert!(before < 0.01, "{policy:?} before: {before}");
        assert!(expected.contains(&during), "{policy:?}: reads {during} of its share for a token");
        let pressure = first(&trace).memory_pressure;
        let found = pressure.during.expect("after") - pressure.before.expect("before");
        let more = (taken + Bytes::from_mib(64)).as_f64() / (64u64 << 30) as f64;
        assert_near(found, more, WITHIN, "more pressure");
    }
}

#[test]
fn run_ends_out_of_memory() {
    let (cluster, plan) = ring(&[PLENTY, Bytes(1 << 30)], 8, &[16, 16], OS);
    let memory = Some(MemoryLoad { size: Bytes(1 << 30), ramp_time: Some(Seconds(1.0)) });
    let trace = run_with(&cluster, &plan, &[Event { memory, ..on("d1", 2) }], None).trace;
    assert_eq!(trace.outcome, Outcome::OutOfMemory);
    assert_eq!(trace.run_events.last().map(|it| it.kind), Some(RunEventKind::OutOfMemory));
}

#[test]
fn swapping_frees_memory_at_its_rate() {
    let share = layers(&llama_8b(), 16..32);
    // Other programs occupy a quarter of the memory for the share plus 96 MiB, until they are swapped out at 4:1.
    let can_swap = Bytes(share.0 / 3);
    let unswapped = share + Bytes::from_mib(96) - Bytes(can_swap.0 * 3 / 4);
    let (mut cluster, plan) = ring(&[PLENTY, unswapped], 24, &[16, 16], OS);
    let memory = &mut cluster.members[1].device.memory;
    memory.can_swap = Some(Sourced::new(can_swap, "test"));
    memory.swap_available = Some(Sourced::new(Bytes(4 << 30), "test"));
    let swap = Some(CompressedSwap { swap_out_rate: BytesPerSecond(40e6), compression_ratio: 4.0 });
    let event =
        Event { start_time: Some(Seconds(0.0)), after_tokens: None, compressed_swap: swap, ..on("d1", 1) };
    let trace = run_with(&cluster, &plan, std::slice::from_ref(&event), None).trace;
    assert_eq!(trace.outcome, Outcome::Ok);
    let read = readings(&trace, 1, Counter::BytesRead);
    let each: Vec<f64> = read.windows(2).map(|pair| (pair[1] - pair[0]) as f64 / share.as_f64()).collect();
    assert!(each[1] > 0.98, "the share does not fit yet: {each:?}");
    assert!(each[22] < 0.01, "the share fits: {each:?}");
    // Tokens read from disk until the swapping has ended and all weights are in memory.
    let seconds = can_swap.as_f64() / 40e6;
    let quiet = each.iter().position(|&part| part < 0.01).expect("a quiet token");
    let counted = trace.readings.iter().find(|it| it.device_index == 1 && it.pass_index as usize == quiet);
    let at = counted.expect("counted").time_ns;
    assert!(at as f64 * 1e-9 > seconds * 0.8, "quiet from {at} ns on, and swapping takes {seconds} s");
    cluster.members[1].device.memory.can_swap = None;
    assert!(matches!(simulation_error(&cluster, &plan, &[event]), SimError::NoSwap { .. }));
}
