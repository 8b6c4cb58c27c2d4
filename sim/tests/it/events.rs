//! Scenario events: what loads, losses and stalls cost a simulated ring, against closed forms.
//!
//! In the rings of [`crate::small_rings`] a token takes reading weights from memory at 10 GB/s and hops, so every
//! change has one expected number.

use hearth_core::cluster::Cluster;
use hearth_core::metrics::event_impact::{EventImpact, event_impact};
use hearth_core::metrics::{self, Metrics};
use hearth_core::recovery::{NoPlan, Replanner};
use hearth_profiles::device::PageCachePolicy;
use hearth_profiles::{Bytes, BytesPerSecond, Fraction, Seconds, Sourced};
use hearth_schema::events::{Event, Load, Return, Swap, Taken};
use hearth_schema::plan::{Plan, Role};
use hearth_schema::residency::{Residency, ResidencyOptions};
use hearth_schema::run_events::RunEventKind;
use hearth_schema::trace::{Counter, Kind, Outcome, Trace};
use hearth_sim::{Disturbances, Input, Options, Run, SimError, simulate_with_disturbances};

use crate::small_rings::{OS, PLENTY, cluster, count, layers, llama_8b, plan, readings, tpot, use_wifi};

/// Distributes the layers evenly over the reachable devices.
#[derive(Debug)]
struct Evenly;

impl Replanner for Evenly {
    fn replan(&self, there: &Cluster) -> Result<Plan, NoPlan> {
        let (count, layers) = (there.members.len() as u32, there.model.shape.layers.0);
        let windows: Vec<u32> =
            (0..count).map(|place| layers * (place + 1) / count - layers * place / count).collect();
        let mut plan = plan(&there.model, &windows, OS);
        (plan.rounds, plan.sequences) = (1, there.workload.sequences);
        let mut names: Vec<&String> = there.members.iter().map(|member| &member.name).collect();
        names.rotate_left(there.head);
        for (device, name) in plan.devices.iter_mut().zip(names) {
            device.name.clone_from(name);
        }
        Ok(plan)
    }
}

/// Finds no plan.
#[derive(Debug)]
struct Never;

impl Replanner for Never {
    fn replan(&self, _: &Cluster) -> Result<Plan, NoPlan> {
        Err(NoPlan { reason: "too little memory".into() })
    }
}

fn during(cluster: &Cluster, plan: &Plan, events: &[Event], replanner: Option<&dyn Replanner>) -> Run {
    let options = Options { warm: true, ..Options::default() };
    let input = Input { cluster, plan, options: &options };
    simulate_with_disturbances(&input, &Disturbances { events, replanner }).expect("a run that ends")
}

fn refused(cluster: &Cluster, plan: &Plan, events: &[Event]) -> SimError {
    let input = Input { cluster, plan, options: &Options::default() };
    simulate_with_disturbances(&input, &Disturbances { events, replanner: None }).expect_err("a refusal")
}

/// A ring of two halves with memory for everything and events on the second.
fn halves(events: &[Event]) -> (Trace, Metrics) {
    let cluster = cluster("llama-8b", &[PLENTY, PLENTY], 12);
    let plan = plan(&cluster.model, &[16, 16], OS);
    let trace = during(&cluster, &plan, events, None).trace;
    let metrics = metrics::compute(&trace);
    (trace, metrics)
}

fn on(device: &str, token: u32) -> Event {
    Event { token: Some(token), device: Some(device.into()), ..Event::default() }
}

fn first(trace: &Trace) -> EventImpact {
    event_impact(trace, &trace.run_events[0])
}

/// Milliseconds of reading the second half once at 10 GB/s.
fn half() -> f64 {
    layers(&llama_8b(), 16..32).as_f64() / 10e9 * 1e3
}

fn near(found: f64, expected: f64) -> bool {
    (found / expected - 1.0).abs() < 0.005
}

#[test]
fn load_on_half_the_cores_doubles_computing() {
    // Four threads beside its own four on four cores, until 0.2 s after the fourth token: a part of two tokens.
    let game = Event { load: Some(Load { threads: 4, gpu: None }), ..on("d1", 4) };
    let (trace, _) = halves(std::slice::from_ref(&game));
    let phases = first(&trace).tpot_ms;
    let (before, during) = (phases.before.expect("three"), phases.during.expect("eight"));
    assert!(near(during - before, half()), "{before} ms, {during} ms, and half a model takes {} ms", half());
    let (quiet, busy) = (before, during);
    let (trace, metrics) = halves(&[Event { lasts: Some(Seconds(2.5 * busy / 1e3)), ..game }]);
    let phases = first(&trace).tpot_ms;
    assert!(near(phases.after.expect("after the game"), quiet), "{phases:?} against {quiet}");
    // What the device waits for a core is queueing, not computing: two and a half tokens of eleven.
    let queue = metrics.terms_ms.queue * 11.0;
    assert!((2.0 * half()..3.0 * half()).contains(&queue), "{queue} ms of queueing");
    assert!(near(metrics.terms_ms.cpu, halves(&[]).1.terms_ms.cpu));
}

#[test]
fn half_the_clock_doubles_computing() {
    let (trace, metrics) = halves(&[Event { slow: Some(Fraction(0.5)), ..on("d1", 1) }]);
    let (quiet, slow) = (halves(&[]).1, first(&trace).tpot_ms.during.expect("all"));
    assert!(near(slow - tpot(&quiet), half()));
    assert!(near(metrics.terms_ms.cpu - quiet.terms_ms.cpu, half()), "it is computing, not queueing");
    assert!(metrics.terms_ms.queue < 0.001 * slow);
}

#[test]
fn disk_load_slows_reading() {
    // The second half is read from disk for every token: its faults are served at 1 GB/s, or at 0.25.
    let mut cluster = cluster("llama-8b", &[PLENTY, Bytes(1 << 30)], 6);
    cluster.members[1].device.disk.latency = None;
    let plan = plan(&cluster.model, &[16, 16], OS);
    let event = Event { disk_load: Some(Fraction(0.75)), ..on("d1", 3) };
    let trace = during(&cluster, &plan, &[event], None).trace;
    let phases = first(&trace).tpot_ms;
    let (before, during) = (phases.before.expect("tokens"), phases.during.expect("tokens"));
    // Three times the time of reading more, a tenth of which had been hidden behind computing.
    let more = during - before;
    assert!(
        (29.0 * half()..31.0 * half()).contains(&more),
        "{more} ms more, half a model is {} ms",
        10.0 * half()
    );
}

#[test]
fn stall_adds_to_token_time() {
    let stall = Event { token: Some(4), lasts: Some(Seconds(1.5)), stalls: true, ..Event::default() };
    let (trace, metrics) = halves(&[stall]);
    assert_eq!((trace.outcome, trace.run_events.len()), (Outcome::Ok, 1), "nobody is missed within 1.5 s");
    let phases = first(&trace);
    let (before, longest) = (phases.tpot_ms.before.expect("three"), phases.max_ms.during.expect("one"));
    // The head computes its half during the stall, so the token ends 1.5 s after the rest of it.
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
    let run = during(&cluster, &plan, &[Event { leaves: true, ..on("d2", 4) }], Some(&Evenly));
    let trace = &run.trace;
    assert_eq!(trace.outcome, Outcome::Ok);
    let outputs = count(trace, Kind::Output);
    assert_eq!(outputs, 12, "every token comes out once");
    let kinds: Vec<RunEventKind> = trace.run_events.iter().map(|it| it.kind).collect();
    assert_eq!(kinds, [RunEventKind::Away, RunEventKind::Silent, RunEventKind::Replanned]);
    let [away, silent, renewed] = [0, 1, 2].map(|at| &trace.run_events[at]);
    assert_eq!((away.start, away.end), (silent.start, None));
    // 1.5 to 2.0 s of silence, at a heartbeat of the head's.
    let silence = silent.end.expect("noticed") - silent.start;
    assert!(
        (1_500_000_000..2_000_000_001).contains(&silence) && silent.end.expect("noticed") % 500_000_000 == 0
    );
    assert_eq!((renewed.start, run.plans.len()), (silent.end.expect("noticed"), 1));
    assert_eq!(renewed.plan.as_deref(), Some(run.plans[0].digest().as_str()));
    assert!(renewed.what.contains("d0 16, d1 16; 8 tokens computed again"), "{}", renewed.what);

    // The plan's way and back (8 ms), a batch of 8 tokens on either half, from disk what each did not have.
    let again = (renewed.end.expect("a token") - renewed.start) as f64 * 1e-6;
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
    // The bubble is the silence and the transfer of the plan.
    let lost = metrics.terms_ms.bubble * 11.0;
    assert!(lost >= silence as f64 * 1e-6 && lost < silence as f64 * 1e-6 + 50.0, "{lost} ms in the bubble");
}

#[test]
fn sequences_are_recomputed_after_a_loss() {
    let mut cluster = cluster("llama-8b", &[PLENTY, PLENTY, PLENTY], 6);
    cluster.workload.sequences = 3;
    let plan = Plan { sequences: 3, ..plan(&cluster.model, &[10, 11, 11], OS) };
    let run = during(&cluster, &plan, &[Event { leaves: true, ..on("d2", 7) }], Some(&Evenly));
    let trace = &run.trace;
    assert_eq!((trace.outcome, run.plans.len()), (Outcome::Ok, 1));
    let outputs = count(trace, Kind::Output);
    assert_eq!(outputs, 18, "every token comes out once");
    // Prompts of 4 tokens; 7 tokens are complete when the device leaves, and those on the other two halves come out yet.
    let renewed = trace.run_events.iter().find(|it| it.kind == RunEventKind::Replanned).expect("a new ring");
    let out = trace
        .readings
        .iter()
        .filter(|it| (it.device, it.counter) == (0, Counter::Unreclaimable) && it.at <= renewed.start);
    let again = format!("; {} tokens computed again", 3 * 4 + out.count());
    assert!(renewed.what.ends_with(&again), "{} and {again}", renewed.what);
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
        during(&cluster, &plan, events, None).trace
    };
    let stall = Event { token: Some(4), lasts: Some(Seconds(1.5)), stalls: true, ..Event::default() };
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
    // With less than 72 MiB for files, and nothing that others could give up.
    let memory = Some(Taken { taken: Bytes(1 << 30) - Bytes::mib(64), over: None });
    let trace = during(&cluster, &plan, &[Event { memory, ..on("d1", 2) }], None).trace;
    let last = trace.run_events.last().expect("why");
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
    assert!(matches!(error, SimError::SwapsItself { .. }), "{error:?}");
}

#[test]
fn events_need_a_ring_plan() {
    let cluster = cluster("llama-8b", &[PLENTY, PLENTY], 4);
    let plan = plan(&cluster.model, &[16, 16], ResidencyOptions::of(Residency::Pinned));
    let slow = Event { slow: Some(Fraction(0.5)), ..on("d1", 2) };
    assert_eq!(during(&cluster, &plan, &[], None).trace.outcome, Outcome::Ok);
    let error = refused(&cluster, &plan, &[slow]);
    assert!(matches!(error, SimError::EventsWithoutRing { .. }), "{error:?}");
}

#[test]
fn run_ends_without_a_new_plan() {
    let leaves = [Event { leaves: true, ..on("d1", 4) }];
    let cluster = cluster("llama-8b", &[PLENTY, PLENTY], 12);
    let plan = plan(&cluster.model, &[16, 16], OS);
    let nobody: Option<&dyn Replanner> = None;
    for (replanner, reason) in [(nobody, "nobody plans again"), (Some(&Never as _), "too little memory")] {
        let trace = during(&cluster, &plan, &leaves, replanner).trace;
        assert_eq!(trace.outcome, Outcome::Killed);
        let last = trace.run_events.last().expect("why");
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
    let run = during(&cluster, &plan, &[leaves.clone(), back(Return::BetweenTokens)], Some(&Evenly));
    assert_eq!((run.trace.outcome, run.plans.len()), (Outcome::Ok, 2));
    assert_eq!(run.plans[1].devices.len(), 3);
    let outputs = count(&run.trace, Kind::Output);
    assert_eq!(outputs, 20);
    assert!(run.trace.run_events[0].end.is_some(), "it is back");
    let run = during(&cluster, &plan, &[leaves.clone(), back(Return::NextRequest)], Some(&Evenly));
    assert_eq!((run.trace.outcome, run.plans.len()), (Outcome::Ok, 1));
    // Back before it is missed: the messages that waited for it go on, and nothing is computed again.
    let short = [
        Event { at: Some(Seconds(1.0)), token: None, ..leaves },
        Event { at: Some(Seconds(2.9)), token: None, ..back(Return::BetweenTokens) },
    ];
    let run = during(&cluster, &plan, &short, Some(&Evenly));
    assert_eq!((run.trace.outcome, run.plans.len()), (Outcome::Ok, 0));
    assert_eq!(run.trace.passes.len(), 20);
}

#[test]
fn spare_device_joins_after_a_loss() {
    let cluster = cluster("llama-8b", &[PLENTY, PLENTY, PLENTY], 8);
    let plan = plan(&cluster.model, &[16, 16], OS);
    let run = during(&cluster, &plan, &[Event { leaves: true, ..on("d1", 3) }], Some(&Evenly));
    assert_eq!(run.trace.outcome, Outcome::Ok);
    let names: Vec<&str> = run.trace.header.devices.iter().map(|device| device.name.as_str()).collect();
    assert_eq!(names, ["d0", "d1", "d2"], "places in the trace stay what they were");
    let on_third = run.trace.records.iter().filter(|it| it.device == 2 && it.kind == Kind::Compute).count();
    assert_eq!(on_third, 5, "one for each token after the third");
    assert!(run.trace.records.iter().filter(|it| it.device == 1).all(|it| it.pass <= 3));
}

#[test]
fn memory_pressure_by_residency() {
    // Room for all of the second half and 1 GiB less from the fourth token on: 0.75 of it, roughly.
    let model = llama_8b();
    let share = layers(&model, 16..32);
    let taken = Bytes(share.0 / 4);
    // Without a helper, which would take pages that have arrived from the reader: then some are read twice.
    let managed = ResidencyOptions::of(Residency::Managed);
    for (residency, expected) in [(OS, 0.98..1.03), (managed, 0.25..0.32)] {
        let policy = residency.policy;
        let plan = plan(&model, &[16, 16], residency);
        let room = share + Bytes::mib(64) + Bytes::mib(32);
        let cluster = cluster("llama-8b", &[PLENTY, room], 16);
        let memory = Some(Taken { taken: taken + Bytes::mib(64), over: None });
        let trace = during(&cluster, &plan, &[Event { memory, ..on("d1", 4) }], None).trace;
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
    let memory = Some(Taken { taken: Bytes(1 << 30), over: Some(Seconds(1.0)) });
    let trace = during(&cluster, &plan, &[Event { memory, ..on("d1", 2) }], None).trace;
    assert_eq!(trace.outcome, Outcome::OutOfMemory);
    assert_eq!(trace.run_events.last().map(|it| it.kind), Some(RunEventKind::OutOfMemory));
}

#[test]
fn swapping_frees_memory_at_its_rate() {
    let model = llama_8b();
    let share = layers(&model, 16..32);
    let plan = plan(&model, &[16, 16], OS);
    // A quarter of the share and 96 MiB beside it are other programs' until they are swapped out, at 4:1.
    let can_swap = Bytes(share.0 / 3);
    let mut cluster = cluster("llama-8b", &[PLENTY, share + Bytes::mib(96) - Bytes(can_swap.0 * 3 / 4)], 24);
    let memory = &mut cluster.members[1].device.memory;
    memory.can_swap = Some(Sourced::new(can_swap, "test"));
    memory.swap_available = Some(Sourced::new(Bytes(4 << 30), "test"));
    let swap = Some(Swap { rate: BytesPerSecond(40e6), compression: 4.0 });
    let event = Event { at: Some(Seconds(0.0)), device: Some("d1".into()), swap, ..Event::default() };
    let trace = during(&cluster, &plan, std::slice::from_ref(&event), None).trace;
    assert_eq!(trace.outcome, Outcome::Ok);
    let read = readings(&trace, 1, Counter::BytesRead);
    let each: Vec<f64> = read.windows(2).map(|pair| (pair[1] - pair[0]) as f64 / share.as_f64()).collect();
    assert!(each[1] > 0.98, "it does not fit yet: {each:?}");
    assert!(each[22] < 0.01, "it fits: {each:?}");
    // As long as the swapping lasts, some token reads; once it is over and all is read, none does.
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
    let trace = during(&cluster, &plan, &[Event { leaves: true, ..on("d0", 3) }], Some(&Evenly)).trace;
    assert_eq!(trace.outcome, Outcome::Killed);
}
