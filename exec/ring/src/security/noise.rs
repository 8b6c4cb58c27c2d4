//! The handshake of an encrypted connection: both ends prove that they have the key.
//!
//! Noise `NNpsk0`: each end sends a fresh Curve25519 point, and every flight is authenticated under the key. Two
//! flights of 56 bytes, nothing else, whatever a peer sends:
//!
//! | bytes | content |
//! |---|---|
//! | 8 | [`ENCRYPTED_PREFIX`], which no plain frame can begin with |
//! | 32 | the point |
//! | 16 | the tag |
//!
//! A recorded first flight is answered when it is replayed, and that is all: the answer's point is new, so a replay
//! does not give the session's keys.

use std::time::Duration;

use snow::{Builder, HandshakeState, TransportState};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use super::key::Key;
use crate::error::EncryptionError;
use crate::wire::ENCRYPTED_PREFIX;

/// Pattern, curve, cipher and hash.
const PROTOCOL: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
/// A point and a tag.
const FLIGHT: usize = 32 + 16;
/// The time limit of the whole handshake; shorter than a worker's wait for a hello, so that this error comes first.
const DEADLINE: Duration = Duration::from_secs(4);
/// The time to wait for the first frame of a peer without encryption, so that closing does not cut off the error sent
/// to it.
const REFUSAL_DEADLINE: Duration = Duration::from_millis(200);

/// The role of an end in the handshake; the connecting end sends first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The end that connects.
    Connecting,
    /// The end that accepts.
    Accepting,
}

/// Performs the handshake, which only holders of the key can complete.
pub async fn handshake<S>(
    mut link: S,
    key: Key,
    side: Side,
) -> Result<(S, Box<TransportState>), EncryptionError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let cipher = timeout(DEADLINE, exchange(&mut link, &key, side)).await;
    let cipher = cipher.map_err(|_| EncryptionError::Key { seen: "it says nothing" })??;
    Ok((link, Box::new(cipher)))
}

async fn exchange<S>(link: &mut S, key: &Key, side: Side) -> Result<TransportState, EncryptionError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let builder = Builder::new(PROTOCOL.parse()?).psk(0, key.secret())?.prologue(&ENCRYPTED_PREFIX)?;
    let state = match side {
        Side::Connecting => {
            let mut state = builder.build_initiator()?;
            send(link, &mut state).await?;
            receive(link, &mut state).await?;
            state
        }
        Side::Accepting => {
            let mut state = builder.build_responder()?;
            receive(link, &mut state).await?;
            send(link, &mut state).await?;
            state
        }
    };
    Ok(state.into_transport_mode()?)
}

/// A connection that ends here was most likely ended by a peer that cannot verify what it got.
fn hung_up(_: std::io::Error) -> EncryptionError {
    EncryptionError::Key { seen: "it hung up" }
}

async fn send(
    link: &mut (impl AsyncWrite + Unpin),
    state: &mut HandshakeState,
) -> Result<(), EncryptionError> {
    let mut flight = [0; ENCRYPTED_PREFIX.len() + FLIGHT];
    flight[..ENCRYPTED_PREFIX.len()].copy_from_slice(&ENCRYPTED_PREFIX);
    let written = state.write_message(&[], &mut flight[ENCRYPTED_PREFIX.len()..])?;
    assert_eq!(written, FLIGHT, "the pattern has a point and a tag in each flight");
    link.write_all(&flight).await.map_err(hung_up)?;
    link.flush().await.map_err(hung_up)
}

async fn receive<S>(link: &mut S, state: &mut HandshakeState) -> Result<(), EncryptionError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut first = [0; ENCRYPTED_PREFIX.len()];
    link.read_exact(&mut first).await.map_err(hung_up)?;
    if first != ENCRYPTED_PREFIX {
        refuse_plain_peer(link).await;
        return Err(EncryptionError::Key { seen: "it does not encrypt" });
    }
    let (mut flight, mut empty) = ([0; FLIGHT], [0; FLIGHT]);
    link.read_exact(&mut flight).await.map_err(hung_up)?;
    state
        .read_message(&flight, &mut empty)
        .map_err(|_| EncryptionError::Key { seen: "its handshake is encrypted with another key" })?;
    Ok(())
}

/// Lets a plain peer know why it is refused: it takes [`ENCRYPTED_PREFIX`] for the start of a frame.
async fn refuse_plain_peer<S>(link: &mut S)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let refusal = async {
        link.write_all(&ENCRYPTED_PREFIX).await?;
        link.flush().await?;
        // Closing over unread bytes resets the connection, and the peer might then see only that.
        link.read(&mut [0; 4096]).await
    };
    let _ = timeout(REFUSAL_DEADLINE, refusal).await;
}
