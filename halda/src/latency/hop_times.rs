//! Hop times: seconds to send the hidden state from one device to the next.
//!
//! `t_comm` of the prima.cpp paper, Table 6, belongs to the sender alone. If an instance gives hops by pair, it
//! belongs to the device that really comes next: devices that are not in the ring, or have no layers in a partial
//! last round, are passed by, and the last one hands back to the head. A ring of one device then has no hop.
//!
//! A pair without an entry has no link. Whether the next device matters at all is decided once: where every
//! device sends equally fast to all others, planners do without the order of the ring.
//!
//! Not here: which device comes next ([`crate::problem::assignment`]).

use crate::problem::instance::Instance;

/// The hop times of a validated instance.
#[derive(Debug, Clone)]
pub(crate) struct HopTimes {
    /// The hop of each sender to any device; the instance's `hop` where it depends on the neighbour.
    pub of_sender: Vec<f64>,
    /// between[from * M + to], infinite where there is no link; empty if the instance has only senders' hops.
    between: Vec<f64>,
    /// Whether a hop depends on the next device.
    pub neighbour_matters: bool,
}

impl HopTimes {
    pub(crate) fn new(instance: &Instance) -> Self {
        let senders: Vec<f64> = instance.devices.iter().map(|device| device.hop).collect();
        let Some(rows) = &instance.hops else {
            return Self { of_sender: senders, between: Vec::new(), neighbour_matters: false };
        };
        let between: Vec<f64> =
            rows.iter().flatten().map(|seconds| seconds.unwrap_or(f64::INFINITY)).collect();
        let devices = rows.len();
        let first = |from: usize| (0..devices).find(|to| *to != from).map(|to| between[from * devices + to]);
        let all_equal = |from: usize| {
            let others = (0..devices).filter(|to| *to != from).map(|to| between[from * devices + to]);
            first(from).is_none_or(|first| first.is_finite() && others.into_iter().all(|hop| hop == first))
        };
        let neighbour_matters = !(0..devices).all(all_equal);
        let of_sender = if neighbour_matters {
            senders
        } else {
            (0..devices).map(|from| first(from).unwrap_or(0.0)).collect()
        };
        Self { of_sender, between, neighbour_matters }
    }

    /// Returns the seconds from one device to another, infinite where there is no link.
    pub(crate) fn seconds(&self, from: usize, to: usize) -> f64 {
        if self.between.is_empty() {
            self.of_sender[from]
        } else if from == to {
            0.0
        } else {
            self.between[from * self.of_sender.len() + to]
        }
    }

    /// Returns whether hops are given by pair; then a ring of one device has none.
    pub(crate) fn by_pair(&self) -> bool {
        !self.between.is_empty()
    }

    /// Returns the hop of a window if it does not depend on the next device, otherwise 0: it is then counted
    /// separately.
    pub(crate) fn own(&self, from: usize) -> f64 {
        if self.neighbour_matters { 0.0 } else { self.of_sender[from] }
    }

    /// Returns the longest existing hop of a sender.
    pub(crate) fn longest(&self, from: usize) -> f64 {
        let others = (0..self.of_sender.len()).map(|to| self.seconds(from, to));
        others.filter(|hop| hop.is_finite()).fold(0.0, f64::max)
    }

    /// Returns the shortest hop of a sender to another device, infinite if it reaches none.
    pub(crate) fn shortest(&self, from: usize) -> f64 {
        let others = (0..self.of_sender.len()).filter(|to| *to != from).map(|to| self.seconds(from, to));
        others.fold(f64::INFINITY, f64::min)
    }
}
