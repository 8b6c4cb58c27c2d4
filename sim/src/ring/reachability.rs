//! Reachability of devices, and the messages to and from unreachable ones.
//!
//! A device is unreachable while it is away or its links stall. Messages to and from it are held, as TCP holds them,
//! and continue when the device is back. If the ring gets a new plan before that, the held messages are dropped.
//!
//! Not here: failure detection ([`hearth_core::recovery::heartbeat`]), and the reaction
//! ([`crate::ring::reconfiguration`]).

use crate::device::context::Message;
use crate::engine::Nanos;

/// A message to or from an unreachable device.
#[derive(Debug, Clone, Copy)]
pub struct Held {
    pub from: usize,
    pub to: usize,
    pub message: Message,
    /// The time at which it was handed over, if it has not been sent yet.
    pub unsent: Option<Nanos>,
}

/// The members of the cluster that are unreachable.
#[derive(Debug, Clone)]
pub struct Reachability {
    /// The number of active events that disconnect each member.
    cut: Vec<u32>,
    /// The time at which each member became unreachable.
    since: Vec<Nanos>,
    held: Vec<Held>,
}

impl Reachability {
    pub fn new(members: usize) -> Self {
        Self { cut: vec![0; members], since: vec![0; members], held: Vec::new() }
    }

    /// Adds an event that cuts a member off. Returns true if it was reachable before.
    pub fn cut(&mut self, now: Nanos, member: usize) -> bool {
        self.cut[member] += 1;
        let first = self.cut[member] == 1;
        if first {
            self.since[member] = now;
        }
        first
    }

    /// Removes an event that cut a member off. Returns true if it is reachable again.
    pub fn back(&mut self, member: usize) -> bool {
        let before = self.cut[member];
        self.cut[member] = before.saturating_sub(1);
        before == 1
    }

    pub fn reaches(&self, member: usize) -> bool {
        self.cut[member] == 0
    }

    /// Returns the time at which a member became unreachable, if it is.
    pub fn since(&self, member: usize) -> Option<Nanos> {
        (self.cut[member] > 0).then(|| self.since[member])
    }

    pub fn hold(&mut self, held: Held) {
        self.held.push(held);
    }

    /// Takes the messages that can continue, in the order in which they were held. `slots` are the members at each
    /// slot.
    pub fn take_deliverable(&mut self, slots: &[usize]) -> Vec<Held> {
        let free = |held: &mut Held| [held.from, held.to].iter().all(|&slot| self.cut[slots[slot]] == 0);
        self.held.extract_if(.., free).collect()
    }

    /// Drops all held messages.
    pub fn drop_held(&mut self) {
        self.held.clear();
    }
}
