//! Reachability of devices, and the messages to and from unreachable devices.
//!
//! A device is unreachable while it is away or its links stall. Messages to and from the device are held, as in TCP,
//! and continue when the device is reachable again. If the ring gets a new plan before that, they are dropped.
//!
//! Not here: failure detection ([`hearth_core::recovery::heartbeat`]), and the reaction to a failure
//! ([`crate::ring::reconfiguration`]).

use crate::device::context::Message;
use crate::engine::Nanos;

#[derive(Debug, Clone)]
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
    pub fn new(member_count: usize) -> Self {
        Self { disconnections: vec![0; member_count], since: vec![0; member_count], held_messages: vec![] }
    }

    /// Handles the start of an event that disconnects a member. Returns whether the member was reachable until then.
    pub fn disconnect(&mut self, now: Nanos, member: usize) -> bool {
        self.disconnections[member] += 1;
        let first = self.disconnections[member] == 1;
        if first {
            self.since[member] = now;
        }
        first
    }

    /// Handles the end of an event that disconnects a member. Returns whether the member is reachable again.
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

    /// Removes and returns the held messages that can continue, in order. `member_indices` has the index
    /// of each device among the members of the cluster, by device ID.
    pub fn pop_deliverable_messages(&mut self, member_indices: &[usize]) -> Vec<HeldMessage> {
        let is_reachable = |id: usize| self.disconnections[member_indices[id]] == 0;
        let is_free =
            |held: &mut HeldMessage| is_reachable(held.message.sender_id) && is_reachable(held.receiver);
        self.held_messages.extract_if(.., is_free).collect()
    }
}
