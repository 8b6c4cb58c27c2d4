//! Tests of the schedule: the steps of the prima.cpp paper's figures, rejected events, and properties of all plans.

use proptest::prelude::*;

use super::batching::{BatchLimits, SHARED_PROMPT_TOKENS};
use super::*;
use hearth_profiles::{Document, Seconds};
use hearth_schema::plan::{
    PlanPrediction, PlannedDevice, PlannedDraftModel, PlannedModel, PlannerRecord, PredictedTerms,
    ScenarioRecord,
};
use hearth_schema::residency::ResidencyOptions;
use hearth_schema::scenario::Workload;

/// Returns a valid plan of a ring with these windows, the head first.
pub(crate) fn plan(layers: u32, windows: &[u32], prefetch: bool) -> Plan {
    let residency = ResidencyOptions { prefetch, ..ResidencyOptions::default() };
    let device = |(index, &window): (usize, &u32)| {
        let role = match (index, window) {
            (0, _) => Role::Head,
            (_, 0) => Role::Relay,
            _ => Role::Worker,
        };
        PlannedDevice { residency, ..PlannedDevice::new(format!("d{index}"), role, window) }
    };
    let scenario = ScenarioRecord { name: "test".into(), digest: String::new() };
    let model = PlannedModel {
        name: "m".into(),
        file_digest: None,
        shape_digest: "shape:0".into(),
        layers,
        weight_digests: None,
    };
    let planner = PlannerRecord { strategy: "manual".into(), options: vec![] };
    Plan {
        rounds: layers.div_ceil(windows.iter().sum()),
        context_length: 1024,
        devices: windows.iter().enumerate().map(device).collect(),
        ..Plan::empty(scenario, model, planner)
    }
}

/// Runs one batch around the ring and returns all steps in the order of execution, each with the index of its device.
pub(crate) fn run(plan: &Plan, batch: impl Into<Batch>) -> Vec<(usize, Step)> {
    let shared = Arc::new(plan.clone());
    let mut ring: Vec<Schedule> =
        (0..plan.devices.len()).map(|device| Schedule::new(shared.clone(), device)).collect();
    let mut steps = Vec::new();
    let mut next = Some((0, Event::Begin(batch.into())));
    while let Some((device, event)) = next.take() {
        for step in ring[device].react(&event).expect("the event follows from a step") {
            if let Step::Send { batch, next_round, receiver, .. } = &step {
                let (batch, round) = (batch.clone(), *next_round);
                next = Some((*receiver, Event::Arrived { batch, round }));
            }
            steps.push((device, step));
        }
    }
    assert!(ring.iter().all(|schedule| schedule.in_flight.is_empty()), "the batch is finished everywhere");
    steps
}

const DECODE: Pass = Pass::new(0, 9, 1, true);

fn steps_of(plan: &Plan, device: usize, pass: Pass) -> Vec<Step> {
    run(plan, pass).into_iter().filter(|(at, _)| *at == device).map(|(_, step)| step).collect()
}

/// Returns the first letters of a device's steps: Draft, Embed, Compute, Output, Send, Prefetch, Release.
fn letters(plan: &Plan, device: usize, pass: Pass) -> String {
    steps_of(plan, device, pass).iter().map(|step| format!("{step:?}").remove(0)).collect()
}

fn prefetched(plan: &Plan, device: usize, pass: Pass) -> Vec<ModelPart> {
    let part = |step| if let Step::Prefetch { part, .. } = step { Some(part) } else { None };
    steps_of(plan, device, pass).into_iter().filter_map(part).collect()
}

#[test]
fn figure_one_visits_six_devices_three_times() {
    // 36 layers, 6 devices, window 2: W = 12, k = 3.
    let steps = run(&plan(36, &[2; 6], false), DECODE);
    let mut computed = Vec::new();
    for (device, step) in &steps {
        if let Step::Compute { layers, .. } = step {
            computed.push((*device, layers.clone()));
        }
    }
    let expected: Vec<_> = (0u32..18).map(|index| (index as usize % 6, 2 * index..2 * index + 2)).collect();
    assert_eq!(computed, expected, "18 segments");
    assert_eq!(steps.last(), Some(&(0, Step::Output { batch: DECODE.into(), processor: Processor::Cpu })));
}

#[test]
fn partial_last_round_skips_devices_without_layers() {
    // 8 layers, windows 2, 2, 1: rounds of 5 and 3 (2 + 1); the third device has nothing in the second.
    let plan = plan(8, &[2, 2, 1], false);
    assert_eq!(plan.rounds, 2);
    assert_eq!(plan.window(1, 1), 7..8);
    assert!(plan.window(2, 1).is_empty());
    let mut sends = Vec::new();
    for (device, step) in run(&plan, DECODE) {
        if let Step::Send { receiver, next_round, .. } = step {
            sends.push((device, receiver, next_round));
        }
    }
    assert_eq!(sends, [(0, 1, 0), (1, 2, 0), (2, 0, 1), (0, 1, 1), (1, 0, 2)]);
}

#[test]
fn next_window_is_prefetched() {
    let plan = plan(8, &[2, 2], true);
    let (layers, output) = (ModelPart::Layers, ModelPart::Output);
    assert_eq!(prefetched(&plan, 0, DECODE), [layers(4..6), output, layers(0..2)]);
    assert_eq!(prefetched(&plan, 1, DECODE), [layers(6..8), layers(2..4)]);
}

#[test]
fn window_is_released_after_its_computation() {
    let mut plan = plan(8, &[2, 2], true);
    plan.devices.iter_mut().for_each(|device| device.residency.evict_after_use = true);
    assert_eq!(letters(&plan, 0, DECODE), "ECSRPCSRPORP");
    assert_eq!(letters(&plan, 1, DECODE), "CSRPCSRP");
    let released = |step: &Step| matches!(step, Step::Release { part: ModelPart::Layers(layers), .. } if *layers == (2..4));
    assert!(steps_of(&plan, 1, DECODE).iter().any(released));
}

#[test]
fn managed_device_prefetches_before_it_computes() {
    let managed = ResidencyOptions::with_policy(Residency::Managed);
    let mut plan = plan(8, &[2, 2], true);
    plan.devices.iter_mut().for_each(|device| device.residency = managed);
    assert_eq!(letters(&plan, 0, DECODE), "EPPCSRPCSRPOR");
    assert_eq!(letters(&plan, 1, DECODE), "PPCSRPCSR");
}

#[test]
fn only_the_next_part_is_prefetched() {
    // A head without layers sends the token four times before it computes the output.
    let mut without_layers = plan(8, &[0, 2], true);
    without_layers.devices[0].residency = ResidencyOptions::with_policy(Residency::Managed);
    assert_eq!(letters(&without_layers, 0, DECODE), "EPSSSSOR");
    // After a pass without output, the head prefetches its first window for the next pass.
    let without_output = Pass { has_output: false, ..DECODE };
    let prefetched = prefetched(&plan(8, &[2, 2], true), 0, without_output);
    assert_eq!(prefetched, [ModelPart::Layers(4..6), ModelPart::Layers(0..2)]);
}

#[test]
fn busy_periods_end_where_a_device_becomes_idle() {
    let layers = ModelPart::Layers;
    let ring = plan(8, &[2, 2], true);
    assert_eq!(parts_by_busy_period(&ring, 0), [vec![ModelPart::Output, layers(0..2)], vec![layers(4..6)]]);
    assert_eq!(parts_by_busy_period(&ring, 1), [[layers(2..4)], [layers(6..8)]]);
    // A single device is never idle.
    assert_eq!(parts_by_busy_period(&plan(8, &[3], true), 0).len(), 1);
    // If only the head has layers in the last round, it continues with the output and the next token without idling.
    let partial = plan(6, &[2, 2], true);
    assert_eq!(parts_by_busy_period(&partial, 0), [vec![layers(4..6), ModelPart::Output, layers(0..2)]]);
    // A relay and layers on a GPU read nothing.
    let mut relay = plan(4, &[1, 0, 1], true);
    relay.devices[2].gpu_layers = 1;
    assert!(parts_by_busy_period(&relay, 1).is_empty() && parts_by_busy_period(&relay, 2).is_empty());
}

#[test]
fn single_device_sends_no_messages() {
    let steps = run(&plan(8, &[3], false), DECODE);
    assert!(steps.iter().all(|(_, step)| !matches!(step, Step::Send { .. })));
    assert_eq!(steps.iter().filter(|(_, step)| matches!(step, Step::Compute { .. })).count(), 3);
}

#[test]
fn relay_forwards_and_computes_nothing() {
    let steps = steps_of(&plan(4, &[1, 0, 1], true), 1, DECODE);
    assert!(steps.iter().any(|step| matches!(step, Step::Send { receiver: 2, .. })));
    assert!(!steps.iter().any(|step| matches!(step, Step::Compute { .. } | Step::Prefetch { .. })));
}

#[test]
fn unexpected_message_is_rejected_and_changes_nothing() {
    let mut worker = Schedule::new(Arc::new(plan(8, &[2, 2], false)), 1);
    let before = worker.clone();
    let early = worker.react(&Event::Arrived { batch: DECODE.into(), round: 1 });
    assert!(matches!(early, Err(ScheduleError::UnexpectedRound { got: 1, .. })));
    assert!(matches!(worker.react(&Event::Begin(DECODE.into())), Err(ScheduleError::NotTheHead { .. })));
    let huge = Pass { tokens: u32::MAX, first_position: u32::MAX, ..DECODE };
    let rejected = worker.react(&Event::Arrived { batch: huge.into(), round: 0 });
    assert!(matches!(rejected, Err(ScheduleError::BadPass { .. })));
    assert_eq!(worker, before);
}

#[test]
fn lost_and_repeated_passes_are_rejected() {
    let mut worker = Schedule::new(Arc::new(plan(8, &[2, 2], false)), 1);
    let arrived = |index| Event::Arrived { batch: Pass { index, ..DECODE }.into(), round: 0 };
    worker.react(&arrived(0)).expect("the first pass");
    let before = worker.clone();
    for (index, what) in [(2, "pass 1 is missing"), (u32::MAX, "all others are missing")] {
        let (device, round) = ("d1".into(), 0);
        let expected = Err(ScheduleError::PassOutOfOrder { device, pass: index, round, expected: 1 });
        assert_eq!(worker.react(&arrived(index)), expected, "{what}");
    }
    assert!(worker.react(&arrived(0)).is_err(), "the first pass arrives again");
    assert_eq!(worker, before);
    worker.react(&arrived(1)).expect("the next pass");
}

#[test]
fn changed_pass_is_rejected_and_changes_nothing() {
    let mut worker = Schedule::new(Arc::new(plan(8, &[2, 2], false)), 1);
    worker.react(&Event::Arrived { batch: DECODE.into(), round: 0 }).expect("its first round");
    let before = worker.clone();
    let longer = Pass { tokens: DECODE.tokens + 1, ..DECODE };
    let elsewhere = Pass { first_position: DECODE.first_position + 1, ..DECODE };
    for pass in [longer, elsewhere, Pass { has_output: !DECODE.has_output, ..DECODE }] {
        let rejected = worker.react(&Event::Arrived { batch: pass.into(), round: 1 });
        assert_eq!(rejected, Err(ScheduleError::ChangedPass { device: "d1".into(), pass: DECODE.index }));
        assert_eq!(worker, before);
    }
    worker.react(&Event::Arrived { batch: DECODE.into(), round: 1 }).expect("its second round");
}

/// Returns the plan of a ring of two devices with a draft model and KV caches for two sequences.
fn drafting() -> Plan {
    let model = PlannedModel {
        name: "n".into(),
        file_digest: None,
        shape_digest: "shape:1".into(),
        layers: 2,
        weight_digests: None,
    };
    let draft = Some(PlannedDraftModel { model, processor: Processor::Cpu });
    Plan { draft_model: draft, sequences: 2, ..plan(8, &[4, 4], false) }
}

#[test]
fn head_drafts_before_a_pass_and_runs_the_draft_model_on_a_prompt_after_sending_it() {
    let plan = drafting();
    let drafted = Pass { drafted: 3, ..Pass::new(0, 8, 4, true) };
    assert_eq!(letters(&plan, 0, Pass::new(0, 0, 8, true)), "ECSDO");
    assert_eq!(letters(&plan, 0, drafted), "DECSO");
    // The last token of a request has no drafts.
    assert_eq!(letters(&plan, 0, Pass::new(0, 8, 1, true)), "ECSO");
    assert_eq!(letters(&plan, 1, drafted), "CS");
}

#[test]
fn recurrent_state_is_not_rolled_back() {
    let mut schedule = Schedule::new(Arc::new(drafting()), 1).with_truncation(false);
    let event = |index, first| Event::Arrived { batch: Pass::new(index, first, 4, true).into(), round: 0 };
    schedule.react(&event(0, 0)).expect("the prompt");
    schedule.react(&event(1, 4)).expect("continues");
    let before = schedule.clone();
    let rolled = schedule.react(&event(2, 6));
    assert!(matches!(rolled, Err(ScheduleError::RolledBackState { first: 6, cached: 8, .. })), "{rolled:?}");
    assert_eq!(schedule, before);
    schedule.react(&event(2, 0)).expect("begins again");
}

#[test]
fn rejected_drafts_are_rolled_back_on_every_device() {
    let plan = Arc::new(drafting());
    let verify = |index, first_position| Pass { drafted: 3, ..Pass::new(index, first_position, 4, true) };
    for device in [0, 1] {
        let mut schedule = Schedule::new(plan.clone(), device);
        let event = |pass: Pass| match device {
            0 => Event::Begin(pass.into()),
            _ => Event::Arrived { batch: pass.into(), round: 0 },
        };
        schedule.react(&event(Pass::new(0, 0, 8, true))).expect("the prompt");
        // All drafts are accepted, then one of three, then all.
        for (index, first) in [(1, 8), (2, 12), (3, 14), (4, 18)] {
            schedule.react(&event(verify(index, first))).expect("in order");
        }
        let before = schedule.clone();
        let gap = schedule.react(&event(verify(5, 30)));
        assert!(matches!(gap, Err(ScheduleError::Gap { first: 30, cached: 22, .. })), "{gap:?}");
        // The plan has caches for two sequences, each with its own positions.
        let rejected = schedule.react(&event(Pass { sequence_index: 2, ..verify(5, 22) }));
        assert!(matches!(rejected, Err(ScheduleError::UnknownSequence { sequence: 2, sequences: 2, .. })));
        assert_eq!(schedule, before);
        schedule
            .react(&event(Pass { sequence_index: 1, ..verify(5, 30) }))
            .expect("a sequence first seen here");
    }
}

#[test]
fn invalid_drafts_are_rejected() {
    let with = |drafted, pass| Pass { drafted, ..pass };
    let (plain, drafts) = (Arc::new(plan(8, &[4, 4], false)), Arc::new(drafting()));
    for (plan, pass) in [
        (&plain, with(1, Pass::new(0, 0, 2, true))),
        (&drafts, with(2, Pass::new(0, 0, 2, true))),
        (&drafts, with(u32::MAX, Pass::new(0, 0, 2, true))),
        (&drafts, with(1, Pass::new(0, 0, 2, false))),
    ] {
        let mut head = Schedule::new(plan.clone(), 0);
        let rejected = head.react(&Event::Begin(pass.into()));
        assert!(matches!(rejected, Err(ScheduleError::BadDrafts { .. })), "{pass:?}: {rejected:?}");
        assert_eq!(head, Schedule::new(plan.clone(), 0));
    }
}

#[test]
fn batch_computes_all_its_passes_in_the_steps_of_one() {
    let plan = drafting();
    let drafted = Pass { drafted: 3, ..Pass::new(1, 8, 4, true) };
    let prompt = Pass { sequence_index: 1, ..Pass::new(2, 0, 20, false) };
    let batch = Batch::new(vec![drafted, prompt]).expect("a batch");
    let mut head = Schedule::new(Arc::new(plan.clone()), 0);
    head.react(&Event::Begin(Pass::new(0, 0, 8, true).into())).expect("the prompt");
    let steps = head.react(&Event::Begin(batch.clone())).expect("the batch");
    let drafts: Vec<u32> = steps
        .iter()
        .filter_map(|step| if let Step::Draft { batch: 1, pass } = step { Some(pass.index) } else { None })
        .collect();
    assert_eq!(drafts, [1, 2], "tokens are drafted first, and the draft model reads the prompt last");
    assert!(steps.contains(&Step::Compute { batch, round: 0, layers: 0..4, processor: Processor::Cpu }));
    assert_eq!((head.cached.get(&0), head.cached.get(&1)), (Some(&12), Some(&20)));
    let before = head.clone();
    let gap =
        Batch::new(vec![Pass::new(3, 12, 1, true), Pass { sequence_index: 1, ..Pass::new(4, 21, 1, true) }]);
    let rejected = head.react(&Event::Begin(gap.expect("a batch")));
    assert!(
        matches!(rejected, Err(ScheduleError::Gap { pass: 4, first: 21, cached: 20, .. })),
        "{rejected:?}"
    );
    let large = [0, 1].map(|at| Pass { sequence_index: at, ..Pass::new(3 + at, 0, 300, true) });
    let rejected = head.react(&Event::Begin(Batch::new(large.to_vec()).expect("a batch")));
    assert_eq!(rejected, Err(ScheduleError::LargeBatch { pass: 3, tokens: 600 }));
    assert_eq!(head, before);
}

#[test]
fn more_batches_are_in_flight_if_devices_take_equally_long() {
    let limits = |seconds: [f64; 3], tpot: f64, disk: f64| {
        let mut plan = plan(12, &[4, 4, 4], false);
        for (device, time) in plan.devices.iter_mut().zip(seconds) {
            let (compute, disk) = (Seconds(time - disk), Seconds(disk));
            device.predicted_terms = Some(PredictedTerms { compute, disk, ..PredictedTerms::default() });
        }
        plan.prediction = Some(PlanPrediction { tpot: Seconds(tpot) });
        let BatchLimits { in_flight, shared_prompt_tokens } = BatchLimits::for_plan(&plan);
        (in_flight, shared_prompt_tokens)
    };
    assert_eq!(limits([0.1, 0.1, 0.1], 0.32, 0.0), (3, SHARED_PROMPT_TOKENS));
    assert_eq!(limits([0.19, 0.17, 0.0], 0.37, 0.0), (2, SHARED_PROMPT_TOKENS));
    assert_eq!(limits([0.3, 0.02, 0.02], 0.36, 0.0), (1, SHARED_PROMPT_TOKENS));
    // The devices read ahead while they wait for each other.
    assert_eq!(limits([0.3, 0.3, 0.3], 0.92, 0.2), (1, MAX_PASS_TOKENS));
    let unknown = BatchLimits::for_plan(&plan(12, &[4, 0, 4], false));
    assert_eq!((unknown.in_flight, unknown.shared_prompt_tokens), (2, SHARED_PROMPT_TOKENS));
}

#[test]
fn workload_is_a_prompt_and_then_single_tokens() {
    let passes = workload_passes(&Workload::new(600, 3));
    let shape: Vec<_> =
        passes.iter().map(|pass| (pass.first_position, pass.tokens, pass.has_output)).collect();
    assert_eq!(shape, [(0, 512, false), (512, 88, true), (600, 1, true), (601, 1, true)]);
}

proptest! {
    #[test]
    fn every_layer_is_computed_once_and_in_order(
        layers in 1u32..60,
        windows in proptest::collection::vec(0u32..9, 1..6),
        prefetch: bool,
    ) {
        let ring: u32 = windows.iter().sum();
        prop_assume!(ring > 0);
        let plan = plan(layers, &windows, prefetch);
        prop_assume!(plan.validate().is_ok());
        let mut next = 0;
        for (_, step) in run(&plan, DECODE) {
            if let Step::Compute { layers, .. } = step {
                prop_assert_eq!(layers.start, next);
                next = layers.end;
            }
        }
        prop_assert_eq!(next, layers);
    }

    #[test]
    fn no_event_panics(
        device in 0usize..3,
        events in proptest::collection::vec((any::<bool>(), 0u32..4, 0u32..5, any::<u32>(), any::<u32>()), 0..30),
    ) {
        let mut schedule = Schedule::new(Arc::new(plan(9, &[2, 0, 1], true)), device);
        for (begin, index, round, tokens, first_position) in events {
            let pass = Pass::new(index, first_position, tokens % 600, true);
            let other = Pass { sequence_index: 1, ..Pass::new(index.saturating_add(1), 0, 2, true) };
            let batch = Batch::new(vec![pass, other]).filter(|_| tokens % 3 == 0).unwrap_or_else(|| pass.into());
            let event = if begin { Event::Begin(batch) } else { Event::Arrived { batch, round } };
            let _ = schedule.react(&event);
        }
    }
}
