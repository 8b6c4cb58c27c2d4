//! The messages of the ring protocol, which are the headers of frames.

use bincode::de::Decoder;
use bincode::enc::Encoder;
use bincode::error::{DecodeError, EncodeError};
use bincode::{Decode, Encode};
use hearth_schema::pass::Pass;

/// The first field of every hello, which identifies the protocol: `HRTH` as a little-endian number.
pub const MAGIC: u32 = 0x4854_5248;

/// The version of the protocol. Both ends must have the same version.
pub const PROTOCOL_VERSION: u16 = 5;

/// The purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub enum ConnectionPurpose {
    /// Commands of the head to a worker.
    Control,
    /// Activations from the device with ring index `from`, for the plan of an epoch.
    Data { from: u16, epoch: u32 },
    /// Link measurements.
    Probe,
    /// Layers for a worker without a model file.
    Fetch,
}

/// The lengths in bytes of a model file and of its header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub struct FileLengths {
    pub file_bytes: u64,
    /// Length of the part before the first tensor, in bytes.
    pub header_bytes: u64,
}

/// The facts that a worker sends about itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Encode, Decode)]
pub struct WorkerFacts {
    /// Version of the hearth program on the worker.
    pub program_version: String,
    /// Digest of the model file; empty without one.
    pub model_digest: String,
    /// Digest of the model's shape and weight formats; empty without a model file.
    pub shape_digest: String,
    /// Total memory of the device, in bytes.
    pub memory_total_bytes: u64,
    /// Operating system and kernel release, for example `linux 6.8.0`.
    pub os_and_kernel: String,
}

/// The address at which a device of the ring receives activations.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct PeerAddress {
    /// The device's index in the ring.
    pub device_index: u16,
    pub address: String,
}

/// The configuration of an epoch, for one worker.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct EpochConfig {
    pub epoch: u32,
    /// The worker's index in the ring.
    pub device_index: u16,
    /// Index of the first pass of this epoch; earlier passes belong to earlier plans.
    pub first_pass_index: u32,
    /// The address at which the head accepts activations, and serves layers to workers without a model file.
    pub head_address: String,
    /// The devices that the worker sends activations to.
    pub receivers: Vec<PeerAddress>,
}

/// A connection to another device that broke.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct BrokenLink {
    /// The epoch for which the connection was opened.
    pub epoch: u32,
    /// The ring index of the device at the other end.
    pub peer_index: u16,
    pub reason: String,
}

/// The description of a pass, sent with its activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActivationsHeader {
    /// The epoch in which the activations were computed. Activations of an earlier epoch are dropped.
    pub epoch: u32,
    pub pass: Pass,
    /// The round that the receiver computes next.
    pub round: u32,
    /// Whether the values are f16 instead of f32.
    pub is_f16: bool,
}

impl Encode for ActivationsHeader {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        let Pass { index, first_position, tokens, has_output: output, sequence_index: sequence, drafted } =
            self.pass;
        let pass = (index, first_position, tokens, output, sequence, drafted);
        (self.epoch, pass, self.round, self.is_f16).encode(encoder)
    }
}

impl<Context> Decode<Context> for ActivationsHeader {
    fn decode<D: Decoder<Context = Context>>(decoder: &mut D) -> Result<Self, DecodeError> {
        let (epoch, (index, first_position, tokens, output, sequence, drafted), round, is_f16) =
            Decode::decode(decoder)?;
        let pass =
            Pass { index, first_position, tokens, has_output: output, sequence_index: sequence, drafted };
        Ok(Self { epoch, pass, round, is_f16 })
    }
}

bincode::impl_borrow_decode!(ActivationsHeader);

/// A message, which is the header of a frame.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Message {
    /// The first frame of the connecting end. Data connections must have the session number of the head.
    Hello { magic: u32, protocol: u16, session: u64, purpose: ConnectionPurpose },
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
    Configure(EpochConfig),
    /// The worker has loaded its layers, connected to its neighbours, and discarded all passes before the epoch.
    Ready { epoch: u32 },
    /// The worker has fetched `done` of the `total` bytes of layers that it needs before it is ready.
    Fetching { done: u64, total: u64 },
    /// The worker has uploaded `done` of the `total` bytes of layers that its GPU needs before it is ready.
    Uploading { done: u64, total: u64 },
    /// Begins a new request on the same ring: the worker clears its KV cache and starts a new trace.
    Reset { epoch: u32 },
    /// The worker can no longer exchange activations with another device.
    LinkBroken(BrokenLink),
    /// Activations of a pass. The payload is `[tokens, embedding]`.
    Activations(ActivationsHeader),
    /// Requests the trace since the last reset.
    CollectTrace,
    /// Trace lines of an epoch, as payload. `more` says whether more reports follow.
    TraceLines { epoch: u32, more: bool },
    /// Requests a pong with the same nonce.
    Ping { nonce: u64 },
    /// The reply to a ping. `clock` is the time of the replying device, in nanoseconds.
    Pong { nonce: u64, clock: u64 },
    /// Requests the lengths of the head's model files.
    ListFiles,
    /// The lengths of the model files, in the order of the parts of a split GGUF model.
    Files { files: Vec<FileLengths> },
    /// Requests a chunk of a model file, by the index of the file and the index of the chunk in it.
    GetChunk { file: u16, chunk: u64 },
    /// A chunk of a model file, as payload, and its SHA-256.
    Chunk { file: u16, chunk: u64, hash: [u8; 32] },
    /// The sender ends the session.
    Goodbye,
}
