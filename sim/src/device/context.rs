//! The interface between a device and the simulation around it: events, messages, records.

use hearth_profiles::Bytes;
use hearth_schema::pass::Pass;
use hearth_schema::trace::Record;

use crate::engine::{Engine, Nanos};

/// An event of a simulated ring; a `usize` is the device's slot.
#[derive(Debug, Clone, Copy)]
pub enum Event {
    /// A step of known length is over, or a touch is tried again.
    Wake(usize),
    /// The processor may have finished a computation.
    Processor(usize),
    /// Reads may have arrived.
    Disk(usize),
    /// The helper thread continues.
    Helper(usize),
    /// A Wi-Fi transmission may be over.
    Wifi,
    /// Activations arrive.
    Deliver(usize, Message),
    /// The event timeline has an action due.
    Timeline,
}

/// Activations in flight.
#[derive(Debug, Clone, Copy)]
pub struct Message {
    pub pass: Pass,
    /// The round that the receiver begins.
    pub round: u32,
    /// The round in which they were sent.
    pub sent_in: u32,
    /// The sender's slot.
    pub from: u16,
    pub bytes: Bytes,
    /// The time at which they arrived.
    pub at: Nanos,
}

/// Something that a device hands to the simulation.
#[derive(Debug, Clone, Copy)]
pub enum Outgoing {
    /// Activations for another place in the ring.
    Send(usize, Message),
    /// The tokens of a pass are available.
    Output(u32),
}

/// Access of a device to the event queue and the trace while it handles an event.
#[derive(Debug)]
pub struct SimContext<'a> {
    pub engine: &'a mut Engine<Event>,
    /// The trace so far.
    pub records: &'a mut Vec<Record>,
    /// Messages that the simulation processes afterwards.
    pub outgoing: &'a mut Vec<Outgoing>,
}
