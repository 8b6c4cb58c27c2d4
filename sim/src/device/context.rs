//! Interface between a simulated device and the simulated ring: events, messages and trace records.

use hearth_profiles::Bytes;
use hearth_schema::pass::Batch;
use hearth_schema::trace::StepRecord;

use crate::engine::Engine;

/// An event of a simulated ring; a `usize` is a device ID, the index among all devices of the run.
#[derive(Debug, Clone)]
pub enum Event {
    /// A step of known duration has ended, a woken thread runs, or a read that found no free memory is tried again.
    Wake(usize),
    /// The CPU may have finished a computation.
    Cpu(usize),
    Disk(usize),
    /// The helper thread, which reads weights ahead, continues after a pause or a wait.
    Helper(usize),
    /// A Wi-Fi transmission may have ended.
    Wifi,
    /// A message arrives at the device.
    Deliver(usize, Message),
    /// An action of the event timeline is due.
    Timeline,
    /// A request arrives.
    Arrival,
}

/// Activations on the way from one device to the next.
#[derive(Debug, Clone)]
pub struct Message {
    pub batch: Batch,
    /// The round around the ring in which the receiver will compute.
    pub round: u32,
    /// The round around the ring in which the sender computed; one less than `round` if the receiver is the head
    /// device.
    pub sender_round: u32,
    /// The device ID of the sender: its index among all devices of the run.
    pub sender_id: usize,
    pub bytes: Bytes,
}

/// What a simulated device sends: activations to another device, or the tokens of a batch.
#[derive(Debug, Clone)]
pub enum DeviceOutput {
    /// Activations for the device with this index in the ring.
    Send(usize, Message),
    /// The tokens of the batch with this index.
    Output(u32),
}

/// Access of a device to the event queue and the trace while it handles an event.
#[derive(Debug)]
pub struct SimContext<'a> {
    pub engine: &'a mut Engine<Event>,
    pub records: &'a mut Vec<StepRecord>,
    pub outputs: &'a mut Vec<DeviceOutput>,
}
