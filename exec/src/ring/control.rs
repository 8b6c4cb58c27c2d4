//! How does the head order a worker about, and notice that it is gone?
//!
//! One control connection a worker: a task writes what is queued, one takes the answers, one asks for a
//! sign of life every half second and fails the request when none came for two. Pongs carry the worker's
//! clock; the shortest round trip tells the offset best, because the pong was written half way between.
//!
//! Not here: what the orders make a worker do ([`super::worker`]).

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_profiles::Document;
use hearth_schema::heartbeat;
use hearth_schema::plan::{Plan, PlannedDevice};
use hearth_schema::schedule::Schedule;
use hearth_schema::trace::{Reading, Record};
use tokio::io::{AsyncRead, AsyncWrite, ReadHalf, WriteHalf};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::clock::wall_nanos;
use crate::ring::check_digests;
use crate::ring::deadline::{WRITE_DEADLINE, within};
use crate::ring::error::{RingError, strange};
use crate::ring::network::Network;
use crate::ring::recorder::Lines;
use crate::ring::wire::{
    Frame, MAGIC, MAX_DOCUMENT_PAYLOAD, Message, PROTOCOL, PeerAddress, Purpose, WorkerFacts,
};
use crate::ring::worker::NodeEvent;

/// To reach a worker and hear what model it has.
pub(super) const HELLO_DEADLINE: Duration = Duration::from_secs(10);
/// From the plan until a worker holds its layers and neighbours.
const READY_DEADLINE: Duration = Duration::from_mins(1);
/// Between two signs of life that a worker is asked for.
const HEARTBEAT: Duration = Duration::from_nanos(heartbeat::INTERVAL);
/// Without a sign of life, after which a worker counts as gone.
const SILENCE_DEADLINE: Duration = Duration::from_nanos(heartbeat::SILENCE);
/// To hand over a trace.
const COLLECT_DEADLINE: Duration = Duration::from_mins(1);
/// The most lines of one worker's trace: a day of a fast ring.
const MAX_LINES: usize = 50_000_000;
/// Pings that estimate a clock's offset before a request.
const OFFSET_PINGS: u64 = 8;

/// The head's connection to one worker.
pub(super) struct Control {
    name: String,
    place: u16,
    pub(super) facts: WorkerFacts,
    /// This machine's address on the worker's side.
    pub(super) seen_from: Option<IpAddr>,
    orders: mpsc::UnboundedSender<Frame>,
    answers: mpsc::UnboundedReceiver<Frame>,
    clock: Arc<Mutex<ClockOffset>>,
    watcher: JoinHandle<()>,
    reader: JoinHandle<()>,
    writer: JoinHandle<()>,
}

/// The offset of a worker's clock, from the shortest ping so far.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ClockOffset {
    /// Round trip of the best ping, in nanoseconds; none yet if 0.
    round_trip: u64,
    /// What to add to the worker's times, in nanoseconds.
    to_head: i64,
    last_seen: u64,
}

/// Where a worker listens.
pub(super) fn address(device: &PlannedDevice) -> Result<&str, RingError> {
    device.address.as_deref().ok_or_else(|| RingError::NoAddress { name: device.name.clone() })
}

/// Opens the control connection to a worker and checks its model.
pub(super) async fn greet<N: Network>(
    network: &N,
    plan: &Plan,
    place: usize,
    device: &PlannedDevice,
    session: u64,
    inbox: mpsc::UnboundedSender<NodeEvent>,
) -> Result<Control, RingError> {
    let (name, at) = (device.name.clone(), address(device)?);
    let greeting = async {
        let mut stream = network.connect(at).await.map_err(|error| RingError::Unreachable {
            name: name.clone(),
            address: at.into(),
            why: error.to_string(),
        })?;
        let hello = Message::Hello { magic: MAGIC, protocol: PROTOCOL, session, purpose: Purpose::Control };
        let greeting = |error| RingError::greeting(&name, error);
        Frame::from(hello).write(&mut stream).await.map_err(greeting)?;
        match Frame::read(&mut stream, 0).await.map_err(greeting)? {
            Some(Frame { message: Message::Welcome(facts), .. }) => Ok((stream, facts)),
            Some(Frame { message: Message::Refuse { reason }, .. }) => {
                Err(RingError::Refused { name: name.clone(), reason })
            }
            _ => Err(strange(&name, "its first frame is no welcome")),
        }
    };
    let (stream, facts) = within(HELLO_DEADLINE, &format!("reaching worker `{name}`"), greeting).await??;
    check_digests(plan, &facts.model_digest, &facts.shape_digest, &format!("worker `{name}`"))?;
    let seen_from = network.local_host(&stream);
    let (reader, writer) = tokio::io::split(stream);
    let (orders, queue) = mpsc::unbounded_channel();
    let (answer, answers) = mpsc::unbounded_channel();
    let clock = Arc::new(Mutex::new(ClockOffset { last_seen: wall_nanos(), ..ClockOffset::default() }));
    let watcher = tokio::spawn(watch(name.clone(), clock.clone(), orders.clone(), inbox.clone()));
    let reader = tokio::spawn(listen(name.clone(), reader, clock.clone(), answer, inbox));
    let writer = tokio::spawn(write(writer, queue));
    Ok(Control {
        name,
        place: place as u16,
        facts,
        seen_from,
        orders,
        answers,
        clock,
        watcher,
        reader,
        writer,
    })
}

async fn write<S: AsyncWrite>(mut stream: WriteHalf<S>, mut frames: mpsc::UnboundedReceiver<Frame>) {
    while let Some(frame) = frames.recv().await {
        if !matches!(timeout(WRITE_DEADLINE, frame.write(&mut stream)).await, Ok(Ok(()))) {
            return;
        }
    }
}

/// Asks for signs of life, and fails the request when they stay out.
async fn watch(
    name: String,
    clock: Arc<Mutex<ClockOffset>>,
    orders: mpsc::UnboundedSender<Frame>,
    inbox: mpsc::UnboundedSender<NodeEvent>,
) {
    let mut told = false;
    loop {
        if orders.send(Message::Ping { nonce: wall_nanos() }.into()).is_err() {
            return;
        }
        tokio::time::sleep(HEARTBEAT).await;
        let last_seen = clock.lock().unwrap_or_else(PoisonError::into_inner).last_seen;
        let silent = wall_nanos().saturating_sub(last_seen) > SILENCE_DEADLINE.as_nanos() as u64;
        if silent && !told {
            let why = format!("no sign of life for {} s", SILENCE_DEADLINE.as_secs());
            let _ = inbox.send(NodeEvent::Failed(RingError::Gone { name: name.clone(), why }));
        }
        // The pings go on: whoever wakes up again should not find the head silent.
        told = silent;
    }
}

/// Takes a worker's answers: pongs set the clock, the rest goes to whoever asked.
async fn listen<S: AsyncRead>(
    name: String,
    mut stream: ReadHalf<S>,
    clock: Arc<Mutex<ClockOffset>>,
    answers: mpsc::UnboundedSender<Frame>,
    inbox: mpsc::UnboundedSender<NodeEvent>,
) {
    let error = loop {
        match Frame::read(&mut stream, MAX_DOCUMENT_PAYLOAD).await {
            Ok(Some(Frame { message: Message::Pong { nonce, clock: theirs }, .. })) => {
                clock.lock().unwrap_or_else(PoisonError::into_inner).pong(nonce, theirs);
            }
            Ok(Some(Frame { message: Message::Refuse { reason }, .. })) => {
                break RingError::Refused { name, reason };
            }
            Ok(Some(frame)) => {
                if answers.send(frame).is_err() {
                    return;
                }
            }
            Ok(None) => break RingError::Gone { name, why: "it hung up".into() },
            Err(error) => break RingError::Gone { name, why: error.to_string() },
        }
    };
    let _ = answers.send(Frame::from(Message::Refuse { reason: error.to_string() }));
    let _ = inbox.send(NodeEvent::Failed(error));
}

impl ClockOffset {
    /// A pong came back: `nonce` is when its ping left, on our clock.
    fn pong(&mut self, nonce: u64, theirs: u64) {
        let now = wall_nanos();
        self.last_seen = now;
        let round_trip = now.saturating_sub(nonce).max(1);
        if self.round_trip == 0 || round_trip < self.round_trip {
            self.round_trip = round_trip;
            // The pong was written half way between.
            self.to_head = (nonce + round_trip / 2) as i64 - theirs as i64;
        }
    }
}

impl Control {
    /// What to add to the worker's times.
    pub(super) fn clock_offset(&self) -> i64 {
        self.clock.lock().unwrap_or_else(PoisonError::into_inner).to_head
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

    pub(super) fn configure(&self, plan: &Arc<Plan>, head: &str) -> Result<(), RingError> {
        let place = usize::from(self.place);
        let mut receivers = Vec::new();
        for to in Schedule::new(plan.clone(), place).receivers() {
            let address = if to == 0 { head } else { address(&plan.devices[to])? };
            receivers.push(PeerAddress { place: to as u16, address: address.into() });
        }
        let message = Message::Configure { place: self.place, receivers };
        self.order(Frame { message, payload: plan.to_yaml().into_bytes() })
    }

    fn order(&self, frame: impl Into<Frame>) -> Result<(), RingError> {
        self.orders
            .send(frame.into())
            .map_err(|_| RingError::Gone { name: self.name.clone(), why: "its connection is closed".into() })
    }

    async fn answer(&mut self, limit: Duration, what: &str) -> Result<Frame, RingError> {
        let what = format!("worker `{}` {what}", self.name);
        match within(limit, &what, self.answers.recv()).await? {
            Some(Frame { message: Message::Refuse { reason }, .. }) => {
                Err(RingError::Refused { name: self.name.clone(), reason })
            }
            Some(frame) => Ok(frame),
            None => Err(RingError::Gone { name: self.name.clone(), why: "it hung up".into() }),
        }
    }

    pub(super) async fn ready(&mut self) -> Result<(), RingError> {
        match self.answer(READY_DEADLINE, "getting ready").await?.message {
            Message::Ready => Ok(()),
            other => Err(strange(&self.name, &format!("{other:?} instead of ready"))),
        }
    }

    pub(super) async fn reset(&mut self) -> Result<(), RingError> {
        // Clocks drift apart: what an hour ago was the shortest ping says nothing about now.
        self.clock.lock().unwrap_or_else(PoisonError::into_inner).round_trip = 0;
        for _ in 0..OFFSET_PINGS {
            self.order(Message::Ping { nonce: wall_nanos() })?;
        }
        self.order(Message::Reset)?;
        self.ready().await
    }

    pub(super) async fn collect(&mut self) -> Result<Lines, RingError> {
        self.order(Message::Collect)?;
        let what = format!("worker `{}` handing its trace over", self.name);
        within(COLLECT_DEADLINE, &what, self.lines()).await?
    }

    async fn lines(&mut self) -> Result<Lines, RingError> {
        let mut lines = Lines::default();
        loop {
            let frame = self.answer(COLLECT_DEADLINE, "handing its trace over").await?;
            let Message::Report { more } = frame.message else {
                return Err(strange(&self.name, &format!("{:?} instead of a trace", frame.message)));
            };
            let (records, readings): (Vec<Record>, Vec<Reading>) = serde_json::from_slice(&frame.payload)
                .map_err(|error| strange(&self.name, &format!("a trace that cannot be read: {error}")))?;
            let foreign =
                records.iter().any(|record| record.device != self.place || record.end < record.start)
                    || readings.iter().any(|reading| reading.device != self.place);
            if foreign || lines.records.len() + lines.readings.len() > MAX_LINES {
                return Err(strange(&self.name, "a trace with another device's lines, or without end"));
            }
            lines.records.extend(records);
            lines.readings.extend(readings);
            if !more {
                return Ok(lines);
            }
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        for task in [&self.watcher, &self.reader, &self.writer] {
            task.abort();
        }
    }
}
