//! The messages of the ring protocol, which are the headers of frames.

use bincode::{Decode, Encode};
use hearth_schema::pass::Pass;

/// The first field of every hello, which identifies the protocol: `HRTH` as a little-endian number.
pub const MAGIC: u32 = 0x4854_5248;

/// The version of the protocol. Both ends must have the same version.
pub const PROTOCOL_VERSION: u16 = 5;

/// The purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub enum Purpose {
    /// Commands of the head to a worker.
    Control,
    /// Activations from the device with ring index `from`, for the plan of an epoch.
    Data { from: u16, epoch: u32 },
    /// Link measurements.
    Probe,
    /// Layers for a worker without a model file.
    Fetch,
}

/// The lengths of a model file and of its header, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub struct FileLengths {
    pub file: u64,
    /// Bytes before the first tensor.
    pub header: u64,
}

/// The facts that a worker sends about itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Encode, Decode)]
pub struct WorkerFacts {
    /// Version of the program.
    pub version: String,
    /// Digest of the model file; empty without one.
    pub model_digest: String,
    /// Digest of the model's shape and weight formats; empty without a model file.
    pub shape_digest: String,
    /// Total memory of the device, in bytes.
    pub memory_total: u64,
    /// Operating system and release of its kernel.
    pub kernel: String,
}

/// The address at which a device of the ring receives activations.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct PeerAddress {
    /// The device's index in the ring.
    pub device_index: u16,
    pub address: String,
}

/// A message, which is the header of a frame.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Message {
    /// The first frame of the connecting end. Data connections must have the session number of the head.
    Hello { magic: u32, protocol: u16, session: u64, purpose: Purpose },
    /// The first frame of the accepting end.
    Welcome(WorkerFacts),
    /// Sent instead of a [`Message::Welcome`] or of any other reply. The connection then ends. The reason says what is
    /// wrong and how to fix it.
    Refuse { reason: String },
    /// Commands the worker to stop the current epoch, and to accept activations of the new one, whose number is
    /// greater than all earlier ones.
    Prepare { epoch: u32 },
    /// The reply to [`Message::Prepare`]: the worker accepts only connections of this epoch from now on.
    Prepared { epoch: u32 },
    /// Configures the prepared epoch. The payload is the plan.
    Configure {
        epoch: u32,
        /// The worker's index in the ring.
        device_index: u16,
        /// Index of the first pass of this epoch; earlier passes belong to earlier plans.
        first_pass: u32,
        /// The address at which the head accepts activations, and serves layers to workers without a model file.
        head: String,
        /// The devices that the worker sends activations to.
        receivers: Vec<PeerAddress>,
    },
    /// The worker has loaded its layers, connected to its neighbours, and discarded all passes before the epoch.
    Ready { epoch: u32 },
    /// The worker has fetched `done` of the `total` bytes of layers that it needs before it is ready.
    Fetching { done: u64, total: u64 },
    /// The worker has uploaded `done` of the `total` bytes of layers that its GPU needs before it is ready.
    Uploading { done: u64, total: u64 },
    /// Begins a new request on the same ring: the worker clears its KV cache and starts a new trace.
    Reset { epoch: u32 },
    /// The worker can no longer exchange activations with the device that has ring index `peer`. The connection was
    /// opened for `epoch`.
    LinkBroken { epoch: u32, peer: u16, reason: String },
    /// Activations of a pass. The payload is `[tokens, embedding]`.
    Activations {
        /// The epoch in which they were computed. Activations of an earlier epoch are dropped.
        epoch: u32,
        /// Index of the pass.
        pass: u32,
        /// Position of the first token of the pass.
        first_position: u32,
        /// Number of tokens of the pass.
        tokens: u32,
        /// Whether tokens are sampled from the output of the pass.
        output: bool,
        /// The sequence that the tokens belong to.
        sequence: u32,
        /// Number of drafted tokens, which are the last ones of the pass.
        drafted: u32,
        /// The round that the receiver computes next.
        round: u32,
        /// Whether the values are f16 instead of f32.
        is_f16: bool,
    },
    /// Requests the trace since the last reset.
    Collect,
    /// Trace lines of an epoch, as payload. `more` says whether more reports follow.
    Report { epoch: u32, more: bool },
    /// Requests a pong with the same nonce.
    Ping { nonce: u64 },
    /// The reply to a ping. `clock` is the time of the replying device, in nanoseconds.
    Pong { nonce: u64, clock: u64 },
    /// Requests the lengths of the model files.
    ListFiles,
    /// The lengths of the model files, in the order of the parts.
    Files { files: Vec<FileLengths> },
    /// Requests a chunk of a model file, by the indices of both.
    GetChunk { file: u16, chunk: u64 },
    /// A chunk of a model file, as payload, and its SHA-256.
    Chunk { file: u16, chunk: u64, hash: [u8; 32] },
    /// The sender ends the session.
    Goodbye,
}

impl Message {
    /// Creates the message for the activations of a pass, which are f16 if `is_f16`.
    pub fn activations(epoch: u32, pass: Pass, round: u32, is_f16: bool) -> Message {
        let Pass { index, first_position, tokens, output, sequence, drafted } = pass;
        Message::Activations {
            epoch,
            pass: index,
            first_position,
            tokens,
            output,
            sequence,
            drafted,
            round,
            is_f16,
        }
    }

    /// Returns the epoch, the pass, the round and whether values are f16, if this is a message with activations.
    pub fn pass(&self) -> Option<(u32, Pass, u32, bool)> {
        let Message::Activations {
            epoch,
            pass: index,
            first_position,
            tokens,
            output,
            sequence,
            drafted,
            round,
            is_f16,
        } = *self
        else {
            return None;
        };
        Some((epoch, Pass { index, first_position, tokens, output, sequence, drafted }, round, is_f16))
    }
}
