//! Tests of several sequences, prompt batches and drafts: times against closed forms, invariants of any workload.

use std::collections::BTreeMap;

use hearth_core::cluster::Cluster;
use hearth_core::memory::draft::{self, DraftError};
use hearth_core::metrics::token_times::{DecodeStep, TokenTimes};
use hearth_core::metrics::{self, Metrics};
use hearth_profiles::device::shipped_profile;
use hearth_profiles::{Bytes, Document, Format, Seconds, model};
use hearth_schema::plan::{Plan, PlannedDraftModel, PlannedModel, Processor};
use hearth_schema::scenario::Workload;
use hearth_schema::trace::{Counter, Outcome, StepKind, Trace};
use hearth_sim::SimError;
use proptest::prelude::*;

use crate::small_rings::{
    OS, PLENTY, add_gpu, assert_near, assert_terms, bytes, cluster, draft_model, layers, links, llama_8b,
    memories, readings, records, simulation_error, tpot, warm, with_drafts,
};

/// Returns a cluster whose devices have enough memory for all weights, and whose links take a microsecond.
fn quick(model: &str, devices: usize, workload: Workload) -> Cluster {
    let links = links(Seconds(1e-6), 1e12);
    Cluster { links, workload, ..cluster(model, &vec![PLENTY; devices], 1) }
}

fn planned(cluster: &Cluster, windows: &[u32]) -> Plan {
    crate::small_rings::planned(cluster, windows, OS)
}

fn run(cluster: &Cluster, windows: &[u32]) -> Metrics {
    metrics::compute_metrics(&warm(cluster, &planned(cluster, windows)))
}

#[test]
fn cold_run_only_delays_first_token() {
    // Weights are read from disk once, and then all are in memory.
    let cluster = quick("1b", 2, Workload { sequences: 2, ..Workload::new(4, 30) });
    let cold = crate::small_rings::run(&cluster, &planned(&cluster, &[8, 8]));
    let warm = run(&cluster, &[8, 8]);
    assert!(cold.ttft_ms > warm.ttft_ms && cold.sequences.len() == 2);
    assert!(tpot(&cold) / tpot(&warm) < 1.2, "{} and {}", tpot(&cold), tpot(&warm));
}

#[test]
fn prompt_batches_keep_all_devices_busy() {
    let model = llama_8b();
    // A batch takes a device the time to read its 8 layers, for any number of tokens.
    let stage = |first: u32| layers(&model, first..first + 8).as_f64() / 100e9;
    let stages = [0, 8, 16, 24].map(stage);
    let (once, longest) = (stages.iter().sum::<f64>(), stages.into_iter().fold(0.0, f64::max));
    for batches in [1, 2, 4, 8] {
        let workload = Workload { micro_batch: 8 / batches, ..Workload::new(8, 1) };
        let mut cluster = quick("llama-8b", 4, workload);
        for member in &mut cluster.members {
            // A GPU, so that no time for first touches of pages is included.
            add_gpu(&mut member.device, "cuda", "100 GB/s", None);
        }
        let mut plan = planned(&cluster, &[8; 4]);
        plan.devices.iter_mut().for_each(|device| device.gpu_layers = 8);
        let trace = warm(&cluster, &plan);
        let computed = || records(&trace, StepKind::Compute);
        let (begin, end) = (computed().map(|it| it.start_ns).min(), computed().map(|it| it.end_ns).max());
        let found = (end.expect("computed") - begin.expect("computed")) as f64 * 1e-9;
        // The layers of the shipped formats are not quite equal. If they were, the run would take the time of m + d -
        // 1 steps, instead of the m d steps that it would take without overlap.
        let (m, d) = (f64::from(batches), 4.0);
        assert_near(found, once + (m - 1.0) * longest, 0.002, format!("{batches} batches, s"));
        let equal = (m + d - 1.0) / (m * d) * (m * once);
        assert_near(found, equal, 0.05, format!("{batches} batches, s as on equal devices"));
        let ttft = metrics::compute_metrics(&trace).ttft_ms.expect("a token") * 1e-3;
        assert!(ttft > found, "the output follows");
    }
}

#[test]
fn two_sequences_keep_two_devices_busy() {
    let model = llama_8b();
    let (layer, output) = (model.layer_bytes(20).as_f64(), model.output_head_bytes().as_f64());
    // The output matrix takes as long as about 4 layers: the head has 15 layers and the output, the other device 17.
    let windows = [15, 17];
    let one = run(&quick("llama-8b", 2, Workload::new(4, 100)), &windows);
    let workload = Workload { sequences: 2, ..Workload::new(4, 100) };
    let two = run(&quick("llama-8b", 2, workload), &windows);
    // A token takes the time of both stages; with two sequences, a token is complete whenever the longer stage ends.
    let stage = |layers: f64, more: f64| (layers * layer + more) / 10e9;
    let (head, other) = (stage(15.0, output), stage(17.0, 0.0));
    let gain = two.tokens_per_s.expect("tokens") / one.tokens_per_s.expect("tokens");
    assert_near(gain, (head + other) / head.max(other), 0.03, "gain");
    assert!(gain > 1.8, "{gain} times");
    let own: Vec<_> = two.sequences.iter().map(|sequence| sequence.decoded_tokens).collect();
    assert_eq!(own, [99, 99]);
    assert_eq!(two.sequences[0].ttft_ms, two.sequences[1].ttft_ms, "short prompts share a batch");
    assert!(one.sequences.is_empty() && one.speculation.is_none());
    // The terms include waiting for each other.
    assert_terms(&two);
    assert!(two.terms_ms.queue > 0.0);
    // Four sequences are computed in two batches, each of which reads the weights once.
    let workload = Workload { sequences: 4, ..Workload::new(4, 100) };
    let four = run(&quick("llama-8b", 2, workload), &windows).tokens_per_s.expect("tokens");
    assert_near(four / two.tokens_per_s.expect("tokens"), 2.0, 0.05, "gain of four sequences");
}

#[test]
fn tokens_per_step_follow_acceptance() {
    for (chance, drafts) in [(0.0, 3), (0.4, 1), (0.7, 5), (0.9, 8), (1.0, 5)] {
        let mut many = quick("1b", 1, Workload { sequences: 8, ..Workload::new(4, 400) });
        many.context_length = 404;
        let cluster = with_drafts(many, drafts, chance);
        let drafting = run(&cluster, &[16]).speculation.expect("drafts");
        // Leviathan et al., 2023, Eq. 1: (1 - a^(n+1)) / (1 - a), the sum of the powers up to n.
        let expected: f64 = (0..=drafts).map(|power| chance.powi(power as i32)).sum();
        let found = drafting.tokens_per_step;
        assert_near(found, expected, 0.05, format!("{chance}, {drafts}"));
        assert!((drafting.acceptance - chance).abs() < 0.03, "{}", drafting.acceptance);
        assert_eq!(drafting.accepted_drafts + drafting.steps, (drafting.steps as f64 * found).round() as u64);
    }
}

#[test]
fn draft_adds_its_time_and_batch_reads_weights_once() {
    let plain = run(&quick("llama-8b", 1, Workload::new(4, 61)), &[32]);
    let with =
        |acceptance| run(&with_drafts(quick("llama-8b", 1, Workload::new(4, 61)), 5, acceptance), &[32]);
    let (all, none) = (with(1.0), with(0.0));
    // Each step reads the weights of the draft model 5 times and those of the model once.
    let drafted = all.speculation.clone().expect("drafts");
    let own = draft_model(&model::shipped_profile("llama-8b").expect("shipped"));
    let reading = (own.all_layers_bytes() + own.output_head_bytes()).as_f64() / 10e9 * 1e3 * 5.0;
    // 60 tokens in 10 steps of 6.
    assert_eq!((drafted.steps, drafted.accepted_drafts), (10, 50));
    assert_near(drafted.draft_ms * 6.0, reading, 0.01, "ms of drafting");
    assert!((drafted.draft_ms + drafted.verify_ms - tpot(&all)).abs() < 1e-9);
    assert_near(tpot(&all), (tpot(&plain) + reading) / 6.0, 0.01, "ms");
    // If no draft is accepted, drafting only adds time. The last token has no drafts.
    let expected = tpot(&plain) + reading;
    assert!(tpot(&none) > tpot(&plain) && tpot(&none) < expected * 1.005, "{} and {expected}", tpot(&none));
    assert_terms(&all);
}

#[test]
fn draft_model_uses_the_heads_memory() {
    let base = with_drafts(quick("1b", 2, Workload::new(4, 8)), 3, 0.5);
    let plan = planned(&base, &[8, 8]);
    let own = base.draft_model.clone().expect("a draft");
    let cache = own.shape.mixer(0).cache_bytes(plan.context_length, Format::F16).0 * own.layers.len() as u64;
    let unreclaimable = |trace: &Trace, device| readings(trace, device, Counter::Unreclaimable)[0];
    let plain = quick("1b", 2, Workload::new(4, 8));
    let (with, without) = (warm(&base, &plan), warm(&plain, &planned(&plain, &[8, 8])));
    assert_eq!(unreclaimable(&with, 0) - unreclaimable(&without, 0), own.total_bytes().0 + cache);
    assert_eq!(unreclaimable(&with, 1), unreclaimable(&without, 1));
    // A head with less memory is out of memory.
    let mut short_head = base.clone();
    short_head.members[0].device.memory.available_memory.value = Bytes(own.total_bytes().0);
    assert_eq!(warm(&short_head, &plan).outcome, Outcome::OutOfMemory);
    // Every sequence has a cache for the whole context, on the ring and for the draft.
    let mut several = plain.clone();
    several.workload.sequences = 3;
    let three = warm(&several, &planned(&several, &[8, 8]));
    assert_eq!(unreclaimable(&three, 1), 3 * unreclaimable(&without, 1));
}

#[test]
fn gpu_draft_does_not_use_the_cpu() {
    let mut cluster = with_drafts(quick("1b", 1, Workload::new(4, 13)), 4, 1.0);
    cluster.members[0].device = shipped_profile("d3").expect("shipped");
    "d0".clone_into(&mut cluster.members[0].device.name);
    let plan = planned(&cluster, &[16]);
    let planned_processor = plan.draft_model.as_ref().map(|draft| draft.processor);
    assert_eq!(planned_processor, Some(Processor::Gpu), "the draft fits");
    let found = metrics::compute_metrics(&warm(&cluster, &plan));
    let (gpu, drafting) = (found.terms_ms.gpu, found.speculation.expect("drafts").draft_ms);
    assert!(gpu > 0.0 && (gpu - drafting).abs() < 1e-9);
    // If the draft model does not fit, the run is out of memory.
    let gpu = cluster.members[0].device.gpu.as_mut().expect("a GPU");
    gpu.memory_available.value = gpu.compute_buffer.value;
    assert_eq!(warm(&cluster, &plan).outcome, Outcome::OutOfMemory);
    let chosen = draft::planned_draft(&cluster).expect("a draft").processor;
    assert_eq!(chosen, Processor::Cpu, "a plan would use the CPU");
}

#[test]
fn mismatched_draft_plan_is_rejected() {
    let base = with_drafts(quick("1b", 1, Workload::new(4, 8)), 3, 0.5);
    let plan = planned(&base, &[16]);
    let draft_error = |cluster: &Cluster, plan: &Plan| match simulation_error(cluster, plan) {
        SimError::Draft(error) => error,
        other => panic!("{other:?}"),
    };
    let without_draft = Plan { draft_model: None, ..plan.clone() };
    assert!(matches!(draft_error(&base, &without_draft), DraftError::OnlyOneHasDraft { .. }));
    let plain = quick("1b", 1, Workload::new(4, 8));
    assert!(matches!(draft_error(&plain, &plan), DraftError::OnlyOneHasDraft { .. }));
    let mut other = base.clone();
    other.draft_model = Some(model::shipped_profile("tiny").expect("shipped"));
    assert!(matches!(draft_error(&other, &plan), DraftError::DifferentModel { .. }));
    // A draft model with another vocabulary.
    let model = model::shipped_profile("tiny").expect("shipped");
    let planned = PlannedDraftModel { model: PlannedModel::from_profile(&model), processor: Processor::Cpu };
    let with_tiny = Plan { draft_model: Some(planned), ..plan.clone() };
    assert!(matches!(draft_error(&other, &with_tiny), DraftError::VocabularyMismatch { .. }));
    let mut on_gpu = plan.clone();
    on_gpu.draft_model.as_mut().expect("a draft").processor = Processor::Gpu;
    assert!(matches!(draft_error(&base, &on_gpu), DraftError::NoGpu { .. }));
    let mut several = base;
    several.workload.sequences = 2;
    assert!(matches!(draft_error(&several, &plan), DraftError::TooFewCaches { requested: 2, planned: 1 }));
}

#[test]
fn later_tokens_are_never_faster_in_a_quiet_run() {
    let mut cluster = quick("1b", 2, Workload::new(4, 400));
    cluster.context_length = 404;
    // Embedding rows are in memory, so none is read from disk.
    let trace = warm(&cluster, &planned(&cluster, &[8, 8]));
    let steps = TokenTimes::from_trace(&trace).decode_steps;
    let times: Vec<u64> = steps.iter().map(DecodeStep::duration_ns).collect();
    // Each step is rounded to a nanosecond, and a token has fewer than a hundred steps.
    assert!(times.windows(2).all(|pair| pair[1] + 100 >= pair[0]), "{times:?}");
    assert!(times[398] > times[0], "the cache grows: {} and {}", times[0], times[398]);
}

proptest! {
    #![proptest_config(crate::cases(60))]

    /// For any workload on any ring, the run ends, every sequence gets its tokens, the terms sum to the token's time,
    /// the passes of a sequence are consecutive, no message is lost, and a second run is the same.
    #[test]
    fn every_workload_ends_with_all_its_tokens(
        windows in prop::collection::vec(1u32..7, 1..4),
        memory_mib in prop::collection::vec(150u64..1500, 3),
        prompt in 1u32..40,
        generate in 1u32..12,
        sequences in 1u32..5,
        micro_batch in 1u32..20,
        drafts in 0u32..6,
        acceptance in 0.0f64..=1.0,
        seed: u64,
    ) {
        let memories = memories(&memory_mib, windows.len());
        let mut cluster = cluster("1b", &memories, 1);
        cluster.workload = Workload { sequences, micro_batch, ..Workload::new(prompt, generate) };
        cluster.seed = seed;
        if drafts > 0 {
            cluster = with_drafts(cluster, drafts, acceptance);
        }
        let plan = planned(&cluster, &windows);
        prop_assume!(plan.validate().is_ok());
        let trace = warm(&cluster, &plan);
        if trace.outcome != Outcome::Ok {
            return Ok(());
        }
        let metrics = metrics::compute_metrics(&trace);
        let outputs = TokenTimes::from_trace(&trace);
        prop_assert_eq!(outputs.first_tokens.len(), sequences as usize);
        prop_assert_eq!(outputs.decoded_tokens() as u32, sequences * (generate - 1));
        if metrics.tpot_ms.is_some() {
            assert_terms(&metrics);
            prop_assert!(metrics.tokens_per_s.is_some_and(f64::is_finite));
        }
        let accepted = trace.readings.iter().filter(|reading| reading.counter == Counter::Accepted);
        let accepted: BTreeMap<u32, u64> = accepted.map(|reading| (reading.pass_index, reading.value)).collect();
        let mut positions: BTreeMap<u32, u32> = BTreeMap::new();
        for pass in &trace.passes {
            let at = positions.entry(pass.sequence_index).or_insert(0);
            prop_assert_eq!(pass.first_position, *at);
            let accepted_drafts = accepted.get(&pass.index).map_or(0, |&value| value as u32);
            *at += pass.tokens - pass.drafted + accepted_drafts;
        }
        prop_assert_eq!(bytes(&trace, StepKind::Send), bytes(&trace, StepKind::Receive), "what is sent arrives");
        prop_assert_eq!(warm(&cluster, &plan), trace);
    }
}
