//! Reachability of devices, and the messages to and from unreachable devices.
//!
//! A device is unreachable while it is away or its links stall. Messages to and from the device are held, as in TCP,
//! and continue when the device is reachable again. A new plan of the ring before that drops the held messages.
//!
//! Not here: failure detection ([`hearth_core::recovery::heartbeat`]), and the reaction to a failure
//! ([`crate::ring::reconfiguration`]).

use crate::device::context::Message;
use crate::engine::Nanos;

#[derive(Debug, Clone, Copy)]
pub struct HeldMessage {
    pub receiver: usize,
    pub message: Message,
    /// The time at which the message was submitted; `None` if the message has been sent already.
    pub unsent_since: Option<Nanos>,
}

#[derive(Debug, Clone)]
pub struct Reachability {
    /// For each member, the number of active events that disconnect it.
    disconnections: Vec<u32>,
    /// For each member, the time at which it last became unreachable.
    since: Vec<Nanos>,
    pub held_messages: Vec<HeldMessage>,
}

impl Reachability {
    pub fn new(members: usize) -> Self {
        Self { disconnections: vec![0; members], since: vec![0; members], held_messages: Vec::new() }
    }

    /// Counts the start of an event that disconnects a member. Returns whether the member was reachable before.
    pub fn disconnect(&mut self, now: Nanos, member: usize) -> bool {
        self.disconnections[member] += 1;
        let first = self.disconnections[member] == 1;
        if first {
            self.since[member] = now;
        }
        first
    }

    /// Counts the end of an event that disconnects a member. Returns whether the member has become reachable again.
    pub fn reconnect(&mut self, member: usize) -> bool {
        let before = self.disconnections[member];
        self.disconnections[member] = before.saturating_sub(1);
        before == 1
    }

    pub fn is_reachable(&self, member: usize) -> bool {
        self.disconnections[member] == 0
    }

    /// Returns the time at which a member became unreachable; `None` if the member is reachable.
    pub fn unreachable_since(&self, member: usize) -> Option<Nanos> {
        (self.disconnections[member] > 0).then(|| self.since[member])
    }

    /// Removes and returns the held messages that can continue, in order. `members` has the member index of each slot.
    pub fn pop_deliverable_messages(&mut self, members: &[usize]) -> Vec<HeldMessage> {
        let is_reachable = |slot: usize| self.disconnections[members[slot]] == 0;
        let is_free =
            |held: &mut HeldMessage| is_reachable(held.message.sender_slot) && is_reachable(held.receiver);
        self.held_messages.extract_if(.., is_free).collect()
    }
}
