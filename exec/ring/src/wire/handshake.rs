//! The handshake of a connection: hello and welcome, and the deadline of every wait for another device.
//!
//! The connecting device sends a hello with its purpose. The other device replies with a welcome, or refuses with a
//! reason and closes the connection. All purposes (control, activations, probes, layers) have the same handshake.
//!
//! Not here: who may connect ([`crate::security`]), and what follows the welcome.

use std::time::Duration;

use tokio::time::timeout;

use super::frame::Frame;
use super::message::{ConnectionPurpose, MAGIC, Message, PROTOCOL_VERSION, WorkerInfo};
use super::transport::{ByteStream, Transport, check_encrypted_or_loopback};
use crate::error::{Result, RingError, WireError, protocol_error};

/// The time limit for connecting to a device and receiving its welcome. source: assumed, three tries of TCP's first
/// packet (1 s, 2 s and 4 s apart, RFC 6298)
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);
/// The time limit from accepting a connection to receiving its first frame. source: assumed
const HELLO_DEADLINE: Duration = Duration::from_secs(5);
/// The time limit for sending a frame.
pub const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Waits for the future `wait`, at most for `limit`. `what` names the operation in the error.
pub async fn with_timeout<T>(limit: Duration, what: &str, wait: impl Future<Output = T>) -> Result<T> {
    timeout(limit, wait).await.map_err(|_| RingError::Deadline {
        what: what.into(),
        seconds: limit.as_secs_f64(),
        hint: "check that the other device is still running and that the network is up",
    })
}

/// Connects to a device and waits for its welcome. Returns the stream, and what the device sent about itself. Does not
/// connect to another machine without a key.
pub async fn open_connection<T: Transport>(
    transport: &T,
    name: &str,
    address: &str,
    session: u64,
    purpose: ConnectionPurpose,
) -> Result<(T::Stream, WorkerInfo)> {
    check_encrypted_or_loopback(transport, address)?;
    let connecting = async {
        let mut stream = transport.connect(address).await.map_err(|error| RingError::Unreachable {
            name: name.into(),
            address: address.into(),
            reason: error.to_string(),
        })?;
        let failed = |error: WireError| RingError::handshake_failed(name, &error);
        let hello = Message::Hello { magic: MAGIC, protocol: PROTOCOL_VERSION, session, purpose };
        Frame::from(hello).write(&mut stream).await.map_err(failed)?;
        match Frame::read(&mut stream, 0).await.map_err(failed)? {
            Some(Frame { message: Message::Welcome(info), .. }) => Ok((stream, info)),
            Some(Frame { message: Message::Refuse { reason }, .. }) => Err(RingError::refused(name, &reason)),
            None => Err(RingError::disconnected(name, "it closed the connection")),
            Some(_) => Err(protocol_error(name, "its first frame is not a welcome")),
        }
    };
    with_timeout(CONNECT_DEADLINE, &format!("connecting to `{name}`"), connecting).await?
}

/// Reads a hello. Returns the session number and the purpose. Refuses a peer with a different protocol version.
pub async fn read_hello<S: ByteStream>(stream: &mut S) -> Result<(u64, ConnectionPurpose)> {
    let reading = Frame::read(stream, 0);
    let hello = with_timeout(HELLO_DEADLINE, "receiving a connection's first frame", reading).await?;
    let hello = hello.map_err(|error| RingError::handshake_failed("a peer", &error))?;
    let Some(Frame { message: Message::Hello { magic, protocol, session, purpose }, .. }) = hello else {
        return Err(protocol_error("a peer", "its first frame is not a hello"));
    };
    if magic == MAGIC && protocol == PROTOCOL_VERSION {
        return Ok((session, purpose));
    }
    let reason = format!(
        "this device has protocol version {PROTOCOL_VERSION}, not {protocol}; use the same version of hearth \
         on all devices"
    );
    Err(send_refusal(stream, reason).await)
}

/// Accepts a connection by sending a welcome.
pub async fn send_welcome(stream: &mut impl ByteStream, info: WorkerInfo) -> Result<()> {
    let frame = Frame::from(Message::Welcome(info));
    Ok(with_timeout(WRITE_TIMEOUT, "accepting a connection", frame.write(stream)).await??)
}

/// Refuses a connection by sending the reason. Returns the error for this end.
pub async fn send_refusal(stream: &mut impl ByteStream, reason: String) -> RingError {
    let frame = Frame::from(Message::Refuse { reason: reason.clone() });
    // A peer that has disconnected does not need the reason.
    let _ = with_timeout(WRITE_TIMEOUT, "refusing a connection", frame.write(stream)).await;
    RingError::Refused { name: "this device".into(), reason }
}
