//! The messages of the ring protocol, which are the headers of frames.

use bincode::de::Decoder;
use bincode::enc::Encoder;
use bincode::error::{DecodeError, EncodeError};
use bincode::{Decode, Encode};
use hearth_schema::pass::{Batch, CacheChange, Pass};

/// The first field of every hello, which identifies the protocol: `HRTH` as a little-endian number.
pub const MAGIC: u32 = 0x4854_5248;

/// The version of the ring protocol. Both ends of a connection must have the same version.
pub const PROTOCOL_VERSION: u16 = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub enum ConnectionPurpose {
    /// Commands of the head to a worker, and the replies.
    Control,
    /// Activations that the device with ring index `from` sends in an epoch.
    Data { from: u16, epoch: u32 },
    /// Link measurements.
    Probe,
    /// Layers that the head sends to a worker without a model file.
    Fetch,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub struct FileLengths {
    pub file_bytes: u64,
    /// Length of the part of the file before the first tensor, in bytes.
    pub header_bytes: u64,
}

/// The information that a worker sends about itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Encode, Decode)]
pub struct WorkerInfo {
    /// Version of the hearth program on the worker.
    pub program_version: String,
    /// Digest of the model file; empty without a model file.
    pub model_digest: String,
    /// Digest of the model's shape and weight formats; empty without a model file.
    pub shape_digest: String,
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

/// The configuration of one worker for an epoch.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct EpochConfig {
    pub epoch: u32,
    /// The worker's index in the ring.
    pub device_index: u16,
    /// Index of the first pass of the epoch; passes with a smaller index belong to earlier plans.
    pub first_pass_index: u32,
    /// The address at which the head accepts activations, and serves layers to workers without a model file.
    pub head_address: String,
    /// The devices that the worker sends activations to.
    pub receivers: Vec<PeerAddress>,
}

/// The report that a device cannot exchange activations with another device.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct BrokenLink {
    /// The epoch for which the connection was opened.
    pub epoch: u32,
    /// The ring index of the device at the other end.
    pub peer_index: u16,
    /// Whether the device at the other end sent activations that no correct device sends. Otherwise, the connection
    /// broke, and either device or the network may be the cause.
    pub is_fault: bool,
    pub reason: String,
}

/// The numbers of messages with activations that a device has received and sent in the current epoch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Encode, Decode)]
pub struct ActivationCounts {
    pub received: u64,
    pub sent: u64,
}

/// The description of a batch, sent with its activations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActivationsHeader {
    /// The epoch in which the activations were computed. Activations of an earlier epoch are dropped.
    pub epoch: u32,
    pub batch: Batch,
    /// The round that the receiver computes next.
    pub round: u32,
    /// Whether the values are f16 instead of f32.
    pub is_f16: bool,
}

/// The first position, the number of tokens, whether there is an output, the sequence, and the number of drafts.
type WirePass = (u32, u32, bool, u32, u32);

/// The sequences from and to which positions are copied, and their number; a released sequence is copied to itself.
type WireCacheChange = (u32, u32, u32);

impl Encode for ActivationsHeader {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        let passes: Vec<WirePass> = self
            .batch
            .passes()
            .iter()
            .map(|pass| {
                (pass.first_position, pass.tokens, pass.has_output, pass.sequence_index, pass.drafted)
            })
            .collect();
        let changes: Vec<WireCacheChange> = self
            .batch
            .cache_changes()
            .iter()
            .map(|change| match *change {
                CacheChange::Release { sequence } => (sequence, sequence, 0),
                CacheChange::Copy { from, to, tokens } => (from, to, tokens),
            })
            .collect();
        (self.epoch, self.batch.index(), passes, changes, self.round, self.is_f16).encode(encoder)
    }
}

impl<Context> Decode<Context> for ActivationsHeader {
    fn decode<D: Decoder<Context = Context>>(decoder: &mut D) -> Result<Self, DecodeError> {
        type Fields = (u32, u32, Vec<WirePass>, Vec<WireCacheChange>, u32, bool);
        let (epoch, first, passes, changes, round, is_f16): Fields = Decode::decode(decoder)?;
        let pass = |(index, (first_position, tokens, has_output, sequence_index, drafted))| Pass {
            sequence_index,
            drafted,
            ..Pass::new(index, first_position, tokens, has_output)
        };
        let batch = Batch::new((first..=u32::MAX).zip(passes).map(pass).collect());
        let batch = batch.ok_or(DecodeError::Other("the passes do not form a batch"))?;
        let change = |(from, to, tokens)| {
            if from == to {
                CacheChange::Release { sequence: from }
            } else {
                CacheChange::Copy { from, to, tokens }
            }
        };
        let batch = batch.with_cache_changes(changes.into_iter().map(change).collect());
        Ok(Self { epoch, batch, round, is_f16 })
    }
}

bincode::impl_borrow_decode!(ActivationsHeader);

/// A message, which is the header of a frame.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Message {
    /// The first frame of the connecting device. The connections of a session have the same `session` number.
    Hello { magic: u32, protocol: u16, session: u64, purpose: ConnectionPurpose },
    /// The first frame of the accepting device.
    Welcome(WorkerInfo),
    /// Replaces any reply and ends the connection. `reason` says what is wrong and how to fix the problem.
    Refuse { reason: String },
    /// Commands the worker to stop the current epoch, and to accept activations of `epoch`, which has a greater number.
    Prepare { epoch: u32 },
    /// The reply to [`Message::Prepare`]: the worker accepts only connections of this epoch from now on.
    Prepared { epoch: u32 },
    /// Configures the prepared epoch. The payload is the plan as YAML.
    Configure(EpochConfig),
    /// The worker has loaded its layers, connected to its neighbours, and discarded all passes of earlier epochs.
    Ready { epoch: u32 },
    /// The worker has fetched `done` of the `total` bytes of layers that it must fetch before it is ready.
    Fetching { done: u64, total: u64 },
    /// The worker has verified, or uploaded to its GPU, `done` of the `total` bytes of layers before it is ready.
    Uploading { done: u64, total: u64 },
    /// Begins a new request on the same ring: the worker clears its KV cache and starts a new trace.
    Reset { epoch: u32 },
    /// The worker can no longer exchange activations with another device.
    LinkBroken(BrokenLink),
    /// Activations of a batch. The payload has the shape `[tokens, embedding]`.
    Activations(ActivationsHeader),
    /// Requests the trace lines of the worker since the last [`Message::Reset`].
    CollectTrace,
    /// Trace lines of an epoch. The payload is JSON. `more` is true if another message with trace lines follows.
    TraceLines { epoch: u32, more: bool },
    /// Requests a [`Message::Pong`] with the same nonce.
    Ping { nonce: u64 },
    /// The reply to a [`Message::Ping`]. `clock_ns` is the time on the clock of the replying device.
    Pong { nonce: u64, clock_ns: u64, counts: ActivationCounts },
    /// Requests the lengths of the head's model files.
    ListFiles,
    /// The reply to [`Message::ListFiles`], with the files in the order of the splits of the GGUF model.
    Files { files: Vec<FileLengths> },
    /// Requests a chunk of a model file, by the index of the file and the index of the chunk in the file.
    GetChunk { file: u16, chunk: u64 },
    /// The reply to [`Message::GetChunk`]. The payload is the chunk, and `hash` is the SHA-256 of the chunk.
    Chunk { file: u16, chunk: u64, hash: [u8; 32] },
    /// The head ends the session.
    Goodbye,
}
