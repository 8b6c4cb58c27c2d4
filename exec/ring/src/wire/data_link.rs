//! Data links: connections that carry activations from one device to the next.
//!
//! The sender opens a connection for one epoch. The receiver accepts those that name its session and the epoch prepared
//! last ([`OpenEpoch`]), so that nothing of an earlier ring can come in by a new connection; what an old connection
//! still carries has its epoch in every frame.
//!
//! A connection that ends is reported at both ends, and from there to the head. It does not end a session: a broken
//! connection does not tell which devices are still there.
//!
//! Not here: what a device does with activations ([`crate::execution`]), and what the head makes of a broken link
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
const HANG_UP_GRACE: Duration = Duration::from_secs(1);

/// Activations that have arrived.
#[derive(Debug)]
pub struct ReceivedActivations {
    /// The sender's place in the ring, as it said when it connected.
    pub from: u16,
    /// The epoch they were made in.
    pub epoch: u32,
    /// Whose.
    pub pass: Pass,
    /// The round that the receiver computes next.
    pub round: u32,
    /// `[tokens, embedding]`, little-endian.
    pub activations: Vec<u8>,
    /// Whether they are f16 instead of f32.
    pub in_half: bool,
    /// The time at which the last byte was there, on this process's clock.
    pub at: u64,
}

/// Reports that the connection with another device is broken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokenLink {
    /// The epoch it was opened for.
    pub epoch: u32,
    /// The other device's place.
    pub peer: u16,
    pub reason: String,
}

/// What data connections bring.
#[derive(Debug)]
pub enum DataEvent {
    Activations(ReceivedActivations),
    /// No more of them.
    LinkBroken(BrokenLink),
}

/// Receives what data connections bring. Returns false if its receiver is gone.
pub type DataSink = Arc<dyn Fn(DataEvent) -> bool + Send + Sync>;

/// The session and epoch whose activations a device accepts.
#[derive(Clone)]
pub struct OpenEpoch {
    pub session: u64,
    /// The epoch that was prepared last.
    pub epoch: u32,
    /// The receiver of incoming messages.
    pub sink: DataSink,
}

/// A device's open_epoch, closed while there is none.
pub type SharedOpenEpoch = Arc<Mutex<Option<OpenEpoch>>>;

/// Takes activations from a neighbour that has connected and said so, until the connection ends.
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
                let Some((epoch, pass, round, in_half)) = message.pass() else {
                    break "it sent something else than activations".into();
                };
                let arrival =
                    ReceivedActivations { from, epoch, pass, round, activations: payload, in_half, at };
                if !sink(DataEvent::Activations(arrival)) {
                    return;
                }
            }
            Ok(None) => {
                tokio::time::sleep(HANG_UP_GRACE).await;
                break "it hung up".into();
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
    /// This device's place.
    pub place: u16,
    /// Receives broken links.
    pub sink: &'a DataSink,
}

impl<T: Transport> DataConnector<'_, T> {
    /// Connects to the device at a place of the ring. Data sent into the channel is written to the connection, which
    /// closes with the channel.
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
                    Err(_) => "it takes nothing any more".into(),
                };
                sink(DataEvent::LinkBroken(BrokenLink { epoch, peer: to, reason }));
                return;
            }
        });
        Ok(sender)
    }
}
