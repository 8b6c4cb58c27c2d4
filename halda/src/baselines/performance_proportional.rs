//! The strategy `perf`: layers in proportion to speed, within memory.
//!
//! prima.cpp paper, appendix A.10 (`PerfSched`): Galaxy's rule (Ye et al., 2024) with a fallback. One round of the
//! ring, in three steps:
//!
//! 1. Layers in proportion to compute power: layers per second by the latency model, without disk and hops. That is
//!    1/(alpha + beta) on a GPU if the device has one, otherwise 1/alpha on its CPU
//!    ([`crate::latency::coefficients`]). A device keeps what fits the memory of that processor: the GPU's, or RAM.
//! 2. What does not fit moves to GPUs with free memory, again in proportion to power.
//! 3. The rest goes to the CPUs of all devices in proportion to CPU speed: first into their RAM, and when that is
//!    full, beyond it, where it is read from disk for every token.
//!
//! The paper describes them in two sentences. As read here, the "other devices" of step 2 are GPUs, because the rule
//! is made for "GPU clusters" and the fallback adds CPUs. In another reading a lone CPU takes in step 2 all that its
//! RAM holds, before the CPU beside a GPU takes anything. On devices guessed after those of the paper's Fig. 10 and
//! 70B that reading takes 3.1 times the optimum and this one 1.3 times; the paper's takes 1.6 times Halda's time.
//!
//! A GPU that holds no layer, or is slower than the CPU beside it, does not count as one (`crate::capacity`). Step 3
//! uses no slow disks; if all disks are slow, there is no plan. As many layers of a window as fit go to the GPU. If the
//! head's share rounds to nothing, it gets one layer of the largest window.
//!
//! Not here: the cost of hops and disks. A device that slows down all others still gets its share.

use crate::baselines::proportional::{cumulative_rounding, keep_head, speed_weights, within_room};
use crate::capacity::LayerCapacity;
use crate::latency::LatencyModel;
use crate::latency::coefficients::DeviceCosts;
use crate::latency::gpu_split::RoundCounts;
use crate::problem::assignment::Assignment;
use crate::strategy::{Infeasible, Proposal, SearchStep, Strategy, StrategyError};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PerformanceProportional;

impl Strategy for PerformanceProportional {
    fn name(&self) -> &'static str {
        "perf"
    }

    fn propose(&self, model: &LatencyModel) -> Result<Proposal, StrategyError> {
        let capacities: Vec<LayerCapacity> =
            (0..model.device_count()).map(|device| LayerCapacity::new(model, device, device == 0)).collect();
        let mut window_layers = windows(model, &capacities)?;
        keep_head(&mut window_layers);
        let gpu_layers = window_layers
            .iter()
            .zip(&capacities)
            .enumerate()
            .map(|(device, (window, capacity))| {
                if capacity.gpu_first {
                    model.max_gpu_layers(device, device == 0, *window, RoundCounts::whole(1))
                } else {
                    capacity.gpu_layers(*window)
                }
            })
            .collect();
        Ok(Proposal::of(Assignment::new(0, 1, window_layers, gpu_layers)))
    }
}

fn windows(model: &LatencyModel, capacities: &[LayerCapacity]) -> Result<Vec<u32>, StrategyError> {
    let layers = model.model_layers();
    let costs = &model.devices;
    let on_cpu: Vec<f64> = costs.iter().map(DeviceCosts::cpu_layer).collect();
    let best: Vec<f64> = costs
        .iter()
        .zip(capacities)
        .map(|(device, capacity)| if capacity.gpu_first { device.gpu_layer() } else { device.cpu_layer() })
        .collect();
    let (power, cpu_power) = (speed_weights(&best), speed_weights(&on_cpu));

    let first: Vec<u32> = capacities
        .iter()
        .map(|capacity| if capacity.gpu_first { capacity.gpu } else { capacity.cpu })
        .collect();
    let asked = cumulative_rounding(&power, layers).unwrap_or_default();
    let mut windows: Vec<u32> =
        asked.iter().zip(&first).map(|(asked, capacity)| *asked.min(capacity)).collect();

    let on_gpus: Vec<u32> = capacities
        .iter()
        .zip(&windows)
        .map(|(capacity, window)| if capacity.gpu_first { capacity.gpu - window } else { 0 })
        .collect();
    offload(&mut windows, &power, &on_gpus, layers);

    let on_cpus: Vec<u32> =
        capacities.iter().zip(&windows).map(|(capacity, window)| capacity.layers() - window).collect();
    offload(&mut windows, &cpu_power, &on_cpus, layers);

    let beyond: Vec<u32> = costs.iter().map(|device| if device.slow_disk { 0 } else { layers }).collect();
    offload(&mut windows, &cpu_power, &beyond, layers);

    let held: u32 = windows.iter().sum();
    if held < layers {
        let outcome = Err(Infeasible::TooLittleMemory { ring_layers: layers, held });
        return Err(StrategyError::Infeasible(vec![SearchStep {
            head: 0,
            rounds: 1,
            ring_layers: layers,
            outcome,
        }]));
    }
    Ok(windows)
}

/// Distributes the layers that no window has yet, within `capacity`.
fn offload(windows: &mut [u32], power: &[u64], capacity: &[u32], layers: u32) {
    let left = layers - windows.iter().sum::<u32>();
    for (window, more) in windows.iter_mut().zip(within_room(power, capacity, left)) {
        *window += more;
    }
}
