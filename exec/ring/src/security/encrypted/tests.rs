//! Tests of encrypted connections: a third party cannot read, change or replay messages.

use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::time::timeout;

use super::super::noise::HANDSHAKE_MESSAGE_LEN;
use super::*;
use crate::wire::{ENCRYPTED_PREFIX, Frame, Message, WireError};

type Read = Result<Option<Frame>, WireError>;

fn key() -> Key {
    Key::parse("a phrase for a test").unwrap()
}

fn connecting(link: DuplexStream) -> EncryptedStream<DuplexStream> {
    EncryptedStream::new(link, key(), HandshakeRole::Initiator)
}

fn accepting(link: DuplexStream) -> EncryptedStream<DuplexStream> {
    EncryptedStream::new(link, key(), HandshakeRole::Responder)
}

fn frame() -> Frame {
    Frame { message: Message::Ping { nonce: 7 }, payload: b"what only two may know".repeat(10) }
}

/// Returns the number of bytes that the initiator sends: a handshake message, and a message with the frame.
fn sent_len() -> usize {
    HANDSHAKE_MESSAGE_LEN + LENGTH_BYTES + TAG_BYTES + frame().encode().unwrap().len()
}

/// Writes a frame as the initiator, or reads a frame as the responder. Returns the error.
async fn first_error(link: DuplexStream, key: Key, role: HandshakeRole) -> WireError {
    let mut stream = EncryptedStream::new(link, key, role);
    match role {
        HandshakeRole::Initiator => frame().write(&mut stream).await.unwrap_err(),
        HandshakeRole::Responder => Frame::read(&mut stream, 1 << 10).await.unwrap_err(),
    }
}

async fn soon<T>(wait: impl Future<Output = T>) -> T {
    timeout(std::time::Duration::from_secs(20), wait).await.expect("nothing may hang")
}

fn run<T>(wait: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(soon(wait))
}

/// The changes that the third party makes to the bytes of the initiator.
#[derive(Debug, Clone, Copy, Default)]
struct Tampering {
    flip: Option<(usize, u8)>,
    cut: Option<usize>,
}

/// Forwards bytes with the changes of `how`. Returns all forwarded bytes.
async fn tamper(mut rx: impl AsyncRead + Unpin, mut tx: impl AsyncWrite + Unpin, how: Tampering) -> Vec<u8> {
    let (mut passed, mut buffer) = (Vec::new(), [0; 4096]);
    while let Ok(count @ 1..) = rx.read(&mut buffer).await {
        let mut bytes = buffer[..count].to_vec();
        if let Some((at, bit)) = how.flip
            && let Some(byte) = at.checked_sub(passed.len()).and_then(|at| bytes.get_mut(at))
        {
            *byte ^= 1 << bit;
        }
        bytes.truncate(how.cut.unwrap_or(usize::MAX).saturating_sub(passed.len()));
        passed.extend_from_slice(&bytes);
        if tx.write_all(&bytes).await.is_err() || bytes.len() < count {
            break;
        }
    }
    let _ = tx.shutdown().await;
    passed
}

/// Sends a frame through a third party. Returns the received frame, and all forwarded bytes.
async fn through(how: Tampering) -> (Read, Vec<u8>) {
    let (near, near_end) = duplex(1 << 16);
    let (far_end, far) = duplex(1 << 16);
    let (from_near, to_near) = tokio::io::split(near_end);
    let (from_far, to_far) = tokio::io::split(far_end);
    let write = async move {
        let mut near = connecting(near);
        let _ = frame().write(&mut near).await;
        let _ = near.shutdown().await;
    };
    let read = async move {
        let mut far = accepting(far);
        Frame::read(&mut far, 1 << 10).await
    };
    let answers = tokio::spawn(tamper(from_far, to_near, Tampering::default()));
    let ((), read, passed) = tokio::join!(write, read, tamper(from_near, to_far, how));
    answers.abort();
    (read, passed)
}

#[tokio::test]
async fn ciphertext_hides_the_frame() {
    let (read, passed) = soon(through(Tampering::default())).await;
    assert_eq!(read.unwrap(), Some(frame()));
    assert_eq!(passed.len(), sent_len(), "a handshake message and one other message");
    assert!(!passed.windows(4).any(|part| part == b"what" || part == b"know"));
}

#[tokio::test]
async fn wrong_key_is_rejected_at_both_ends() {
    let (near, far) = duplex(1 << 16);
    let near = first_error(near, key(), HandshakeRole::Initiator);
    let far = first_error(far, Key::parse("a phrase for a rest").unwrap(), HandshakeRole::Responder);
    let (near, far) = soon(async { tokio::join!(near, far) }).await;
    for error in [near, far] {
        assert!(error.to_string().contains("no key or a different key"), "{error}");
    }
}

#[tokio::test]
async fn plain_and_encrypted_peers_reject_each_other() {
    for (role, expected) in [
        (HandshakeRole::Responder, "the peer does not encrypt"),
        (HandshakeRole::Initiator, "the peer closed the connection"),
    ] {
        let (mut plain, link) = duplex(1 << 16);
        let plain = async move {
            if matches!(role, HandshakeRole::Responder) {
                frame().write(&mut plain).await.unwrap();
            }
            Frame::read(&mut plain, 1 << 10).await.unwrap_err()
        };
        let encrypted = first_error(link, key(), role);
        let (plain, encrypted) = soon(async { tokio::join!(plain, encrypted) }).await;
        assert!(matches!(plain, WireError::PeerEncrypts), "{role:?}: {plain}");
        assert!(encrypted.to_string().contains(expected), "{role:?}: {encrypted}");
    }
}

#[tokio::test]
async fn silent_peer_is_disconnected_after_the_deadline() {
    let (_silent, far) = duplex(1 << 16);
    let error = soon(first_error(far, key(), HandshakeRole::Responder)).await;
    assert!(error.to_string().contains("the peer does not respond"), "{error}");
}

#[tokio::test]
async fn recorded_connection_cannot_be_replayed() {
    let (_, recorded) = soon(through(Tampering::default())).await;
    for (replayed, fine) in [(HANDSHAKE_MESSAGE_LEN, true), (recorded.len(), false)] {
        let (mut replay, far) = duplex(1 << 16);
        replay.write_all(&recorded[..replayed]).await.unwrap();
        replay.shutdown().await.unwrap();
        let mut far = accepting(far);
        let read = soon(Frame::read(&mut far, 1 << 10)).await;
        // There is a reply to the first handshake message, but no frame can follow.
        assert!(matches!(read, Ok(None)) == fine && !matches!(read, Ok(Some(_))), "{replayed}: {read:?}");
        let again = soon(Frame::read(&mut far, 1 << 10)).await;
        assert!(!matches!(again, Ok(Some(_))), "a failed connection stays failed");
    }
}

#[tokio::test]
async fn reflected_handshake_message_is_rejected() {
    let (near, mut mirror) = duplex(1 << 16);
    let reflect = async move {
        let mut message = [0; HANDSHAKE_MESSAGE_LEN];
        mirror.read_exact(&mut message).await.unwrap();
        mirror.write_all(&message).await.unwrap();
        let _ = mirror.read(&mut message).await;
    };
    let write = first_error(near, key(), HandshakeRole::Initiator);
    let ((), error) = soon(async { tokio::join!(reflect, write) }).await;
    assert!(error.to_string().contains("a different key"), "{error}");
}

async fn pair() -> (EncryptedStream<DuplexStream>, EncryptedStream<DuplexStream>) {
    let (near, far) = duplex(1 << 16);
    let (mut near, mut far) = (connecting(near), accepting(far));
    let sent = frame();
    let (wrote, read) = tokio::join!(sent.write(&mut near), Frame::read(&mut far, 1 << 10));
    assert_eq!((wrote.unwrap(), read.unwrap()), ((), Some(frame())));
    (near, far)
}

fn link(stream: &mut EncryptedStream<DuplexStream>) -> &mut DuplexStream {
    match &mut stream.state {
        State::Open { link, .. } => link,
        _ => panic!("the handshake is done"),
    }
}

#[tokio::test]
async fn replayed_message_fails_the_connection() {
    let (mut near, mut far) = pair().await;
    let last = near.outgoing.ciphertext.clone();
    link(&mut near).write_all(&last).await.unwrap();
    frame().write(&mut near).await.unwrap();
    for _ in 0..2 {
        let error = soon(Frame::read(&mut far, 1 << 10)).await.unwrap_err();
        assert!(error.to_string().contains("altered or replayed"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_halves_carry_large_frames_at_once() {
    let (near, far) = duplex(1 << 12);
    let large = Frame { payload: (0..4u32 << 20).map(|at| (at % 251) as u8).collect(), ..frame() };
    let mut tasks = Vec::new();
    // The handshake has not started yet, so either half may start it.
    for stream in [connecting(near), accepting(far)] {
        let (mut reader, mut writer) = tokio::io::split(stream);
        let (sent, expected) = (large.clone(), large.clone());
        tasks.push(tokio::spawn(async move { sent.write(&mut writer).await.unwrap() }));
        tasks.push(tokio::spawn(async move {
            assert!(Frame::read(&mut reader, 4 << 20).await.unwrap() == Some(expected));
        }));
    }
    for task in tasks {
        soon(task).await.unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn flipped_bit_or_cut_stream_delivers_nothing(at in 0usize..320, bit in 0u8..8) {
        let at = at % sent_len();
        for (flip, cut) in [(Some((at, bit)), None), (None, Some(at))] {
            let (read, _) = run(through(Tampering { flip, cut }));
            prop_assert!(!matches!(read, Ok(Some(_))), "{flip:?} {cut:?}: {read:?}");
        }
    }

    #[test]
    fn random_handshake_bytes_are_an_error(
        bytes in proptest::collection::vec(any::<u8>(), 0..200), marked: bool, accept: bool
    ) {
        run(async {
            let (mut client, end) = duplex(1 << 16);
            if marked {
                client.write_all(&ENCRYPTED_PREFIX).await.unwrap();
            }
            client.write_all(&bytes).await.unwrap();
            client.shutdown().await.unwrap();
            let mut end = if accept { accepting(end) } else { connecting(end) };
            let read = Frame::read(&mut end, 1 << 10).await;
            assert!(read.is_err(), "{read:?}");
        });
    }

    #[test]
    fn random_message_bytes_are_an_error(bytes in proptest::collection::vec(any::<u8>(), 1..200)) {
        run(async {
            let (mut near, mut far) = pair().await;
            link(&mut near).write_all(&bytes).await.unwrap();
            link(&mut near).shutdown().await.unwrap();
            let read = Frame::read(&mut far, 1 << 10).await;
            assert!(read.is_err(), "{read:?}");
        });
    }
}
