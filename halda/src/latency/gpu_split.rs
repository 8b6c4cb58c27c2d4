//! The best number of GPU layers for a given window.
//!
//! For a window of w layers (l in all rounds) of which n are on the GPU (lgpu in all rounds), the time is convex in
//! lgpu, which increases with n. Compute and memory terms are linear in lgpu. The disk term is convex, piecewise
//! linear and decreases with lgpu; with Metal it is constant. So the best n is an end of its range or next to the one
//! kink, where the CPU share starts to fit: four candidates suffice.
//!
//! The range is `lgpu <= GPU memory`, and with a slow disk also `l - lgpu <= x`, or `l <= x` with Metal.

use crate::{LatencyModel, RoundWindow};

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GpuSplit {
    /// n: the number of GPU layers in the window of a round.
    pub gpu_layers: u32,
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
        let counts = window.rounds_and_rest(self.model.layers);
        let windows = counts.0 + counts.1.min(1);
        let fit = self.devices[window.device].gpu_layers_that_fit(window.is_head, &self.model, windows);
        gpu_layers_within(counts, fit).min(i64::from(window.window_layers)) as u32
    }

    /// Returns the maximum number of GPU layers in a window of `layers` layers if a token takes a single round.
    pub(crate) fn max_gpu_layers_in_one_round(&self, device: usize, head: usize, layers: u32) -> u32 {
        self.max_gpu_layers(RoundWindow::first(device, device == head, self.model.layers, layers))
    }

    /// Returns the fastest GPU split of a window; `None` if every split reads a slow disk. Ties go to fewer GPU layers.
    pub(crate) fn best_split(&self, window: RoundWindow) -> Option<GpuSplit> {
        self.best_split_with_hop(window, self.devices[window.device].hop)
    }

    /// Returns the split of [`Self::best_split`] if the hop after the window takes `hop` seconds.
    pub(crate) fn best_split_with_hop(&self, window: RoundWindow, hop: f64) -> Option<GpuSplit> {
        let RoundWindow { device, is_head: head, .. } = window;
        if window.window_layers == 0 {
            return Some(GpuSplit { gpu_layers: 0, device_seconds: 0.0 });
        }
        let costs = &self.devices[device];
        let most = i64::from(self.max_gpu_layers(window));
        let counts = window.rounds_and_rest(self.model.layers);
        let layers = i64::from(window.share(self.model.layers, 0).layers);
        let mut least = 0;
        if costs.has_slow_disk && !costs.uses_metal {
            let must_leave = layers - costs.layers_that_fit(head, &self.model);
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
            let terms = self.terms_with_hop(device, head, window.share(self.model.layers, gpu_layers), hop);
            let is_allowed = !terms.exceeds_memory || !costs.has_slow_disk;
            is_allowed.then(|| GpuSplit { gpu_layers, device_seconds: terms.seconds() })
        };
        let splits = candidates.into_iter().enumerate().filter(is_new).filter_map(split);
        splits.min_by(|one, other| one.device_seconds.total_cmp(&other.device_seconds))
    }

    /// Returns the maximum number of CPU layers without rereading layer weights (the head rereads an embedding row
    /// anyway).
    fn layers_before_reading(&self, device: usize, head: bool) -> i64 {
        let costs = &self.devices[device];
        let head_bytes = if head { self.model.output_head_bytes } else { 0 };
        (costs.memory_capacity_bytes - costs.buffer_bytes - head_bytes)
            .div_euclid(self.model.layer_resident_bytes)
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
