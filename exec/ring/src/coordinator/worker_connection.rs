//! The head's control connection to one worker: sends messages, reads answers, and notices when the worker is lost.
//!
//! One task writes what is queued, one reads, and one sends a ping every half second and reports the worker as lost
//! when nothing has come for longer than [`heartbeat::SILENCE`]. All that is read goes into the head's one inbox with
//! the number of the connection, so that an answer over an earlier connection is not taken for a new one. Pongs carry
//! the worker's clock; the shortest round trip estimates the offset best, because the pong was written half way
//! between.
//!
//! Not here: what a message makes a worker do ([`crate::worker`]), and what the head makes of an answer
//! ([`super::coordinator`]).

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_core::recovery::heartbeat;
use hearth_schema::plan::Plan;
use hearth_schema::plan::PlannedDevice;
use tokio::io::{AsyncRead, AsyncWrite, ReadHalf, WriteHalf};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::error::RingError;
use crate::execution::check_digests;
use crate::wire::{
    DataEvent, Frame, MAX_DOCUMENT_PAYLOAD, Message, Purpose, Transport, WRITE_DEADLINE, WorkerFacts,
    open_connection,
};
use hearth_runtime::clock::wall_nanos;

/// The interval between two pings.
const HEARTBEAT: Duration = Duration::from_nanos(heartbeat::INTERVAL);
/// Without a frame for this time, a worker counts as lost.
const SILENCE_DEADLINE: Duration = Duration::from_nanos(heartbeat::SILENCE);
/// Pings that estimate a clock's offset before a request.
const OFFSET_PINGS: u64 = 8;

/// An event in the head's inbox.
#[derive(Debug)]
pub(super) enum HeadEvent {
    /// An event of the worker's data connections.
    Data(DataEvent),
    /// An answer of a worker over a control connection, by its number.
    Message { connection: u64, frame: Frame },
    /// A worker is lost.
    Lost {
        connection: u64,
        error: RingError,
        /// The time at which its last frame came, on this process's clock.
        since: u64,
    },
    /// A pass takes longer than this limit.
    PassTimeout(Duration),
    /// The request is cancelled.
    Cancel,
}

/// The head's connection to one worker.
pub(super) struct WorkerConnection {
    name: String,
    pub(super) number: u64,
    pub(super) facts: WorkerFacts,
    /// This machine's address on the worker's side.
    pub(super) local_ip: Option<IpAddr>,
    frames: mpsc::UnboundedSender<Frame>,
    clock: Arc<Mutex<WorkerClock>>,
    heartbeat: JoinHandle<()>,
    reader: JoinHandle<()>,
    writer: JoinHandle<()>,
}

/// The offset of a worker's clock, from the shortest ping so far, and when its last frame came.
#[derive(Debug, Clone, Copy)]
struct WorkerClock {
    /// Round trip of the shortest ping, in nanoseconds; 0 before the first.
    round_trip: u64,
    /// The offset of the worker's clock, in nanoseconds: added to its times.
    to_head: i64,
    last_frame: Instant,
    /// The same on this process's wall clock.
    last_frame_at: u64,
}

/// The address of a planned worker.
pub(super) fn address(device: &PlannedDevice) -> Result<&str, RingError> {
    device.address.as_deref().ok_or_else(|| RingError::NoAddress { name: device.name.clone() })
}

/// State shared by the tasks of a connection: the channel for events, and the worker's clock.
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
        RingError::Disconnected { name: self.name.clone(), reason: reason.into() }
    }
}

async fn write_frames<S: AsyncWrite>(mut stream: WriteHalf<S>, mut frames: mpsc::UnboundedReceiver<Frame>) {
    while let Some(frame) = frames.recv().await {
        // A worker that does not read is silent too, and lost for that.
        if !matches!(timeout(WRITE_DEADLINE, frame.write(&mut stream)).await, Ok(Ok(()))) {
            return;
        }
    }
}

/// Sends pings, and reports the worker as lost when no frame comes.
async fn send_heartbeats(monitor: Monitor, frames: mpsc::UnboundedSender<Frame>) {
    loop {
        if frames.send(Message::Ping { nonce: wall_nanos() }.into()).is_err() {
            return;
        }
        let sent = Instant::now();
        tokio::time::sleep(HEARTBEAT).await;
        let mut clock = monitor.clock();
        if sent.elapsed() > 2 * HEARTBEAT {
            // This process stood still, not the worker: its frames are still to be read.
            clock.last_frame = Instant::now();
        }
        let last_frame = clock.last_frame;
        drop(clock);
        if last_frame.elapsed() > SILENCE_DEADLINE {
            let reason = format!("no sign of life for {} s", SILENCE_DEADLINE.as_secs_f64());
            monitor.report_lost(monitor.disconnected(reason));
            return;
        }
    }
}

/// Reads a worker's frames: pongs set the clock, the others go to the head.
async fn read_frames<S: AsyncRead>(monitor: Monitor, mut stream: ReadHalf<S>) {
    let error = loop {
        let frame = match Frame::read(&mut stream, MAX_DOCUMENT_PAYLOAD).await {
            Ok(Some(frame)) => frame,
            Ok(None) => break monitor.disconnected("it hung up"),
            Err(error) => break monitor.disconnected(error.to_string()),
        };
        let pong = match &frame.message {
            Message::Pong { nonce, clock } => Some((*nonce, *clock)),
            _ => None,
        };
        monitor.clock().frame_received(pong);
        match frame.message {
            Message::Pong { .. } => {}
            Message::Refuse { reason } => break RingError::Refused { name: monitor.name.clone(), reason },
            _ => {
                let event = HeadEvent::Message { connection: monitor.connection, frame };
                if monitor.inbox.send(event).is_err() {
                    return;
                }
            }
        }
    };
    monitor.report_lost(error);
}

impl WorkerClock {
    /// Records that a frame came. Of a pong: when its ping left, on our clock, and when it was answered, on the
    /// worker's.
    fn frame_received(&mut self, pong: Option<(u64, u64)>) {
        let now = wall_nanos();
        (self.last_frame, self.last_frame_at) = (Instant::now(), now);
        let Some((nonce, theirs)) = pong else { return };
        let round_trip = now.saturating_sub(nonce).max(1);
        if self.round_trip == 0 || round_trip < self.round_trip {
            self.round_trip = round_trip;
            // The pong was written half way between.
            self.to_head =
                nonce.saturating_add(round_trip / 2).cast_signed().wrapping_sub(theirs.cast_signed());
        }
    }
}

impl WorkerConnection {
    /// Opens the control connection to a worker, and checks its model.
    pub(super) async fn open<T: Transport>(
        transport: &T,
        plan: &Plan,
        device: &PlannedDevice,
        (session, number): (u64, u64),
        inbox: &mpsc::UnboundedSender<HeadEvent>,
    ) -> Result<WorkerConnection, RingError> {
        let (name, at) = (device.name.clone(), address(device)?);
        let (stream, facts) = open_connection(transport, &name, at, session, Purpose::Control).await?;
        // A worker without a model fetches its layers from this one.
        if !facts.model_digest.is_empty() {
            check_digests(plan, &facts.model_digest, &facts.shape_digest, &format!("worker `{name}`"))?;
        }
        let local_ip = transport.local_ip(&stream);
        let (reader, writer) = tokio::io::split(stream);
        let (frames, queue) = mpsc::unbounded_channel();
        let (last_frame, last_frame_at) = (Instant::now(), wall_nanos());
        let clock = WorkerClock { round_trip: 0, to_head: 0, last_frame, last_frame_at };
        let clock = Arc::new(Mutex::new(clock));
        let monitor =
            Monitor { name: name.clone(), connection: number, clock: clock.clone(), inbox: inbox.clone() };
        let heartbeat = tokio::spawn(send_heartbeats(monitor.clone(), frames.clone()));
        let reader = tokio::spawn(read_frames(monitor, reader));
        let writer = tokio::spawn(write_frames(writer, queue));
        Ok(WorkerConnection { name, number, facts, local_ip, frames, clock, heartbeat, reader, writer })
    }

    /// The offset of the worker's clock, in nanoseconds: added to its times.
    pub(super) fn clock_offset(&self) -> i64 {
        self.clock.lock().unwrap_or_else(PoisonError::into_inner).to_head
    }

    /// Measures the clock's offset again: clocks drift apart, so the shortest ping of an hour ago says nothing about
    /// now.
    pub(super) fn measure_clock_offset(&self) {
        self.clock.lock().unwrap_or_else(PoisonError::into_inner).round_trip = 0;
        for _ in 0..OFFSET_PINGS {
            self.send(Message::Ping { nonce: wall_nanos() });
        }
    }

    /// Queues a frame. The reader or the heartbeat notices a worker that cannot be sent to.
    pub(super) fn send(&self, frame: impl Into<Frame>) {
        let _ = self.frames.send(frame.into());
    }

    /// Ends the session in order: the goodbye is the last frame written.
    pub(super) async fn close(&mut self) {
        let _ = self.frames.send(Message::Goodbye.into());
        // The writer ends once the queue is written and has no sender; the heartbeat is one.
        let (frames, _) = mpsc::unbounded_channel();
        self.frames = frames;
        self.heartbeat.abort();
        let _ = timeout(HEARTBEAT, &mut self.writer).await;
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for WorkerConnection {
    fn drop(&mut self) {
        for task in [&self.heartbeat, &self.reader, &self.writer] {
            task.abort();
        }
    }
}
