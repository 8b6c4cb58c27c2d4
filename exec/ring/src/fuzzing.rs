//! Entries of the fuzz targets: frames and handshakes of untrusted peers.
//!
//! An entry gets arbitrary bytes. It calls the parser, and panics if the result violates a property. The fuzz targets
//! (`fuzz/`) and the tests below call the entries; no program contains them.

use std::sync::LazyLock;

use std::time::Duration;

use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::runtime::{Builder, Runtime};
use tokio::time::Instant;

use crate::security::noise::{self, HandshakeRole};
use crate::security::{EncryptedTransport, Key};
use crate::wire::{Frame, Listener, MemoryTransport, Message, Transport, activations, read_hello};

/// Returns the maximum memory of an entry for an input of this length, in bytes: payloads and pipes, and for each byte
/// of the input a decoded message of at most 32 bytes, which an entry decodes several times.
pub fn allowed_memory(input_bytes: usize) -> usize {
    4 * MAX_PAYLOAD_BYTES + 100 * input_bytes
}

const MAX_PAYLOAD_BYTES: usize = 1 << 20;

fn runtime() -> Runtime {
    // The clock is paused: a wait that only a time limit ends is over at once, and never blocks a fuzzer.
    Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime")
}

/// Reads frames until the end of the input or an error. A frame that is written and read again is the same frame.
pub fn frame(input: &[u8]) {
    runtime().block_on(async {
        let mut rest = input;
        while let Ok(Some(frame)) = Frame::read(&mut rest, MAX_PAYLOAD_BYTES).await {
            let written = frame.encode().expect("a frame that was read is not too long");
            let again = Frame::read(&mut written.as_slice(), MAX_PAYLOAD_BYTES).await;
            assert_eq!(again.expect("what was written is valid").as_ref(), Some(&frame));
            if let Message::Activations(header) = frame.message {
                let _ = activations::decode(&frame.payload, header.is_f16, header.batch.tokens() as usize);
            }
        }
        let (mut peer, mut stream) = tokio::io::duplex(input.len().max(1) + 1);
        peer.write_all(input).await.expect("the pipe is large enough");
        peer.shutdown().await.expect("the pipe is open");
        let _ = read_hello(&mut stream).await;
    });
}

static KEY: LazyLock<Key> = LazyLock::new(|| Key::parse("a phrase for a test").expect("a key"));

/// Sends the input to a device with a key. The first byte of the input chooses the part of the peer:
///
/// - 0: a peer without the key connects to the device, and 1: the device connects to it. The device gets no frame.
/// - 2: a peer with the key sends the input instead of encrypted messages. The device gets no frame.
/// - 3: a peer with the key encrypts the input. The device gets the frame in the input.
///
/// No part lets the device wait until a time limit ends.
pub fn handshake(input: &[u8]) {
    let Some((part, input)) = input.split_first() else { return };
    runtime().block_on(async {
        let start = Instant::now();
        let (plain, address) = (MemoryTransport::default(), "device");
        let encrypted = EncryptedTransport::new(plain.clone(), KEY.clone());
        let frame = if part % 4 == 1 {
            let mut listener = plain.bind(address).await.expect("a free address");
            let mut device = encrypted.connect(address).await.expect("the peer listens");
            let peer = listener.accept().await.expect("a connection");
            let exchange = async {
                Frame::from(Message::ListFiles).write(&mut device).await?;
                Frame::read(&mut device, MAX_PAYLOAD_BYTES).await
            };
            tokio::join!(exchange, send(peer, input)).0
        } else {
            let mut listener = encrypted.bind(address).await.expect("a free address");
            let (without_key, with_key) = (plain.connect(address).await, encrypted.connect(address).await);
            let mut device = listener.accept().await.expect("a connection");
            let mut device_for_key = listener.accept().await.expect("a connection");
            let without_key = without_key.expect("the device listens");
            let read = Frame::read(&mut device, MAX_PAYLOAD_BYTES);
            match part % 4 {
                0 => tokio::join!(read, send(without_key, input)).0,
                2 => {
                    let peer = async {
                        let opened =
                            noise::handshake(without_key, KEY.clone(), HandshakeRole::Initiator).await;
                        send(opened.expect("both ends have the key").0, input).await
                    };
                    tokio::join!(read, peer).0
                }
                _ => {
                    let read = Frame::read(&mut device_for_key, MAX_PAYLOAD_BYTES);
                    tokio::join!(read, send(with_key.expect("the device listens"), input)).0
                }
            }
        };
        match part % 4 {
            0 | 1 => assert!(frame.is_err(), "a peer without the key sent a frame, or ended a session"),
            2 => assert!(!matches!(frame, Ok(Some(_))), "bytes that are not encrypted are a frame"),
            // Without a byte there is no message, and the handshake does not begin.
            _ if input.is_empty() => {}
            _ => {
                let expected = Frame::read(&mut &*input, MAX_PAYLOAD_BYTES).await;
                assert_eq!(format!("{frame:?}"), format!("{expected:?}"));
            }
        }
        assert_eq!(start.elapsed(), Duration::ZERO, "the device waited for a time limit");
    });
}

/// Sends all bytes and ends the stream. Returns the stream, so that the device can still write to it.
async fn send<S: AsyncWrite + Unpin>(mut peer: S, bytes: &[u8]) -> S {
    // The device closes the connection at an error.
    let _ = peer.write_all(bytes).await;
    let _ = peer.flush().await;
    let _ = peer.shutdown().await;
    peer
}

#[cfg(test)]
#[path = "../../../fuzz/replay.rs"]
mod replay;

#[test]
fn frame_corpus() {
    replay::replay("frame", allowed_memory, frame);
}

#[test]
fn handshake_corpus() {
    replay::replay("handshake", allowed_memory, handshake);
}
