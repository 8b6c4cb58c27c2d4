//! Answers and times of the planners on extreme input.
//!
//! ```text
//! cargo run --release -p hearth-studies --bin extreme_input
//! ```
//!
//! Devices without memory, one device, more devices than layers, layer counts without factors, speeds that are no
//! numbers, 64 devices: a line for each case with how many strategies found a plan, how many refused with a reason,
//! and the slowest of them. The devices are those of `tests/data/lda/medium.jsonl`.

use std::error::Error;

use hearth_halda::registry::NAMES;
use hearth_halda::{Gpu, Instance, LatencyModel, Model, StrategyOptions, WorkTimes, solve, strategy_by_name};
use hearth_schema::residency::{Residency, ResidencyOptions};
use hearth_studies::{instance, medium_instances, timed};

fn main() -> Result<(), Box<dyn Error>> {
    println!("{:<44} {:>6} {:>8} {:>12}  slowest strategy", "case", "plans", "errors", "slowest ms");
    for (case, instance) in cases()? {
        let model = match LatencyModel::new(&instance) {
            Ok(model) => model,
            Err(error) => {
                println!("{case:<44} invalid instance: {error}");
                continue;
            }
        };
        let (mut plans, mut refused, mut slowest) = (0, 0, (0.0, ""));
        for name in NAMES {
            for keep_all in [false, true] {
                let options = options(&instance, keep_all);
                let strategy = strategy_by_name(name, &options)?;
                let (solved, seconds) = timed(|| solve(strategy.as_ref(), &model));
                match solved {
                    Ok(solution) if solution.seconds().is_finite() => plans += 1,
                    Ok(_) => return Err(format!("{case}: `{name}` found a plan without a time").into()),
                    Err(_) => refused += 1,
                }
                if seconds > slowest.0 {
                    slowest = (seconds, name);
                }
            }
        }
        println!("{case:<44} {plans:>6} {refused:>8} {:>12.1}  {}", slowest.0 * 1e3, slowest.1);
    }
    Ok(())
}

/// Returns options that every strategy accepts.
fn options(instance: &Instance, keep_all: bool) -> StrategyOptions {
    let devices = instance.devices.len() as u32;
    let layers = instance.model.model_layers;
    StrategyOptions {
        rules: hearth_halda::Rules { may_drop: !keep_all, may_leave_remainder: false },
        window_layers: Some(
            (0..devices).map(|device| (layers / devices + u32::from(device == 0)).max(1)).collect(),
        ),
        total_memory: Some(instance.devices.iter().map(|device| device.ram_available).collect()),
        ..StrategyOptions::default()
    }
}

fn cases() -> Result<Vec<(String, Instance)>, Box<dyn Error>> {
    let (model, devices) = medium_instances()?;
    let made = |count, layers| instance(&Model { model_layers: layers, ..model.clone() }, &devices, 0, count);
    let changed = |mut instance: Instance, change: &dyn Fn(&mut hearth_halda::Device)| {
        instance.devices.iter_mut().for_each(change);
        instance
    };
    let mut cases = vec![
        ("valid, 4 devices, 80 layers".to_owned(), made(4, 80)),
        ("one device".to_owned(), made(1, 80)),
        ("one device, one layer".to_owned(), made(1, 1)),
        ("12 devices, 5 layers".to_owned(), made(12, 5)),
        ("64 devices, 80 layers".to_owned(), made(64, 80)),
        ("64 devices, 512 layers".to_owned(), made(64, 512)),
    ];
    for layers in [61, 79, 127, 509] {
        cases.push((format!("8 devices, {layers} layers"), made(8, layers)));
    }
    cases.push((
        "no memory anywhere".to_owned(),
        changed(made(6, 80), &|device| {
            (device.ram_available, device.metal_available, device.cuda_available) = (0, 0, 0);
            (device.can_swap, device.swap_available) = (0, 0);
        }),
    ));
    for (what, value) in [("infinite", f64::INFINITY), ("NaN", f64::NAN), ("zero", 0.0), ("1e-300", 1e-300)] {
        let disks = changed(made(4, 80), &|device| device.disk_read = value);
        cases.push((format!("disks of speed {what}"), disks));
        let memory = changed(made(4, 80), &|device| device.cpu_memory_rate = value);
        cases.push((format!("memory of speed {what}"), memory));
        let hops = changed(made(4, 80), &|device| device.hop = value);
        cases.push((format!("hops of {what} seconds"), hops));
    }
    let mut cut_off = made(4, 80);
    cut_off.hops = Some(vec![vec![None; 4]; 4]);
    cases.push(("no links".to_owned(), cut_off));
    let mut uneven = made(64, 128);
    uneven.model.layer_bytes =
        (0..128).map(|layer| uneven.model.layer_weight_bytes + layer % 7 * (4 << 20)).collect();
    cases.push(("64 devices, 128 layers of different bytes".to_owned(), uneven.clone()));
    for device in &mut uneven.devices {
        let cpu_layers: Vec<f64> = (0..128).map(|layer| 1e-2 + f64::from(layer % 5) * 1e-3).collect();
        let gpu_layers = if device.gpu == Gpu::None { Vec::new() } else { cpu_layers.clone() };
        let output_on_gpu = (device.gpu != Gpu::None).then_some(1e-3);
        let (output, cpu_window, gpu_window) = (1e-2, 1e-4, 1e-4);
        device.runtime.work =
            Some(WorkTimes { cpu_layers, gpu_layers, output, output_on_gpu, cpu_window, gpu_window });
        device.runtime.residencies.push(ResidencyOptions::of(Residency::Managed));
    }
    cases.push(("the same, all that a profile knows".to_owned(), uneven));
    Ok(cases)
}
