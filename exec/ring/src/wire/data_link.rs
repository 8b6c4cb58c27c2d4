//! Data links: connections that carry activations from one device to the next.
//!
//! The sender opens a connection for one epoch. The receiver accepts only connections for its session and its latest
//! prepared epoch ([`OpenEpoch`]), so that a new connection cannot deliver activations of an earlier ring. Every
//! frame contains its epoch, so that late frames of an old connection are recognised.
//!
//! Both ends report the end of a connection to the head. The session continues, because a broken connection does not
//! show which device is lost.
//!
//! Not here: the computation with activations ([`crate::execution`]), and the head's reaction to a broken link
//! ([`crate::coordinator`]).

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_schema::pass::Pass;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::frame::Frame;
use super::handshake::{WRITE_DEADLINE, open_connection, refuse, send_welcome};
use super::message::{Purpose, WorkerFacts};
use super::transport::Transport;
use crate::error::RingError;
use hearth_runtime::clock::wall_nanos;

/// The grace period before a neighbour's closed connection counts as broken: usually the epoch has ended, which the
/// head is about to announce, or the device was lost, which the head detects itself. source: assumed
const CLOSE_GRACE: Duration = Duration::from_secs(1);

/// Received activations of a pass.
#[derive(Debug)]
pub struct ReceivedActivations {
    /// The sender's place in the ring, from its hello.
    pub sender_place: u16,
    /// The epoch in which the activations were computed.
    pub epoch: u32,
    /// The pass that the activations belong to.
    pub pass: Pass,
    /// The round that the receiver computes next.
    pub round: u32,
    /// Little-endian values, `[tokens, embedding]`.
    pub activations: Vec<u8>,
    /// Whether the values are f16 instead of f32.
    pub is_f16: bool,
    /// The time at which the last byte arrived, in nanoseconds on this process's clock.
    pub received_ns: u64,
}

/// The report of a broken connection to another device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokenLink {
    /// The epoch for which the connection was opened.
    pub epoch: u32,
    /// The other device's place in the ring.
    pub peer: u16,
    pub reason: String,
}

/// An event of a data connection.
#[derive(Debug)]
pub enum DataEvent {
    Activations(ReceivedActivations),
    /// The connection has ended.
    LinkBroken(BrokenLink),
}

/// Receives the events of data connections. Returns false if it accepts no more events.
pub type DataSink = Arc<dyn Fn(DataEvent) -> bool + Send + Sync>;

/// The session and epoch whose activations a device accepts.
#[derive(Clone)]
pub struct OpenEpoch {
    pub session: u64,
    /// The latest prepared epoch.
    pub epoch: u32,
    /// Receives the events of accepted connections.
    pub sink: DataSink,
}

/// The open epoch of a device, shared between its tasks; `None` before an epoch is prepared.
pub type SharedOpenEpoch = Arc<Mutex<Option<OpenEpoch>>>;

/// Accepts a data connection if it is for the open epoch, and receives activations until the connection ends.
pub async fn accept_activations<S>(
    mut stream: S,
    open_epoch: &SharedOpenEpoch,
    session: u64,
    (from, epoch): (u16, u32),
    max_payload: usize,
) -> Result<(), RingError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let open = open_epoch.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let Some(open) = open.filter(|open| (open.session, open.epoch) == (session, epoch)) else {
        return Err(refuse(&mut stream, "this device is not in that session and epoch".into()).await);
    };
    send_welcome(&mut stream, WorkerFacts::default()).await?;
    receive_activations(stream, (from, epoch), max_payload, &open.sink).await;
    Ok(())
}

/// Reads activations until the connection ends, and reports how it ended.
pub async fn receive_activations<S>(
    mut stream: S,
    (from, epoch): (u16, u32),
    max_payload: usize,
    sink: &DataSink,
) where
    S: AsyncRead + Unpin,
{
    let reason = loop {
        match Frame::read(&mut stream, max_payload).await {
            Ok(Some(Frame { message, payload })) => {
                let at = wall_nanos();
                let Some((epoch, pass, round, is_f16)) = message.pass() else {
                    break "it sent a message other than activations".into();
                };
                let arrival = ReceivedActivations {
                    sender_place: from,
                    epoch,
                    pass,
                    round,
                    activations: payload,
                    is_f16,
                    received_ns: at,
                };
                if !sink(DataEvent::Activations(arrival)) {
                    return;
                }
            }
            Ok(None) => {
                tokio::time::sleep(CLOSE_GRACE).await;
                break "it closed the connection".into();
            }
            Err(error) => break error.to_string(),
        }
    };
    sink(DataEvent::LinkBroken(BrokenLink { epoch, peer: from, reason }));
}

/// Opens the connections over which this device sends activations.
pub struct DataConnector<'a, T> {
    pub transport: &'a T,
    pub session: u64,
    pub epoch: u32,
    /// This device's place in the ring.
    pub place: u16,
    /// Receives broken links.
    pub sink: &'a DataSink,
}

impl<T: Transport> DataConnector<'_, T> {
    /// Connects to the device at place `to` of the ring. Frames sent to the returned channel are written to the
    /// connection, which is closed when the channel is closed.
    pub async fn connect(
        &self,
        to: u16,
        name: &str,
        address: &str,
    ) -> Result<mpsc::UnboundedSender<Frame>, RingError> {
        let purpose = Purpose::Data { from: self.place, epoch: self.epoch };
        let (mut stream, _) = open_connection(self.transport, name, address, self.session, purpose).await?;
        let (sender, mut frames) = mpsc::unbounded_channel::<Frame>();
        let (sink, epoch) = (self.sink.clone(), self.epoch);
        tokio::spawn(async move {
            while let Some(frame) = frames.recv().await {
                let reason = match timeout(WRITE_DEADLINE, frame.write(&mut stream)).await {
                    Ok(Ok(())) => continue,
                    Ok(Err(error)) => error.to_string(),
                    Err(_) => "it does not read any more".into(),
                };
                sink(DataEvent::LinkBroken(BrokenLink { epoch, peer: to, reason }));
                return;
            }
        });
        Ok(sender)
    }
}
