//! How do bytes on a connection become messages, when nobody trusts them?
//!
//! A frame is two little-endian `u32` lengths, a bincode header of the first length and a raw payload of
//! the second: tensors and documents travel beside the header, never inside. Both lengths are checked
//! against limits before anything is allocated, the header is decoded with a byte limit (bincode without
//! one allocates what a ten-byte message asks for), and every byte of it must be used.
//!
//! Not here: what a message means ([`super::worker`], [`super::head`]).

use bincode::{Decode, Encode};
use hearth_schema::pass::Pass;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

#[cfg(target_endian = "big")]
compile_error!("activations travel as little-endian numbers; a big-endian host needs a conversion here");

/// First field of every handshake.
pub const MAGIC: u32 = 0x4854_5248;

/// Version of the protocol; both ends must have the same.
pub const PROTOCOL: u16 = 5;

/// What a connection sealed with a key begins with. As the length of a header it is far beyond the limit,
/// so no unsealed frame begins like this.
pub const SEALED: [u8; 8] = *b"hearth\0\x01";

/// The longest header, in bytes: names, addresses and digests.
const MAX_HEADER_BYTES: usize = 64 << 10;

/// The longest payload before a connection is known to carry activations: a plan or a trace chunk.
pub const MAX_DOCUMENT_PAYLOAD: usize = 4 << 20;

/// Bytes of the two lengths.
const PREFIX_BYTES: usize = 8;

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub enum Purpose {
    /// The head's orders to a worker.
    Control,
    /// Activations from a neighbour in the ring.
    Data {
        /// The neighbour's place in the ring.
        from: u16,
        /// For which epoch both have taken up a plan.
        epoch: u32,
    },
    /// Link measurements.
    Probe,
    /// Layers that the one who connects has not.
    Fetch,
}

/// A file of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub struct FileOutline {
    /// Its bytes.
    pub length: u64,
    /// Of these before the first tensor.
    pub header: u64,
}

/// What a worker tells about itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Encode, Decode)]
pub struct WorkerFacts {
    /// Version of the program.
    pub version: String,
    /// Digest of its model file.
    pub model_digest: String,
    /// Digest of its model's shape and formats.
    pub shape_digest: String,
    /// Memory it has in all, in bytes.
    pub memory_total: u64,
    /// System and kernel.
    pub kernel: String,
}

/// Whose place is where.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct PeerAddress {
    /// Place in the ring.
    pub place: u16,
    /// Address it takes activations at.
    pub address: String,
}

/// A header.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Message {
    /// First frame of whoever connects.
    Hello {
        /// [`MAGIC`].
        magic: u32,
        /// [`PROTOCOL`].
        protocol: u16,
        /// Names the head's session; data connections must repeat it.
        session: u64,
        /// What for.
        purpose: Purpose,
    },
    /// First frame of whoever was connected to.
    Welcome(WorkerFacts),
    /// Instead of [`Message::Welcome`], or of any answer: why not. The connection ends.
    Refuse {
        /// What, where and how to mend it.
        reason: String,
    },
    /// A new epoch: stop what is under way, and let those in who send activations of the new one.
    Prepare {
        /// Greater than every one before.
        epoch: u32,
    },
    /// The worker takes connections of that epoch, and of no other.
    Prepared {
        /// The epoch.
        epoch: u32,
    },
    /// The plan of the epoch that was prepared, as payload, and this worker's place in it.
    Configure {
        /// The epoch.
        epoch: u32,
        /// The worker's place in the ring.
        place: u16,
        /// Earlier passes were given up with an earlier plan.
        first_pass: u32,
        /// Where the head gives layers to those who have not the model.
        head: String,
        /// Where it sends activations to.
        receivers: Vec<PeerAddress>,
    },
    /// The worker holds its layers and its neighbours, and nothing of passes before the epoch.
    Ready {
        /// The epoch.
        epoch: u32,
    },
    /// The worker is fetching layers before it can be ready.
    Fetching {
        /// Bytes that are there.
        done: u64,
        /// Bytes to fetch.
        total: u64,
    },
    /// The worker is putting layers on its GPU before it can be ready.
    Uploading {
        /// Bytes that are there.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
    /// A new request over the same ring: forget keys and values, start a new trace.
    Reset {
        /// The request's epoch.
        epoch: u32,
    },
    /// The worker can no longer exchange activations with another device.
    Cut {
        /// Since which epoch.
        epoch: u32,
        /// The other's place in the ring.
        peer: u16,
        /// What was seen.
        why: String,
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
        /// In which epoch the lines were written.
        epoch: u32,
        /// Whether more follow.
        more: bool,
    },
    /// Are you there, and what time is it with you?
    Ping {
        /// Repeated in the answer.
        nonce: u64,
    },
    /// I am.
    Pong {
        /// The asker's.
        nonce: u64,
        /// Nanoseconds on the answerer's clock.
        clock: u64,
    },
    /// What files has the model?
    Outline,
    /// These.
    Files {
        /// In the order of the parts.
        files: Vec<FileOutline>,
    },
    /// Asks for a chunk of a file.
    Want {
        /// Which file.
        file: u16,
        /// Which chunk, from 0.
        chunk: u64,
    },
    /// A chunk, as payload.
    Chunk {
        /// Which file.
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

    /// If activations follow: their epoch, their pass, the round to take up, and whether they are f16.
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

/// A header and its payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// What it is.
    pub message: Message,
    /// Raw bytes beside it.
    pub payload: Vec<u8>,
}

impl From<Message> for Frame {
    fn from(message: Message) -> Frame {
        Frame { message, payload: Vec::new() }
    }
}

/// Why bytes are not a frame.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// A length beyond its limit.
    #[error("a frame announces a {what} of {length} bytes; at most {limit} are taken")]
    TooLong {
        /// `header` or `payload`.
        what: &'static str,
        /// What was announced.
        length: usize,
        /// What is allowed here.
        limit: usize,
    },
    /// The header is not one.
    #[error("a frame's header cannot be read: {0}")]
    Header(String),
    /// The peer's connections are sealed and this end's are not.
    #[error("the peer has a key and this end has none; give both ends the same --key")]
    Sealed,
    /// The stream ended inside a frame.
    #[error("the connection ended inside a frame")]
    Cut,
    /// The connection failed.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// The two lengths of a frame, within their limits.
fn lengths(prefix: [u8; PREFIX_BYTES], max_payload: usize) -> Result<(usize, usize), WireError> {
    if prefix == SEALED {
        return Err(WireError::Sealed);
    }
    let [h0, h1, h2, h3, p0, p1, p2, p3] = prefix;
    let header = u32::from_le_bytes([h0, h1, h2, h3]) as usize;
    let payload = u32::from_le_bytes([p0, p1, p2, p3]) as usize;
    for (what, length, limit) in [("header", header, MAX_HEADER_BYTES), ("payload", payload, max_payload)] {
        if length > limit {
            return Err(WireError::TooLong { what, length, limit });
        }
    }
    Ok((header, payload))
}

fn header(bytes: &[u8]) -> Result<Message, WireError> {
    let config = bincode::config::standard().with_limit::<MAX_HEADER_BYTES>();
    let (message, used) =
        bincode::decode_from_slice(bytes, config).map_err(|error| WireError::Header(error.to_string()))?;
    if used == bytes.len() {
        Ok(message)
    } else {
        Err(WireError::Header(format!("{} bytes follow it", bytes.len() - used)))
    }
}

impl Frame {
    /// The frame's bytes.
    pub fn encode(&self) -> Result<Vec<u8>, WireError> {
        let header = bincode::encode_to_vec(&self.message, bincode::config::standard())
            .map_err(|error| WireError::Header(error.to_string()))?;
        let mut bytes = Vec::with_capacity(PREFIX_BYTES + header.len() + self.payload.len());
        for (what, length) in [("header", header.len()), ("payload", self.payload.len())] {
            let announced = u32::try_from(length).map_err(|_| WireError::TooLong {
                what,
                length,
                limit: u32::MAX as usize,
            })?;
            bytes.extend_from_slice(&announced.to_le_bytes());
        }
        bytes.extend_from_slice(&header);
        bytes.extend_from_slice(&self.payload);
        Ok(bytes)
    }

    /// A frame at the front of `bytes` and how many it takes; `None` if more are needed.
    pub fn decode(bytes: &[u8], max_payload: usize) -> Result<Option<(Frame, usize)>, WireError> {
        let Some(prefix) = bytes.first_chunk::<PREFIX_BYTES>() else { return Ok(None) };
        let (head, payload) = lengths(*prefix, max_payload)?;
        let end = PREFIX_BYTES + head + payload;
        if bytes.len() < end {
            return Ok(None);
        }
        let message = header(&bytes[PREFIX_BYTES..PREFIX_BYTES + head])?;
        Ok(Some((Frame { message, payload: bytes[PREFIX_BYTES + head..end].to_vec() }, end)))
    }

    /// Reads one frame; `None` if the stream ends before it begins.
    pub async fn read(
        stream: &mut (impl AsyncRead + Unpin),
        max_payload: usize,
    ) -> Result<Option<Frame>, WireError> {
        let mut prefix = [0; PREFIX_BYTES];
        let first = stream.read(&mut prefix).await?;
        if first == 0 {
            return Ok(None);
        }
        read_rest(stream, &mut prefix[first..]).await?;
        let (head, payload) = lengths(prefix, max_payload)?;
        let mut bytes = vec![0; head];
        read_rest(stream, &mut bytes).await?;
        let message = header(&bytes)?;
        let mut bytes = vec![0; payload];
        read_rest(stream, &mut bytes).await?;
        Ok(Some(Frame { message, payload: bytes }))
    }

    /// Writes the frame.
    pub async fn write(&self, stream: &mut (impl AsyncWrite + Unpin)) -> Result<(), WireError> {
        stream.write_all(&self.encode()?).await?;
        Ok(stream.flush().await?)
    }
}

async fn read_rest(stream: &mut (impl AsyncRead + Unpin), bytes: &mut [u8]) -> Result<(), WireError> {
    match stream.read_exact(bytes).await {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Err(WireError::Cut),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample() -> Frame {
        let pass = Pass { sequence: 3, drafted: 1, ..Pass::plain(7, 40, 2, true) };
        Frame { message: Message::activations(5, pass, 3, false), payload: vec![1, 2, 3, 4] }
    }

    #[test]
    fn a_frame_reads_back() {
        let bytes = sample().encode().unwrap();
        assert_eq!(Frame::decode(&bytes, 16).unwrap(), Some((sample(), bytes.len())));
        assert_eq!(Frame::decode(&bytes[..bytes.len() - 1], 16).unwrap(), None, "one byte is missing");
    }

    #[test]
    fn a_huge_length_is_refused_before_it_is_believed() {
        let bytes = [0xff; 16];
        assert!(matches!(Frame::decode(&bytes, 16), Err(WireError::TooLong { what: "header", .. })));
        let payload = [4, 0, 0, 0, 0xff, 0xff, 0xff, 0x7f];
        assert!(matches!(Frame::decode(&payload, 16), Err(WireError::TooLong { what: "payload", .. })));
        // A string that announces 2^63 bytes inside a ten-byte header: variant 2 (Refuse), then a u64.
        let mut hostile = vec![10, 0, 0, 0, 0, 0, 0, 0, 2, 253];
        hostile.extend_from_slice(&(1u64 << 63).to_le_bytes());
        assert!(matches!(Frame::decode(&hostile, 16), Err(WireError::Header(_))));
    }

    #[test]
    fn a_sealed_connection_is_told_from_damage() {
        assert!(matches!(Frame::decode(&SEALED, 16), Err(WireError::Sealed)));
    }

    #[test]
    fn bytes_after_a_header_are_refused() {
        let mut bytes = Frame::from(Message::Ready { epoch: 0 }).encode().unwrap();
        bytes[0] += 1;
        bytes.push(0);
        assert!(matches!(Frame::decode(&bytes, 0), Err(WireError::Header(_))));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_frame_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = Frame::decode(&bytes, 64);
        }

        #[test]
        fn any_damage_is_a_frame_or_an_error(at in 0usize..24, bit in 0u8..8, cut in 0usize..24) {
            let mut bytes = sample().encode().unwrap();
            let at = at % bytes.len();
            bytes[at] ^= 1 << bit;
            bytes.truncate(bytes.len() - cut.min(bytes.len()));
            let _ = Frame::decode(&bytes, 64);
        }
    }
}
