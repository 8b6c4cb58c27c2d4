//! The head's control connection to one worker: sends messages, reads replies, and detects the loss of the worker.
//!
//! One task writes the queued frames and another task reads frames. A third task sends a ping every half second, and
//! reports the worker as lost when no frame has arrived for longer than [`heartbeat::LOSS_TIMEOUT_NS`]. Received frames
//! go to the head's inbox with the number of the connection, so that a reply over an earlier connection is not mistaken
//! for a reply over the current connection. The clock offset is estimated from the shortest round trip of a ping.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_core::recovery::heartbeat;
use hearth_schema::plan::{Plan, PlannedDevice};
use tokio::io::{AsyncRead, AsyncWrite, ReadHalf, WriteHalf};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::error::{Result, RingError, protocol_error};
use crate::execution::check_digests;
use crate::wire::{
    ActivationCounts, ConnectionPurpose, DataLinkEvent, Frame, FrameHeader, MAX_DOCUMENT_PAYLOAD_BYTES,
    Message, ReceiveBudget, Reservation, Transport, WRITE_TIMEOUT, WorkerInfo, open_connection,
};
use hearth_runtime::clock::monotonic_nanos;

const HEARTBEAT: Duration = Duration::from_nanos(heartbeat::INTERVAL_NS);
/// The time without a frame from a worker after which the worker counts as lost.
const SILENCE_DEADLINE: Duration = Duration::from_nanos(heartbeat::LOSS_TIMEOUT_NS);
/// Number of pings that measure the clock offset before a request.
const OFFSET_PINGS: u64 = 8;
/// Maximum number of frames of full length that wait for the head.
const MAX_WAITING_FRAMES: usize = 8;

/// An event in the head's inbox.
#[derive(Debug)]
pub(super) enum HeadEvent {
    /// An event of a data connection.
    Data(DataLinkEvent),
    /// A message of a worker over the control connection with this number.
    Message { connection: u64, frame: Frame, _reservation: Reservation },
    /// A worker is lost. Its last frame arrived at `since`, in nanoseconds on this process's clock.
    Lost { connection: u64, error: RingError, since: u64 },
    /// A pass takes longer than this limit.
    PassTimeout(Duration),
    /// The active request was cancelled.
    Cancel,
}

pub(super) struct WorkerConnection {
    /// The number of the connection in its session.
    pub(super) connection_id: u64,
    monitor: Monitor,
    pub(super) local_ip: Option<IpAddr>,
    frames: mpsc::UnboundedSender<Frame>,
    heartbeat: JoinHandle<()>,
    reader: JoinHandle<()>,
    writer: JoinHandle<()>,
}

#[derive(Debug, Clone, Copy)]
struct WorkerClock {
    /// The shortest round trip of a ping in the current measurement, in nanoseconds; 0 before the first pong.
    round_trip: u64,
    /// Nanoseconds to add to the worker's times, to convert them to the head's clock.
    to_head: i64,
    last_frame: Instant,
    /// The arrival time of the last frame, in nanoseconds on this process's clock.
    last_frame_at: u64,
    /// Whether the worker's frames wait until the head has handled earlier frames.
    is_waiting_for_head: bool,
    counts: ActivationCounts,
}

pub(super) fn address(device: &PlannedDevice) -> Result<&str> {
    device.address.as_deref().ok_or_else(|| RingError::NoAddress { name: device.name.clone() })
}

/// The state that the tasks of a connection share: the channel for events, and the worker's clock.
#[derive(Clone)]
struct Monitor {
    name: String,
    connection: u64,
    clock: Arc<Mutex<WorkerClock>>,
    inbox: mpsc::UnboundedSender<HeadEvent>,
}

impl Monitor {
    fn clock(&self) -> std::sync::MutexGuard<'_, WorkerClock> {
        self.clock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report_lost(&self, error: RingError) {
        let since = self.clock().last_frame_at;
        let _ = self.inbox.send(HeadEvent::Lost { connection: self.connection, error, since });
    }

    fn disconnected(&self, reason: impl Into<String>) -> RingError {
        RingError::disconnected(&self.name, reason)
    }
}

async fn write_frames<S: AsyncWrite>(mut stream: WriteHalf<S>, mut frames: mpsc::UnboundedReceiver<Frame>) {
    while let Some(frame) = frames.recv().await {
        // A worker that does not read sends no pongs either, so the heartbeat reports it as lost.
        if !matches!(timeout(WRITE_TIMEOUT, frame.write(&mut stream)).await, Ok(Ok(()))) {
            return;
        }
    }
}

/// Sends pings, and reports the worker as lost when no frame arrives for [`SILENCE_DEADLINE`].
async fn send_heartbeats(monitor: Monitor, frames: mpsc::UnboundedSender<Frame>) {
    loop {
        if frames.send(Message::Ping { nonce: monotonic_nanos() }.into()).is_err() {
            return;
        }
        let sent = Instant::now();
        tokio::time::sleep(HEARTBEAT).await;
        let mut clock = monitor.clock();
        if clock.is_waiting_for_head || sent.elapsed() > 2 * HEARTBEAT {
            // This process computes or was suspended, not the worker: the worker's frames have not been read yet.
            clock.last_frame = Instant::now();
        }
        let last_frame = clock.last_frame;
        drop(clock);
        if last_frame.elapsed() > SILENCE_DEADLINE {
            let reason = format!("no message for {} s", SILENCE_DEADLINE.as_secs_f64());
            monitor.report_lost(monitor.disconnected(reason));
            return;
        }
    }
}

/// Reads the frames of a worker: pongs update the clock offset, all other messages go to the head's inbox.
async fn read_frames<S: AsyncRead>(monitor: Monitor, mut stream: ReadHalf<S>) {
    let budget = ReceiveBudget::new(MAX_WAITING_FRAMES, MAX_DOCUMENT_PAYLOAD_BYTES);
    let mut rate = RateLimit::default();
    let error = loop {
        let frame = match FrameHeader::read(&mut stream, MAX_DOCUMENT_PAYLOAD_BYTES).await {
            Ok(Some(frame)) => frame,
            Ok(None) => break monitor.disconnected("it closed the connection"),
            Err(error) => break monitor.disconnected(error.to_string()),
        };
        if !rate.allows_another() {
            let what = format!("it sends more than {} messages per second", RateLimit::MAX_RATE);
            break protocol_error(&monitor.name, what);
        }
        let Some(reservation) = reserve(&monitor, &budget, frame.payload_len).await else { return };
        let frame = match frame.read_payload(&mut stream).await {
            Ok(frame) => frame,
            Err(error) => break monitor.disconnected(error.to_string()),
        };
        let mut clock = monitor.clock();
        (clock.last_frame, clock.last_frame_at) = (Instant::now(), monotonic_nanos());
        match frame.message {
            Message::Pong { nonce, clock_ns: theirs, counts } => {
                clock.counts = counts;
                clock.on_pong(nonce, theirs);
            }
            Message::Refuse { reason } => break RingError::refused(&monitor.name, &reason),
            _ => {
                let event =
                    HeadEvent::Message { connection: monitor.connection, frame, _reservation: reservation };
                if monitor.inbox.send(event).is_err() {
                    return;
                }
            }
        }
    };
    monitor.report_lost(error);
}

/// Waits until a frame with a payload of this length fits the budget. Meanwhile the worker does not count as silent.
async fn reserve(monitor: &Monitor, budget: &ReceiveBudget, payload_len: usize) -> Option<Reservation> {
    if let Some(reservation) = budget.try_reserve(payload_len) {
        return Some(reservation);
    }
    monitor.clock().is_waiting_for_head = true;
    let reservation = budget.reserve(payload_len).await;
    let mut clock = monitor.clock();
    (clock.is_waiting_for_head, clock.last_frame) = (false, Instant::now());
    reservation
}

/// Limits the messages of a worker, so that a worker that floods the head does not stop the ring.
struct RateLimit {
    /// The start of the current second, and the number of messages since then.
    second: (Instant, u32),
}

impl RateLimit {
    /// source: assumed; a worker that fetches layers over 10 Gbit/s reports 1200 chunks per second
    const MAX_RATE: u32 = 5000;

    fn allows_another(&mut self) -> bool {
        let (start, count) = &mut self.second;
        if start.elapsed() >= Duration::from_secs(1) {
            (*start, *count) = (Instant::now(), 0);
        }
        *count += 1;
        *count <= Self::MAX_RATE
    }
}

impl Default for RateLimit {
    fn default() -> Self {
        Self { second: (Instant::now(), 0) }
    }
}

impl WorkerClock {
    /// Updates the clock offset from a pong that has just arrived. The ping was sent at `nonce` on the head's clock,
    /// and answered at `theirs` on the worker's clock, both in nanoseconds.
    fn on_pong(&mut self, nonce: u64, theirs: u64) {
        let round_trip = self.last_frame_at.saturating_sub(nonce).max(1);
        if self.round_trip == 0 || round_trip < self.round_trip {
            self.round_trip = round_trip;
            // Assumes that the pong was written half way through the round trip.
            self.to_head =
                nonce.saturating_add(round_trip / 2).cast_signed().wrapping_sub(theirs.cast_signed());
        }
    }
}

impl WorkerConnection {
    /// Opens the control connection to a worker, and checks its model. Also returns what the worker sent about itself.
    pub(super) async fn open<T: Transport>(
        transport: &T,
        plan: &Plan,
        device: &PlannedDevice,
        (session, connection_id): (u64, u64),
        inbox: &mpsc::UnboundedSender<HeadEvent>,
    ) -> Result<(WorkerConnection, WorkerInfo)> {
        let (name, at) = (device.name.clone(), address(device)?);
        let (stream, info) =
            open_connection(transport, &name, at, session, ConnectionPurpose::Control).await?;
        // A worker without a model file fetches its layers from the head.
        if !info.model_digest.is_empty() {
            check_digests(plan, &info.model_digest, &info.shape_digest, &format!("worker `{name}`"))?;
        }
        let local_ip = transport.local_ip(&stream);
        let (reader, writer) = tokio::io::split(stream);
        let (frames, queue) = mpsc::unbounded_channel();
        let (last_frame, last_frame_at) = (Instant::now(), monotonic_nanos());
        let clock = Arc::new(Mutex::new(WorkerClock {
            round_trip: 0,
            to_head: 0,
            last_frame,
            last_frame_at,
            is_waiting_for_head: false,
            counts: ActivationCounts::default(),
        }));
        let monitor = Monitor { name, connection: connection_id, clock, inbox: inbox.clone() };
        let heartbeat = tokio::spawn(send_heartbeats(monitor.clone(), frames.clone()));
        let reader = tokio::spawn(read_frames(monitor.clone(), reader));
        let writer = tokio::spawn(write_frames(writer, queue));
        Ok((WorkerConnection { connection_id, monitor, local_ip, frames, heartbeat, reader, writer }, info))
    }

    /// Returns the nanoseconds to add to the worker's times, to convert them to the head's clock.
    pub(super) fn clock_offset_ns(&self) -> i64 {
        self.monitor.clock().to_head
    }

    /// Returns the worker's counts in the current epoch, at most one heartbeat old.
    pub(super) fn counts(&self) -> ActivationCounts {
        self.monitor.clock().counts
    }

    /// Measures the clock offset again, because clocks drift apart and an old measurement becomes wrong.
    pub(super) fn measure_clock_offset(&self) {
        self.monitor.clock().round_trip = 0;
        for _ in 0..OFFSET_PINGS {
            self.send(Message::Ping { nonce: monotonic_nanos() });
        }
    }

    /// Queues a frame. If the frame cannot be sent, the reader or the heartbeat reports the worker as lost.
    pub(super) fn send(&self, frame: impl Into<Frame>) {
        let _ = self.frames.send(frame.into());
    }

    /// Ends the session: writes the queued frames and then a goodbye.
    pub(super) async fn close(&mut self) {
        let _ = self.frames.send(Message::Goodbye.into());
        // The writer ends once the queue is written and has no sender; the heartbeat has the other one.
        self.frames = mpsc::unbounded_channel().0;
        self.heartbeat.abort();
        let _ = timeout(HEARTBEAT, &mut self.writer).await;
    }
}

impl Drop for WorkerConnection {
    fn drop(&mut self) {
        for task in [&self.heartbeat, &self.reader, &self.writer] {
            task.abort();
        }
    }
}
