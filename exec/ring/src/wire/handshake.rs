//! The start of a connection: hello and welcome, and the deadline of every wait for another device.
//!
//! The end that connects sends a hello with its purpose; the other end welcomes it, or refuses with a reason and hangs
//! up. It is the same for control connections, activations, probes and layers.
//!
//! Not here: who may connect ([`crate::security`]), and what follows the welcome.

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

use super::frame::Frame;
use super::message::{MAGIC, Message, PROTOCOL, Purpose, WorkerFacts};
use super::transport::Transport;
use crate::error::WireError;
use crate::error::{RingError, protocol_error};

/// The time limit for connecting to a device and receiving its welcome. source: assumed, three tries of TCP's first
/// packet (1 s, 2 s and 4 s apart, RFC 6298)
pub const CALL_DEADLINE: Duration = Duration::from_secs(10);
/// The time limit between accepting a connection and its first frame. source: assumed
const HELLO_DEADLINE: Duration = Duration::from_secs(5);

/// The time limit for sending a frame.
pub const WRITE_DEADLINE: Duration = Duration::from_secs(10);

/// Waits with a deadline.
pub async fn with_deadline<T>(
    limit: Duration,
    what: &str,
    wait: impl Future<Output = T>,
) -> Result<T, RingError> {
    timeout(limit, wait).await.map_err(|_| RingError::Deadline {
        what: what.into(),
        seconds: limit.as_secs_f64(),
        hint: "see whether the other end still runs and the network is up",
    })
}

/// Connects to a device and waits for its welcome. Returns the stream, and the facts about the device.
pub async fn open_connection<T: Transport>(
    transport: &T,
    name: &str,
    address: &str,
    session: u64,
    purpose: Purpose,
) -> Result<(T::Stream, WorkerFacts), RingError> {
    let calling = async {
        let mut stream = transport.connect(address).await.map_err(|error| RingError::Unreachable {
            name: name.into(),
            address: address.into(),
            reason: error.to_string(),
        })?;
        let failed = |error: WireError| RingError::handshake(name, &error);
        let hello = Message::Hello { magic: MAGIC, protocol: PROTOCOL, session, purpose };
        Frame::from(hello).write(&mut stream).await.map_err(failed)?;
        match Frame::read(&mut stream, 0).await.map_err(failed)? {
            Some(Frame { message: Message::Welcome(facts), .. }) => Ok((stream, facts)),
            Some(Frame { message: Message::Refuse { reason }, .. }) => {
                Err(RingError::Refused { name: name.into(), reason })
            }
            None => Err(RingError::Disconnected { name: name.into(), reason: "it hung up".into() }),
            Some(_) => Err(protocol_error(name, "its first frame is no welcome")),
        }
    };
    with_deadline(CALL_DEADLINE, &format!("reaching `{name}`"), calling).await?
}

/// Reads the session and the purpose of a connection. A peer of another version is refused.
pub async fn read_hello<S>(stream: &mut S) -> Result<(u64, Purpose), RingError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let hello = with_deadline(HELLO_DEADLINE, "a connection's first frame", Frame::read(stream, 0)).await?;
    let hello = hello.map_err(|error| RingError::handshake("a peer", &error))?;
    let Some(Frame { message: Message::Hello { magic, protocol, session, purpose }, .. }) = hello else {
        return Err(protocol_error("a connection", "its first frame is no hello"));
    };
    if magic == MAGIC && protocol == PROTOCOL {
        return Ok((session, purpose));
    }
    let reason = format!("this end speaks protocol {PROTOCOL} of hearth, not {protocol}; use one version");
    Err(refuse(stream, reason).await)
}

/// Accepts a connection.
pub async fn send_welcome<S: AsyncWrite + Unpin>(
    stream: &mut S,
    facts: WorkerFacts,
) -> Result<(), RingError> {
    let frame = Frame::from(Message::Welcome(facts));
    Ok(with_deadline(WRITE_DEADLINE, "welcoming a connection", frame.write(stream)).await??)
}

/// Refuses a connection. Returns the error of this end.
pub async fn refuse<S: AsyncWrite + Unpin>(stream: &mut S, reason: String) -> RingError {
    let frame = Frame::from(Message::Refuse { reason: reason.clone() });
    // Whoever has gone already does not need the reason.
    let _ = with_deadline(WRITE_DEADLINE, "refusing a connection", frame.write(stream)).await;
    RingError::Refused { name: "this device".into(), reason }
}
