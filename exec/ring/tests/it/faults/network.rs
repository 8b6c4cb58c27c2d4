//! A simulated home network: delays, frozen devices, blocked pairs of devices, resets and crashes.
//!
//! The network connects devices of one process, under tokio's paused clock. Every written chunk arrives in order, after
//! a delay drawn from the seed. A device or a pair of devices may be blocked for some time; meanwhile sent bytes wait,
//! as in TCP. A connection may be reset. A device may crash, which resets all its connections and refuses new
//! connections until the device is started again. There is only one thread, so a seed gives one order of events.
//!
//! Not here: loss and reordering of packets, which TCP turns into delay, and altered bytes, which encryption detects
//! (`hearth_ring::security`).

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use hearth_ring::wire::{ActivationsHeader, Frame, Message};
use hearth_ring::{Listener, Transport};
use hearth_schema::pass::Pass;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep, sleep_until};

#[derive(Clone)]
pub struct SimulatedNetwork(Arc<Mutex<State>>);

/// What happens to the next activations that a device sends.
#[derive(Debug, Clone, Copy)]
pub enum Tampering {
    Dropped,
    SentTwice,
    /// The last value is missing.
    TooShort,
    NotFinite,
}

struct State {
    random: ChaCha8Rng,
    max_delay: Duration,
    listeners: BTreeMap<String, BoundListener>,
    ports: u32,
    /// The number of crashes of each device. An endpoint that was created before the last crash of its device fails.
    crash_counts: Vec<u32>,
    frozen: Vec<Instant>,
    tampering: Vec<Option<Tampering>>,
    /// The number of messages that were changed, lost or repeated.
    tampered: u64,
    /// The time until which the traffic between each pair of devices is blocked.
    cut: BTreeMap<(usize, usize), Instant>,
    connections: Vec<Connection>,
}

struct BoundListener {
    device: usize,
    incoming: mpsc::UnboundedSender<Stream>,
}

struct Connection {
    ends: [usize; 2],
    pipes: [Arc<Mutex<Pipe>>; 2],
}

#[derive(Default)]
struct Pipe {
    /// The chunks in flight, with their arrival times.
    chunks: VecDeque<(Instant, Vec<u8>)>,
    /// The arrival time of the chunk that was written last.
    last: Option<Instant>,
    /// The time at which the end of the stream arrives, if the writer has closed the pipe.
    closed: Option<Instant>,
    reset: bool,
    reader: Option<Waker>,
}

impl Pipe {
    fn break_connection(&mut self) {
        self.reset = true;
        self.chunks.clear();
        self.wake_reader();
    }

    fn wake_reader(&mut self) {
        self.reader.take().into_iter().for_each(Waker::wake);
    }
}

impl SimulatedNetwork {
    pub fn new(seed: u64, devices: usize, max_delay: Duration) -> SimulatedNetwork {
        let now = Instant::now();
        SimulatedNetwork(Arc::new(Mutex::new(State {
            random: ChaCha8Rng::seed_from_u64(seed),
            max_delay,
            listeners: BTreeMap::new(),
            ports: 0,
            crash_counts: vec![0; devices],
            frozen: vec![now; devices],
            tampering: vec![None; devices],
            tampered: 0,
            cut: BTreeMap::new(),
            connections: Vec::new(),
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("nobody panics here")
    }

    /// Returns the endpoint of a device, which is valid until the device crashes.
    pub fn endpoint(&self, device: usize) -> Endpoint {
        Endpoint { network: self.clone(), device, crash_count: self.state().crash_counts[device] }
    }

    /// Blocks all traffic of a device for the given time.
    pub fn freeze(&self, device: usize, lasts: Duration) {
        let until = Instant::now() + lasts;
        let frozen = &mut self.state().frozen[device];
        *frozen = (*frozen).max(until);
    }

    /// Blocks the traffic between two devices for the given time.
    pub fn cut(&self, one: usize, other: usize, lasts: Duration) {
        let until = Instant::now() + lasts;
        let pair = (one.min(other), one.max(other));
        let mut state = self.state();
        let end = state.cut.entry(pair).or_insert(until);
        *end = until.max(*end);
    }

    /// Changes the next activations that a device sends.
    pub fn tamper(&self, device: usize, how: Tampering) {
        self.state().tampering[device] = Some(how);
    }

    /// Returns the number of messages that were changed, lost or repeated.
    pub fn tampered(&self) -> u64 {
        self.state().tampered
    }

    /// Resets a random connection of a device, if it has one.
    pub fn reset_connection(&self, device: usize) {
        let mut state = self.state();
        let State { connections, random, .. } = &mut *state;
        let is_open = |connection: &&Connection| connection.ends.contains(&device) && connection.is_open();
        let open: Vec<_> = connections.iter().filter(is_open).collect();
        if !open.is_empty() {
            open[random.random_range(0..open.len())].reset();
        }
    }

    /// Crashes a device: resets its connections and removes its listeners.
    pub fn crash(&self, device: usize) {
        let mut state = self.state();
        state.crash_counts[device] += 1;
        let own = state.connections.iter().filter(|connection| connection.ends.contains(&device));
        own.for_each(Connection::reset);
        state.listeners.retain(|_, listener| listener.device != device);
    }
}

impl Connection {
    fn is_open(&self) -> bool {
        self.pipes.iter().all(|pipe| {
            let pipe = pipe.lock().expect("nobody panics here");
            !pipe.reset && pipe.closed.is_none()
        })
    }

    fn reset(&self) {
        self.pipes.iter().for_each(|pipe| pipe.lock().expect("nobody panics here").break_connection());
    }
}

impl State {
    /// Returns the time until which the traffic between two devices is blocked.
    fn blocked_until(&self, one: usize, other: usize) -> Instant {
        let cut = self.cut.get(&(one.min(other), one.max(other))).copied();
        let frozen = self.frozen[one].max(self.frozen[other]);
        cut.map_or(frozen, |cut| cut.max(frozen))
    }

    fn delay(&mut self) -> Duration {
        let max = self.max_delay.as_micros() as u64;
        Duration::from_micros(self.random.random_range(max / 20..=max))
    }
}

/// The transport of a device, which fails after the device has crashed.
#[derive(Clone)]
pub struct Endpoint {
    network: SimulatedNetwork,
    device: usize,
    /// The number of crashes of the device when the endpoint was created.
    crash_count: u32,
}

impl Endpoint {
    /// Returns the state of the network, or an error if the device has crashed.
    fn alive_state(&self) -> io::Result<MutexGuard<'_, State>> {
        let state = self.network.state();
        let is_alive = state.crash_counts[self.device] == self.crash_count;
        is_alive.then_some(state).ok_or_else(|| io::ErrorKind::NetworkDown.into())
    }
}

impl Transport for Endpoint {
    type Stream = Stream;
    type Listener = SimulatedListener;

    async fn connect(&self, address: &str) -> io::Result<Stream> {
        loop {
            let until = {
                let mut state = self.network.state();
                let to = state.listeners.get(address).map(|listener| listener.device);
                let delay = Instant::now() + state.delay();
                to.map_or(delay, |to| delay.max(state.blocked_until(self.device, to)))
            };
            sleep_until(until).await;
            let mut state = self.alive_state()?;
            let Some(listener) = state.listeners.get(address) else {
                return Err(io::ErrorKind::ConnectionRefused.into());
            };
            let there = listener.device;
            if state.blocked_until(self.device, there) > Instant::now() {
                continue;
            }
            let pipes = [(); 2].map(|()| Arc::new(Mutex::new(Pipe::default())));
            let end = |own: usize, other: usize, out: usize| Stream {
                network: self.network.clone(),
                own,
                other,
                out: pipes[out].clone(),
                into: pipes[1 - out].clone(),
                timer: None,
            };
            let (near, far) = (end(self.device, there, 0), end(there, self.device, 1));
            if listener.incoming.send(far).is_err() {
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            let ends = [self.device, there];
            state.connections.push(Connection { ends, pipes });
            return Ok(near);
        }
    }

    async fn bind(&self, address: &str) -> io::Result<SimulatedListener> {
        let mut state = self.alive_state()?;
        state.ports += 1;
        let address = match address.strip_suffix(":0") {
            Some(host) => format!("{host}:{}", 40_000 + state.ports),
            None => address.to_owned(),
        };
        let (incoming, connections) = mpsc::unbounded_channel();
        state.listeners.insert(address.clone(), BoundListener { device: self.device, incoming });
        Ok(SimulatedListener { address, connections })
    }
}

/// Accepts connections of a device, and waits forever after a crash of the device.
pub struct SimulatedListener {
    address: String,
    connections: mpsc::UnboundedReceiver<Stream>,
}

impl Listener for SimulatedListener {
    type Stream = Stream;

    async fn accept(&mut self) -> io::Result<Stream> {
        match self.connections.recv().await {
            Some(stream) => Ok(stream),
            None => std::future::pending().await,
        }
    }

    fn address(&self) -> String {
        self.address.clone()
    }
}

pub struct Stream {
    network: SimulatedNetwork,
    own: usize,
    other: usize,
    out: Arc<Mutex<Pipe>>,
    into: Arc<Mutex<Pipe>>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            let now = Instant::now();
            let blocked_until = this.network.state().blocked_until(this.own, this.other);
            let mut pipe = this.into.lock().expect("nobody panics here");
            if pipe.reset {
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
            let due = pipe.chunks.front().map(|chunk| chunk.0).or(pipe.closed);
            let Some(due) = due else {
                pipe.reader = Some(cx.waker().clone());
                return Poll::Pending;
            };
            let due = due.max(blocked_until);
            if due <= now {
                if let Some((_, chunk)) = pipe.chunks.front_mut() {
                    let count = chunk.len().min(buf.remaining());
                    buf.put_slice(&chunk[..count]);
                    chunk.drain(..count);
                    if chunk.is_empty() {
                        pipe.chunks.pop_front();
                    }
                }
                return Poll::Ready(Ok(()));
            }
            // Woken for a reset as well.
            pipe.reader = Some(cx.waker().clone());
            drop(pipe);
            let timer = this.timer.get_or_insert_with(|| Box::pin(sleep_until(due)));
            timer.as_mut().reset(due);
            if timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let (delay, tampering) = {
            let mut state = self.network.state();
            let tampering = if is_activations(bytes) { state.tampering[self.own].take() } else { None };
            state.tampered += u64::from(tampering.is_some());
            (state.delay(), tampering)
        };
        let closed = self.into.lock().expect("nobody panics here").closed;
        let peer_has_closed = closed.is_some_and(|closed| closed <= Instant::now());
        let mut pipe = self.out.lock().expect("nobody panics here");
        if pipe.reset || peer_has_closed {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let due = pipe.last.map_or(Instant::now() + delay, |last| last.max(Instant::now() + delay));
        pipe.last = Some(due);
        pipe.chunks.extend(tamper(bytes.to_vec(), tampering).into_iter().map(|bytes| (due, bytes)));
        pipe.wake_reader();
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.close();
        Poll::Ready(Ok(()))
    }
}

/// Whether a written chunk is a frame with activations: its header begins with the index of that message.
fn is_activations(chunk: &[u8]) -> bool {
    static INDEX: LazyLock<u8> = LazyLock::new(|| {
        let batch = Pass::new(0, 0, 1, true).into();
        let header = ActivationsHeader { epoch: 0, batch, round: 0, is_f16: false };
        Frame::from(Message::Activations(header)).encode().expect("a frame")[8]
    });
    chunk.len() > 8 && chunk[4..8] != [0; 4] && chunk[8] == *INDEX
}

/// Returns the frames that are sent instead of `frame`.
fn tamper(mut frame: Vec<u8>, how: Option<Tampering>) -> Vec<Vec<u8>> {
    match how {
        None => {}
        Some(Tampering::Dropped) => return vec![],
        Some(Tampering::SentTwice) => return vec![frame.clone(), frame],
        Some(Tampering::TooShort) => {
            let payload = u32::from_le_bytes([frame[4], frame[5], frame[6], frame[7]]) - 4;
            frame[4..8].copy_from_slice(&payload.to_le_bytes());
            frame.truncate(frame.len() - 4);
        }
        Some(Tampering::NotFinite) => {
            // NaN in f32, and in the second value in f16.
            let end = frame.len();
            frame[end - 4..].copy_from_slice(&[0, 0, 0xc0, 0x7f]);
        }
    }
    vec![frame]
}

impl Stream {
    fn close(&self) {
        let mut pipe = self.out.lock().expect("nobody panics here");
        let now = Instant::now();
        let last = pipe.last.map_or(now, |last| last.max(now));
        pipe.closed.get_or_insert(last);
        pipe.wake_reader();
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.close();
    }
}
