//! What a device exchanges with the simulation around it: events, messages, records.

use hearth_profiles::Bytes;
use hearth_schema::pass::Pass;
use hearth_schema::trace::Record;

use crate::engine::{Engine, Nanos};

/// Something that happens at a place in the ring.
#[derive(Debug, Clone, Copy)]
pub enum Event {
    /// A step of known length is over, or a touch is tried again.
    Wake(usize),
    /// The processor may be done with something.
    Processor(usize),
    /// Reads may have arrived.
    Disk(usize),
    /// The helper goes on.
    Helper(usize),
    /// A Wi-Fi transmission may be over.
    Wifi,
    /// Activations arrive.
    Deliver(usize, Message),
    /// The event timeline has an action due.
    Timeline,
}

/// Activations on their way.
#[derive(Debug, Clone, Copy)]
pub struct Message {
    /// Whose.
    pub pass: Pass,
    /// The round that the receiver takes up.
    pub round: u32,
    /// The round in which it was sent.
    pub sent_in: u32,
    /// Who sent it.
    pub from: u16,
    /// Their size.
    pub bytes: Bytes,
    /// When they were there.
    pub at: Nanos,
}

/// What happened that others must hear of.
#[derive(Debug, Clone, Copy)]
pub enum Outgoing {
    /// Activations for another place in the ring.
    Send(usize, Message),
    /// The tokens of a pass are out.
    Output(u32),
}

/// Where a device schedules events, writes records and leaves what others must hear of.
#[derive(Debug)]
pub struct SimContext<'a> {
    /// Pending events.
    pub engine: &'a mut Engine<Event>,
    /// The trace so far.
    pub records: &'a mut Vec<Record>,
    /// To be delivered by the simulation.
    pub outgoing: &'a mut Vec<Outgoing>,
}
