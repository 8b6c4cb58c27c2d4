//! The interface between a device and the simulation around it: events, messages, records.

use hearth_profiles::Bytes;
use hearth_schema::pass::Pass;
use hearth_schema::trace::Record;

use crate::engine::{Engine, Nanos};

/// An event of a simulated ring; a `usize` is the device's slot.
#[derive(Debug, Clone, Copy)]
pub enum Event {
    /// A step of known duration has ended, or a touch must be tried again.
    Wake(usize),
    /// The processor may have finished a computation.
    Processor(usize),
    /// Reads may have arrived.
    Disk(usize),
    /// The helper thread continues after a pause or a wait.
    Helper(usize),
    /// A Wi-Fi transmission may have ended.
    Wifi,
    /// Activations arrive at the device.
    Deliver(usize, Message),
    /// An action of the event timeline is due.
    Timeline,
}

/// Activations on the way from one device to the next.
#[derive(Debug, Clone, Copy)]
pub struct Message {
    pub pass: Pass,
    /// The round that the receiver begins.
    pub round: u32,
    /// The round in which the activations were sent.
    pub sent_round: u32,
    /// The sender's slot.
    pub from: u16,
    pub bytes: Bytes,
    /// The time at which the activations arrive.
    pub arrival: Nanos,
}

/// An output of a device, which the simulation processes.
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
    /// Outputs of the device, which the simulation processes afterwards.
    pub outgoing: &'a mut Vec<Outgoing>,
}
