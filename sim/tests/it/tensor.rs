//! Tests of tensor-parallel plans: times against closed forms, and the invariants of any slices.
//!
//! The devices are those of [`crate::small_rings`]. Invariants: determinism, no lost bytes, terms that sum to the time.

use hearth_core::{Cluster, metrics};
use hearth_profiles::{Bytes, Format, Seconds, Sourced};
use hearth_schema::plan::tensor_parallel::{AllReduce, HeadWeights, Slice, TensorParallelPlan};
use hearth_schema::plan::{Plan, PlanKind};
use hearth_schema::residency::{Residency, ResidencyOptions};
use hearth_schema::trace::{Counter, MemoryKind, Outcome, StepKind, Trace};
use hearth_sim::{Options, SimError};
use proptest::prelude::*;

use crate::small_rings::{
    LATENCY, PLENTY, assert_near, assert_terms, cluster, cold, count, layers, plan as ring_plan, records,
    ring, run, set_prompt, simulate_with, simulation_error, tpot, written,
};

/// Returns a plan with these slices, each of key-value heads (8 in all) and feed-forward rows (14336 in all).
fn plan(cluster: &Cluster, all_reduce: AllReduce, slices: &[(u32, u32)], options: ResidencyOptions) -> Plan {
    let layers = cluster.model.shape.layers.0;
    let slice = |(place, &(kv_heads, feed_forward))| {
        let device = format!("d{place}");
        Slice { device, kv_heads, feed_forward_rows: feed_forward }
    };
    let kind = PlanKind::Tensor(TensorParallelPlan {
        all_reduce,
        all_reduce_time: Some(Seconds(0.003)).filter(|_| all_reduce == AllReduce::OverTheAir),
        partial_result_format: Format::F32,
        head_weights: HeadWeights::Slice,
        max_batch_tokens: None,
        embedding_format: None,
        slices: slices.iter().enumerate().map(slice).collect(),
    });
    Plan { kind, rounds: 1, ..ring_plan(&cluster.model, &vec![layers; slices.len()], options) }
}

const PATTERNS: [AllReduce; 4] =
    [AllReduce::AllGather, AllReduce::Star, AllReduce::Ring, AllReduce::OverTheAir];

const PINNED: ResidencyOptions = ResidencyOptions::pinned(None);

fn even(count: u32) -> Vec<(u32, u32)> {
    (0..count).map(|_| (8 / count, 14336 / count)).collect()
}

#[test]
fn one_device_equals_a_ring_of_one() {
    let cluster = cluster("llama-8b", &[PLENTY], 6);
    let ring = tpot(&run(&cluster, &ring_plan(&cluster.model, &[32], PINNED)));
    for pattern in PATTERNS {
        let plan = plan(&cluster, pattern, &even(1), PINNED);
        let trace = cold(&cluster, &plan);
        assert_eq!((count(&trace, StepKind::Send), count(&trace, StepKind::Receive)), (0, 0));
        // Steps are rounded to the nanosecond.
        assert_near(tpot(&metrics::compute_metrics(&trace)), ring, 1e-4, format!("{pattern:?}, ms"));
    }
}

#[test]
fn token_time_is_slowest_slice_plus_all_reduce() {
    let cluster = cluster("llama-8b", &[PLENTY; 4], 6);
    let model = &cluster.model;
    // 4096 values of 4 bytes at 100 MB/s.
    let wire = 16384.0 / 100e6 * 1e3;
    let latency = LATENCY.0 * 1e3;
    let alone = model.output_head_bytes().as_f64() / 10e9 * 1e3;
    let slice = model.all_layers_bytes().as_f64() / 4.0 / 10e9 * 1e3;
    // A token needs the embedding rows sent to the workers, and 64 sums. Each of the three workers has its own wire.
    for (pattern, each) in [
        (AllReduce::AllGather, latency + wire),
        (AllReduce::Star, 2.0 * (latency + wire)),
        (AllReduce::Ring, 6.0 * (latency + wire / 4.0)),
        (AllReduce::OverTheAir, 3.0),
    ] {
        let found = tpot(&run(&cluster, &plan(&cluster, pattern, &even(4), PINNED)));
        // The sum does not include norms on every device and attention over a dozen positions.
        let expected = slice + alone + (latency + wire) + 64.0 * each;
        assert_near(found, expected, 0.01, format!("{pattern:?}, ms"));
    }
}

#[test]
fn over_the_air_all_reduce_is_independent_of_device_count() {
    let sums = |count: u32| {
        let cluster = cluster("llama-8b", &vec![PLENTY; count as usize], 4);
        run(&cluster, &plan(&cluster, AllReduce::OverTheAir, &even(count), PINNED)).terms_ms.network
    };
    assert!((sums(2) - sums(8)).abs() < 1e-3, "{} and {}", sums(2), sums(8));
}

#[test]
fn sliding_window_rereads_and_overlaps() {
    let cluster = cluster("llama-8b", &[PLENTY; 2], 6);
    let sliding = |blocks| ResidencyOptions {
        resident_blocks: Some(blocks),
        ..ResidencyOptions::with_policy(Residency::Sliding)
    };
    let metrics = run(&cluster, &plan(&cluster, AllReduce::OverTheAir, &even(2), sliding(4)));
    // The disk reads 1 GB/s and computing reads 10 GB/s from memory, so a token takes the time in which the head's
    // disk reads its slice and the output.
    let share = cluster.model.all_layers_bytes().as_f64() / 2.0;
    let read = share + cluster.model.output_head_bytes().as_f64();
    let found = tpot(&metrics);
    assert_near(found, read / 1e6, 0.02, "ms");
    assert_near(metrics.devices[0].bytes_read_per_token, read, 0.01, "bytes read per token");
    assert!(metrics.devices[0].resident_bytes < 400_000_000, "{metrics:?}");
    assert!(metrics.terms_ms.demand_disk > 0.8 * found, "{:?}", metrics.terms_ms);
    // A window that includes all blocks reads nothing.
    let whole = run(&cluster, &plan(&cluster, AllReduce::OverTheAir, &even(2), sliding(2000)));
    assert_eq!(whole.devices[0].bytes_read_per_token, 0.0);
}

#[test]
fn out_of_memory_names_the_device() {
    let cluster = cluster("llama-8b", &[PLENTY, Bytes(3 << 29)], 3);
    let plan = plan(&cluster, AllReduce::Star, &even(2), PINNED);
    let trace = cold(&cluster, &plan);
    assert_eq!((trace.outcome, trace.records.len()), (Outcome::OutOfMemory, 0));
    let metrics = metrics::compute_metrics(&trace);
    let [short] = &metrics.memory_shortages[..] else { panic!("{metrics:?}") };
    assert_eq!((short.device.as_str(), short.memory_kind), ("d1", MemoryKind::Main));
    assert_eq!(short.available_bytes, 3 << 29);
    assert!(short.needed_bytes > cluster.model.all_layers_bytes().0 / 2);
    assert_eq!(Trace::read(&mut &written(&trace)[..]).expect("a trace").shortages, trace.shortages);
    // Without the check the plan runs as with enough memory.
    let ignoring = Options { ignore_memory_shortages: true, ..Options::default() };
    let found = metrics::compute_metrics(&simulate_with(&cluster, &plan, &ignoring));
    let enough = self::cluster("llama-8b", &[PLENTY, PLENTY], 3);
    assert_eq!(found.tpot_ms, run(&enough, &plan).tpot_ms);
}

#[test]
fn head_needs_memory_to_load_the_model() {
    let cluster = cluster("llama-8b", &[PLENTY, PLENTY], 3);
    let mut plan =
        plan(&cluster, AllReduce::AllGather, &even(2), ResidencyOptions::pinned(Some(Format::Q4_0)));
    let pressure = |plan: &Plan| run(&cluster, plan).devices[0].memory_pressure;
    let slices = pressure(&plan);
    let PlanKind::Tensor(tensor) = &mut plan.kind else { panic!("slices") };
    (tensor.head_weights, tensor.embedding_format) = (HeadWeights::Model, Some(Format::F32));
    // 8 030 261 248 weights, of which the 525 336 576 of the embedding take 4 bytes and are stored twice.
    let (embedding, weights) = (525_336_576.0, 8_030_261_248.0);
    let model = (weights - embedding) * 18.0 / 32.0 + embedding * 4.0;
    let found = (pressure(&plan) - slices) * f64::from(64 << 10) * f64::from(1 << 20);
    assert_near(found, model + embedding * (4.0 - 18.0 / 32.0), 0.001, "bytes");
}

#[test]
fn excess_weights_are_swapped() {
    let mut cluster = cluster("llama-8b", &[PLENTY, Bytes(3 << 29)], 4);
    let plan = plan(&cluster, AllReduce::Star, &even(2), PINNED);
    cluster.members[1].device.memory.swap_available = Some(Sourced::new(Bytes(1 << 30), "test"));
    let metrics = run(&cluster, &plan);
    assert_eq!(metrics.outcome, Outcome::Ok);
    // The least recently used weights are evicted, so the whole slice is read again for every token.
    let share = cluster.model.all_layers_bytes().as_f64() / 2.0;
    let read = metrics.devices[1].bytes_read_per_token / share;
    assert!((0.99..1.01).contains(&read), "{read} of the slice");
    assert!(metrics.devices[1].demand_disk_ms > 0.99 * share / 1e6, "{metrics:?}");
    // The same in a ring.
    let ring = run(&cluster, &ring_plan(&cluster.model, &[16, 16], PINNED));
    assert_eq!(ring.outcome, Outcome::Ok);
    assert!(ring.devices[1].bytes_read_per_token > 0.9 * share, "{ring:?}");
}

#[test]
fn pinned_ring_reads_nothing() {
    let f16 = ResidencyOptions::pinned(Some(Format::F16));
    let (cluster, half) = ring(&[PLENTY, PLENTY], 4, &[16, 16], f16);
    let metrics = run(&cluster, &half);
    assert_eq!(metrics.devices[1].bytes_read_per_token, 0.0);
    // 16 layers of 218 103 808 weights and two norms, and the keys and values of 512 tokens.
    let weights = 16.0 * (218_103_808.0 * 2.0 + 32_768.0);
    let cache = 16.0 * 512.0 * 2.0 * 1024.0 * 2.0;
    let found = metrics.devices[1].memory_pressure * f64::from(64 << 10) * f64::from(1 << 20);
    assert_near(found, weights + cache, 1e-6, "bytes");
    // A format without a measured rate takes the time of its bytes: 3.5 times that of Q4_K_M.
    let plain = run(&cluster, &ring_plan(&cluster.model, &[16, 16], PINNED));
    let ratio = metrics.devices[1].busy_ms / plain.devices[1].busy_ms;
    assert_near(ratio, weights / layers(&cluster.model, 16..32).as_f64(), 0.01, "ratio");
}

#[test]
fn slices_of_another_model_are_rejected() {
    let mut cluster = cluster("llama-8b", &[PLENTY, PLENTY], 3);
    for (slices, reason) in [
        ([(4, 7168), (4, 7000)], "`feed_forward` add up to 14168"),
        ([(8, 14336), (8, 14336)], "`kv_heads` add up to 16"),
        ([(8, 14336), (0, 0)], "neither KV heads nor feed-forward rows"),
    ] {
        let error = simulation_error(&cluster, &plan(&cluster, AllReduce::Star, &slices, PINNED));
        assert!(matches!(error, SimError::InvalidPlan(_)) && error.to_string().contains(reason), "{error:?}");
    }
    cluster.workload.prompt_tokens = 600;
    let error = simulation_error(&cluster, &plan(&cluster, AllReduce::Star, &even(2), PINNED));
    assert!(matches!(error, SimError::Schedule(_)), "{error:?}");
}

#[test]
fn long_prompt_runs_in_batches() {
    let mut cluster = cluster("llama-8b", &[PLENTY, PLENTY], 3);
    let mut plan = plan(&cluster, AllReduce::Star, &even(2), PINNED);
    set_prompt(&mut cluster, &mut plan, 2048, 1100);
    let trace = cold(&cluster, &plan);
    assert_eq!(trace.passes.len(), 3 + 2);
    assert_eq!((count(&trace, StepKind::Output), trace.outcome), (3, Outcome::Ok));
    // Token by token, if the plan sets the batch to 1.
    let PlanKind::Tensor(tensor) = &mut plan.kind else { panic!("slices") };
    tensor.max_batch_tokens = Some(1);
    let trace = cold(&cluster, &plan);
    assert_eq!(trace.passes.len(), 1100 + 2);
    assert!(trace.passes[1099].has_output && !trace.passes[1098].has_output);
}

proptest! {
    #![proptest_config(crate::cases(24))]
    #[test]
    fn any_slices_keep_invariants(
        pattern in prop::sample::select(&PATTERNS[..]),
        cuts in proptest::collection::vec((0u32..=8, 0u32..=14336), 0..4),
        blocks in proptest::option::of(1u32..80),
    ) {
        let mut heads: Vec<u32> = cuts.iter().map(|cut| cut.0).chain([0, 8]).collect();
        let mut rows: Vec<u32> = cuts.iter().map(|cut| cut.1).chain([0, 14336]).collect();
        heads.sort_unstable();
        rows.sort_unstable();
        let slices: Vec<(u32, u32)> =
            heads.windows(2).zip(rows.windows(2)).map(|(h, r)| (h[1] - h[0], r[1] - r[0])).collect();
        prop_assume!(slices.iter().all(|slice| *slice != (0, 0)));
        let residency =
            blocks.map_or(PINNED, |_| ResidencyOptions { resident_blocks: blocks, ..ResidencyOptions::with_policy(Residency::Sliding) });
        let cluster = cluster("llama-8b", &vec![PLENTY; slices.len()], 3);
        let plan = plan(&cluster, pattern, &slices, residency);
        let trace = cold(&cluster, &plan);
        let total = |kind| {
            let with_peer = records(&trace, kind).filter(|record| record.peer.is_some());
            with_peer.map(|record| record.bytes).sum::<u64>()
        };
        prop_assert_eq!(total(StepKind::Send), total(StepKind::Receive), "bytes were lost");
        let computed = records(&trace, StepKind::Compute).filter(|record| record.pass_index == 1);
        let computed: u64 = computed.map(|record| record.bytes).sum();
        let norms = 32 * 32_768 * (slices.len() as u64 - 1);
        prop_assert_eq!(computed, cluster.model.all_layers_bytes().0 + norms, "not each weight is computed once");
        assert_terms(&metrics::compute_metrics(&trace));
        prop_assert!(trace == cold(&cluster, &plan), "two runs differ");
        let mut read = trace.readings.iter().filter(|reading| reading.counter == Counter::BytesRead);
        prop_assert!(blocks.is_some() || read.all(|reading| reading.value == 0));
    }
}
