//! The messages of the ring protocol, which are the headers of frames.
//!
//! Not here: the handling of messages ([`crate::worker`], [`crate::coordinator`]).

use bincode::{Decode, Encode};
use hearth_schema::pass::Pass;

/// The first field of every hello.
pub const MAGIC: u32 = 0x4854_5248;

/// The version of the protocol. Both ends must have the same version.
pub const PROTOCOL_VERSION: u16 = 5;

/// The purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub enum Purpose {
    /// Commands of the head to a worker.
    Control,
    /// Activations from a neighbour in the ring.
    Data {
        /// The neighbour's place in the ring.
        from: u16,
        /// The epoch of the plan that both ends use.
        epoch: u32,
    },
    /// Link measurements.
    Probe,
    /// Layers for a worker without a model file.
    Fetch,
}

/// The lengths of a model file and of its header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub struct FileLengths {
    /// Bytes of the whole file.
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

/// The address of a device in the ring.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct PeerAddress {
    /// The device's place in the ring.
    pub place: u16,
    /// The address at which the device receives activations.
    pub address: String,
}

/// A message, which is the header of a frame.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Message {
    /// The first frame of the connecting end.
    Hello {
        magic: u32,
        protocol: u16,
        /// The number of the head's session. Data connections must have the same number.
        session: u64,
        purpose: Purpose,
    },
    /// The first frame of the accepting end.
    Welcome(WorkerFacts),
    /// Sent instead of a [`Message::Welcome`] or of any other reply. The connection then ends.
    Refuse {
        /// What is wrong and how to fix it.
        reason: String,
    },
    /// Tells the worker to stop the current epoch, and to accept activations of the new one.
    Prepare {
        /// The new epoch; greater than all earlier ones.
        epoch: u32,
    },
    /// The worker accepts only connections of this epoch.
    Prepared { epoch: u32 },
    /// Configures the prepared epoch. The payload is the plan.
    Configure {
        epoch: u32,
        /// The worker's place in the ring.
        place: u16,
        /// Index of the first pass of this epoch; earlier passes belong to earlier plans.
        first_pass: u32,
        /// The address at which the head accepts activations, and serves layers to workers without a model file.
        head: String,
        /// The devices that the worker sends activations to.
        receivers: Vec<PeerAddress>,
    },
    /// The worker has loaded its layers, connected to its neighbours, and discarded all passes before the epoch.
    Ready { epoch: u32 },
    /// The worker is fetching layers before it can be ready.
    Fetching {
        /// Bytes fetched so far.
        done: u64,
        /// Bytes to fetch.
        total: u64,
    },
    /// The worker is uploading layers to its GPU before it can be ready.
    Uploading {
        /// Bytes uploaded so far.
        done: u64,
        /// Bytes to upload.
        total: u64,
    },
    /// Begins a new request on the same ring: the worker clears its KV cache and starts a new trace.
    Reset {
        /// The epoch of the request.
        epoch: u32,
    },
    /// The worker can no longer exchange activations with another device.
    LinkBroken {
        /// The epoch for which the connection was opened.
        epoch: u32,
        /// The other device's place in the ring.
        peer: u16,
        reason: String,
    },
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
        /// Whether a token will be sampled.
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
    /// Trace lines, as payload.
    Report {
        /// The epoch in which the lines were written.
        epoch: u32,
        /// Whether more reports follow.
        more: bool,
    },
    /// Requests a pong with the time.
    Ping {
        /// Repeated in the pong.
        nonce: u64,
    },
    /// The reply to a ping.
    Pong {
        /// The nonce of the ping.
        nonce: u64,
        /// Nanoseconds on the clock of the replying device.
        clock: u64,
    },
    /// Requests the lengths of the model files.
    ListFiles,
    /// The lengths of the model files.
    Files {
        /// The files, in the order of the parts.
        files: Vec<FileLengths>,
    },
    /// Requests a chunk of a model file.
    GetChunk {
        /// Index of the file.
        file: u16,
        /// Index of the chunk in the file.
        chunk: u64,
    },
    /// A chunk of a model file, as payload.
    Chunk {
        /// Index of the file.
        file: u16,
        /// Index of the chunk in the file.
        chunk: u64,
        /// SHA-256 of the chunk.
        hash: [u8; 32],
    },
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
