//! The strategy `edgeshard`: the fastest division into consecutive blocks of layers that fit in memory.
//!
//! It is the dynamic program for latency of EdgeShard (Zhang et al., 2024). The layers are divided into consecutive
//! blocks, one per device of a pipeline. The first block is on the device with the prompt. The program minimises the
//! time of computing and communication per token. Devices may be dropped.
//!
//! ```text
//! f_m(j) = min( f_{m-1}(j),  min over 1 <= w <= min(j, cap_m) of f_{m-1}(j - w) + t_m(w) ),   result f_M(L)
//! ```
//!
//! `cap_m` is the number of layers that fit on device m. `t_m(w)` is its time by the latency model for a window of w
//! layers in one round, including its hop, with as many layers as possible on the faster processor.
//!
//! Deviation: in the paper the last device and the set of used devices are part of the state. Here the devices are in
//! the instance's order, so the used devices are always among the first m, and the program is exact for that order
//! except for hops. If a hop depends on the receiver, an estimate is used, and a head with all layers counts one hop
//! although it has none.
//!
//! Deviation: a block fits if the device holds it without reading from disk (`crate::capacity`), because weights are
//! memory-mapped here. If all devices together cannot hold the model, or the head cannot hold a layer, there is no
//! plan.
//!
//! Not here: several rounds, and plans that read from disk ([`crate::solvers::exact`]).

use crate::capacity::{LayerCapacity, capacities};
use crate::latency::LatencyModel;
use crate::problem::assignment::{Assignment, Share};
use crate::strategy::{Proposal, Strategy, StrategyError};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EdgeShard;

impl Strategy for EdgeShard {
    fn name(&self) -> &'static str {
        "edgeshard"
    }

    fn propose(&self, model: &LatencyModel) -> Result<Proposal, StrategyError> {
        let capacities = capacities(model, self.name())?;
        let window_layers = fastest_blocks(model, &capacities);
        let gpu_layers = capacities
            .iter()
            .zip(&window_layers)
            .map(|(capacity, window)| capacity.gpu_layers(*window))
            .collect();
        Ok(Proposal::new(Assignment::new(0, 1, window_layers, gpu_layers)))
    }
}

/// Solves the dynamic program. The devices together must hold the model, and the head at least one layer.
fn fastest_blocks(model: &LatencyModel, capacities: &[LayerCapacity]) -> Vec<u32> {
    let layers = model.model_layers() as usize;
    // fastest[j]: the minimum time for the first j layers on the devices so far.
    let mut fastest = vec![f64::INFINITY; layers + 1];
    fastest[0] = 0.0;
    // chosen[device][j]: the block of the device in the best division of the first j layers.
    let mut chosen = Vec::with_capacity(capacities.len());
    for (device, capacity) in capacities.iter().enumerate() {
        let head = device == 0;
        let mut next = if head { vec![f64::INFINITY; layers + 1] } else { fastest.clone() };
        let mut blocks = vec![0; layers + 1];
        for block in 1..=capacity.layers().min(layers as u32) {
            let share = Share::new(block, capacity.gpu_layers(block), 1, 0);
            let seconds = model.terms(device, head, share).seconds();
            for placed in block as usize..=layers {
                let total = fastest[placed - block as usize] + seconds;
                if total < next[placed] {
                    next[placed] = total;
                    blocks[placed] = block;
                }
            }
        }
        fastest = next;
        chosen.push(blocks);
    }
    let mut placed = layers;
    let mut windows: Vec<u32> = Vec::with_capacity(capacities.len());
    for blocks in chosen.iter().rev() {
        windows.push(blocks[placed]);
        placed -= blocks[placed] as usize;
    }
    windows.reverse();
    windows
}
