//! A simulated home network: delays, frozen devices, cuts, resets and crashes.
//!
//! Connections between devices of one process, under tokio's paused clock. Every chunk that is written arrives in order
//! after a delay drawn from the seed. A device may be frozen and a pair of devices cut off for a time, in which what is
//! sent waits, as TCP holds it; a connection may be reset; a device may crash, which resets all its connections and
//! lets nobody connect until it is started again. One thread, one seed, one order of events.
//!
//! Not here: loss and reordering of packets, which TCP hides as delay, and altered bytes, which a key finds out
//! (`ring::security`).

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use hearth_ring::{Listener, Transport};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep, sleep_until};

/// All devices and what is between them.
#[derive(Clone)]
pub struct SimulatedNetwork(Arc<Mutex<State>>);

struct State {
    random: ChaCha8Rng,
    /// The largest delay of a chunk.
    slowest: Duration,
    listeners: BTreeMap<String, Listening>,
    ports: u32,
    /// How often each device has been started.
    lives: Vec<u32>,
    frozen: Vec<Instant>,
    /// Until when nothing gets from one to the other, and back.
    cut: BTreeMap<(usize, usize), Instant>,
    wires: Vec<Wire>,
}

struct Listening {
    device: usize,
    life: u32,
    incoming: mpsc::UnboundedSender<Stream>,
}

/// Both directions of a connection.
struct Wire {
    ends: [usize; 2],
    pipes: [Arc<Mutex<Pipe>>; 2],
}

/// One direction.
#[derive(Default)]
struct Pipe {
    chunks: VecDeque<(Instant, Vec<u8>)>,
    last: Option<Instant>,
    /// The time at which its writer has closed it.
    closed: Option<Instant>,
    reset: bool,
    reader: Option<Waker>,
}

impl Pipe {
    fn break_off(&mut self) {
        self.reset = true;
        self.chunks.clear();
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }
}

impl SimulatedNetwork {
    /// With so many devices.
    pub fn new(seed: u64, devices: usize, slowest: Duration) -> SimulatedNetwork {
        let now = Instant::now();
        SimulatedNetwork(Arc::new(Mutex::new(State {
            random: ChaCha8Rng::seed_from_u64(seed),
            slowest,
            listeners: BTreeMap::new(),
            ports: 0,
            lives: vec![0; devices],
            frozen: vec![now; devices],
            cut: BTreeMap::new(),
            wires: Vec::new(),
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("nobody panics here")
    }

    /// The network as a device sees it, in its present life.
    pub fn endpoint(&self, device: usize) -> Endpoint {
        Endpoint { network: self.clone(), device, life: self.state().lives[device] }
    }

    /// Nothing gets in or out of a device for a time.
    pub fn freeze(&self, device: usize, lasts: Duration) {
        let until = Instant::now() + lasts;
        let frozen = &mut self.state().frozen[device];
        *frozen = (*frozen).max(until);
    }

    /// Nothing gets from one device to another and back for a time.
    pub fn cut(&self, one: usize, other: usize, lasts: Duration) {
        let until = Instant::now() + lasts;
        let pair = (one.min(other), one.max(other));
        let end = self.state().cut.entry(pair).or_insert(until).to_owned();
        self.state().cut.insert(pair, end.max(until));
    }

    /// Breaks a connection of a device, if it has one.
    pub fn reset_one(&self, device: usize) {
        let mut state = self.state();
        let open: Vec<usize> = (0..state.wires.len())
            .filter(|&at| state.wires[at].ends.contains(&device) && state.wires[at].is_open())
            .collect();
        if !open.is_empty() {
            let which = open[state.random.random_range(0..open.len())];
            state.wires[which].break_off();
        }
    }

    /// Ends a device's life: its connections break, and nobody can connect.
    pub fn crash(&self, device: usize) {
        let mut state = self.state();
        state.lives[device] += 1;
        state.wires.iter().filter(|wire| wire.ends.contains(&device)).for_each(Wire::break_off);
        state.listeners.retain(|_, listening| listening.device != device);
    }
}

impl Wire {
    fn is_open(&self) -> bool {
        self.pipes.iter().all(|pipe| {
            let pipe = pipe.lock().expect("nobody panics here");
            !pipe.reset && pipe.closed.is_none()
        })
    }

    fn break_off(&self) {
        self.pipes.iter().for_each(|pipe| pipe.lock().expect("nobody panics here").break_off());
    }
}

impl State {
    /// Until when what goes between two devices waits.
    fn held(&self, one: usize, other: usize) -> Instant {
        let cut = self.cut.get(&(one.min(other), one.max(other))).copied();
        let frozen = self.frozen[one].max(self.frozen[other]);
        cut.map_or(frozen, |cut| cut.max(frozen))
    }

    fn delay(&mut self) -> Duration {
        let slowest = self.slowest.as_micros() as u64;
        Duration::from_micros(self.random.random_range(slowest / 20..=slowest))
    }
}

/// A device's network.
#[derive(Clone)]
pub struct Endpoint {
    network: SimulatedNetwork,
    device: usize,
    life: u32,
}

impl Endpoint {
    fn is_alive(&self) -> bool {
        self.network.state().lives[self.device] == self.life
    }
}

impl Transport for Endpoint {
    type Stream = Stream;
    type Listener = Accepting;

    async fn connect(&self, address: &str) -> io::Result<Stream> {
        loop {
            let until = {
                let mut state = self.network.state();
                let to = state.listeners.get(address).map(|listening| listening.device);
                let delay = Instant::now() + state.delay();
                to.map_or(delay, |to| delay.max(state.held(self.device, to)))
            };
            sleep_until(until).await;
            let mut state = self.network.state();
            if state.lives[self.device] != self.life {
                return Err(io::ErrorKind::NetworkDown.into());
            }
            let Some(listening) = state.listeners.get(address) else {
                return Err(io::ErrorKind::ConnectionRefused.into());
            };
            let there = listening.device;
            if state.held(self.device, there) > Instant::now() {
                continue;
            }
            if state.lives[there] != listening.life {
                return Err(io::ErrorKind::ConnectionRefused.into());
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
            if listening.incoming.send(far).is_err() {
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            let ends = [self.device, there];
            state.wires.push(Wire { ends, pipes });
            return Ok(near);
        }
    }

    async fn bind(&self, address: &str) -> io::Result<Accepting> {
        if !self.is_alive() {
            return Err(io::ErrorKind::NetworkDown.into());
        }
        let mut state = self.network.state();
        state.ports += 1;
        let address = match address.strip_suffix(":0") {
            Some(host) => format!("{host}:{}", 40_000 + state.ports),
            None => address.to_owned(),
        };
        let (incoming, connections) = mpsc::unbounded_channel();
        state.listeners.insert(address.clone(), Listening { device: self.device, life: self.life, incoming });
        Ok(Accepting { address, connections })
    }
}

/// What accepts connections; never again after a crash.
pub struct Accepting {
    address: String,
    connections: mpsc::UnboundedReceiver<Stream>,
}

impl Listener for Accepting {
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

/// One end of a connection.
pub struct Stream {
    network: SimulatedNetwork,
    own: usize,
    other: usize,
    out: Arc<Mutex<Pipe>>,
    into: Arc<Mutex<Pipe>>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            let now = Instant::now();
            let held = this.network.state().held(this.own, this.other);
            let mut pipe = this.into.lock().expect("nobody panics here");
            if pipe.reset {
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
            let due = pipe.chunks.front().map(|chunk| chunk.0).or(pipe.closed);
            let Some(due) = due else {
                pipe.reader = Some(context.waker().clone());
                return Poll::Pending;
            };
            let due = due.max(held);
            if due <= now {
                if let Some((_, chunk)) = pipe.chunks.front_mut() {
                    let count = chunk.len().min(buffer.remaining());
                    buffer.put_slice(&chunk[..count]);
                    chunk.drain(..count);
                    if chunk.is_empty() {
                        pipe.chunks.pop_front();
                    }
                }
                return Poll::Ready(Ok(()));
            }
            // Woken for a reset as well.
            pipe.reader = Some(context.waker().clone());
            drop(pipe);
            let timer = this.timer.get_or_insert_with(|| Box::pin(sleep_until(due)));
            timer.as_mut().reset(due);
            if timer.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let delay = self.network.state().delay();
        let peer_is_gone = {
            let back = self.into.lock().expect("nobody panics here");
            back.closed.is_some_and(|closed| closed <= Instant::now())
        };
        let mut pipe = self.out.lock().expect("nobody panics here");
        if pipe.reset || peer_is_gone {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let due = pipe.last.map_or(Instant::now() + delay, |last| last.max(Instant::now() + delay));
        pipe.last = Some(due);
        pipe.chunks.push_back((due, bytes.to_vec()));
        if let Some(reader) = pipe.reader.take() {
            reader.wake();
        }
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

impl Stream {
    fn close(&self) {
        let mut pipe = self.out.lock().expect("nobody panics here");
        let now = Instant::now();
        let last = pipe.last.map_or(now, |last| last.max(now));
        pipe.closed.get_or_insert(last);
        if let Some(reader) = pipe.reader.take() {
            reader.wake();
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.close();
    }
}
