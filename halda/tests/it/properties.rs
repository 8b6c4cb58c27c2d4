//! Properties of the planners on random instances.
//!
//! On small instances of all kinds (Metal, CUDA, Android, slow disks, little memory), `exact` equals exhaustive
//! search, and `halda` finds the same plan with and without pruning. The plans of all strategies satisfy the named
//! constraints, and their T equals the re-evaluated one. Extreme instances cause neither a panic nor a NaN.

use std::collections::BTreeMap;

use hearth_halda::baselines::exhaustive::for_each_split;
use hearth_halda::solvers::overlap::best_residencies;
use hearth_halda::{
    Assignment, ComputeTimes, CostTerms, Device, EdgeShard, EvenWindows, ExactSearch, ExhaustiveSearch,
    ExpertReads, GpuApi, Halda, HeadChoice, Instance, LatencyModel, LinguaLinked, ManualPlan,
    MemoryProportional, MemoryRisk, Model, Objective, OrderChoice, OverlapSearch, PerformanceProportional,
    PlanRules, ReadRates, RereadScope, RuntimeModel, SingleDevice, Strategy as Planner, StrategyError,
    latency::constraints::ring_violations, solve, valid_rounds, violations,
};
use hearth_profiles::Bytes;
use hearth_profiles::device::Os;
use hearth_schema::residency::{Residency, ResidencyOptions};
use proptest::prelude::*;

use crate::fixtures::{
    ALL_RULES, MAY_DROP, UNRESTRICTED, check_best_head, check_equally_fast, config_with_cases, nearly_equal,
    plain_instance, plain_model,
};

/// The bytes of a layer in the small instances.
const LAYER: u64 = 100 << 20;

/// Returns `value` for the weight format q4k, and half of it for f32.
fn per_format(value: f64) -> BTreeMap<String, f64> {
    BTreeMap::from([("q4k".to_owned(), value), ("f32".to_owned(), value / 2.0)])
}

prop_compose! {
    fn runtime()(
        residencies in prop::collection::vec(residency(), 1..=2),
        excess in any::<bool>(),
        processors in 1..=8_u32,
        token_overhead in prop_oneof![Just(0.0), 0.0..1e-2_f64],
        rates in prop::option::of(prop::array::uniform3(5e7..5e9_f64)),
        memory_uncertainty in prop_oneof![Just(0.0), 0.0..0.3_f64],
    ) -> RuntimeModel {
        let rereads = if excess { RereadScope::Excess } else { RereadScope::Everything };
        let read_rates = rates.map(|[fault, read_ahead, stream]| ReadRates { fault_read_rate: fault, read_ahead_rate: read_ahead, stream_read_rate: stream });
        RuntimeModel { allowed_residencies: residencies, reread_scope: rereads, memory_uncertainty, experts: None, cpu_count: processors, token_overhead_seconds: token_overhead, read_rates, compute_times: None }
    }
}

/// Returns times of unequal layers: about `cpu` seconds on the CPU, and `of_gpu` times as long on the GPU.
fn compute_times(layers: u32, cpu: f64, of_gpu: f64, gpu: GpuApi) -> ComputeTimes {
    let cpu_layers: Vec<f64> =
        (0..layers).map(|layer| cpu * (1.0 + f64::from(layer * 7 % 5) / 10.0)).collect();
    let on_gpu = |seconds: &f64| seconds * of_gpu;
    let gpu_layers =
        if gpu == GpuApi::None { Vec::new() } else { cpu_layers.iter().rev().map(on_gpu).collect() };
    ComputeTimes {
        gpu_output_seconds: (gpu != GpuApi::None).then_some(2.0 * cpu * of_gpu),
        cpu_layer_seconds: cpu_layers,
        gpu_layer_seconds: gpu_layers,
        cpu_output_seconds: 2.0 * cpu,
        cpu_window_overhead_seconds: cpu / 9.0,
        gpu_window_overhead_seconds: cpu / 11.0,
    }
}

fn residency() -> impl Strategy<Value = ResidencyOptions> {
    let of = ResidencyOptions::with_policy;
    let buffered = move |buffer| ResidencyOptions { stream_buffer: Some(buffer), ..of(Residency::Managed) };
    let budget = |of: ResidencyOptions, budget| ResidencyOptions { prefetch_budget: Some(budget), ..of };
    prop_oneof![
        2 => Just(of(Residency::Os)),
        1 => Just(of(Residency::Windowed)),
        1 => Just(of(Residency::Os).without_prefetch()),
        1 => Just(ResidencyOptions { evict_after_use: true, ..of(Residency::Os) }),
        1 => (0..2 * LAYER).prop_map(move |bytes| budget(of(Residency::Windowed), Bytes(bytes))),
        3 => (19..28_u32).prop_map(move |power| buffered(Bytes(1 << power))),
    ]
}

prop_compose! {
    /// Generates a device whose memory sizes hold up to `layers` layers. With `exact_fit` they hold whole layers.
    fn device(layers: u32)(
        kind in prop_oneof![
            Just((Os::Linux, GpuApi::None)),
            Just((Os::Linux, GpuApi::Cuda)),
            Just((Os::Macos, GpuApi::None)),
            Just((Os::Macos, GpuApi::Metal)),
            Just((Os::Android, GpuApi::None)),
        ],
        cpu in 1e10..1e12_f64,
        gpu_speedup in prop_oneof![Just(0.5), 2.0..50.0_f64],
        memory_rate in 1e10..1e11_f64,
        memory in prop::array::uniform3(0..=u64::from(layers) * LAYER),
        exact_fit in any::<bool>(),
        swap in 0..3 * LAYER,
        buffers in prop::array::uniform2(0..LAYER / 4),
        disk in prop_oneof![5e7..5e8_f64, 5e8..5e9_f64],
        hop in prop_oneof![Just(0.0), 1e-3..1e-2_f64],
        copies in prop::array::uniform2(0.0..1e-4_f64),
        runtime in runtime(),
    ) -> Device {
        let (os, gpu) = kind;
        let has_gpu = gpu != GpuApi::None;
        let memory = if exact_fit { memory.map(|bytes| bytes / LAYER * LAYER) } else { memory };
        let buffers = if exact_fit { [0; 2] } else { buffers };
        Device {
            name: format!("{os:?}-{gpu:?}"),
            os,
            gpu,
            cpu_speed: per_format(cpu),
            gpu_speed: if has_gpu { per_format(cpu * gpu_speedup) } else { BTreeMap::new() },
            cpu_memory_rate: memory_rate,
            gpu_memory_rate: if has_gpu { memory_rate * gpu_speedup } else { 0.0 },
            cpu_cache_write_seconds: 1e-5,
            gpu_cache_write_seconds: 2e-5,
            gpu_upload_seconds: copies[0],
            gpu_download_seconds: copies[1],
            unified_memory: gpu == GpuApi::Metal,
            hop_seconds: hop,
            disk_read_rate: disk,
            ram_available: memory[0],
            metal_available: memory[1],
            cuda_available: memory[2],
            swappable_bytes: swap,
            swap_available: LAYER,
            cpu_buffer_bytes: buffers[0],
            gpu_buffer_bytes: buffers[1],
            runtime,
        }
    }
}

prop_compose! {
    /// Generates an instance. `max_layers[i]` is the maximum number of layers with i + 1 devices.
    fn small(max_layers: [u32; 4])(devices in 1..=4_usize)(
        layers in 1..=max_layers[devices - 1],
        devices in prop::collection::vec(device(max_layers[devices - 1]), devices),
        threshold in prop_oneof![Just(0.0), Just(3e8_f64), Just(1e9_f64)],
        cached_tokens in prop_oneof![Just(0_u64), 1..4096_u64],
        vocab_size in prop_oneof![Just(1_u64), 1000..130_000_u64],
        ends in prop::array::uniform2(0..2 * LAYER),
        heavier in prop::collection::vec(0..LAYER / 4, 40),
        even in any::<bool>(),
        work in prop::collection::vec(prop::option::of((1e-3..5e-2_f64, prop_oneof![Just(0.1), 0.1..2.0_f64])), 4),
    ) -> Instance {
        let mut devices = devices;
        for (device, times) in devices.iter_mut().zip(work) {
            device.runtime.compute_times = times.map(|(cpu, of_gpu)| compute_times(layers, cpu, of_gpu, device.gpu));
        }
        let heavier = heavier.iter().take(layers as usize).map(|more| LAYER + more);
        let model = Model {
            key_heads: 8,
            key_head_dim: 128,
            value_heads: 8,
            value_head_dim: 128,
            cached_tokens,
            vocab_size,
            input_embedding_bytes: ends[0],
            output_head_bytes: ends[1],
            layer_flops: per_format(2e9),
            output_flops: BTreeMap::from([("q4k".to_owned(), 1e9)]),
            weight_bytes_by_layer: if even { Vec::new() } else { heavier.collect() },
            ..plain_model(layers, LAYER, 0.0)
        };
        Instance { slow_disk_threshold: threshold, ..plain_instance(model, devices) }
    }
}

fn strategies(model: &LatencyModel) -> Vec<Box<dyn Planner>> {
    let layers = model.model_layers();
    let devices = model.device_count();
    let total = model.instance().devices.iter().map(|device| 2 * device.ram_available).collect();
    let mut all: Vec<Box<dyn Planner>> = vec![
        Box::new(SingleDevice::default()),
        Box::new(MemoryProportional::Available),
        Box::new(MemoryProportional::Total(total)),
        Box::new(PerformanceProportional),
        Box::new(EdgeShard),
        Box::new(LinguaLinked),
    ];
    let (best, order) = (HeadChoice::Best, OrderChoice::Best);
    for rules in ALL_RULES {
        all.push(Box::new(ExactSearch { rules, ..ExactSearch::default() }));
        all.push(Box::new(ExactSearch { rules, head: best, rounds: Some(1), ..ExactSearch::default() }));
        all.push(Box::new(ExactSearch { rules, head: best, order, ..ExactSearch::default() }));
        all.push(Box::new(ExactSearch { rules, order, rounds: Some(2), ..ExactSearch::default() }));
        all.push(Box::new(OverlapSearch { rules, ..OverlapSearch::default() }));
        all.push(Box::new(OverlapSearch { rules, head: best, order, ..OverlapSearch::default() }));
    }
    for may_drop_devices in [false, true] {
        let halda = Halda { may_drop_devices, ..Halda::PRIMA_CPP_PAPER };
        for terms in [CostTerms::PRIMA_CPP_PAPER, CostTerms::PRIMA_CPP] {
            all.push(Box::new(Halda { terms, flip_memory_cases: !may_drop_devices, ..halda }));
        }
        all.push(Box::new(Halda { head: devices - 1, rounds: Some(layers), ..halda }));
        all.push(Box::new(Halda { prune_by_bound: false, ..halda }));
    }
    for rounds in [0, 1, 2, layers] {
        all.push(Box::new(EvenWindows { rounds }));
    }
    for head in 0..=devices {
        all.push(Box::new(SingleDevice { device: Some(head) }));
        let window_layers = vec![layers / devices as u32; devices];
        let gpu_layers = vec![layers / (devices as u32 + 1); devices];
        let (rounds, residencies) = ((head == 0).then_some(1), Vec::new());
        all.push(Box::new(ManualPlan { head, rounds, window_layers, gpu_layers, residencies }));
    }
    all
}

/// Checks for all strategies that plans satisfy the constraints and have the re-evaluated time.
fn check_contract(model: &LatencyModel) -> Result<(), TestCaseError> {
    for strategy in strategies(model) {
        let name = strategy.name();
        match solve(strategy.as_ref(), model) {
            Ok(solution) => {
                let (assignment, rules) = (&solution.assignment, strategy.rules());
                let (broken, again) = if strategy.objective() == Objective::Paper {
                    (violations(model, assignment, rules), model.evaluate(assignment))
                } else {
                    let again = model.evaluate_steady_state(assignment, &solution.residencies);
                    (ring_violations(model, assignment, rules), again)
                };
                prop_assert_eq!(broken, vec![], "{}", name);
                let seconds = again.unwrap().seconds_per_token;
                prop_assert!(seconds.is_finite() && seconds >= 0.0, "{}: {}", name, seconds);
                prop_assert_eq!(seconds, solution.seconds_per_token(), "{}", name);
                let avoids_risk = solution.explanation.avoided_risk.is_some();
                if strategy.is_optimal() && strategy.objective() == Objective::SteadyState && !avoids_risk {
                    let residencies = best_residencies(model, assignment).unwrap();
                    let best = model.steady_state_seconds(assignment, &residencies);
                    prop_assert!(nearly_equal(best, seconds), "{} is not {}", best, seconds);
                }
                prop_assert_eq!(solution.explanation.devices.len(), model.device_count());
                if let Some(gap) = solution.explanation.optimality_gap {
                    prop_assert!(gap >= -1e-9, "{} is {} below the optimum", name, gap);
                }
            }
            Err(refusal) => {
                prop_assert!(!refusal.to_string().is_empty());
                prop_assert!(!matches!(refusal, StrategyError::LinearProgramFailed { .. }), "{}", refusal);
            }
        }
    }
    Ok(())
}

/// Returns the minimum steady-state seconds per token of all splits and residencies, with device 0 as the head.
fn minimum_steady_state(model: &LatencyModel, rules: PlanRules) -> f64 {
    let (layers, devices) = (model.model_layers(), model.device_count());
    let mut residencies = vec![Vec::new()];
    for device in &model.instance().devices {
        let with_each = |chosen: Vec<ResidencyOptions>| {
            let add = move |residency: &ResidencyOptions| [chosen.as_slice(), &[*residency]].concat();
            device.runtime.allowed_residencies.iter().map(add)
        };
        residencies = residencies.into_iter().flat_map(with_each).collect();
    }
    let mut best = f64::INFINITY;
    for layers_per_round in layers.min(2)..=layers {
        let mut plan =
            Assignment::new(0, layers.div_ceil(layers_per_round), vec![0; devices], vec![0; devices]);
        for_each_split(&mut plan, 0, layers_per_round, &mut |plan| {
            if ring_violations(model, plan, rules).is_empty() {
                let times = residencies.iter().map(|chosen| model.steady_state_seconds(plan, chosen));
                best = times.fold(best, f64::min);
            }
        });
    }
    best
}

/// The experts of a mixture in [`extreme_instances_neither_panic_nor_yield_nan`].
const EXPERTS: ExpertReads = ExpertReads {
    weight_share: 0.8,
    used_share: 0.125,
    in_use_bytes: 1 << 20,
    used: 2,
    layer_bytes: 1 << 23,
    latency_seconds: 1e-3,
    read_around: 1.0,
};

proptest! {
    #![proptest_config(config_with_cases(256))]

    #[test]
    fn overlap_equals_exhaustive_search(instance in small([12, 6, 4, 3])) {
        let model = LatencyModel::new(&instance).unwrap();
        for rules in ALL_RULES {
            let expected = minimum_steady_state(&model, rules);
            let overlap = OverlapSearch { rules, memory_risk: MemoryRisk::Ignore, ..OverlapSearch::default() };
            match solve(&overlap, &model) {
                Ok(found) => prop_assert!(nearly_equal(found.seconds_per_token(), expected), "{} is not {}", found.seconds_per_token(), expected),
                Err(StrategyError::Infeasible(_)) => prop_assert_eq!(expected, f64::INFINITY),
                Err(refusal) => return Err(TestCaseError::fail(refusal.to_string())),
            }
        }
    }

    // If the fastest plan is not slower on average, no other is searched.
    #[test]
    fn overlap_has_the_best_mean_over_uncertain_memory(instance in small([8, 5, 4, 3])) {
        let model = LatencyModel::new(&instance).unwrap();
        let Some(uncertain) = model.with_uncertain_memory() else { return Ok(()) };
        for rules in ALL_RULES {
            let overlap = OverlapSearch { rules, ..OverlapSearch::default() };
            let Ok(found) = solve(&overlap, &model) else { continue };
            let mean = uncertain.steady_state_seconds(&found.assignment, &found.residencies);
            let expected = minimum_steady_state(&uncertain, rules);
            let is_safe = found.explanation.avoided_risk.is_none() && mean <= found.seconds_per_token();
            prop_assert!(is_safe || nearly_equal(mean, expected), "{} is not {}", mean, expected);
        }
    }

    #[test]
    fn exact_equals_exhaustive_search(instance in small([20, 12, 8, 6])) {
        let model = LatencyModel::new(&instance).unwrap();
        for rules in ALL_RULES {
            let exact = ExactSearch { rules, ..ExactSearch::default() };
            check_equally_fast(&exact, &ExhaustiveSearch { rules, ..ExhaustiveSearch::default() }, &model)?;
        }
        for rounds in valid_rounds(instance.model.model_layers) {
            let exact = ExactSearch { rounds: Some(rounds), ..ExactSearch::default() };
            check_equally_fast(&exact, &ExhaustiveSearch { rounds: Some(rounds), ..ExhaustiveSearch::default() }, &model)?;
        }
    }

    #[test]
    fn returned_plans_satisfy_the_constraints(instance in small([40, 24, 16, 12])) {
        check_contract(&LatencyModel::new(&instance).unwrap())?;
    }

    // (w, n, k) and (k w, k n, 1) have the same layers on each device, but the second has only 1/k of the hops and
    // copies to GPUs. So the paper's objective never prefers several rounds.
    #[test]
    fn one_round_is_never_slower(instance in small([20, 12, 12, 12])) {
        let model = LatencyModel::new(&instance).unwrap();
        let best = |rounds| {
            let exact = ExactSearch { rules: MAY_DROP, rounds: Some(rounds), ..ExactSearch::default() };
            solve(&exact, &model).ok()
        };
        for rounds in valid_rounds(instance.model.model_layers) {
            let Some(several) = best(rounds) else { continue };
            let times = |layers: &[u32]| layers.iter().map(|layers| layers * rounds).collect();
            let plan = &several.assignment;
            let merged = Assignment::new(0, 1, times(&plan.window_layers), times(&plan.gpu_layers));
            prop_assert_eq!(violations(&model, &merged, MAY_DROP), vec![]);
            let once = model.evaluate(&merged).unwrap();
            prop_assert!(once.seconds_per_token <= several.seconds_per_token() * (1.0 + 1e-9));
            for (once, several) in once.devices.iter().zip(&several.breakdown.devices) {
                prop_assert_eq!((once.compute_seconds, once.disk_seconds), (several.compute_seconds, several.disk_seconds));
                prop_assert!(nearly_equal(f64::from(rounds) * once.communication_seconds, several.communication_seconds));
            }
            let fastest = best(1).map_or(f64::INFINITY, |solution| solution.seconds_per_token());
            prop_assert!(fastest <= several.seconds_per_token() * (1.0 + 1e-9), "{} > {}", fastest, several.seconds_per_token());
        }
    }

    #[test]
    fn pruning_changes_no_plan(instance in small([40, 24, 16, 12])) {
        let model = LatencyModel::new(&instance).unwrap();
        for terms in [CostTerms::PRIMA_CPP_PAPER, CostTerms::PRIMA_CPP] {
            for may_drop in [false, true] {
                let halda = Halda { may_drop_devices: may_drop, terms, flip_memory_cases: !may_drop, ..Halda::PRIMA_CPP_PAPER };
                let plan = |prune_by_bound| {
                    let solution = solve(&Halda { prune_by_bound, ..halda }, &model);
                    solution.map(|solution| solution.assignment).ok()
                };
                prop_assert_eq!(plan(true), plan(false));
            }
        }
    }

    #[test]
    fn best_head_is_as_fast_as_the_fastest_fixed_head(instance in small([8, 8, 8, 8])) {
        check_best_head(ExactSearch { rules: UNRESTRICTED, ..ExactSearch::default() }, &LatencyModel::new(&instance).unwrap())?;
    }
}

proptest! {
    #![proptest_config(config_with_cases(512))]

    #[test]
    fn heuristics_do_not_read_where_memory_suffices(instance in small([40, 24, 16, 12])) {
        let model = LatencyModel::new(&instance).unwrap();
        let fastest = solve(&EdgeShard, &model);
        let balanced = solve(&LinguaLinked, &model);
        // Both use the same capacities, so they fail on the same instances.
        let fastest = match (fastest, &balanced) {
            (Ok(fastest), _) => fastest,
            (Err(StrategyError::OutOfMemory { held, .. }), Err(StrategyError::OutOfMemory { held: same, .. })) => {
                prop_assert_eq!(held, *same);
                return Ok(());
            }
            (Err(StrategyError::HeadOutOfMemory { .. }), Err(StrategyError::HeadOutOfMemory { .. })) => return Ok(()),
            (fastest, _) => return Err(TestCaseError::fail(format!("{fastest:?}\nbut\n{balanced:?}"))),
        };
        let by_power = solve(&PerformanceProportional, &model).unwrap();
        for solution in [&fastest, &balanced.unwrap(), &by_power] {
            for device in &solution.breakdown.devices {
                prop_assert!(!device.exceeds_memory, "{}: {:?}", solution.strategy, device);
            }
            // `edgeshard` is the fastest plan that reads nothing and fills the faster processor first.
            prop_assert!(solution.seconds_per_token() >= fastest.seconds_per_token() * (1.0 - 1e-9), "{}", solution.strategy);
        }
    }
}

/// Resizes all vectors with an element per layer, so that their lengths pass validation.
fn resize_layers(instance: &mut Instance, layers: u32) {
    instance.model.model_layers = layers;
    let count = layers.min(600) as usize;
    if !instance.model.weight_bytes_by_layer.is_empty() {
        instance.model.weight_bytes_by_layer.resize(count, LAYER);
    }
    for device in &mut instance.devices {
        if let Some(work) = &mut device.runtime.compute_times {
            work.cpu_layer_seconds.resize(count, 1e-2);
            work.gpu_layer_seconds.resize(if device.gpu == GpuApi::None { 0 } else { count }, 1e-3);
        }
    }
}

fn extreme_value() -> impl Strategy<Value = f64> {
    prop_oneof![
        6 => 1e-3..1e12_f64,
        1 => Just(0.0),
        1 => prop_oneof![Just(-1.0), Just(f64::NAN), Just(f64::INFINITY), Just(f64::MAX)],
        1 => prop_oneof![Just(f64::MIN_POSITIVE), Just(5e-324), Just(1e300)],
    ]
}

fn extreme_bytes() -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => 0..1_u64 << 36,
        2 => prop_oneof![Just(0), Just(1), Just(1 << 50)],
        1 => prop_oneof![Just((1 << 50) + 1), Just(u64::MAX), any::<u64>()],
    ]
}

proptest! {
    #![proptest_config(config_with_cases(512))]

    #[test]
    fn extreme_instances_neither_panic_nor_yield_nan(
        instance in small([20, 12, 8, 8]),
        values in prop::collection::vec((0..17_usize, extreme_value()), 0..3),
        bytes in prop::collection::vec((0..14_usize, extreme_bytes()), 0..4),
        layers in prop_oneof![4 => 0..30_u32, 1 => Just(u32::MAX)],
        rows in prop::option::of(prop::collection::vec(prop::option::of(extreme_value()), 16)),
        columns in prop_oneof![9 => Just(0_usize), 1 => 0..6_usize],
    ) {
        let mut instance = instance;
        instance.pair_hop_seconds = rows.map(|entries| {
            let devices = instance.devices.len();
            let width = if columns == 0 { devices } else { columns };
            entries.chunks(width).take(devices).map(<[_]>::to_vec).collect()
        });
        resize_layers(&mut instance, layers);
        for (field, value) in values {
            let count = instance.devices.len();
            let device = &mut instance.devices[field % count];
            let target = match field {
                0 => &mut device.cpu_memory_rate,
                1 => &mut device.gpu_memory_rate,
                2 => &mut device.cpu_cache_write_seconds,
                3 => &mut device.gpu_cache_write_seconds,
                4 => &mut device.gpu_upload_seconds,
                5 => &mut device.gpu_download_seconds,
                6 => &mut device.hop_seconds,
                7 => &mut device.disk_read_rate,
                8 => device.cpu_speed.entry("q4k".to_owned()).or_default(),
                9 => device.gpu_speed.entry("f32".to_owned()).or_default(),
                10 => instance.model.layer_flops.entry("q4k".to_owned()).or_default(),
                11 => &mut device.runtime.token_overhead_seconds,
                12 if layers > 0 && device.runtime.compute_times.is_some() => {
                    &mut device.runtime.compute_times.as_mut().unwrap().cpu_layer_seconds[0]
                }
                13 => &mut device.runtime.experts.get_or_insert(EXPERTS).weight_share,
                14 => &mut device.runtime.experts.get_or_insert(EXPERTS).used_share,
                15 => &mut device.runtime.experts.get_or_insert(EXPERTS).read_around,
                _ => &mut instance.slow_disk_threshold,
            };
            *target = value;
        }
        for (field, value) in bytes {
            let count = instance.devices.len();
            let device = &mut instance.devices[field % count];
            let target = match field {
                0 => &mut device.ram_available,
                1 => &mut device.metal_available,
                2 => &mut device.cuda_available,
                3 => &mut device.swappable_bytes,
                4 => &mut device.swap_available,
                5 => &mut device.cpu_buffer_bytes,
                6 => &mut device.gpu_buffer_bytes,
                7 => &mut instance.model.layer_weight_bytes,
                8 => &mut instance.model.input_embedding_bytes,
                9 => &mut instance.model.output_head_bytes,
                10 => &mut instance.model.vocab_size,
                11 if !instance.model.weight_bytes_by_layer.is_empty() => &mut instance.model.weight_bytes_by_layer[0],
                12 => &mut device.runtime.experts.get_or_insert(EXPERTS).in_use_bytes,
                _ => &mut instance.model.cached_tokens,
            };
            *target = value;
        }
        match LatencyModel::new(&instance) {
            Ok(model) => check_contract(&model)?,
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}
