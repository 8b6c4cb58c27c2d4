//! How does the head order a worker about, and notice that it is gone?
//!
//! One control connection a worker: a task writes what is queued, one takes what the worker says, one asks for a sign
//! of life every half second and tells the head when none came for longer than [`heartbeat::SILENCE`]. All that is
//! heard goes to the head's one inbox, marked with the connection's number, so that what a worker said over an earlier
//! connection is not taken for what it says now. Pongs carry the worker's clock; the shortest round trip tells the
//! offset best, because the pong was written half way between.
//!
//! Not here: what the orders make a worker do ([`crate::worker`]), and what the head makes of an answer
//! (`reconfiguration`).

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
    DataEvent, Frame, MAX_DOCUMENT_PAYLOAD, Message, Network, Purpose, WRITE_DEADLINE, WorkerFacts, call,
};
use hearth_runtime::clock::wall_nanos;

/// Between two signs of life that a worker is asked for.
const HEARTBEAT: Duration = Duration::from_nanos(heartbeat::INTERVAL);
/// Without a sign of life, after which a worker counts as gone.
const SILENCE_DEADLINE: Duration = Duration::from_nanos(heartbeat::SILENCE);
/// Pings that estimate a clock's offset before a request.
const OFFSET_PINGS: u64 = 8;

/// What the head hears.
#[derive(Debug)]
pub(super) enum HeadEvent {
    /// From its data connections.
    Data(DataEvent),
    /// An answer of a worker.
    Said {
        /// Over which control connection.
        link: u64,
        /// What.
        frame: Frame,
    },
    /// A worker is gone.
    Gone {
        /// Over which control connection it was reached.
        link: u64,
        /// Why.
        error: RingError,
        /// When it was last heard of, on this process's clock.
        since: u64,
    },
    /// A pass takes too long.
    Late(Duration),
    /// The request is to end.
    Stop,
}

/// The head's connection to one worker.
pub(super) struct Control {
    name: String,
    /// The number of this connection.
    pub(super) link: u64,
    pub(super) facts: WorkerFacts,
    /// This machine's address on the worker's side.
    pub(super) seen_from: Option<IpAddr>,
    orders: mpsc::UnboundedSender<Frame>,
    clock: Arc<Mutex<ClockOffset>>,
    watcher: JoinHandle<()>,
    reader: JoinHandle<()>,
    writer: JoinHandle<()>,
}

/// The offset of a worker's clock, from the shortest ping so far, and when it was last heard of.
#[derive(Debug, Clone, Copy)]
struct ClockOffset {
    /// Round trip of the best ping, in nanoseconds; none yet if 0.
    round_trip: u64,
    /// What to add to the worker's times, in nanoseconds.
    to_head: i64,
    heard: Instant,
    heard_at: u64,
}

/// Where a worker listens.
pub(super) fn address(device: &PlannedDevice) -> Result<&str, RingError> {
    device.address.as_deref().ok_or_else(|| RingError::NoAddress { name: device.name.clone() })
}

/// Opens the control connection to a worker and checks its model.
pub(super) async fn greet<N: Network>(
    network: &N,
    plan: &Plan,
    device: &PlannedDevice,
    (session, link): (u64, u64),
    inbox: &mpsc::UnboundedSender<HeadEvent>,
) -> Result<Control, RingError> {
    let (name, at) = (device.name.clone(), address(device)?);
    let (stream, facts) = call(network, &name, at, session, Purpose::Control).await?;
    // A worker without a model fetches its layers of this one.
    if !facts.model_digest.is_empty() {
        check_digests(plan, &facts.model_digest, &facts.shape_digest, &format!("worker `{name}`"))?;
    }
    let seen_from = network.local_host(&stream);
    let (reader, writer) = tokio::io::split(stream);
    let (orders, queue) = mpsc::unbounded_channel();
    let (heard, heard_at) = (Instant::now(), wall_nanos());
    let clock = Arc::new(Mutex::new(ClockOffset { round_trip: 0, to_head: 0, heard, heard_at }));
    let ear = Ear { name: name.clone(), link, clock: clock.clone(), inbox: inbox.clone() };
    let watcher = tokio::spawn(watch(ear.clone(), orders.clone()));
    let reader = tokio::spawn(listen(ear, reader));
    let writer = tokio::spawn(write(writer, queue));
    Ok(Control { name, link, facts, seen_from, orders, clock, watcher, reader, writer })
}

/// Where what is heard of a worker goes.
#[derive(Clone)]
struct Ear {
    name: String,
    link: u64,
    clock: Arc<Mutex<ClockOffset>>,
    inbox: mpsc::UnboundedSender<HeadEvent>,
}

impl Ear {
    fn gone(&self, error: RingError) {
        let since = self.clock.lock().unwrap_or_else(PoisonError::into_inner).heard_at;
        let _ = self.inbox.send(HeadEvent::Gone { link: self.link, error, since });
    }
}

async fn write<S: AsyncWrite>(mut stream: WriteHalf<S>, mut frames: mpsc::UnboundedReceiver<Frame>) {
    while let Some(frame) = frames.recv().await {
        // A worker that takes nothing any more is silent too, and missed for that.
        if !matches!(timeout(WRITE_DEADLINE, frame.write(&mut stream)).await, Ok(Ok(()))) {
            return;
        }
    }
}

/// Asks for signs of life, and says when they stay out.
async fn watch(ear: Ear, orders: mpsc::UnboundedSender<Frame>) {
    loop {
        if orders.send(Message::Ping { nonce: wall_nanos() }.into()).is_err() {
            return;
        }
        let asked = Instant::now();
        tokio::time::sleep(HEARTBEAT).await;
        let mut clock = ear.clock.lock().unwrap_or_else(PoisonError::into_inner);
        if asked.elapsed() > 2 * HEARTBEAT {
            // This process stood still, not the worker: what it said meanwhile is still to be read.
            clock.heard = Instant::now();
        }
        let heard = clock.heard;
        drop(clock);
        if heard.elapsed() > SILENCE_DEADLINE {
            let why = format!("no sign of life for {} s", SILENCE_DEADLINE.as_secs_f64());
            ear.gone(RingError::Gone { name: ear.name.clone(), why });
            return;
        }
    }
}

/// Takes what a worker says: pongs set the clock, the rest goes to the head.
async fn listen<S: AsyncRead>(ear: Ear, mut stream: ReadHalf<S>) {
    let name = ear.name.clone();
    let error = loop {
        let frame = match Frame::read(&mut stream, MAX_DOCUMENT_PAYLOAD).await {
            Ok(Some(frame)) => frame,
            Ok(None) => break RingError::Gone { name, why: "it hung up".into() },
            Err(error) => break RingError::Gone { name, why: error.to_string() },
        };
        let pong = match &frame.message {
            Message::Pong { nonce, clock } => Some((*nonce, *clock)),
            _ => None,
        };
        ear.clock.lock().unwrap_or_else(PoisonError::into_inner).heard(pong);
        match frame.message {
            Message::Pong { .. } => {}
            Message::Refuse { reason } => break RingError::Refused { name, reason },
            _ if ear.inbox.send(HeadEvent::Said { link: ear.link, frame }).is_err() => return,
            _ => {}
        }
    };
    ear.gone(error);
}

impl ClockOffset {
    /// A frame came; of a pong when its ping left, on our clock, and the worker's clock when it was answered.
    fn heard(&mut self, pong: Option<(u64, u64)>) {
        let now = wall_nanos();
        (self.heard, self.heard_at) = (Instant::now(), now);
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

impl Control {
    /// What to add to the worker's times.
    pub(super) fn clock_offset(&self) -> i64 {
        self.clock.lock().unwrap_or_else(PoisonError::into_inner).to_head
    }

    /// Asks for the time anew: clocks drift apart, so that the shortest ping of an hour ago says nothing about now.
    pub(super) fn set_clock(&self) {
        self.clock.lock().unwrap_or_else(PoisonError::into_inner).round_trip = 0;
        for _ in 0..OFFSET_PINGS {
            self.order(Message::Ping { nonce: wall_nanos() });
        }
    }

    /// Sends a frame. A worker that cannot be sent to is missed by the one who listens to it.
    pub(super) fn order(&self, frame: impl Into<Frame>) {
        let _ = self.orders.send(frame.into());
    }

    /// Ends the session in order: the goodbye is the last frame written.
    pub(super) async fn close(&mut self) {
        let _ = self.orders.send(Message::Goodbye.into());
        // The writer ends once what is queued is written and nobody can queue more; the watcher could.
        let (orders, _) = mpsc::unbounded_channel();
        self.orders = orders;
        self.watcher.abort();
        let _ = timeout(HEARTBEAT, &mut self.writer).await;
    }

    /// The worker's name.
    pub(super) fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        for task in [&self.watcher, &self.reader, &self.writer] {
            task.abort();
        }
    }
}
