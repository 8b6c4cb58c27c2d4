//! Tests of rings: time per token against closed forms, and the invariants of any plan.

use hearth_core::metrics;
use hearth_profiles::device::PageCachePolicy;
use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Bytes, Document};
use hearth_schema::plan::Role;
use hearth_schema::residency::{Residency, ResidencyOptions};
use hearth_schema::trace::{Outcome, StepKind};
use hearth_sim::{Options, SimError};
use proptest::prelude::*;

use crate::small_rings::{
    OS, PLENTY, add_gpu, assert_near, cluster, cold, count, layers, llama_8b, memories, plan, records, ring,
    run, set_prompt, simulate_with, simulation_error, tpot, warm,
};

fn policy(residency: Residency, prefetch: bool) -> ResidencyOptions {
    ResidencyOptions { prefetch, ..ResidencyOptions::with_policy(residency) }
}

/// Returns the milliseconds to read the weights that a token uses once from memory, at 10 GB/s.
fn reading(model: &ModelProfile) -> f64 {
    (model.all_layers_bytes() + model.output_head_bytes() + model.embedding_row_bytes()).as_f64() / 10e9 * 1e3
}

#[test]
fn token_time_with_enough_memory() {
    let cluster = cluster("llama-8b", &[PLENTY, PLENTY], 6);
    // A hop takes 4096 values of 4 bytes at 100 MB/s, that is 0.16 ms, and 4 ms of latency.
    let hop = 4.0 + 16384.0 / 100e6 * 1e3;
    for (windows, hops) in [(&[16, 16][..], 2.0), (&[8, 8], 4.0), (&[4, 4], 8.0)] {
        let plan = plan(&cluster.model, windows, OS);
        let found = tpot(&metrics::compute_metrics(&warm(&cluster, &plan)));
        // The sum does not include attention over a dozen positions and the kernel time of the page cache.
        assert_near(found, reading(&cluster.model) + hops * hop, 0.005, format!("{windows:?}, ms"));
    }
}

#[test]
fn linux_rereads_the_whole_share() {
    // The second device has 16 of 32 layers, and memory for 90 % of them.
    let share = layers(&llama_8b(), 16..32);
    let (cluster, plan) = ring(&[PLENTY, Bytes(share.0 * 9 / 10)], 6, &[16, 16], OS);
    let metrics = run(&cluster, &plan);
    let read = metrics.devices[1].bytes_read_per_token / share.as_f64();
    assert!((0.99..1.02).contains(&read), "{read} of the share");
    // Reading (1 GB/s) is not hidden, and computing is hidden behind reading: T0 + share / s less the overlap.
    let disk = share.as_f64() / 1e9 * 1e3;
    let found = tpot(&metrics);
    let quiet = tpot(&run(&self::cluster("llama-8b", &[PLENTY, PLENTY], 6), &plan));
    let computing = share.as_f64() / 10e9 * 1e3;
    assert!((quiet + disk - computing - 5.0..quiet + disk + 5.0).contains(&found), "{found} ms");
}

#[test]
fn prefetch_helps_only_with_several_rounds() {
    let model = llama_8b();
    let share = layers(&model, 0..16);
    // 60 % of its half: two windows of a quarter of the half fit at once, one window of the whole half does not.
    let slow = cluster("llama-8b", &[PLENTY, Bytes(share.0 * 6 / 10)], 8);
    let run = |windows: &[u32], prefetch| {
        let metrics = run(&slow, &plan(&model, windows, policy(Residency::Os, prefetch)));
        let read = metrics.devices[1].bytes_read_per_token / share.as_f64();
        (tpot(&metrics), read)
    };
    let (plain, conflict, ring) = (run(&[16, 16], false), run(&[16, 16], true), run(&[4, 4], true));
    assert!((0.99..1.02).contains(&plain.1), "{plain:?}");
    // The prefetch-release conflict: nearly all weights are read twice. The head computes for too short a time to
    // hide the second read; with a head of 0.2 s and a share of 1 s a real machine does the same (see `linux_rows`).
    assert!(conflict.1 > 1.7 && conflict.0 > plain.0, "k=1: {plain:?}, with prefetch {conflict:?}");
    assert!(ring.1 < 1.1 && ring.0 < 0.95 * plain.0, "k=4: {ring:?} against {plain:?}");
}

#[test]
fn terms_sum_to_token_time() {
    let (cluster, plan) = ring(&[PLENTY, Bytes(1 << 30)], 6, &[5, 3], policy(Residency::Os, true));
    let metrics = run(&cluster, &plan);
    let tpot = tpot(&metrics);
    assert_near(metrics.terms_ms.sum(), tpot, 1e-9, "the sum of the terms");
    assert!(metrics.terms_ms.bubble.abs() < 0.01 * tpot, "{:?}", metrics.terms_ms);
    assert!(metrics.terms_ms.demand_disk > 0.0 && metrics.terms_ms.network > 0.0);
    assert!(metrics.terms_ms.queue < 0.01 * tpot, "{:?}", metrics.terms_ms);
}

#[test]
fn prompt_batches_flow_through_the_ring() {
    let (mut long, mut plan) = ring(&[PLENTY, PLENTY], 3, &[16, 16], OS);
    set_prompt(&mut long, &mut plan, 2048, 1100);
    let trace = warm(&long, &plan);
    assert_eq!(trace.passes.len(), 3 + 2);
    assert_eq!(count(&trace, StepKind::Output), 3);
    // The head computes the second batch while the worker computes the first.
    let on = |device, pass| {
        let found =
            records(&trace, StepKind::Compute).find(|it| (it.device_index, it.pass_index) == (device, pass));
        found.map(|record| record.start_ns..record.end_ns).expect("computed")
    };
    assert!(on(0, 1).start < on(1, 0).end);
}

#[test]
fn unreclaimable_beyond_memory_is_out_of_memory() {
    let (mut small, plan) = ring(&[PLENTY, Bytes(1 << 20)], 3, &[16, 16], OS);
    assert_eq!(cold(&small, &plan).outcome, Outcome::OutOfMemory);
    small.members.pop();
    assert!(matches!(simulation_error(&small, &plan), SimError::UnknownDevice { index: 1, .. }));
}

#[test]
fn gpu_layers_do_not_use_the_disk() {
    let (mut cluster, mut plan) = ring(&[PLENTY], 4, &[16], OS);
    add_gpu(&mut cluster.members[0].device, "cuda", "100 GB/s", Some(["1 ms", "2 ms"]));
    plan.devices[0].gpu_layers = 16;
    let metrics = run(&cluster, &plan);
    let terms = metrics.terms_ms;
    // 32 layers in two windows, at 100 GB/s; an upload and a download for each window.
    let model = &cluster.model;
    assert_near(terms.gpu, model.all_layers_bytes().as_f64() / 100e9 * 1e3, 0.01, "ms on the GPU");
    assert!((terms.memory - 2.0 * 3.0).abs() < 0.01, "{} ms of copies", terms.memory);
    // No layer is read again, but the output matrix of the first token and new embedding rows are.
    let output = model.output_head_bytes().as_f64();
    assert!(metrics.devices[0].bytes_read_per_token < output, "embedding rows and the pages around them");
    (plan.devices[0].gpu_layers, plan.devices[0].window, plan.rounds) = (17, 32, 1);
    cluster.members[0].device.gpu = None;
    assert!(matches!(simulation_error(&cluster, &plan), SimError::NoGpu { layers: 17, .. }));
}

#[test]
fn prefetch_keeps_to_its_budget() {
    let half = Bytes(layers(&llama_8b(), 0..16).0 / 2);
    for residency in [Residency::Os, Residency::Windowed] {
        let (cluster, mut plan) = ring(&[PLENTY, half], 5, &[4, 4], policy(residency, true));
        plan.devices[1].residency.prefetch_budget = Some(Bytes::from_mib(64));
        let trace = cold(&cluster, &plan);
        let ahead = records(&trace, StepKind::Prefetch).filter(|record| record.device_index == 1);
        let max = ahead.map(|record| record.bytes).max().expect("a prefetch");
        assert_eq!(max, 64 << 20, "{residency:?}");
    }
}

proptest! {
    #![proptest_config(crate::cases(100))]

    /// For any windows, memory sizes and policies, the run ends, every token is output once, and no record ends before
    /// it starts.
    #[test]
    fn every_run_ends_with_all_its_tokens(
        windows in prop::collection::vec(0u32..7, 1..5),
        memory_mib in prop::collection::vec(16u64..700, 4),
        linear in prop::collection::vec(any::<bool>(), 4),
        prefetch: bool,
        windowed: bool,
        warm: bool,
        chunk in 17u32..24,
        generate in 1u32..5,
    ) {
        prop_assume!(windows.iter().sum::<u32>() > 0);
        let memories = memories(&memory_mib, windows.len());
        let mut cluster = cluster("1b", &memories, generate);
        for (member, linear) in cluster.members.iter_mut().zip(&linear) {
            if *linear {
                member.device.memory.page_cache = PageCachePolicy::PaperLinear;
            }
        }
        let residency = if windowed { Residency::Windowed } else { Residency::Os };
        let mut plan = plan(&cluster.model, &windows, policy(residency, prefetch));
        for device in plan.devices.iter_mut().skip(1).filter(|device| device.window == 0) {
            device.role = Role::Relay;
        }
        prop_assume!(plan.validate().is_ok());
        let options = Options { chunk_size: Bytes(1 << chunk), starts_warm: warm, ..Options::default() };
        let trace = simulate_with(&cluster, &plan, &options);
        if trace.outcome == Outcome::Ok {
            prop_assert_eq!(count(&trace, StepKind::Output) as u32, generate);
            let reversed = trace.records.iter().find(|record| record.start_ns > record.end_ns);
            prop_assert!(reversed.is_none(), "{:?}", reversed);
        }
    }
}
