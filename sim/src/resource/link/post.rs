//! Which message has arrived?
//!
//! A link knows messages by numbers. Here each keeps what its world wants back when it is known how it fared.
//!
//! Not here: when that is ([`super::air`], [`super::constant`]).

use std::collections::BTreeMap;

use hearth_profiles::Bytes;

use super::{AirLink, Delivery, Link, Sent};
use crate::engine::Nanos;

/// Links, and what belongs to the messages on them.
#[derive(Debug, Clone)]
pub struct Post<T> {
    links: AirLink,
    leaving: BTreeMap<u64, T>,
}

impl<T> Post<T> {
    /// Nothing has been sent over these links.
    pub fn new(links: AirLink) -> Self {
        Self { links, leaving: BTreeMap::new() }
    }

    /// Hands over a message. If nothing that comes later can change how it fares, that is known at once;
    /// [`Post::settled`] tells it otherwise.
    pub fn send(
        &mut self,
        now: Nanos,
        [from, to]: [usize; 2],
        bytes: Bytes,
        item: T,
    ) -> Option<(T, Delivery)> {
        match self.links.send(now, from, to, bytes) {
            Sent::Known(delivery) => Some((item, delivery)),
            Sent::Pending(number) => {
                self.leaving.insert(number, item);
                None
            }
        }
    }

    /// Takes one message of which everything is known by now.
    pub fn settled(&mut self, now: Nanos) -> Option<(T, Delivery)> {
        loop {
            let (number, delivery) = self.links.settled(now)?;
            // Nobody wants those that were given up.
            if let Some(item) = self.leaving.remove(&number) {
                return Some((item, delivery));
            }
        }
    }

    /// Gives up all messages that have not left. What was handed over to the air is sent all the same.
    pub fn give_up(&mut self) {
        self.leaving.clear();
    }

    /// When to ask again.
    pub fn next_event(&self) -> Option<Nanos> {
        self.links.next_event()
    }

    /// See [`AirLink::stall`].
    pub fn stall(&mut self, channel: &str, now: Nanos, until: Nanos) -> bool {
        self.links.stall(channel, now, until)
    }

    /// The same for every channel.
    pub fn stall_all(&mut self, now: Nanos, until: Nanos) {
        self.links.stall_all(now, until);
    }
}
