//! The handshake of an encrypted connection: both ends prove that they have the key.
//!
//! The protocol is Noise `NNpsk0`: each end sends one message with an ephemeral Curve25519 public key, and the shared
//! key authenticates both messages. A message has [`ENCRYPTED_PREFIX`], which no unencrypted frame begins with, the
//! public key (32 bytes) and the authentication tag (16 bytes).
//!
//! If an attacker replays a recorded first message, the accepting end replies to it. But the reply has a new public
//! key, so the attacker cannot compute the keys of the session.

use std::time::Duration;

use snow::{Builder, HandshakeState, TransportState};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::key::Key;
use crate::error::EncryptionError;
use crate::wire::{ByteStream, ENCRYPTED_PREFIX};

const PROTOCOL: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
/// Length of a Noise message, in bytes: a public key and a tag.
const NOISE_MESSAGE_LEN: usize = 32 + 16;
/// Length of a handshake message, in bytes: the prefix and a Noise message.
pub const HANDSHAKE_MESSAGE_LEN: usize = ENCRYPTED_PREFIX.len() + NOISE_MESSAGE_LEN;
/// The time limit of the handshake. The limit of the first frame is longer, so that the error names the handshake.
const DEADLINE: Duration = Duration::from_secs(4);
/// The time to wait for the first frame of an unencrypted peer; closing earlier could discard the refusal sent to it.
const REFUSAL_DEADLINE: Duration = Duration::from_millis(200);

/// The role of a device in the handshake. The connecting device is the initiator and sends the first message.
#[derive(Debug, Clone, Copy)]
pub enum HandshakeRole {
    Initiator,
    Responder,
}

/// Performs the handshake on `link` with the shared key. Returns the link and the state of the cipher.
pub async fn handshake<S: ByteStream>(
    mut link: S,
    key: Key,
    role: HandshakeRole,
) -> Result<(S, Box<TransportState>), EncryptionError> {
    let cipher = timeout(DEADLINE, exchange(&mut link, &key, role)).await;
    let cipher = cipher.map_err(|_| EncryptionError::Handshake { cause: "the peer does not respond" })??;
    Ok((link, Box::new(cipher)))
}

async fn exchange(
    link: &mut impl ByteStream,
    key: &Key,
    role: HandshakeRole,
) -> Result<TransportState, EncryptionError> {
    let builder = Builder::new(PROTOCOL.parse()?).psk(0, key.secret())?.prologue(&ENCRYPTED_PREFIX)?;
    let mut state = match role {
        HandshakeRole::Initiator => builder.build_initiator()?,
        HandshakeRole::Responder => builder.build_responder()?,
    };
    while !state.is_handshake_finished() {
        if state.is_my_turn() {
            send(link, &mut state).await?;
        } else {
            receive(link, &mut state).await?;
        }
    }
    Ok(state.into_transport_mode()?)
}

/// Creates the error for a closed connection: most likely, the peer has a different key and rejected the last message.
fn closed(_: std::io::Error) -> EncryptionError {
    EncryptionError::Handshake { cause: "the peer closed the connection" }
}

async fn send(link: &mut impl ByteStream, state: &mut HandshakeState) -> Result<(), EncryptionError> {
    let mut message = [0; HANDSHAKE_MESSAGE_LEN];
    message[..ENCRYPTED_PREFIX.len()].copy_from_slice(&ENCRYPTED_PREFIX);
    let written = state.write_message(&[], &mut message[ENCRYPTED_PREFIX.len()..])?;
    assert_eq!(written, NOISE_MESSAGE_LEN, "a message of the pattern has a public key and a tag");
    link.write_all(&message).await.map_err(closed)?;
    link.flush().await.map_err(closed)
}

async fn receive(link: &mut impl ByteStream, state: &mut HandshakeState) -> Result<(), EncryptionError> {
    let mut prefix = [0; ENCRYPTED_PREFIX.len()];
    link.read_exact(&mut prefix).await.map_err(closed)?;
    if prefix != ENCRYPTED_PREFIX {
        refuse_plain_peer(link).await;
        return Err(EncryptionError::Handshake { cause: "the peer does not encrypt" });
    }
    let (mut message, mut empty) = ([0; NOISE_MESSAGE_LEN], [0; NOISE_MESSAGE_LEN]);
    link.read_exact(&mut message).await.map_err(closed)?;
    state
        .read_message(&message, &mut empty)
        .map_err(|_| EncryptionError::Handshake { cause: "the peer uses a different key" })?;
    Ok(())
}

/// Sends [`ENCRYPTED_PREFIX`] to a peer without a key, so that the peer recognises that this device has a key.
async fn refuse_plain_peer(link: &mut impl ByteStream) {
    let refusal = async {
        link.write_all(&ENCRYPTED_PREFIX).await?;
        link.flush().await?;
        // Closing a connection with unread bytes resets it, and the peer might then not receive the prefix.
        link.read(&mut [0; 4096]).await
    };
    let _ = timeout(REFUSAL_DEADLINE, refusal).await;
}
