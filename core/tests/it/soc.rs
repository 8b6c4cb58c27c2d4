//! Compares the latency model of a phone's GPU and NPU with published results.
//!
//! HeteroLLM paper, sections 3 to 5, with Llama-8B unless stated otherwise. `docs/studies/soc` compares the numbers.

use hearth_core::soc::interval::total_time;
use hearth_core::soc::prefill::fastest_graph_sizes;
use hearth_core::soc::solver::{Partition, PartitionSolver};
use hearth_core::soc::{Matmul, SocLatencyModel};
use hearth_profiles::device::soc::{
    MatmulProfile, MeasuredMatmul, PartitionPolicy, ProfileMode, Soc, SocStrategy, Synchronisation,
};
use hearth_profiles::device::{SocOptions, shipped_profile};
use hearth_profiles::model::{ModelDocument, ModelProfile};
use hearth_profiles::{Document, Format, Seconds, model};
use hearth_schema::pass::Pass;
use proptest::prelude::*;

fn soc(options: SocOptions) -> Soc {
    let mut soc = shipped_profile("snapdragon-8-gen-3").expect("it is shipped").soc.expect("it has one");
    soc.default_options = options;
    soc
}

fn llama() -> ModelProfile {
    model::shipped_profile("llama-8b").expect("it is shipped")
}

fn intern() -> ModelProfile {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../scenarios/soc/models/internlm-1.8b.yaml");
    let text = std::fs::read_to_string(path).expect("the document");
    ModelDocument::from_yaml(&text).and_then(|document| document.to_profile()).expect("a model")
}

/// Returns the predicted seconds for a pass through the whole model.
fn time(soc: &Soc, model: &ModelProfile, pass: Pass) -> f64 {
    let forward = SocLatencyModel::new(soc, model, Format::F16).forward_cost(pass);
    let layers = total_time(&forward.layer_intervals) * f64::from(model.shape.layers.0);
    (layers + forward.output_interval.time() + forward.preparation_time).0
}

fn prompt(strategy: SocStrategy, tokens: u32) -> f64 {
    time(&soc(SocOptions::with_strategy(strategy)), &llama(), Pass::new(0, 0, tokens, true))
}

fn speed(strategy: SocStrategy, tokens: u32) -> f64 {
    f64::from(tokens) / prompt(strategy, tokens)
}

fn token(options: SocOptions) -> f64 {
    time(&soc(options), &llama(), Pass::new(1, 256, 1, true))
}

fn near(found: f64, expected: f64, share: f64) {
    assert!((found / expected - 1.0).abs() <= share, "{found} is not within {share} of {expected}");
}

fn slow(partitions: PartitionPolicy) -> SocOptions {
    let tensor = SocOptions::with_strategy(SocStrategy::HeteroTensor);
    SocOptions { synchronisation: Synchronisation::Slow, partition_policy: partitions, ..tensor }
}

#[test]
fn prefill_times_agree_with_an_independent_implementation() {
    // Pinned results, in tokens/s, of another implementation of the formulas, which is not part of this repository.
    for (strategy, speeds) in [
        (SocStrategy::GpuOnly, [63.6, 63.7, 61.8]),
        (SocStrategy::HeteroLayer, [140.0, 190.5, 174.7]),
        (SocStrategy::HeteroTensor, [181.1, 256.2, 237.6]),
    ] {
        for (tokens, expected) in [64, 256, 1024].into_iter().zip(speeds) {
            near(speed(strategy, tokens), expected, 0.005);
        }
    }
    for (strategy, tokens, expected) in [
        (SocStrategy::HeteroTensor, 135, 0.582),
        (SocStrategy::HeteroTensor, 300, 1.248),
        (SocStrategy::HeteroTensor, 525, 2.087),
        (SocStrategy::HeteroTensor, 600, 2.469),
        (SocStrategy::HeteroTensor, 1000, 4.267),
        (SocStrategy::Pipe, 525, 3.100),
        (SocStrategy::Padding, 525, 5.273),
        (SocStrategy::OnlinePrepare, 525, 4.077),
    ] {
        near(prompt(strategy, tokens), expected, 0.005);
    }
}

#[test]
fn prefill_is_within_the_documented_error_of_the_published_speeds() {
    near(speed(SocStrategy::HeteroTensor, 1024), 247.9, 0.08);
    near(speed(SocStrategy::HeteroTensor, 256), 236.92, 0.12);
    for partitions in [PartitionPolicy::Solved, PartitionPolicy::Fixed] {
        near(256.0 / time(&soc(slow(partitions)), &llama(), Pass::new(0, 0, 256, true)), 196.44, 0.12);
    }
    let tensor = soc(SocOptions::with_strategy(SocStrategy::HeteroTensor));
    near(256.0 / time(&tensor, &intern(), Pass::new(0, 0, 256, true)), 1092.0, 0.08);
    let over = |tokens| prompt(SocStrategy::HeteroLayer, tokens) / prompt(SocStrategy::HeteroTensor, tokens);
    near((over(64) + over(256) + over(1024)) / 3.0, 1.302, 0.06);
    near(over(32), 1.408, 0.08);
    let misaligned = prompt(SocStrategy::HeteroTensor, 525);
    near(prompt(SocStrategy::OnlinePrepare, 525) / misaligned, 2.24, 0.18);
    near(prompt(SocStrategy::Padding, 525) / misaligned, 2.21, 0.18);
    near(prompt(SocStrategy::Pipe, 525) / misaligned, 1.35, 0.18);
}

#[test]
fn decoding_is_within_the_documented_error_of_the_published_speeds() {
    let tensor = token(SocOptions::with_strategy(SocStrategy::HeteroTensor));
    let gpu = token(SocOptions::with_strategy(SocStrategy::GpuOnly));
    near(1.0 / tensor, 14.01, 0.06);
    near(gpu / tensor, 1.234, 0.06);
    // The published ablation keeps the partitions. If they are solved for slow synchronisation, the GPU works alone.
    near(token(slow(PartitionPolicy::Fixed)) / tensor, 4.01, 0.06);
    assert_eq!(token(slow(PartitionPolicy::Solved)).to_bits(), gpu.to_bits());
    // The closed form: 7.505e9 weights of half a byte over 59.1 GB/s, 33.7 MB of keys and values over 43.3, 448
    // events.
    let weights = 32.0 * 218_103_808.0 + 4096.0 * 128_256.0;
    let cached = 32.0 * 2.0 * 8.0 * 128.0 * 2.0 * 257.0;
    near(tensor, 0.5 * weights / 59.1e9 + cached / 43.3e9 + 448.0 * 15.9e-6, 1e-9);
    near(gpu, (0.5 * weights + cached) / 43.3e9, 1e-9);
}

#[test]
fn energy_and_queue_are_as_published() {
    let soc = soc(SocOptions::default());
    let power = soc.power.as_ref().expect("it is known");
    let energy = |strategy| power.strategy_power(strategy).0 * prompt(strategy, 256);
    near(energy(SocStrategy::GpuOnly) / energy(SocStrategy::HeteroTensor), 5.87, 0.10);
    let (soc, model) = (self::soc(SocOptions::with_strategy(SocStrategy::HeteroTensor)), llama());
    let forward = SocLatencyModel::new(&soc, &model, Format::F16).forward_cost(Pass::new(0, 0, 256, true));
    let times = forward.layer_intervals.iter().flat_map(|interval| interval.kernel_seconds.clone());
    let max = times.fold(0.0, f64::max);
    assert!(max <= 14.0e-3, "{max}");
}

#[test]
fn single_processor_has_40_to_45_of_68_gigabytes_per_second() {
    let bus = soc(SocOptions::default()).memory_bandwidths;
    assert!((40e9..=45e9).contains(&bus.single_processor.value.0) && bus.peak_bandwidth.value.0 == 68e9);
}

/// Describes how a matmul with `tokens` tokens is split between GPU and NPU.
fn split_kind(partition: &Partition, tokens: u64) -> &'static str {
    let graphs = &partition.graph_sizes;
    let pads = graphs.iter().sum::<u64>() > tokens - partition.margin_tokens;
    match (partition.margin_tokens > 0, partition.gpu_rows > 0) {
        _ if graphs.is_empty() => "GPU alone",
        (false, false) => "NPU alone",
        (false, true) if !pads => "by rows",
        (true, false) if graphs.len() == 1 => "by tokens",
        (true, false) => "by tokens, several graphs",
        (_, true) => "by tokens and rows, or by rows with padded tokens",
    }
}

#[test]
fn prompt_of_525_is_piped_as_512_and_32_and_every_kind_of_split_occurs() {
    let (soc, model) = (soc(SocOptions::with_strategy(SocStrategy::HeteroTensor)), llama());
    let latency_model = SocLatencyModel::new(&soc, &model, Format::F16);
    let solver = latency_model.solver().expect("an NPU");
    assert_eq!(fastest_graph_sizes(&solver, &model.shape, 525), [512, 32]);
    let mut seen = Vec::new();
    for tokens in [16, 32, 64, 135, 256, 300, 525, 600, 1000, 1024] {
        for (inputs, outputs) in [(4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096)] {
            seen.push(split_kind(&solver.solve(Matmul { inputs, outputs }, tokens), tokens));
        }
    }
    let hybrid = "by tokens and rows, or by rows with padded tokens";
    for split in ["by rows", "by tokens", "by tokens, several graphs", hybrid] {
        assert!(seen.contains(&split), "a split {split} is never the best");
    }
}

#[test]
fn verifying_drafts_costs_one_token_while_bound_by_memory() {
    let soc = soc(SocOptions::with_strategy(SocStrategy::HeteroTensor));
    let verified = |drafted| time(&soc, &llama(), Pass { drafted, ..Pass::new(1, 256, drafted + 1, true) });
    // At five tokens 2 * 5 / 0.91e12 is less than 0.5 / 43.3e9; at six it is more.
    near(verified(4), verified(1), 0.01);
    assert!(verified(5) > 1.05 * verified(4));
    let token = token(SocOptions::with_strategy(SocStrategy::HeteroTensor));
    assert!(verified(31) < 0.5 * 32.0 * token, "one tile of the NPU");
}

/// Returns the NPU times by the formula of `hearth_core::soc::npu` for matmuls whose outputs are a multiple of `step`.
fn table(mode: ProfileMode, tokens: &[u32], step: u32) -> MatmulProfile {
    let (soc, model) = (soc(SocOptions::default()), llama());
    let latency_model = SocLatencyModel::new(&soc, &model, Format::F16);
    let npu = latency_model.solver().expect("an NPU").npu.clone();
    let mut shapes = Vec::new();
    for (inputs, max_outputs) in [(4096_u32, 14336_u32), (14336, 4096)] {
        for outputs in (step..=max_outputs).step_by(step as usize) {
            for &tokens in tokens {
                let matmul = Matmul { inputs: inputs.into(), outputs: outputs.into() };
                let time = Seconds(npu.matmul_seconds(matmul, tokens.into()));
                shapes.push(MeasuredMatmul { outputs, inputs, tokens, time });
            }
        }
    }
    MatmulProfile { mode, source: "assumed: the formula".into(), matmuls: shapes }
}

#[test]
fn measured_table_and_regression_tree_agree_with_the_formula() {
    let graphs = [32, 64, 128, 256, 512, 1024];
    let with = |profiled: MatmulProfile| {
        let mut soc = soc(SocOptions::with_strategy(SocStrategy::HeteroLayer));
        soc.npu.as_mut().expect("an NPU").matmul_profile = Some(profiled);
        time(&soc, &llama(), Pass::new(0, 0, 256, true))
    };
    let formula = prompt(SocStrategy::HeteroLayer, 256);
    near(with(table(ProfileMode::Table, &graphs, 256)), formula, 1e-9);
    // Only every fourth row count is in the table; the tree has to predict the others.
    near(with(table(ProfileMode::Tree, &graphs, 1024)), formula, 0.06);
}

fn solver_is_no_worse(solver: &PartitionSolver, matmul: Matmul, tokens: u64) -> Result<(), TestCaseError> {
    let best = solver.solve(matmul, tokens);
    let time = best.interval.time().0;
    let slack = 1.0 + 1e-12;
    prop_assert!(time <= solver.gpu.matmul_seconds(matmul, tokens) * slack);
    let padded = [solver.graph_sizes.padded_size(tokens)];
    let sync_seconds = solver.sync_cost.event_pair_seconds;
    prop_assert!(time <= (solver.npu_seconds(matmul, &padded) + sync_seconds) * slack);
    for cover in solver.graph_sizes.size_sets_covering(tokens) {
        prop_assert!(time <= (solver.npu_seconds(matmul, cover) + sync_seconds) * slack);
    }
    // All parts sum to the whole.
    let graphs: u64 = best.graph_sizes.iter().sum();
    prop_assert!(best.margin_tokens + graphs >= tokens && best.margin_tokens <= tokens);
    prop_assert!(best.gpu_rows <= matmul.outputs);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn solver_is_never_slower_than_one_processor(
        inputs in 1_u64..20_000, outputs in 1_u64..20_000, tokens in 1_u64..=1024, waits in 0_u32..2,
    ) {
        let synchronisation = if waits == 0 { Synchronisation::Fast } else { Synchronisation::Slow };
        let soc = soc(SocOptions { synchronisation, ..SocOptions::default() });
        let model = llama();
        let latency_model = SocLatencyModel::new(&soc, &model, Format::F16);
        solver_is_no_worse(&latency_model.solver().expect("an NPU"), Matmul { inputs, outputs }, tokens)?;
    }

    #[test]
    fn best_strategy_is_not_slower_than_any_and_all_times_are_finite(
        tokens in 1_u32..3000, first in 0_u32..2000, drafted in 0_u32..20,
    ) {
        let drafted = drafted.min(tokens - 1);
        let pass = Pass { drafted, ..Pass::new(0, first, tokens, true) };
        let model = llama();
        let layer = |strategy| {
            let soc = soc(SocOptions::with_strategy(strategy));
            SocLatencyModel::new(&soc, &model, Format::F16).layer_time(pass).0
        };
        let best = layer(SocStrategy::Best);
        for strategy in SocStrategy::ALL_EXCEPT_BEST {
            let time = layer(strategy);
            prop_assert!(time.is_finite() && time > 0.0);
            prop_assert!(matches!(strategy, SocStrategy::Chunked) || best <= time * (1.0 + 1e-12), "{strategy:?}");
        }
    }
}
