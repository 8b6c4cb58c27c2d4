//! The messages of the ring protocol: what a frame's header can say.
//!
//! Not here: what a device does with a message ([`crate::worker`], [`crate::coordinator`]).

use bincode::{Decode, Encode};
use hearth_schema::pass::Pass;

/// First field of every handshake.
pub const MAGIC: u32 = 0x4854_5248;

/// Version of the protocol; both ends must have the same.
pub const PROTOCOL: u16 = 5;

/// The purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub enum Purpose {
    /// The head's orders to a worker.
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

/// A file of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub struct FileOutline {
    /// Its bytes.
    pub length: u64,
    /// The bytes before the first tensor.
    pub header: u64,
}

/// The facts that a worker sends about itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Encode, Decode)]
pub struct WorkerFacts {
    /// Version of the program.
    pub version: String,
    /// Digest of its model file.
    pub model_digest: String,
    /// Digest of its model's shape and formats.
    pub shape_digest: String,
    /// Memory it has in total, in bytes.
    pub memory_total: u64,
    /// System and kernel.
    pub kernel: String,
}

/// Whose place is where.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct PeerAddress {
    /// Place in the ring.
    pub place: u16,
    /// The address at which it receives activations.
    pub address: String,
}

/// A header.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Message {
    /// First frame of the end that connects.
    Hello {
        magic: u32,
        protocol: u16,
        /// Names the head's session; data connections must repeat it.
        session: u64,
        purpose: Purpose,
    },
    /// First frame of the end that accepts.
    Welcome(WorkerFacts),
    /// Instead of [`Message::Welcome`], or of any answer: why not. The connection ends.
    Refuse {
        /// What, where and how to mend it.
        reason: String,
    },
    /// A new epoch: stop the current one, and accept activations of the new one.
    Prepare {
        /// Greater than every one before.
        epoch: u32,
    },
    /// The worker takes connections of that epoch, and of no other.
    Prepared { epoch: u32 },
    /// The plan of the epoch that was prepared, as payload, and this worker's place in it.
    Configure {
        epoch: u32,
        /// The worker's place in the ring.
        place: u16,
        /// Earlier passes were given up with an earlier plan.
        first_pass: u32,
        /// Where workers without the model fetch layers.
        head: String,
        /// Where it sends activations to.
        receivers: Vec<PeerAddress>,
    },
    /// The worker holds its layers and its neighbours, and nothing of passes before the epoch.
    Ready { epoch: u32 },
    /// The worker is fetching layers before it can be ready.
    Fetching {
        /// Bytes present so far.
        done: u64,
        /// Bytes to fetch.
        total: u64,
    },
    /// The worker is putting layers on its GPU before it can be ready.
    Uploading {
        /// Bytes present so far.
        done: u64,
        /// Bytes in total.
        total: u64,
    },
    /// A new request over the same ring: forget keys and values, start a new trace.
    Reset {
        /// The request's epoch.
        epoch: u32,
    },
    /// The worker can no longer exchange activations with another device.
    LinkBroken {
        /// Since which epoch.
        epoch: u32,
        peer: u16,
        reason: String,
    },
    /// Activations of a pass as payload, `[tokens, embedding]`.
    Activations {
        /// The epoch they were made in; late ones of an earlier one are dropped.
        epoch: u32,
        /// Pass index.
        pass: u32,
        /// Position of its first token.
        first_position: u32,
        /// Tokens in the batch.
        tokens: u32,
        /// Whether a token will be sampled.
        output: bool,
        /// Whose tokens, of the sequences under way.
        sequence: u32,
        /// How many of the tokens, the last ones, are drafts.
        drafted: u32,
        /// The round to take up.
        round: u32,
        /// Whether they are f16 instead of f32.
        in_half: bool,
    },
    /// Asks for the trace since the last reset.
    Collect,
    /// Trace lines as payload.
    Report {
        /// The epoch in which the lines were written.
        epoch: u32,
        /// Whether more follow.
        more: bool,
    },
    /// Asks for an answer and the time.
    Ping {
        /// Repeated in the answer.
        nonce: u64,
    },
    /// The answer to a ping.
    Pong {
        /// The nonce of the ping.
        nonce: u64,
        /// Nanoseconds on the clock of the side that answers.
        clock: u64,
    },
    /// Asks for the files of the model.
    Outline,
    /// The files of the model.
    Files {
        /// The files, in the order of the parts.
        files: Vec<FileOutline>,
    },
    /// Asks for a chunk of a file.
    Want {
        file: u16,
        /// Which chunk, from 0.
        chunk: u64,
    },
    /// A chunk, as payload.
    Chunk {
        file: u16,
        /// Which chunk, from 0.
        chunk: u64,
        /// Its SHA-256.
        hash: [u8; 32],
    },
    /// The sender ends the session in order.
    Goodbye,
}

impl Message {
    /// The header of a pass's activations, which are f16 if `in_half`.
    pub fn activations(epoch: u32, pass: Pass, round: u32, in_half: bool) -> Message {
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
            in_half,
        }
    }

    /// Returns the epoch, the pass, the round and whether values are f16 if activations follow this message.
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
            in_half,
        } = *self
        else {
            return None;
        };
        Some((epoch, Pass { index, first_position, tokens, output, sequence, drafted }, round, in_half))
    }
}
