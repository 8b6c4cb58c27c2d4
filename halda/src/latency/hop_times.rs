//! Hop times: seconds to send the hidden state from one device to the next.
//!
//! In the prima.cpp paper, Table 6, `t_comm` depends only on the sender. If an instance has a hop time for each pair
//! of devices, the time also depends on the receiver. Devices that are not in the ring, or have no layers in a
//! partial last round, are skipped, and the last device sends to the head. A ring of one device then has no hop.
//!
//! A pair without a hop time has no link.

use crate::problem::instance::Instance;

#[derive(Debug, Clone)]
pub(crate) struct HopTimes {
    /// The seconds of a hop from each device to any other; an estimate if hops depend on the receiver.
    pub sender_hop_seconds: Vec<f64>,
    /// The seconds of a hop at index `from * devices + to`; infinite without a link. Empty without hop times by pair.
    pair_hop_seconds: Vec<f64>,
    /// Whether the time of a hop depends on the receiver. If not, the order of the ring does not matter.
    pub depends_on_receiver: bool,
}

impl HopTimes {
    pub(crate) fn new(instance: &Instance) -> Self {
        let senders: Vec<f64> = instance.devices.iter().map(|device| device.hop_seconds).collect();
        let Some(rows) = &instance.pair_hop_seconds else {
            let pair_hop_seconds = Vec::new();
            return Self { sender_hop_seconds: senders, pair_hop_seconds, depends_on_receiver: false };
        };
        let pair_hop_seconds: Vec<f64> =
            rows.iter().flatten().map(|seconds| seconds.unwrap_or(f64::INFINITY)).collect();
        let devices = rows.len();
        let hop = |from: usize, to: usize| pair_hop_seconds[from * devices + to];
        let hops = |from: usize| (0..devices).filter(move |to| *to != from).map(move |to| hop(from, to));
        let first = |from: usize| hops(from).next();
        let all_equal = |from: usize| {
            first(from).is_none_or(|first| first.is_finite() && hops(from).all(|hop| hop == first))
        };
        let depends_on_receiver = !(0..devices).all(all_equal);
        let common_hops = || (0..devices).map(|from| first(from).unwrap_or(0.0)).collect();
        let sender_hop_seconds = if depends_on_receiver { senders } else { common_hops() };
        Self { sender_hop_seconds, pair_hop_seconds, depends_on_receiver }
    }

    /// Returns the seconds of a hop from one device to another; infinite without a link.
    pub(crate) fn seconds(&self, from: usize, to: usize) -> f64 {
        if self.pair_hop_seconds.is_empty() {
            self.sender_hop_seconds[from]
        } else if from == to {
            0.0
        } else {
            self.pair_hop_seconds[from * self.sender_hop_seconds.len() + to]
        }
    }

    pub(crate) fn has_pair_times(&self) -> bool {
        !self.pair_hop_seconds.is_empty()
    }

    /// Returns the seconds of a hop from a device to any other; 0 if hops depend on the receiver.
    pub(crate) fn fixed_hop_seconds(&self, from: usize) -> f64 {
        if self.depends_on_receiver { 0.0 } else { self.sender_hop_seconds[from] }
    }

    pub(crate) fn max_hop_seconds(&self, from: usize) -> f64 {
        let others = (0..self.sender_hop_seconds.len()).map(|to| self.seconds(from, to));
        others.filter(|hop| hop.is_finite()).fold(0.0, f64::max)
    }

    /// Returns the seconds of the shortest hop from a device to another one; infinite if it has no link.
    pub(crate) fn shortest_hop_seconds(&self, from: usize) -> f64 {
        let others =
            (0..self.sender_hop_seconds.len()).filter(|to| *to != from).map(|to| self.seconds(from, to));
        others.fold(f64::INFINITY, f64::min)
    }
}
