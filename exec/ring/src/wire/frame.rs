//! Frames: the binary format of messages and their payloads on a connection with an untrusted peer.
//!
//! A frame consists of two little-endian `u32` lengths, a header of the first length (a [`Message`] in bincode) and a
//! payload of the second length. Tensors and documents are sent as payload, never in the header. Both lengths are
//! checked against limits before anything is allocated. The header is decoded with a byte limit, because bincode
//! would otherwise allocate any length that a message announces. Every byte of the header must be used.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::message::Message;
use crate::error::WireError;

#[cfg(target_endian = "big")]
compile_error!("activations travel as little-endian numbers; a big-endian host needs a conversion here");

/// The first bytes of an encrypted connection. Read as the length of a header, they exceed the limit, so no
/// unencrypted frame begins with them.
pub const ENCRYPTED_PREFIX: [u8; 8] = *b"hearth\0\x01";

/// Maximum length of a header in bytes. It contains names, addresses and digests.
const MAX_HEADER_BYTES: usize = 64 << 10;

/// Maximum length in bytes of a payload other than activations: a plan, or part of a trace.
pub const MAX_DOCUMENT_PAYLOAD: usize = 4 << 20;

/// Size of the two lengths, in bytes.
const PREFIX_BYTES: usize = 8;

/// A message and its payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    pub message: Message,
    /// The raw bytes that follow the message.
    pub payload: Vec<u8>,
}

impl From<Message> for Frame {
    fn from(message: Message) -> Frame {
        Frame { message, payload: Vec::new() }
    }
}

/// Parses the lengths of the header and the payload, and checks them against their limits.
fn parse_lengths(prefix: [u8; PREFIX_BYTES], max_payload: usize) -> Result<(usize, usize), WireError> {
    if prefix == ENCRYPTED_PREFIX {
        return Err(WireError::Encrypted);
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

fn decode_header(bytes: &[u8]) -> Result<Message, WireError> {
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
    /// Encodes the frame.
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

    /// Decodes a frame at the start of `bytes`. Returns the frame and its length, or `None` if more bytes are needed.
    pub fn decode(bytes: &[u8], max_payload: usize) -> Result<Option<(Frame, usize)>, WireError> {
        let Some(prefix) = bytes.first_chunk::<PREFIX_BYTES>() else { return Ok(None) };
        let (head, payload) = parse_lengths(*prefix, max_payload)?;
        let end = PREFIX_BYTES + head + payload;
        if bytes.len() < end {
            return Ok(None);
        }
        let message = decode_header(&bytes[PREFIX_BYTES..PREFIX_BYTES + head])?;
        Ok(Some((Frame { message, payload: bytes[PREFIX_BYTES + head..end].to_vec() }, end)))
    }

    /// Reads one frame. Returns `None` if the stream ends before the frame begins.
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
        let (head, payload) = parse_lengths(prefix, max_payload)?;
        let mut bytes = vec![0; head];
        read_rest(stream, &mut bytes).await?;
        let message = decode_header(&bytes)?;
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
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Err(WireError::Truncated),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use hearth_schema::pass::Pass;
    use proptest::prelude::*;

    use super::*;

    fn sample() -> Frame {
        let pass = Pass { sequence: 3, drafted: 1, ..Pass::new(7, 40, 2, true) };
        Frame { message: Message::activations(5, pass, 3, false), payload: vec![1, 2, 3, 4] }
    }

    #[test]
    fn frame_round_trips() {
        let bytes = sample().encode().unwrap();
        assert_eq!(Frame::decode(&bytes, 16).unwrap(), Some((sample(), bytes.len())));
        assert_eq!(Frame::decode(&bytes[..bytes.len() - 1], 16).unwrap(), None, "one byte is missing");
    }

    #[test]
    fn huge_length_is_refused_before_allocating() {
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
    fn encrypted_connection_is_detected() {
        assert!(matches!(Frame::decode(&ENCRYPTED_PREFIX, 16), Err(WireError::Encrypted)));
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
        fn random_bytes_are_a_frame_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = Frame::decode(&bytes, 64);
        }

        #[test]
        fn damaged_frame_is_a_frame_or_an_error(at in 0usize..24, bit in 0u8..8, cut in 0usize..24) {
            let mut bytes = sample().encode().unwrap();
            let at = at % bytes.len();
            bytes[at] ^= 1 << bit;
            bytes.truncate(bytes.len() - cut.min(bytes.len()));
            let _ = Frame::decode(&bytes, 64);
        }
    }
}
