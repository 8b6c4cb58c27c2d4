//! The strategy `edgeshard`: the fastest division into consecutive blocks of layers that fit in memory.
//!
//! EdgeShard (Zhang et al., 2024) minimises the time of computing and communication per token by a dynamic program. The
//! first block is on the device with the prompt, and devices may be dropped.
//!
//! ```text
//! f_m(j) = min( f_{m-1}(j),  min over 1 <= w <= min(j, cap_m) of f_{m-1}(j - w) + t_m(w) ),   result f_M(L)
//! ```
//!
//! `f_m(j)` is the minimum time of the first j of L layers on the first m of M devices, `cap_m` the number of layers
//! that fit on device m, and `t_m(w)` the time of device m and its hop for w layers in one round, with as many layers
//! as fit on the faster processor.
//!
//! Deviation: in EdgeShard the state includes the last device and the set of used devices. Here the devices are in the
//! instance's order, so the used devices are always among the first m, and the program is exact for that order except
//! for hops: hops that depend on the receiver are estimates, and a head with all layers counts a hop.
//!
//! Deviation: a block fits if nothing is read from disk (`crate::capacity`), because weights are memory-mapped here.

use crate::capacity::{LayerCapacity, layer_capacities, one_round_proposal};
use crate::{LatencyModel, LayerCounts, Proposal, Strategy, StrategyError};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EdgeShard;

impl Strategy for EdgeShard {
    fn name(&self) -> &'static str {
        "edgeshard"
    }

    fn propose(&self, model: &LatencyModel) -> Result<Proposal, StrategyError> {
        let capacities = layer_capacities(model, self.name())?;
        Ok(one_round_proposal(fastest_blocks(model, &capacities), &capacities))
    }
}

/// Returns the windows of the fastest blocks. The devices must have memory for the model, and the head for a layer.
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
        for block in 1..=capacity.max_layers().min(layers as u32) {
            let share = LayerCounts::new(block, capacity.gpu_layers_in_window(block), 1, 0);
            let seconds = model.device_latency_terms(device, head, share).seconds();
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
    let mut windows = vec![0; capacities.len()];
    for (window, blocks) in windows.iter_mut().zip(&chosen).rev() {
        *window = blocks[placed];
        placed -= blocks[placed] as usize;
    }
    windows
}
