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
compile_error!("activations are sent as little-endian numbers; a big-endian host needs a conversion here");

/// The first bytes of an encrypted connection. As a header length, they exceed the limit of an unencrypted frame.
pub const ENCRYPTED_PREFIX: [u8; 8] = *b"hearth\0\x01";

/// Maximum length of a header in bytes. A header contains names, addresses and digests.
const MAX_HEADER_BYTES: usize = 64 << 10;

/// Maximum length in bytes of a payload other than activations: a plan, or part of a trace.
pub const MAX_DOCUMENT_PAYLOAD_BYTES: usize = 4 << 20;

const PREFIX_BYTES: usize = 8;

/// The part of a frame before its payload: the message and the length of the payload.
pub struct FrameHeader {
    pub message: Message,
    pub payload_len: usize,
}

/// A message and its payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    pub message: Message,
    pub payload: Vec<u8>,
}

impl From<Message> for Frame {
    fn from(message: Message) -> Frame {
        Frame { message, payload: Vec::new() }
    }
}

fn parse_lengths(prefix: [u8; PREFIX_BYTES], max_payload: usize) -> Result<(usize, usize), WireError> {
    if prefix == ENCRYPTED_PREFIX {
        return Err(WireError::PeerEncrypts);
    }
    let (lengths, _) = prefix.as_chunks();
    let [header, payload] = [0, 1].map(|index| u32::from_le_bytes(lengths[index]) as usize);
    for (what, length, limit) in [("header", header, MAX_HEADER_BYTES), ("payload", payload, max_payload)] {
        if length > limit {
            return Err(WireError::TooLong { what, length, limit });
        }
    }
    Ok((header, payload))
}

fn decode_header(bytes: &[u8]) -> Result<Message, WireError> {
    let config = bincode::config::standard().with_limit::<MAX_HEADER_BYTES>();
    let (message, used) = bincode::decode_from_slice(bytes, config)
        .map_err(|error| WireError::InvalidHeader(error.to_string()))?;
    match bytes.len() - used {
        0 => Ok(message),
        rest => Err(WireError::InvalidHeader(format!("{rest} bytes follow the message"))),
    }
}

impl Frame {
    pub fn encode(&self) -> Result<Vec<u8>, WireError> {
        let header = bincode::encode_to_vec(&self.message, bincode::config::standard())
            .map_err(|error| WireError::InvalidHeader(error.to_string()))?;
        let mut bytes = Vec::with_capacity(PREFIX_BYTES + header.len() + self.payload.len());
        for (what, length) in [("header", header.len()), ("payload", self.payload.len())] {
            let limit = u32::MAX as usize;
            let announced = u32::try_from(length).map_err(|_| WireError::TooLong { what, length, limit })?;
            bytes.extend_from_slice(&announced.to_le_bytes());
        }
        bytes.extend_from_slice(&header);
        bytes.extend_from_slice(&self.payload);
        Ok(bytes)
    }

    /// Reads a frame with at most `max_payload` bytes of payload. Returns `None` if the stream ends before the frame.
    pub async fn read(
        stream: &mut (impl AsyncRead + Unpin),
        max_payload: usize,
    ) -> Result<Option<Frame>, WireError> {
        let Some(header) = FrameHeader::read(stream, max_payload).await? else { return Ok(None) };
        header.read_payload(stream).await.map(Some)
    }

    pub async fn write(&self, stream: &mut (impl AsyncWrite + Unpin)) -> Result<(), WireError> {
        stream.write_all(&self.encode()?).await?;
        Ok(stream.flush().await?)
    }
}

impl FrameHeader {
    /// Reads the header of a frame with at most `max_payload` bytes of payload, which is left in the stream. Returns
    /// `None` if the stream ends before the frame.
    pub async fn read(
        stream: &mut (impl AsyncRead + Unpin),
        max_payload: usize,
    ) -> Result<Option<FrameHeader>, WireError> {
        let mut prefix = [0; PREFIX_BYTES];
        let first = stream.read(&mut prefix).await?;
        if first == 0 {
            return Ok(None);
        }
        read_rest(stream, &mut prefix[first..]).await?;
        let (header_len, payload_len) = parse_lengths(prefix, max_payload)?;
        let mut bytes = vec![0; header_len];
        read_rest(stream, &mut bytes).await?;
        Ok(Some(FrameHeader { message: decode_header(&bytes)?, payload_len }))
    }

    /// Reads the payload without storing it. Returns the message.
    pub async fn discard_payload(self, stream: &mut (impl AsyncRead + Unpin)) -> Result<Message, WireError> {
        let copied =
            tokio::io::copy(&mut stream.take(self.payload_len as u64), &mut tokio::io::sink()).await?;
        if copied < self.payload_len as u64 { Err(WireError::Truncated) } else { Ok(self.message) }
    }

    /// Reads the payload, which follows the header in the stream.
    pub async fn read_payload(self, stream: &mut (impl AsyncRead + Unpin)) -> Result<Frame, WireError> {
        let mut payload = vec![0; self.payload_len];
        read_rest(stream, &mut payload).await?;
        Ok(Frame { message: self.message, payload })
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
    use hearth_schema::pass::{Batch, Pass};

    use super::super::message::ActivationsHeader;
    use super::*;

    fn sample() -> Frame {
        let pass = Pass { sequence_index: 3, drafted: 1, ..Pass::new(7, 40, 2, true) };
        let batch = Batch::new(vec![pass, Pass::new(8, 0, 5, false)]).expect("a batch");
        let header = ActivationsHeader { epoch: 5, batch, round: 3, is_f16: false };
        Frame { message: Message::Activations(header), payload: vec![1, 2, 3, 4] }
    }

    /// Reads a frame from bytes. Returns the result, and the number of bytes that were not read.
    fn read(mut bytes: &[u8], max_payload: usize) -> (Result<Option<Frame>, WireError>, usize) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        (runtime.block_on(Frame::read(&mut bytes, max_payload)), bytes.len())
    }

    #[test]
    fn frame_round_trips() {
        let bytes = [sample().encode().unwrap(), vec![0; 3]].concat();
        let (frame, rest) = read(&bytes, 16);
        assert_eq!((frame.unwrap(), rest), (Some(sample()), 3));
        let (truncated, _) = read(&bytes[..bytes.len() - 4], 16);
        assert!(matches!(truncated, Err(WireError::Truncated)), "one byte is missing: {truncated:?}");
    }

    #[test]
    fn huge_length_is_rejected_before_allocating() {
        assert!(matches!(read(&[0xff; 16], 16).0, Err(WireError::TooLong { what: "header", .. })));
        let payload = [4, 0, 0, 0, 0xff, 0xff, 0xff, 0x7f];
        assert!(matches!(read(&payload, 16).0, Err(WireError::TooLong { what: "payload", .. })));
        // A string that announces 2^63 bytes inside a ten-byte header: variant 2 (Refuse), then a u64.
        let mut hostile = vec![10, 0, 0, 0, 0, 0, 0, 0, 2, 253];
        hostile.extend_from_slice(&(1u64 << 63).to_le_bytes());
        assert!(matches!(read(&hostile, 16).0, Err(WireError::InvalidHeader(_))));
    }

    #[test]
    fn bytes_after_a_header_are_rejected() {
        let mut bytes = Frame::from(Message::Ready { epoch: 0 }).encode().unwrap();
        bytes[0] += 1;
        bytes.push(0);
        assert!(matches!(read(&bytes, 0).0, Err(WireError::InvalidHeader(_))));
    }
}
