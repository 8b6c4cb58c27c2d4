//! The strategy `perf`: layers in proportion to speed, limited by memory.
//!
//! prima.cpp paper, appendix A.10 (`PerfSched`): the rule of Galaxy (Ye et al., 2024) with a fallback, in one round:
//!
//! 1. Layers are distributed in proportion to compute power, which is the layers per second by the latency model
//!    without disk and hops: 1/(alpha + beta) on a GPU if the device has one, otherwise 1/alpha on its CPU
//!    ([`crate::latency::coefficients`]). A device keeps the layers that fit in the memory of that processor.
//! 2. Layers that do not fit are moved to GPUs with free memory, again in proportion to power.
//! 3. The remaining layers are moved to the CPUs of all devices in proportion to CPU speed: first to their RAM, and
//!    when it is full, to their disks, from which they are read for every token.
//!
//! The "other devices" of step 2 are interpreted as GPUs, because the rule is for "GPU clusters" and the fallback adds
//! CPUs. On devices estimated from the paper's Fig. 10 with the 70B model, the plan then takes 1.3 times as long as the
//! optimum; it takes 3.1 times as long if devices without a GPU fill their RAM in step 2. In the paper, the strategy
//! takes 1.6 times as long as Halda.
//!
//! A GPU that cannot hold a layer, or is slower than the CPU of its device, is ignored in steps 1 and 2
//! (`crate::capacity`). Step 3 uses no slow disks. As many layers of a window as fit are on the GPU. If the window of
//! the head rounds to zero, the head gets one layer of the largest window.
//!
//! Not here: the cost of hops and disks. A device that slows down the ring still gets its layers.

use crate::baselines::proportional_shares::{
    distribute_remaining, ensure_head_layer, proportional_within_capacity, speed_weights,
};
use crate::capacity::LayerCapacity;
use crate::latency::coefficients::DeviceCosts;
use crate::{Assignment, InfeasibleReason, LatencyModel, Proposal, Strategy, StrategyError};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PerformanceProportional;

impl Strategy for PerformanceProportional {
    fn name(&self) -> &'static str {
        "perf"
    }

    fn propose(&self, model: &LatencyModel) -> Result<Proposal, StrategyError> {
        let capacities = LayerCapacity::of_all_devices(model);
        let mut window_layers = windows(model, &capacities)?;
        ensure_head_layer(&mut window_layers);
        let split = |(device, (layers, capacity)): (usize, (&u32, &LayerCapacity))| {
            if capacity.fills_gpu_first {
                model.max_gpu_layers_in_one_round(device, 0, *layers)
            } else {
                capacity.gpu_layers_in_window(*layers)
            }
        };
        let gpu_layers = window_layers.iter().zip(&capacities).enumerate().map(split).collect();
        Ok(Proposal::new(Assignment::new(0, 1, window_layers, gpu_layers)))
    }
}

fn windows(model: &LatencyModel, capacities: &[LayerCapacity]) -> Result<Vec<u32>, StrategyError> {
    let layers = model.model_layers();
    let costs = &model.device_costs;
    let on_cpu: Vec<f64> = costs.iter().map(DeviceCosts::cpu_layer_seconds).collect();
    let fastest = |(device, capacity): (&DeviceCosts, &LayerCapacity)| {
        if capacity.fills_gpu_first { device.gpu_layer_seconds() } else { device.cpu_layer_seconds() }
    };
    let best: Vec<f64> = costs.iter().zip(capacities).map(fastest).collect();
    let (power, cpu_power) = (speed_weights(&best), speed_weights(&on_cpu));

    let on_fastest = |capacity: &LayerCapacity| {
        if capacity.fills_gpu_first { capacity.max_gpu_layers } else { capacity.max_cpu_layers }
    };
    let first: Vec<u32> = capacities.iter().map(on_fastest).collect();
    let mut windows = proportional_within_capacity(&power, &first, layers);

    let free_on_gpu = |(capacity, window): (&LayerCapacity, &u32)| {
        if capacity.fills_gpu_first { capacity.max_gpu_layers - window } else { 0 }
    };
    let on_gpus: Vec<u32> = capacities.iter().zip(&windows).map(free_on_gpu).collect();
    distribute_remaining(&mut windows, &power, &on_gpus, layers);

    let on_cpus: Vec<u32> =
        capacities.iter().zip(&windows).map(|(capacity, window)| capacity.max_layers() - window).collect();
    distribute_remaining(&mut windows, &cpu_power, &on_cpus, layers);

    let on_disks: Vec<u32> =
        costs.iter().map(|device| if device.has_slow_disk { 0 } else { layers }).collect();
    distribute_remaining(&mut windows, &cpu_power, &on_disks, layers);

    let held: u32 = windows.iter().sum();
    if held < layers {
        let reason = InfeasibleReason::TooLittleMemory { layers_per_round: layers, held };
        return Err(StrategyError::no_plan(1, layers, reason));
    }
    Ok(windows)
}
