//! The number of GPU layers with which a device computes a window of a given size fastest.
//!
//! A device has w layers in each window and l layers in all rounds together. If n layers of each window are on the GPU,
//! then lgpu of the l layers are, and lgpu increases with n. The time is convex in lgpu: compute and memory terms are
//! linear, and the disk term is convex, piecewise linear and decreasing (constant with Metal). So the best n is at an
//! end of its range, or next to the only kink, where the CPU layers start to fit in memory: four candidates suffice.
//!
//! The range: GPU memory holds lgpu layers. With a slow disk, main memory must hold the other layers (Metal: all).

use crate::{LatencyModel, RoundWindow};

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GpuSplit {
    /// n: the number of GPU layers in the window of a round.
    pub gpu_layers: u32,
    /// The seconds that the device adds to a token with this split.
    pub device_seconds: f64,
}

/// Returns the maximum number of GPU layers per window (n) for at most `layers` GPU layers in all rounds, or -1 if
/// `layers` is negative. `rest` is the number of layers that a partial last round leaves for the window.
fn gpu_layers_within((rounds, rest): (u32, u32), layers: i64) -> i64 {
    let (rounds, rest) = (i64::from(rounds), i64::from(rest));
    if layers < 0 {
        -1
    } else if layers <= (rounds + 1) * rest {
        layers / (rounds + 1)
    } else {
        (layers - rest) / rounds
    }
}

impl LatencyModel<'_> {
    /// Returns the maximum number of GPU layers in a window (n) that GPU memory allows.
    pub(crate) fn max_gpu_layers(&self, window: RoundWindow) -> u32 {
        let counts = window.whole_rounds_and_rest(self.sizes.model_layers);
        let windows = counts.0 + counts.1.min(1);
        let fit = self.device_costs[window.device].gpu_layers_that_fit(window.is_head, &self.sizes, windows);
        gpu_layers_within(counts, fit).min(i64::from(window.window_layers)) as u32
    }

    /// Returns the maximum number of GPU layers in a window of `layers` layers if a token takes a single round.
    pub(crate) fn max_gpu_layers_in_one_round(&self, device: usize, head: usize, layers: u32) -> u32 {
        self.max_gpu_layers(RoundWindow::at_start(device, device == head, self.sizes.model_layers, layers))
    }

    /// Returns the fastest GPU split of a window; `None` if every split reads a slow disk. Ties go to fewer GPU layers.
    pub(crate) fn best_split(&self, window: RoundWindow) -> Option<GpuSplit> {
        self.best_split_with_hop(window, self.device_costs[window.device].hop_seconds)
    }

    /// Returns the split of [`Self::best_split`] if the hop after the window takes `hop_seconds`.
    pub(crate) fn best_split_with_hop(&self, window: RoundWindow, hop_seconds: f64) -> Option<GpuSplit> {
        let RoundWindow { device, is_head: head, .. } = window;
        if window.window_layers == 0 {
            return Some(GpuSplit { gpu_layers: 0, device_seconds: 0.0 });
        }
        let costs = &self.device_costs[device];
        let most = i64::from(self.max_gpu_layers(window));
        let counts = window.whole_rounds_and_rest(self.sizes.model_layers);
        let layers = i64::from(window.layer_counts(self.sizes.model_layers, 0).layers);
        let mut least = 0;
        if costs.has_slow_disk && !costs.uses_metal {
            let must_leave = layers - costs.layers_that_fit(head, &self.sizes);
            least = gpu_layers_within(counts, must_leave - 1) + 1;
        }
        if least > most {
            return None;
        }
        let kink = gpu_layers_within(counts, layers - 1 - self.layers_before_reading(device, head));
        let candidates = [least, kink.clamp(least, most), (kink + 1).clamp(least, most), most];
        let is_new = |(index, gpu_layers): &(usize, i64)| !candidates[..*index].contains(gpu_layers);
        let split = |(_, gpu_layers): (usize, i64)| {
            let gpu_layers = gpu_layers as u32;
            let counts = window.layer_counts(self.sizes.model_layers, gpu_layers);
            let terms = self.terms_with_hop(device, head, counts, hop_seconds);
            let is_allowed = !terms.exceeds_memory || !costs.has_slow_disk;
            is_allowed.then(|| GpuSplit { gpu_layers, device_seconds: terms.seconds() })
        };
        let splits = candidates.into_iter().enumerate().filter(is_new).filter_map(split);
        splits.min_by(|one, other| one.device_seconds.total_cmp(&other.device_seconds))
    }

    /// Returns the maximum number of CPU layers without rereading layers; the head rereads an embedding row anyway.
    fn layers_before_reading(&self, device: usize, head: bool) -> i64 {
        let costs = &self.device_costs[device];
        let head_bytes = if head { self.sizes.output_head_bytes } else { 0 };
        (costs.memory_capacity_bytes - costs.buffer_bytes - head_bytes)
            .div_euclid(self.sizes.layer_resident_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_layers_within_is_the_inverse_of_lgpu() {
        for (rounds, rest) in [(1, 0), (3, 0), (2, 4), (1, 7)] {
            let lgpu = |n: i64| i64::from(rounds) * n + n.min(i64::from(rest));
            for layers in -2..40 {
                let n = gpu_layers_within((rounds, rest), layers);
                assert!(n == -1 || lgpu(n) <= layers, "{rounds} {rest} {layers}");
                assert!(lgpu(n + 1) > layers, "{rounds} {rest} {layers}");
            }
        }
    }
}
