//! Who cannot be reached, and what becomes of messages to and from them?
//!
//! A device is cut off while it is away or its links stand still. What is sent to it or by it then is held, as TCP
//! holds it, and goes on when the device is back. If the ring has a new plan before that, the held messages are given
//! up with everything else of the old one.
//!
//! Not here: who notices ([`hearth_core::recovery::heartbeat`]), and what a ring does then ([`crate::ring::reconfiguration`]).

use crate::device::context::Message;
use crate::engine::Nanos;

/// A message that cannot go on.
#[derive(Debug, Clone, Copy)]
pub struct Held {
    /// The sender's slot.
    pub from: usize,
    /// The receiver's slot.
    pub to: usize,
    /// The message.
    pub message: Message,
    /// When it was handed over, if it has not been sent yet.
    pub unsent: Option<Nanos>,
}

/// Who of the cluster's members is cut off.
#[derive(Debug, Clone)]
pub struct Reachability {
    /// For each member, how many events cut it off now.
    cut: Vec<u32>,
    /// Since when.
    since: Vec<Nanos>,
    held: Vec<Held>,
}

impl Reachability {
    /// All of so many members can be reached.
    pub fn new(members: usize) -> Self {
        Self { cut: vec![0; members], since: vec![0; members], held: Vec::new() }
    }

    /// A member is cut off by one more event. True if it could be reached before.
    pub fn cut(&mut self, now: Nanos, member: usize) -> bool {
        self.cut[member] += 1;
        let first = self.cut[member] == 1;
        if first {
            self.since[member] = now;
        }
        first
    }

    /// One of the events is over. True if the member can be reached again.
    pub fn back(&mut self, member: usize) -> bool {
        let before = self.cut[member];
        self.cut[member] = before.saturating_sub(1);
        before == 1
    }

    /// Whether a member can be reached.
    pub fn reaches(&self, member: usize) -> bool {
        self.cut[member] == 0
    }

    /// Since when a member has been cut off, if it is.
    pub fn since(&self, member: usize) -> Option<Nanos> {
        (self.cut[member] > 0).then(|| self.since[member])
    }

    /// Holds a message.
    pub fn hold(&mut self, held: Held) {
        self.held.push(held);
    }

    /// Takes the messages that can go on, in the order in which they were held. `slots` are the members at each slot.
    pub fn go_on(&mut self, slots: &[usize]) -> Vec<Held> {
        let free = |held: &mut Held| [held.from, held.to].iter().all(|&slot| self.cut[slots[slot]] == 0);
        self.held.extract_if(.., free).collect()
    }

    /// Gives all held messages up.
    pub fn give_up(&mut self) {
        self.held.clear();
    }
}
