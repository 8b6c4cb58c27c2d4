//! Scenario events: the effects of loads, losses and stalls on a simulated ring, against closed forms.
//!
//! In the rings of [`crate::small_rings`] a token takes the time of its hops and of reading weights from memory at 10
//! GB/s, so every change has one expected value.

use hearth_core::cluster::Cluster;
use hearth_core::metrics::event_impact::{EventImpact, event_impact};
use hearth_core::metrics::{self, Metrics};
use hearth_core::recovery::{NoPlan, Replanner};
use hearth_profiles::device::PageCachePolicy;
use hearth_profiles::{Bytes, BytesPerSecond, Fraction, Seconds, Sourced};
use hearth_schema::events::{Event, Load, MemoryLoad, RejoinTime, Swap};
use hearth_schema::plan::{Plan, Role};
use hearth_schema::residency::{Residency, ResidencyOptions};
use hearth_schema::run_events::RunEventKind;
use hearth_schema::trace::{Counter, Kind, Outcome, Trace};
use hearth_sim::{Disturbances, Input, Options, Run, SimError, simulate_with_disturbances};

use crate::small_rings::{OS, PLENTY, cluster, count, layers, llama_8b, plan, readings, tpot, use_wifi};

/// A replanner that distributes the layers evenly over the reachable devices.
#[derive(Debug)]
struct EvenSplit;

impl Replanner for EvenSplit {
    fn replan(&self, reachable: &Cluster) -> Result<Plan, NoPlan> {
        let (count, layers) = (reachable.members.len() as u32, reachable.model.shape.layers.0);
        let windows: Vec<u32> =
            (0..count).map(|place| layers * (place + 1) / count - layers * place / count).collect();
        let mut plan = plan(&reachable.model, &windows, OS);
        (plan.rounds, plan.sequences) = (1, reachable.workload.sequences);
        let mut names: Vec<&String> = reachable.members.iter().map(|member| &member.name).collect();
        names.rotate_left(reachable.head);
        for (device, name) in plan.devices.iter_mut().zip(names) {
            device.name.clone_from(name);
        }
        Ok(plan)
    }
}

/// A replanner that finds no plan.
#[derive(Debug)]
struct NoPlanFound;

impl Replanner for NoPlanFound {
    fn replan(&self, _: &Cluster) -> Result<Plan, NoPlan> {
        Err(NoPlan { reason: "too little memory".into() })
    }
}

/// Simulates a warm run with events.
fn run_with(cluster: &Cluster, plan: &Plan, events: &[Event], replanner: Option<&dyn Replanner>) -> Run {
    let options = Options { warm_start: true, ..Options::default() };
    let input = Input { cluster, plan, options: &options };
    simulate_with_disturbances(&input, &Disturbances { events, replanner }).expect("a run that ends")
}

/// Returns the error of a run whose events are refused.
fn refused(cluster: &Cluster, plan: &Plan, events: &[Event]) -> SimError {
    let input = Input { cluster, plan, options: &Options::default() };
    simulate_with_disturbances(&input, &Disturbances { events, replanner: None }).expect_err("a refusal")
}

/// Simulates a ring of two halves with enough memory for all weights. Returns the trace and its metrics.
fn halves(events: &[Event]) -> (Trace, Metrics) {
    let cluster = cluster("llama-8b", &[PLENTY, PLENTY], 12);
    let plan = plan(&cluster.model, &[16, 16], OS);
    let trace = run_with(&cluster, &plan, events, None).trace;
    let metrics = metrics::compute(&trace);
    (trace, metrics)
}

/// Returns an event without effect, at a token on a device.
fn on(device: &str, token: u32) -> Event {
    Event { token: Some(token), device: Some(device.into()), ..Event::default() }
}

/// Returns the impact of the first run event.
fn first(trace: &Trace) -> EventImpact {
    event_impact(trace, &trace.run_events[0])
}

/// Returns the milliseconds to read the second half of the layers once at 10 GB/s.
fn half() -> f64 {
    layers(&llama_8b(), 16..32).as_f64() / 10e9 * 1e3
}

/// Whether a value is within 0.5 % of the expected one.
fn near(found: f64, expected: f64) -> bool {
    (found / expected - 1.0).abs() < 0.005
}

#[test]
fn load_on_half_the_cores_doubles_computing() {
    // Four more threads with the device's own four on four cores, from the fourth token on.
    let game = Event { load: Some(Load { threads: 4, gpu_available: None }), ..on("d1", 4) };
    let (trace, _) = halves(std::slice::from_ref(&game));
    let phases = first(&trace).tpot_ms;
    let (before, during) = (phases.before.expect("three"), phases.during.expect("eight"));
    assert!(near(during - before, half()), "{before} ms, {during} ms, and half a model takes {} ms", half());
    let (quiet, busy) = (before, during);
    let (trace, metrics) = halves(&[Event { duration: Some(Seconds(2.5 * busy / 1e3)), ..game }]);
    let phases = first(&trace).tpot_ms;
    assert!(near(phases.after.expect("after the game"), quiet), "{phases:?} against {quiet}");
    // The time for which the device waits for a core is queueing, not computing: in two and a half tokens of eleven.
    let queue = metrics.terms_ms.queue * 11.0;
    assert!((2.0 * half()..3.0 * half()).contains(&queue), "{queue} ms of queueing");
    assert!(near(metrics.terms_ms.cpu, halves(&[]).1.terms_ms.cpu));
}

#[test]
fn half_the_clock_doubles_computing() {
    let (trace, metrics) = halves(&[Event { clock_share: Some(Fraction(0.5)), ..on("d1", 1) }]);
    let (quiet, slow) = (halves(&[]).1, first(&trace).tpot_ms.during.expect("all"));
    assert!(near(slow - tpot(&quiet), half()));
    assert!(near(metrics.terms_ms.cpu - quiet.terms_ms.cpu, half()), "the added time is computing");
    assert!(metrics.terms_ms.queue < 0.001 * slow);
}

#[test]
fn disk_load_slows_reading() {
    // The second half is read from disk for every token, at 1 GB/s, or at 0.25 GB/s under load.
    let mut cluster = cluster("llama-8b", &[PLENTY, Bytes(1 << 30)], 6);
    cluster.members[1].device.disk.latency = None;
    let plan = plan(&cluster.model, &[16, 16], OS);
    let event = Event { disk_load: Some(Fraction(0.75)), ..on("d1", 3) };
    let trace = run_with(&cluster, &plan, &[event], None).trace;
    let phases = first(&trace).tpot_ms;
    let (before, during) = (phases.before.expect("tokens"), phases.during.expect("tokens"));
    // Three times the time of reading is added, and a tenth of that time was hidden behind computing before.
    let more = during - before;
    assert!(
        (29.0 * half()..31.0 * half()).contains(&more),
        "{more} ms more, half a model is {} ms",
        10.0 * half()
    );
}

#[test]
fn stall_adds_to_token_time() {
    let stall = Event { token: Some(4), duration: Some(Seconds(1.5)), stalls: true, ..Event::default() };
    let (trace, metrics) = halves(&[stall]);
    assert_eq!((trace.outcome, trace.run_events.len()), (Outcome::Ok, 1), "no device is lost within 1.5 s");
    let phases = first(&trace);
    let (before, longest) = (phases.tpot_ms.before.expect("three"), phases.max_ms.during.expect("one"));
    // The head computes its half during the stall, so the stall adds 1.5 s less the time of that half.
    let head_half = half();
    assert!(
        near(longest, 1500.0 + before - head_half),
        "{longest} ms, {before} ms without, {head_half} on the head"
    );
    assert!(near(metrics.terms_ms.sum(), tpot(&metrics)));
}

#[test]
fn lost_device_is_replanned_around() {
    let cluster = cluster("llama-8b", &[PLENTY, PLENTY, PLENTY], 12);
    let plan = plan(&cluster.model, &[10, 11, 11], OS);
    let run = run_with(&cluster, &plan, &[Event { leaves: true, ..on("d2", 4) }], Some(&EvenSplit));
    let trace = &run.trace;
    assert_eq!(trace.outcome, Outcome::Ok);
    let outputs = count(trace, Kind::Output);
    assert_eq!(outputs, 12, "every token is output once");
    let kinds: Vec<RunEventKind> = trace.run_events.iter().map(|it| it.kind).collect();
    assert_eq!(kinds, [RunEventKind::Away, RunEventKind::Silent, RunEventKind::Replanned]);
    let [away, silent, replanned] = [0, 1, 2].map(|at| &trace.run_events[at]);
    assert_eq!((away.start, away.end), (silent.start, None));
    // The loss is detected after 1.5 to 2.0 s, at a heartbeat of the head.
    let silence = silent.end.expect("a detected loss") - silent.start;
    assert!(
        (1_500_000_000..2_000_000_001).contains(&silence)
            && silent.end.expect("a detected loss") % 500_000_000 == 0
    );
    assert_eq!((replanned.start, run.plans.len()), (silent.end.expect("a detected loss"), 1));
    assert_eq!(replanned.plan_digest.as_deref(), Some(run.plans[0].digest().as_str()));
    assert!(replanned.what.contains("d0 16, d1 16; 8 tokens computed again"), "{}", replanned.what);

    // The round trip of the plan (8 ms), a batch of 8 tokens on both halves, and reading the new layers of each
    // device from disk.
    let again = (replanned.end.expect("a token") - replanned.start) as f64 * 1e-6;
    let model = &cluster.model;
    let new: Bytes = (10..16).chain(21..32).map(|layer| model.layer_bytes(layer)).sum();
    let disk = new.as_f64() / 1e9 * 1e3;
    let computing = (model.layers_bytes() + model.output_bytes()).as_f64() / 10e9 * 1e3;
    assert!(
        again > 8.0 + 0.9 * disk && again < 8.0 + disk + computing + 30.0,
        "{again} ms, {disk} ms of reading"
    );
    let metrics = metrics::compute(trace);
    assert!(near(metrics.terms_ms.sum(), tpot(&metrics)));
    // The bubble is the time until the detection, and the transfer of the plan.
    let lost = metrics.terms_ms.bubble * 11.0;
    assert!(lost >= silence as f64 * 1e-6 && lost < silence as f64 * 1e-6 + 50.0, "{lost} ms in the bubble");
}

#[test]
fn sequences_are_recomputed_after_a_loss() {
    let mut cluster = cluster("llama-8b", &[PLENTY, PLENTY, PLENTY], 6);
    cluster.workload.sequences = 3;
    let plan = Plan { sequences: 3, ..plan(&cluster.model, &[10, 11, 11], OS) };
    let run = run_with(&cluster, &plan, &[Event { leaves: true, ..on("d2", 7) }], Some(&EvenSplit));
    let trace = &run.trace;
    assert_eq!((trace.outcome, run.plans.len()), (Outcome::Ok, 1));
    let outputs = count(trace, Kind::Output);
    assert_eq!(outputs, 18, "every token is output once");
    // Prompts of 4 tokens; 7 tokens are complete when the device leaves, and the tokens on the other two devices are
    // still output.
    let replanned = trace.run_events.iter().find(|it| it.kind == RunEventKind::Replanned).expect("a plan");
    let out = trace
        .readings
        .iter()
        .filter(|it| (it.device, it.counter) == (0, Counter::Unreclaimable) && it.at <= replanned.start);
    let again = format!("; {} tokens computed again", 3 * 4 + out.count());
    assert!(replanned.what.ends_with(&again), "{} and {again}", replanned.what);
    let metrics = metrics::compute(trace);
    assert!(metrics.sequences.len() == 3 && metrics.sequences.iter().all(|it| it.tokens == 5), "{metrics:?}");
    assert!(near(metrics.terms_ms.sum(), tpot(&metrics)));
}

#[test]
fn wifi_stall_holds_all_messages() {
    let quiet = |events: &[Event]| {
        let mut cluster = cluster("llama-8b", &[PLENTY, PLENTY], 12);
        use_wifi(&mut cluster, "", "");
        let plan = plan(&cluster.model, &[16, 16], OS);
        run_with(&cluster, &plan, events, None).trace
    };
    let stall = Event { token: Some(4), duration: Some(Seconds(1.5)), stalls: true, ..Event::default() };
    let (without, with) = (quiet(&[]), quiet(&[stall]));
    let end =
        |trace: &Trace| trace.records.iter().map(|record| record.end).max().expect("records") as f64 * 1e-6;
    // The head computes its half during the stall.
    let more = end(&with) - end(&without);
    assert!((more / (1500.0 - half()) - 1.0).abs() < 0.02, "{more} ms more");
    assert!(metrics::compute(&with).terms_ms.network > metrics::compute(&without).terms_ms.network + 100.0);
}

#[test]
fn android_kill_is_reported() {
    let mut cluster = cluster("llama-8b", &[PLENTY, Bytes(1 << 30)], 4);
    cluster.members[1].device.memory.page_cache = PageCachePolicy::Android;
    let plan = plan(&cluster.model, &[16, 16], OS);
    // Less than 72 MiB remain for files, and other programs have no memory to give up.
    let memory = Some(MemoryLoad { size: Bytes(1 << 30) - Bytes::mib(64), ramp_time: None });
    let trace = run_with(&cluster, &plan, &[Event { memory, ..on("d1", 2) }], None).trace;
    let last = trace.run_events.last().expect("a reason");
    assert_eq!(
        (trace.outcome, last.kind, last.device.as_deref()),
        (Outcome::Killed, RunEventKind::OutOfMemory, Some("d1"))
    );
    let swap = Some(Swap { rate: BytesPerSecond(40e6), compression: 4.0 });
    let memory = &mut cluster.members[1].device.memory;
    memory.can_swap = Some(Sourced::new(Bytes::mib(64), "test"));
    memory.swap_available = Some(Sourced::new(Bytes(4 << 30), "test"));
    let events = [Event { swap, ..on("d1", 1) }];
    let error = refused(&cluster, &plan, &events);
    assert!(matches!(error, SimError::AutomaticSwap { .. }), "{error:?}");
}

#[test]
fn events_need_a_ring_plan() {
    let cluster = cluster("llama-8b", &[PLENTY, PLENTY], 4);
    let plan = plan(&cluster.model, &[16, 16], ResidencyOptions::with_policy(Residency::Pinned));
    let slow = Event { clock_share: Some(Fraction(0.5)), ..on("d1", 2) };
    assert_eq!(run_with(&cluster, &plan, &[], None).trace.outcome, Outcome::Ok);
    let error = refused(&cluster, &plan, &[slow]);
    assert!(matches!(error, SimError::EventsWithoutRing { .. }), "{error:?}");
}

#[test]
fn run_ends_without_a_new_plan() {
    let leaves = [Event { leaves: true, ..on("d1", 4) }];
    let cluster = cluster("llama-8b", &[PLENTY, PLENTY], 12);
    let plan = plan(&cluster.model, &[16, 16], OS);
    let none: Option<&dyn Replanner> = None;
    for (replanner, reason) in [(none, "no replanner"), (Some(&NoPlanFound as _), "too little memory")] {
        let trace = run_with(&cluster, &plan, &leaves, replanner).trace;
        assert_eq!(trace.outcome, Outcome::Killed);
        let last = trace.run_events.last().expect("a reason");
        assert!(last.kind == RunEventKind::NotReplanned && last.what.contains(reason), "{last:?}");
        assert_eq!(metrics::compute(&trace).tpot_ms.map(|_| ()), Some(()), "the tokens until then count");
    }
}

#[test]
fn returning_device_rejoins_between_tokens() {
    let cluster = cluster("llama-8b", &[PLENTY, PLENTY, PLENTY], 20);
    let plan = plan(&cluster.model, &[10, 11, 11], OS);
    let leaves = Event { leaves: true, ..on("d2", 3) };
    let back = |when| Event { returns: Some(when), ..on("d2", 8) };
    let run = run_with(&cluster, &plan, &[leaves.clone(), back(RejoinTime::BetweenTokens)], Some(&EvenSplit));
    assert_eq!((run.trace.outcome, run.plans.len()), (Outcome::Ok, 2));
    assert_eq!(run.plans[1].devices.len(), 3);
    let outputs = count(&run.trace, Kind::Output);
    assert_eq!(outputs, 20);
    assert!(run.trace.run_events[0].end.is_some(), "the device has returned");
    let run = run_with(&cluster, &plan, &[leaves.clone(), back(RejoinTime::NextRequest)], Some(&EvenSplit));
    assert_eq!((run.trace.outcome, run.plans.len()), (Outcome::Ok, 1));
    // The device returns before its loss is detected: the messages that were held for it continue, and nothing is
    // computed again.
    let short = [
        Event { at: Some(Seconds(1.0)), token: None, ..leaves },
        Event { at: Some(Seconds(2.9)), token: None, ..back(RejoinTime::BetweenTokens) },
    ];
    let run = run_with(&cluster, &plan, &short, Some(&EvenSplit));
    assert_eq!((run.trace.outcome, run.plans.len()), (Outcome::Ok, 0));
    assert_eq!(run.trace.passes.len(), 20);
}

#[test]
fn spare_device_joins_after_a_loss() {
    let cluster = cluster("llama-8b", &[PLENTY, PLENTY, PLENTY], 8);
    let plan = plan(&cluster.model, &[16, 16], OS);
    let run = run_with(&cluster, &plan, &[Event { leaves: true, ..on("d1", 3) }], Some(&EvenSplit));
    assert_eq!(run.trace.outcome, Outcome::Ok);
    let names: Vec<&str> = run.trace.header.devices.iter().map(|device| device.name.as_str()).collect();
    assert_eq!(names, ["d0", "d1", "d2"], "device indices in the trace do not change");
    let on_third = run.trace.records.iter().filter(|it| it.device == 2 && it.kind == Kind::Compute).count();
    assert_eq!(on_third, 5, "one for each token after the third");
    assert!(run.trace.records.iter().filter(|it| it.device == 1).all(|it| it.pass <= 3));
}

#[test]
fn memory_pressure_by_residency() {
    // Memory for all of the second half, and from the fourth token on for about 0.75 of it.
    let model = llama_8b();
    let share = layers(&model, 16..32);
    let taken = Bytes(share.0 / 4);
    // Residency `os` without prefetching: a helper would evict pages that have arrived for the reader, so that some
    // are read twice.
    let managed = ResidencyOptions::with_policy(Residency::Managed);
    for (residency, expected) in [(OS, 0.98..1.03), (managed, 0.25..0.32)] {
        let policy = residency.policy;
        let plan = plan(&model, &[16, 16], residency);
        let memory_budget = share + Bytes::mib(64) + Bytes::mib(32);
        let cluster = cluster("llama-8b", &[PLENTY, memory_budget], 16);
        let memory = Some(MemoryLoad { size: taken + Bytes::mib(64), ramp_time: None });
        let trace = run_with(&cluster, &plan, &[Event { memory, ..on("d1", 4) }], None).trace;
        assert_eq!(trace.outcome, Outcome::Ok);
        let total = readings(&trace, 1, Counter::BytesRead);
        let read =
            |from: usize, to: usize| (total[to] - total[from]) as f64 / (to - from) as f64 / share.as_f64();
        assert!(read(1, 3) < 0.01, "{policy:?} before: {}", read(1, 3));
        assert!(
            expected.contains(&read(10, 15)),
            "{policy:?}: reads {} of its share for a token",
            read(10, 15)
        );
        let pressure = first(&trace).pressure;
        let more = (taken + Bytes::mib(64)).as_f64() / (64u64 << 30) as f64;
        assert!(
            near(pressure.during.expect("after") - pressure.before.expect("before"), more),
            "{pressure:?}"
        );
    }
}

#[test]
fn run_ends_out_of_memory() {
    let cluster = cluster("llama-8b", &[PLENTY, Bytes(1 << 30)], 8);
    let plan = plan(&cluster.model, &[16, 16], OS);
    let memory = Some(MemoryLoad { size: Bytes(1 << 30), ramp_time: Some(Seconds(1.0)) });
    let trace = run_with(&cluster, &plan, &[Event { memory, ..on("d1", 2) }], None).trace;
    assert_eq!(trace.outcome, Outcome::OutOfMemory);
    assert_eq!(trace.run_events.last().map(|it| it.kind), Some(RunEventKind::OutOfMemory));
}

#[test]
fn swapping_frees_memory_at_its_rate() {
    let model = llama_8b();
    let share = layers(&model, 16..32);
    let plan = plan(&model, &[16, 16], OS);
    // Of the memory for the share and 96 MiB more, other programs occupy a quarter of the share until they are
    // swapped out, at 4:1.
    let can_swap = Bytes(share.0 / 3);
    let mut cluster = cluster("llama-8b", &[PLENTY, share + Bytes::mib(96) - Bytes(can_swap.0 * 3 / 4)], 24);
    let memory = &mut cluster.members[1].device.memory;
    memory.can_swap = Some(Sourced::new(can_swap, "test"));
    memory.swap_available = Some(Sourced::new(Bytes(4 << 30), "test"));
    let swap = Some(Swap { rate: BytesPerSecond(40e6), compression: 4.0 });
    let event = Event { at: Some(Seconds(0.0)), device: Some("d1".into()), swap, ..Event::default() };
    let trace = run_with(&cluster, &plan, std::slice::from_ref(&event), None).trace;
    assert_eq!(trace.outcome, Outcome::Ok);
    let read = readings(&trace, 1, Counter::BytesRead);
    let each: Vec<f64> = read.windows(2).map(|pair| (pair[1] - pair[0]) as f64 / share.as_f64()).collect();
    assert!(each[1] > 0.98, "the share does not fit yet: {each:?}");
    assert!(each[22] < 0.01, "the share fits: {each:?}");
    // Tokens read from disk until the swapping has ended and all weights are in memory.
    let seconds = can_swap.as_f64() / 40e6;
    let quiet = each.iter().position(|&part| part < 0.01).expect("a quiet token");
    let at =
        trace.readings.iter().find(|it| it.device == 1 && it.pass as usize == quiet).expect("counted").at;
    assert!(at as f64 * 1e-9 > seconds * 0.8, "quiet from {at} ns on, and swapping takes {seconds} s");
    cluster.members[1].device.memory.can_swap = None;
    assert!(matches!(refused(&cluster, &plan, &[event]), SimError::NoSwap { .. }));
}

#[test]
fn losing_the_head_ends_the_run() {
    let cluster = cluster("llama-8b", &[PLENTY, PLENTY], 8);
    let mut plan = plan(&cluster.model, &[16, 16], OS);
    plan.devices[1].role = Role::Worker;
    let trace = run_with(&cluster, &plan, &[Event { leaves: true, ..on("d0", 3) }], Some(&EvenSplit)).trace;
    assert_eq!(trace.outcome, Outcome::Killed);
}
