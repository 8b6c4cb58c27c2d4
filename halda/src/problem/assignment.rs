//! Assignments: how many layers each device computes in a round, and how many rounds a token takes.
//!
//! The symbols are those of the prima.cpp paper, section 3.2 and Eq. 11-12. In each round of the ring, device m has a
//! window of `w_m` of the L layers, `n_m` of them on its GPU. A round covers `W = sum w_m` layers, and a token takes
//! floor(L/W) whole rounds. If R = L mod W layers remain, a partial last round follows: the windows are filled in ring
//! order until the R layers are used up. So there are k = ceil(L/W) rounds; in the paper, W always divides L.
//!
//! ```text
//! rest_m = max(0, R - sum_{j before m} w_j)
//! l_m    = floor(L/W) w_m + min(w_m, rest_m)         layers of m
//! lgpu_m = floor(L/W) n_m + min(n_m, rest_m)         of these, layers on the GPU (the first n_m of a window)
//! win_m  = floor(L/W) + min(1, rest_m)               windows of m
//! ```
//!
//! Deviation: a device with `w_m` = 0 has no window and no hop; by the last line it would have floor(L/W) windows.

use serde::Serialize;

/// A layer-to-device assignment. Windows (w) and GPU layers (n) are listed by device, in the instance's order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Assignment {
    /// The index of the device that embeds the tokens, computes the output head and samples.
    pub head: usize,
    /// k: the number of rounds per token, including a partial last one.
    pub rounds: u32,
    /// `w_m`: the number of layers of each device in a whole round; 0 for a dropped device and for a relay.
    pub window_layers: Vec<u32>,
    /// `n_m`: the number of layers in each device's window that its GPU computes.
    pub gpu_layers: Vec<u32>,
    /// The devices in the ring, the head first, including relays, which have no layers. If `None`, the ring has the
    /// devices with layers, in the instance's order from the head.
    #[serde(rename = "order")]
    pub ring_order: Option<Vec<usize>>,
}

/// The numbers of layers and windows that one device computes for a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct LayerCounts {
    /// `l_m`: the number of layers of the model on the device.
    pub layers: u32,
    /// `lgpu_m`: the number of layers of the model on the GPU of the device.
    pub gpu_layers: u32,
    /// `win_m`: the number of windows per token. A hop follows each window.
    pub windows: u32,
}

impl LayerCounts {
    /// Counts the layers of a device in `whole_rounds` rounds, and in a partial last round in which the devices before
    /// this one in the ring leave `rest` layers. A window has `window_layers` layers, `gpu_layers` of them on the GPU.
    pub fn new(window_layers: u32, gpu_layers: u32, whole_rounds: u32, rest: u32) -> Self {
        if window_layers == 0 {
            return Self::default();
        }
        Self {
            layers: whole_rounds * window_layers + window_layers.min(rest),
            gpu_layers: whole_rounds * gpu_layers + gpu_layers.min(rest),
            windows: whole_rounds + rest.min(1),
        }
    }
}

/// The position and the size of a device's window in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundWindow {
    pub device: usize,
    pub is_head: bool,
    /// W: the number of layers of a whole round.
    pub layers_per_round: u32,
    /// The number of layers of the round that other devices compute before this window.
    pub layers_before_window: u32,
    /// w: the number of layers of the window.
    pub window_layers: u32,
}

impl RoundWindow {
    pub(crate) fn at_start(device: usize, is_head: bool, layers_per_round: u32, window_layers: u32) -> Self {
        Self { device, is_head, layers_per_round, layers_before_window: 0, window_layers }
    }

    /// Returns the number of whole rounds, and how many layers of a partial last round remain for this window.
    pub(crate) fn whole_rounds_and_rest(self, model_layers: u32) -> (u32, u32) {
        let remainder = model_layers % self.layers_per_round;
        (model_layers / self.layers_per_round, remainder.saturating_sub(self.layers_before_window))
    }

    pub(crate) fn layer_counts(self, model_layers: u32, gpu_layers: u32) -> LayerCounts {
        let (rounds, rest) = self.whole_rounds_and_rest(model_layers);
        LayerCounts::new(self.window_layers, gpu_layers, rounds, rest)
    }
}

impl Assignment {
    /// Creates an assignment whose ring has the instance's order of devices.
    pub fn new(head: usize, rounds: u32, window_layers: Vec<u32>, gpu_layers: Vec<u32>) -> Self {
        Self { head, rounds, window_layers, gpu_layers, ring_order: None }
    }

    /// Returns the devices in the ring including relays, the head first.
    pub fn ring(&self) -> Vec<usize> {
        self.ring_order.clone().unwrap_or_else(|| {
            let devices = self.window_layers.len();
            ring_order(self.head, devices).filter(|device| self.window_layers[*device] > 0).collect()
        })
    }

    /// Returns the devices in the ring, then all other devices in the instance's order from the head.
    pub fn ring_then_unused_devices(&self) -> Vec<usize> {
        let ring = self.ring();
        let others = ring_order(self.head, self.window_layers.len()).filter(|device| !ring.contains(device));
        ring.iter().copied().chain(others).collect()
    }

    /// Returns whether a device is in the ring and has no layers.
    pub fn is_relay(&self, device: usize) -> bool {
        let in_order = self.ring_order.as_ref().is_some_and(|order| order.contains(&device));
        in_order && self.window_layers.get(device) == Some(&0)
    }

    /// Returns W, the number of layers of a whole round.
    pub fn layers_per_round(&self) -> u64 {
        self.window_layers.iter().map(|window| u64::from(*window)).sum()
    }

    /// Returns the layer counts of each device in the instance's order. The assignment must have no
    /// [shape violations](crate::latency::constraints::shape_violations).
    pub(crate) fn layer_counts(&self, model_layers: u32) -> Vec<LayerCounts> {
        let layers_per_round = self.layers_per_round() as u32;
        let rounds = model_layers / layers_per_round;
        let mut rest = model_layers % layers_per_round;
        let mut shares = vec![LayerCounts::default(); self.window_layers.len()];
        for device in self.ring() {
            let window = self.window_layers[device];
            shares[device] = LayerCounts::new(window, self.gpu_layers[device], rounds, rest);
            rest = rest.saturating_sub(window);
        }
        shares
    }
}

/// Returns the indices of the devices in ring order: the head, the devices after it, then the devices before it.
pub fn ring_order(head: usize, device_count: usize) -> impl Iterator<Item = usize> {
    (head..device_count).chain(0..head.min(device_count))
}

/// Returns the numbers of rounds (k) that the prima.cpp paper considers: factors of L below L, ascending; 1 if L = 1.
pub fn valid_rounds(model_layers: u32) -> Vec<u32> {
    (1..=model_layers.max(2) / 2).filter(|rounds| model_layers.is_multiple_of(*rounds)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_rounds_are_proper_factors() {
        for layers in [1, 2, 7] {
            assert_eq!(valid_rounds(layers), [1], "{layers} layers");
        }
        assert_eq!(valid_rounds(12), [1, 2, 3, 4, 6]);
    }

    #[test]
    fn partial_round_fills_windows_in_ring_order() {
        // L = 11, W = 4: two whole rounds (8 layers) and R = 3, of which device 1 (the head) computes 1
        // and device 2 computes 2, so none remains for device 0.
        let assignment = Assignment::new(1, 3, vec![1, 1, 2], vec![0, 0, 1]);
        let shares = assignment.layer_counts(11);
        assert_eq!(shares[1], LayerCounts { layers: 3, gpu_layers: 0, windows: 3 });
        assert_eq!(shares[2], LayerCounts { layers: 6, gpu_layers: 3, windows: 3 });
        assert_eq!(shares[0], LayerCounts { layers: 2, gpu_layers: 0, windows: 2 });
        assert_eq!(LayerCounts::new(0, 0, 3, 2), LayerCounts::default(), "a dropped device has no window");
    }
}
