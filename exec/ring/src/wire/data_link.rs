//! Data links: connections that carry activations from one device to the next.
//!
//! The sender opens a connection for one epoch. The receiver accepts only connections for its session and its latest
//! prepared epoch ([`PreparedEpoch`]), and every frame contains its epoch, so that late frames of an old connection are
//! recognised. Both ends report the end of a connection to the head. The session continues, because a broken
//! connection does not show which device is lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::AsyncRead;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::timeout;

use super::accepted::{AcceptedConnection, ConnectionKind};
use super::budget::{ReceiveBudget, Reservation};
use super::frame::{Frame, FrameHeader};
use super::handshake::{WRITE_TIMEOUT, open_connection, send_refusal, send_welcome};
use super::message::{
    ActivationCounts, ActivationsHeader, BrokenLink, ConnectionPurpose, Message, WorkerInfo,
};
use super::transport::{ByteStream, Transport};
use crate::error::Result;
use hearth_runtime::clock::monotonic_nanos;

/// The grace period before a connection that the peer has closed counts as broken: most often, the epoch has ended,
/// which the head is about to announce, or the peer was lost, which the head detects itself. source: assumed
const CLOSE_GRACE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct ReceivedActivations {
    /// The index of the sender in the ring, as stated in the sender's hello.
    pub sender_index: u16,
    pub header: ActivationsHeader,
    /// Values of shape `[tokens, embedding]`, as little-endian f16 or f32.
    pub activations: Vec<u8>,
    /// The time at which the last byte arrived, in nanoseconds on this process's clock.
    pub received_at_ns: u64,
    /// The part of the epoch's budget that these activations occupy.
    pub reservation: Reservation,
}

/// Counts the messages with activations that a device has received, and those that it has sent or dropped, in an epoch.
#[derive(Debug, Default)]
pub struct ActivationCounters {
    received: AtomicU64,
    sent: AtomicU64,
}

impl ActivationCounters {
    /// Records that received activations are not passed on, for example because they belong to an earlier request.
    pub fn record_dropped(&self) {
        self.sent.fetch_add(1, Ordering::Relaxed);
    }

    pub fn counts(&self) -> ActivationCounts {
        let [received, sent] = [&self.received, &self.sent].map(|counter| counter.load(Ordering::Relaxed));
        ActivationCounts { received, sent }
    }
}

#[derive(Debug)]
pub enum DataLinkEvent {
    Activations(ReceivedActivations),
    LinkBroken(BrokenLink),
}

/// Receives the events of data connections. Returns false if no more events are accepted.
pub type DataLinkEventSink = Arc<dyn Fn(DataLinkEvent) -> bool + Send + Sync>;

/// The session and epoch whose activations a device accepts.
#[derive(Clone)]
pub struct PreparedEpoch {
    pub session: u64,
    pub epoch: u32,
    pub sink: DataLinkEventSink,
    /// The bytes of activations that may wait on this device.
    pub budget: ReceiveBudget,
    pub counters: Arc<ActivationCounters>,
    /// Permits for the connections over which activations arrive.
    pub connections: Arc<Semaphore>,
}

/// Maximum number of connections over which a device receives activations. source: assumed; a ring has one or two
pub const MAX_DATA_CONNECTIONS: usize = 16;

/// The prepared epoch of a device, shared by the tasks of the device; `None` if no epoch is prepared.
pub type SharedPreparedEpoch = Arc<watch::Sender<Option<PreparedEpoch>>>;

/// Replaces the prepared epoch. The readers of the previous epoch end.
pub fn replace_prepared_epoch(shared: &SharedPreparedEpoch, new: Option<PreparedEpoch>) {
    if let Some(old) = shared.send_replace(new) {
        old.budget.close();
    }
}

/// Accepts a data connection if it is for the prepared epoch, and receives activations until the connection ends.
pub async fn accept_activations<S: ByteStream>(
    mut stream: S,
    prepared_epoch: &SharedPreparedEpoch,
    session: u64,
    (sender_index, epoch): (u16, u32),
    max_payload: usize,
    connection: &AcceptedConnection,
) -> Result<()> {
    let prepared = prepared_epoch.borrow().clone();
    let Some(prepared) = prepared.filter(|open| (open.session, open.epoch) == (session, epoch)) else {
        return Err(send_refusal(&mut stream, "this device is not in that session and epoch".into()).await);
    };
    let Ok(_permit) = prepared.connections.clone().try_acquire_owned() else {
        return Err(
            send_refusal(&mut stream, "too many devices send activations to this device".into()).await
        );
    };
    connection.set_kind(ConnectionKind::Session);
    send_welcome(&mut stream, WorkerInfo::default()).await?;
    receive_activations(stream, sender_index, max_payload, &prepared).await;
    Ok(())
}

/// Reads activations until the connection ends, and reports to `sink` how the connection ended.
pub async fn receive_activations(
    mut stream: impl AsyncRead + Unpin,
    sender_index: u16,
    max_payload: usize,
    prepared: &PreparedEpoch,
) {
    let PreparedEpoch { epoch, sink, budget, counters, .. } = prepared;
    let (is_fault, reason) = loop {
        let frame = match FrameHeader::read(&mut stream, max_payload).await {
            Ok(Some(frame)) => frame,
            Ok(None) => {
                tokio::time::sleep(CLOSE_GRACE).await;
                break (false, "it closed the connection".into());
            }
            Err(error) => break (error.is_fault(), error.to_string()),
        };
        let Message::Activations(header) = &frame.message else {
            break (true, "it sent a message other than activations".into());
        };
        let header = header.clone();
        let Some(reservation) = budget.reserve(frame.payload_len).await else { return };
        let activations = match frame.read_payload(&mut stream).await {
            Ok(frame) => frame.payload,
            Err(error) => break (error.is_fault(), error.to_string()),
        };
        let received_at_ns = monotonic_nanos();
        counters.received.fetch_add(1, Ordering::Relaxed);
        let received = ReceivedActivations { sender_index, header, activations, received_at_ns, reservation };
        if !sink(DataLinkEvent::Activations(received)) {
            return;
        }
    };
    sink(DataLinkEvent::LinkBroken(BrokenLink { epoch: *epoch, peer_index: sender_index, is_fault, reason }));
}

/// Opens the connections over which this device sends activations.
pub struct DataConnector<'a, T> {
    pub transport: &'a T,
    pub session: u64,
    pub epoch: u32,
    /// This device's index in the ring.
    pub device_index: u16,
    /// Receives an event for each opened connection that breaks.
    pub sink: &'a DataLinkEventSink,
    pub counters: &'a Arc<ActivationCounters>,
}

impl<T: Transport> DataConnector<'_, T> {
    /// Connects to the device with ring index `to`. Frames that are sent to the returned channel are written to the
    /// connection, which is closed when the channel is closed.
    pub async fn connect(&self, to: u16, name: &str, address: &str) -> Result<mpsc::UnboundedSender<Frame>> {
        let purpose = ConnectionPurpose::Data { from: self.device_index, epoch: self.epoch };
        let (mut stream, _) = open_connection(self.transport, name, address, self.session, purpose).await?;
        let (sender, mut frames) = mpsc::unbounded_channel::<Frame>();
        let (sink, counters, epoch) = (self.sink.clone(), self.counters.clone(), self.epoch);
        tokio::spawn(async move {
            while let Some(frame) = frames.recv().await {
                let reason = match timeout(WRITE_TIMEOUT, frame.write(&mut stream)).await {
                    Ok(Ok(())) => {
                        counters.sent.fetch_add(1, Ordering::Relaxed);
                        continue;
                    }
                    Ok(Err(error)) => error.to_string(),
                    Err(_) => "it no longer reads messages".into(),
                };
                let broken = BrokenLink { epoch, peer_index: to, is_fault: false, reason };
                sink(DataLinkEvent::LinkBroken(broken));
                return;
            }
        });
        Ok(sender)
    }
}
