//! Do the planners hold on instances nobody chose?
//!
//! Small instances of every kind (Metal, CUDA, Android, slow disks, tight memory): `exact` equals trying
//! every plan. All strategies: a returned plan satisfies the named constraints and its T is the re-evaluated
//! one. Wild instances: no panic, no NaN.

use std::collections::BTreeMap;

use hearth_halda::{
    Assignment, Device, Even, Exact, Exhaustive, Gpu, HeadChoice, Instance, LatencyModel, Manual,
    MemoryProportional, Model, OperatingSystem, Refusal, Rules, Single, Strategy as Planner, solve,
    valid_rounds, violations,
};
use proptest::prelude::*;

/// Bytes of a layer in the small instances.
const LAYER: u64 = 100 << 20;

fn per_format(value: f64) -> BTreeMap<String, f64> {
    BTreeMap::from([("q4k".to_owned(), value), ("f32".to_owned(), value / 2.0)])
}

prop_compose! {
    /// A device whose memories hold a few layers, give or take a fraction of one.
    fn device(layers: u32)(
        kind in prop_oneof![
            Just((OperatingSystem::Linux, Gpu::None)),
            Just((OperatingSystem::Linux, Gpu::Cuda)),
            Just((OperatingSystem::Macos, Gpu::None)),
            Just((OperatingSystem::Macos, Gpu::Metal)),
            Just((OperatingSystem::Android, Gpu::None)),
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
    ) -> Device {
        let (os, gpu) = kind;
        let has_gpu = gpu != Gpu::None;
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
            cpu_cache_write: 1e-5,
            gpu_cache_write: 2e-5,
            to_gpu: copies[0],
            from_gpu: copies[1],
            unified_memory: gpu == Gpu::Metal,
            hop,
            disk_read: disk,
            ram_available: memory[0],
            metal_available: memory[1],
            cuda_available: memory[2],
            can_swap: swap,
            swap_available: LAYER,
            cpu_buffer_bytes: buffers[0],
            gpu_buffer_bytes: buffers[1],
        }
    }
}

prop_compose! {
    fn small(largest: [u32; 4])(devices in 1..=4_usize)(
        layers in 1..=largest[devices - 1],
        devices in prop::collection::vec(device(largest[devices - 1]), devices),
        threshold in prop_oneof![Just(0.0), Just(3e8_f64), Just(1e9_f64)],
        cached_tokens in prop_oneof![Just(0_u64), 1..4096_u64],
        vocabulary in prop_oneof![Just(1_u64), 1000..130_000_u64],
        ends in prop::array::uniform2(0..2 * LAYER),
    ) -> Instance {
        Instance {
            name: "small".to_owned(),
            slow_disk_threshold: threshold,
            model: Model {
                name: "small".to_owned(),
                model_layers: layers,
                hidden_width: 1024,
                key_heads: 8,
                key_head_width: 128,
                value_heads: 8,
                value_head_width: 128,
                cached_tokens,
                vocabulary,
                layer_weight_bytes: LAYER,
                input_embedding_bytes: ends[0],
                output_head_bytes: ends[1],
                layer_flops: per_format(2e9),
                output_flops: BTreeMap::from([("q4k".to_owned(), 1e9)]),
            },
            devices,
        }
    }
}

fn equal(left: f64, right: f64) -> bool {
    (left - right).abs() <= 1e-9 * left.abs().max(right.abs())
}

/// Both find the same time, or both find that no plan exists.
fn same(exact: &dyn Planner, oracle: &dyn Planner, model: &LatencyModel) -> Result<(), TestCaseError> {
    match (solve(exact, model), solve(oracle, model)) {
        (Ok(found), Ok(certain)) => {
            let (found, certain) = (found.seconds(), certain.seconds());
            prop_assert!(equal(found, certain), "{} is not {}", found, certain);
        }
        (Err(Refusal::Infeasible(_)), Err(Refusal::Infeasible(_))) => {}
        (found, certain) => {
            return Err(TestCaseError::fail(format!("{found:?}\nbut\n{certain:?}")));
        }
    }
    Ok(())
}

/// Every strategy there is, with all its options.
fn strategies(model: &LatencyModel) -> Vec<Box<dyn Planner>> {
    let layers = model.model_layers();
    let devices = model.device_count();
    let mut all: Vec<Box<dyn Planner>> =
        vec![Box::new(Single::default()), Box::new(MemoryProportional::default())];
    for may_drop in [false, true] {
        for may_leave_remainder in [false, true] {
            let rules = Rules { may_drop, may_leave_remainder };
            all.push(Box::new(Exact { rules, head: HeadChoice::Fixed(0), rounds: None }));
            all.push(Box::new(Exact { rules, head: HeadChoice::Best, rounds: Some(1) }));
        }
    }
    for rounds in [0, 1, 2, layers] {
        all.push(Box::new(Even { rounds }));
    }
    for device in 0..=devices {
        all.push(Box::new(Single { device: Some(device) }));
        let window_layers = vec![layers / devices as u32; devices];
        let gpu_layers = vec![layers / (devices as u32 + 1); devices];
        let rounds = (device == 0).then_some(1);
        all.push(Box::new(Manual { head: device, rounds, window_layers, gpu_layers }));
    }
    all
}

/// The law of the strategy trait.
fn lawful(model: &LatencyModel) -> Result<(), TestCaseError> {
    for strategy in strategies(model) {
        let name = strategy.name();
        match solve(strategy.as_ref(), model) {
            Ok(solution) => {
                prop_assert_eq!(
                    violations(model, &solution.assignment, strategy.rules()),
                    vec![],
                    "{}",
                    name
                );
                let again = model.evaluate(&solution.assignment).unwrap();
                prop_assert!(
                    again.seconds.is_finite() && again.seconds >= 0.0,
                    "{}: {}",
                    name,
                    again.seconds
                );
                prop_assert_eq!(again.seconds, solution.seconds(), "{}", name);
                prop_assert_eq!(solution.explanation.devices.len(), model.device_count());
                if let Some(gap) = solution.explanation.gap {
                    prop_assert!(gap >= -1e-9, "{} is {} below the optimum", name, gap);
                }
            }
            Err(refusal) => prop_assert!(!refusal.to_string().is_empty()),
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn exact_equals_trying_every_plan(instance in small([20, 12, 8, 6])) {
        let model = LatencyModel::new(&instance).unwrap();
        for may_drop in [false, true] {
            for may_leave_remainder in [false, true] {
                let rules = Rules { may_drop, may_leave_remainder };
                let exact = Exact { rules, ..Exact::default() };
                same(&exact, &Exhaustive { rules, rounds: None }, &model)?;
            }
        }
        for rounds in valid_rounds(instance.model.model_layers) {
            let exact = Exact { rounds: Some(rounds), ..Exact::default() };
            same(&exact, &Exhaustive { rules: Rules::default(), rounds: Some(rounds) }, &model)?;
        }
    }

    #[test]
    fn returned_plans_satisfy_the_constraints(instance in small([40, 24, 16, 12])) {
        lawful(&LatencyModel::new(&instance).unwrap())?;
    }

    // (w, n, k) and (k w, k n, 1) give every device the same layers; the second saves k - 1 hops and copies a
    // device. So the paper's objective never prefers more than one round.
    #[test]
    fn one_round_is_never_slower(instance in small([20, 12, 12, 12])) {
        let model = LatencyModel::new(&instance).unwrap();
        let rules = Rules { may_drop: true, may_leave_remainder: false };
        let best = |rounds| {
            let exact = Exact { rules, head: HeadChoice::Fixed(0), rounds: Some(rounds) };
            solve(&exact, &model).ok()
        };
        for rounds in valid_rounds(instance.model.model_layers) {
            let Some(several) = best(rounds) else { continue };
            let times = |layers: &[u32]| layers.iter().map(|layers| layers * rounds).collect();
            let plan = &several.assignment;
            let merged = Assignment::new(0, 1, times(&plan.window_layers), times(&plan.gpu_layers));
            prop_assert_eq!(violations(&model, &merged, rules), vec![]);
            let once = model.evaluate(&merged).unwrap().seconds;
            let turn: f64 = instance
                .devices
                .iter()
                .zip(&plan.window_layers)
                .filter(|(_, window)| **window > 0)
                .map(|(device, _)| {
                    let copies = if device.unified_memory { 0.0 } else { device.to_gpu + device.from_gpu };
                    device.hop + copies
                })
                .sum();
            prop_assert!(equal(several.seconds() - once + 1.0, f64::from(rounds - 1) * turn + 1.0));
            let fastest = best(1).map_or(f64::INFINITY, |solution| solution.seconds());
            prop_assert!(fastest <= several.seconds() * (1.0 + 1e-9), "{} > {}", fastest, several.seconds());
        }
    }

    #[test]
    fn the_best_head_is_the_best_of_all_heads(instance in small([8, 8, 8, 8])) {
        let model = LatencyModel::new(&instance).unwrap();
        let rules = Rules { may_drop: true, may_leave_remainder: true };
        let with = |head| {
            let solution = solve(&Exact { rules, head, rounds: None }, &model);
            solution.map_or(f64::INFINITY, |solution| solution.seconds())
        };
        let each = (0..model.device_count()).map(|head| with(HeadChoice::Fixed(head)));
        let fastest = each.fold(f64::INFINITY, f64::min);
        prop_assert_eq!(with(HeadChoice::Best), fastest);
    }
}

/// Numbers that break things.
fn wild_number() -> impl Strategy<Value = f64> {
    prop_oneof![
        6 => 1e-3..1e12_f64,
        1 => Just(0.0),
        1 => prop_oneof![Just(-1.0), Just(f64::NAN), Just(f64::INFINITY), Just(f64::MAX)],
        1 => prop_oneof![Just(f64::MIN_POSITIVE), Just(5e-324), Just(1e300)],
    ]
}

fn wild_bytes() -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => 0..1_u64 << 36,
        2 => prop_oneof![Just(0), Just(1), Just(1 << 50)],
        1 => prop_oneof![Just((1 << 50) + 1), Just(u64::MAX), any::<u64>()],
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn wild_instances_neither_panic_nor_yield_nan(
        instance in small([20, 12, 8, 8]),
        numbers in prop::collection::vec((0..12_usize, wild_number()), 0..3),
        bytes in prop::collection::vec((0..12_usize, wild_bytes()), 0..4),
        layers in prop_oneof![4 => 0..30_u32, 1 => Just(u32::MAX)],
    ) {
        let mut instance = instance;
        instance.model.model_layers = layers;
        for (field, value) in numbers {
            let count = instance.devices.len();
            let device = &mut instance.devices[field % count];
            let target = match field {
                0 => &mut device.cpu_memory_rate,
                1 => &mut device.gpu_memory_rate,
                2 => &mut device.cpu_cache_write,
                3 => &mut device.gpu_cache_write,
                4 => &mut device.to_gpu,
                5 => &mut device.from_gpu,
                6 => &mut device.hop,
                7 => &mut device.disk_read,
                8 => device.cpu_speed.entry("q4k".to_owned()).or_default(),
                9 => device.gpu_speed.entry("f32".to_owned()).or_default(),
                10 => instance.model.layer_flops.entry("q4k".to_owned()).or_default(),
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
                3 => &mut device.can_swap,
                4 => &mut device.swap_available,
                5 => &mut device.cpu_buffer_bytes,
                6 => &mut device.gpu_buffer_bytes,
                7 => &mut instance.model.layer_weight_bytes,
                8 => &mut instance.model.input_embedding_bytes,
                9 => &mut instance.model.output_head_bytes,
                10 => &mut instance.model.vocabulary,
                _ => &mut instance.model.cached_tokens,
            };
            *target = value;
        }
        match LatencyModel::new(&instance) {
            Ok(model) => lawful(&model)?,
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}
