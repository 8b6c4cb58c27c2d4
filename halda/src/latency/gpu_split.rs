//! The best number of GPU layers for a given window.
//!
//! For a given window the time is a convex function of lgpu, the layers on the GPU. Compute and memory terms are
//! linear in lgpu. The disk term is convex, piecewise linear and decreases with lgpu; with Metal it does not depend on
//! lgpu. lgpu increases with n. So the best n is an end of its range or next to the one kink, where the CPU share starts to fit: four
//! candidates instead of w + 1 suffice.
//!
//! The range is `lgpu <= GPU memory`, and with a slow disk also `l - lgpu <= x`, or `l <= x` with Metal.
//!
//! Not here: the choice of the window ([`crate::solvers::exact`]).

use crate::latency::LatencyModel;
use crate::problem::assignment::Share;

/// A division of a window between GPU and CPU, with its time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Split {
    /// n: the layers on the GPU.
    pub gpu_layers: u32,
    /// The seconds that the device adds to a token.
    pub seconds: f64,
}

/// How often a token passes through the window of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RoundCounts {
    /// floor(L/W): the number of whole rounds.
    pub rounds: u32,
    /// `rest_m`: the layers that remain in a partial last round when it reaches the device.
    pub rest: u32,
}

impl RoundCounts {
    /// Creates counts without a partial last round.
    pub(crate) fn whole(rounds: u32) -> Self {
        Self { rounds, rest: 0 }
    }

    /// Returns the maximum n with lgpu(n) = rounds n + min(n, rest) <= `layers`; -1 if `layers` is negative.
    fn gpu_layers_within(self, layers: i64) -> i64 {
        let (rounds, rest) = (i64::from(self.rounds), i64::from(self.rest));
        if layers < 0 {
            -1
        } else if layers <= (rounds + 1) * rest {
            layers / (rounds + 1)
        } else {
            (layers - rest) / rounds
        }
    }
}

impl LatencyModel<'_> {
    /// Returns the maximum n that GPU memory allows for a window.
    pub(crate) fn max_gpu_layers(
        &self,
        device: usize,
        head: bool,
        window: u32,
        round_counts: RoundCounts,
    ) -> u32 {
        let windows = round_counts.rounds + round_counts.rest.min(1);
        let fit = self.devices[device].gpu_layers_that_fit(head, &self.model, windows);
        round_counts.gpu_layers_within(fit).min(i64::from(window)) as u32
    }

    /// Returns the best split of a window; `None` if the share must fit because of a slow disk, but does not. Ties go
    /// to fewer GPU layers.
    pub(crate) fn best_split(
        &self,
        device: usize,
        head: bool,
        window: u32,
        round_counts: RoundCounts,
    ) -> Option<Split> {
        self.best_split_with_hop(device, head, window, round_counts, self.devices[device].hop)
    }

    /// Returns the best split of a window if the hop after it takes `hop` seconds; see [`Self::best_split`].
    pub(crate) fn best_split_with_hop(
        &self,
        device: usize,
        head: bool,
        window: u32,
        round_counts: RoundCounts,
        hop: f64,
    ) -> Option<Split> {
        if window == 0 {
            return Some(Split { gpu_layers: 0, seconds: 0.0 });
        }
        let costs = &self.devices[device];
        let most = i64::from(self.max_gpu_layers(device, head, window, round_counts));
        let layers = i64::from(Share::new(window, 0, round_counts.rounds, round_counts.rest).layers);
        let mut least = 0;
        if costs.slow_disk && !costs.metal {
            let must_leave = layers - costs.layers_that_fit(head, &self.model);
            least = round_counts.gpu_layers_within(must_leave - 1) + 1;
        }
        if least > most {
            return None;
        }
        let kink = round_counts.gpu_layers_within(layers - 1 - self.layers_before_reading(device, head));
        let candidates = [least, kink.clamp(least, most), (kink + 1).clamp(least, most), most];
        let mut best: Option<Split> = None;
        for (index, gpu_layers) in candidates.into_iter().enumerate() {
            if candidates[..index].contains(&gpu_layers) {
                continue;
            }
            let gpu_layers = gpu_layers as u32;
            let share = Share::new(window, gpu_layers, round_counts.rounds, round_counts.rest);
            let Some(seconds) = self.cost_with_hop(device, head, share, hop) else { continue };
            if best.is_none_or(|best| seconds < best.seconds) {
                best = Some(Split { gpu_layers, seconds });
            }
        }
        best
    }

    /// Returns the maximum number of CPU layers for which the disk term has its minimum. On the head it is slightly
    /// more than the layers that fit, because a row of the embedding is always read.
    fn layers_before_reading(&self, device: usize, head: bool) -> i64 {
        let costs = &self.devices[device];
        let head_bytes = if head { self.model.output_head_bytes } else { 0 };
        (costs.capacity - costs.buffer_bytes - head_bytes).div_euclid(self.model.layer_resident_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_layers_within_is_the_inverse_of_lgpu() {
        for (rounds, rest) in [(1, 0), (3, 0), (2, 4), (1, 7)] {
            let round_counts = RoundCounts { rounds, rest };
            let lgpu = |n: i64| i64::from(rounds) * n + n.min(i64::from(rest));
            for layers in -2..40 {
                let n = round_counts.gpu_layers_within(layers);
                assert!(n == -1 || lgpu(n) <= layers, "{round_counts:?} {layers}");
                assert!(lgpu(n + 1) > layers, "{round_counts:?} {layers}");
            }
        }
    }
}
