//! A transport that emulates the links of other devices on one machine.
//!
//! Connections deliver what this end writes as late as a given [`EmulatedPath`] would: a message waits until the medium
//! is free, occupies it for its overhead and its bytes at the bandwidth, and arrives a delay later, which may be drawn
//! for each. The medium is the connection's own (a wire) or shared (Wi-Fi): all paths that name the same file keep in
//! it until when the medium is occupied, first come, first served. Each end delays what it sends.
//!
//! What one write hands over is one message, if it is at most [`PIECE_BYTES`] long; otherwise it is several.
//!
//! A thread for each direction sleeps until the nanosecond, because the runtime's timer has steps of a millisecond.
//! What that thread and the connection below add is not subtracted: measure it ([`crate::probe`]) and count it in.
//!
//! Not here: loss, and connections that open slowly, which TCP turns into more delay.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hearth_profiles::{BytesPerSecond, Seconds};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::sync::mpsc;

use super::delayed::{self, DelayedStream};
use crate::wire::{Listener, Transport};
use hearth_runtime::clock::machine_nanos;

/// The most that goes over a medium as one message.
/// source: assumed, above the activations of any usual batch
const PIECE_BYTES: usize = 1 << 20;
/// The number of messages in flight in one direction at which the writer blocks.
/// source: assumed
const MAX_PIECES: usize = 256;

/// The longest time for which waiting messages can occupy a medium, in nanoseconds: an hour.
/// source: assumed
const MAX_HOLD: u64 = 3_600_000_000_000;

/// The emulated path from this device to a peer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EmulatedPath {
    /// The time from sending the last byte to its arrival, including overhead; the median if it is random.
    pub latency: Seconds,
    /// The standard deviation of the delay's logarithm; 0 if it is always the same.
    #[serde(default)]
    pub sigma: f64,
    /// The overhead of a message on the medium, without its bytes.
    #[serde(default)]
    pub overhead: Seconds,
    /// The bandwidth limit; none if absent.
    #[serde(default)]
    pub bandwidth: Option<BytesPerSecond>,
    /// The file that stands for a medium that others use too.
    #[serde(default)]
    pub medium: Option<PathBuf>,
    /// The seed of its delays.
    #[serde(default)]
    pub seed: u64,
    /// The number of its random stream.
    #[serde(default)]
    pub stream: u64,
}

impl EmulatedPath {
    /// A wire on which bytes pass as fast as they do.
    pub fn of(latency: Seconds) -> Self {
        Self {
            latency,
            sigma: 0.0,
            overhead: Seconds(0.0),
            bandwidth: None,
            medium: None,
            seed: 0,
            stream: 0,
        }
    }

    /// Nanoseconds on the medium.
    fn hold(&self, bytes: usize) -> u64 {
        let sending = self.bandwidth.map_or(0.0, |rate| bytes as f64 / rate.0.max(1.0));
        nanos(self.overhead.0 + sending)
    }
}

fn nanos(seconds: f64) -> u64 {
    (seconds.max(0.0) * 1e9) as u64
}

/// The path to a peer by its address; to a peer that has connected, if there is no address.
pub type EmulatedPaths = Arc<dyn Fn(Option<&str>) -> io::Result<EmulatedPath> + Send + Sync>;

/// A transport over emulated paths.
#[derive(Clone)]
pub struct EmulatedTransport<T> {
    transport: T,
    paths: EmulatedPaths,
    /// Connections so far, each with delays of its own.
    count: Arc<AtomicU64>,
}

impl<T> EmulatedTransport<T> {
    /// Delays everything written to a peer by the path to it.
    pub fn new(transport: T, paths: EmulatedPaths) -> Self {
        Self { transport, paths, count: Arc::default() }
    }
}

/// The accepting end of an emulated network.
pub struct EmulatedListener<L> {
    listener: L,
    paths: EmulatedPaths,
    count: Arc<AtomicU64>,
}

impl<T: Transport> Transport for EmulatedTransport<T> {
    type Stream = DelayedStream;
    type Listener = EmulatedListener<T::Listener>;

    async fn connect(&self, address: &str) -> io::Result<DelayedStream> {
        let path = (self.paths)(Some(address))?;
        let stream = self.transport.connect(address).await?;
        let host = self.transport.local_ip(&stream);
        emulated(stream, host, Pacer::new(path, &self.count)?)
    }

    async fn bind(&self, address: &str) -> io::Result<Self::Listener> {
        let listener = self.transport.bind(address).await?;
        Ok(EmulatedListener { listener, paths: self.paths.clone(), count: self.count.clone() })
    }

    fn is_encrypted(&self) -> bool {
        self.transport.is_encrypted()
    }

    fn local_ip(&self, stream: &DelayedStream) -> Option<IpAddr> {
        stream.host()
    }
}

impl<L> Listener for EmulatedListener<L>
where
    L: Listener,
    L::Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    type Stream = DelayedStream;

    async fn accept(&mut self) -> io::Result<DelayedStream> {
        let stream = self.listener.accept().await?;
        emulated(stream, None, Pacer::new((self.paths)(None)?, &self.count)?)
    }

    fn address(&self) -> String {
        self.listener.address()
    }
}

/// Says when each message arrives.
#[derive(Debug)]
struct Pacer {
    path: EmulatedPath,
    medium: Option<File>,
    random: ChaCha8Rng,
    /// The time at which the medium is free.
    free: u64,
    /// The time at which the last message arrived.
    last: u64,
}

impl Pacer {
    fn new(path: EmulatedPath, count: &AtomicU64) -> io::Result<Self> {
        let mut random = ChaCha8Rng::seed_from_u64(path.seed);
        // Sixteen bits of connections of each path.
        random.set_stream((path.stream << 16) | (count.fetch_add(1, Ordering::Relaxed) & 0xffff));
        let open = |path| File::options().read(true).write(true).open(path);
        let medium = path.medium.as_ref().map(open).transpose()?;
        Ok(Self { path, medium, random, free: 0, last: 0 })
    }

    /// Returns the arrival time of a message sent at `handed`. The message waits for a shared medium.
    fn arrival(&mut self, handed: u64, bytes: usize) -> io::Result<u64> {
        let hold = self.path.hold(bytes);
        self.free = match &self.medium {
            None => self.free.max(handed) + hold,
            Some(medium) => occupy(medium, handed, hold)?,
        };
        let sent = self.free;
        let after = (self.delay() - self.path.overhead.0).max(0.0);
        // Messages of one connection arrive in their order.
        self.last = self.last.max(sent + nanos(after));
        Ok(self.last)
    }

    fn delay(&mut self) -> f64 {
        let median = self.path.latency.0;
        if self.path.sigma <= 0.0 {
            median
        } else {
            median * (self.path.sigma * normal(&mut self.random)).exp()
        }
    }
}

/// Occupies a shared medium from `from`, or from when it is free, for `hold` nanoseconds. Returns when it is free
/// again.
///
/// The lock is held for a write only: a process that is stopped while its message is on the medium blocks no other.
/// A medium that claims to be occupied for longer than [`MAX_HOLD`] is some other file.
fn occupy(mut medium: &File, from: u64, hold: u64) -> io::Result<u64> {
    medium.lock()?;
    let mut free = Vec::new();
    medium.rewind()?;
    medium.read_to_end(&mut free)?;
    let free = match <[u8; 8]>::try_from(free.as_slice()) {
        Ok(free) => u64::from_le_bytes(free),
        // Nobody has written before the first.
        Err(_) if free.is_empty() => 0,
        Err(_) => return Err(invalid_medium()),
    };
    if free > from.saturating_add(MAX_HOLD) {
        return Err(invalid_medium());
    }
    let until = free.max(from).saturating_add(hold);
    medium.rewind()?;
    medium.write_all(&until.to_le_bytes())?;
    medium.unlock()?;
    Ok(until)
}

fn invalid_medium() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "the medium's file does not hold the time at which the medium is free",
    )
}

/// A draw of the standard normal distribution (Box and Muller, 1958).
fn normal(random: &mut ChaCha8Rng) -> f64 {
    let mut uniform = || (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
    let (radius, angle) = (1.0 - uniform(), uniform());
    (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
}

fn sleep_until(at: u64) {
    let now = machine_nanos();
    if at > now {
        std::thread::sleep(Duration::from_nanos(at - now));
    }
}

/// Lets this thread sleep to the microsecond; else the kernel may wake it 50 us late.
fn set_timer_slack() {
    #[cfg(target_os = "linux")]
    // SAFETY: the call takes numbers and changes how this thread's timers are rounded.
    unsafe {
        libc::prctl(libc::PR_SET_TIMERSLACK, 1);
    }
}

/// Puts a pacer into the outgoing direction of a connection.
fn emulated<S>(stream: S, host: Option<IpAddr>, mut pacer: Pacer) -> io::Result<DelayedStream>
where
    S: AsyncRead + AsyncWrite + Send + 'static,
{
    let (near, far) = tokio::io::duplex(PIECE_BYTES);
    let (mut from_near, to_near) = tokio::io::split(far);
    let (from_peer, to_peer) = tokio::io::split(stream);
    let (pieces, mut waiting) = mpsc::channel::<(u64, Vec<u8>)>(MAX_PIECES);
    let (arrived, due) = mpsc::channel::<Vec<u8>>(MAX_PIECES);
    tokio::spawn(async move {
        let mut buffer = vec![0; PIECE_BYTES];
        while let Ok(count @ 1..) = from_near.read(&mut buffer).await {
            // A medium that is gone ends the connection.
            let Ok(at) = pacer.arrival(machine_nanos(), count) else { return };
            if pieces.send((at, buffer[..count].to_vec())).await.is_err() {
                return;
            }
        }
    });
    std::thread::Builder::new().name("link".into()).spawn(move || {
        set_timer_slack();
        while let Some((at, piece)) = waiting.blocking_recv() {
            sleep_until(at);
            if arrived.blocking_send(piece).is_err() {
                return;
            }
        }
    })?;
    tokio::spawn(delayed::write_pieces(due, to_peer));
    tokio::spawn(delayed::copy_from_peer(from_peer, to_near));
    Ok(DelayedStream::new(near, host))
}

impl<T> std::fmt::Debug for EmulatedTransport<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EmulatedTransport").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::MemoryTransport;
    use crate::wire::{Frame, Message};

    fn transport_over(path: &EmulatedPath) -> EmulatedTransport<MemoryTransport> {
        let path = path.clone();
        EmulatedTransport::new(MemoryTransport::default(), Arc::new(move |_| Ok(path.clone())))
    }

    fn pacer(path: EmulatedPath) -> Pacer {
        Pacer::new(path, &AtomicU64::new(0)).unwrap()
    }

    #[test]
    fn messages_queue_for_their_bytes_and_arrive_after_the_latency() {
        let mut slow =
            pacer(EmulatedPath { bandwidth: Some(BytesPerSecond(1e6)), ..EmulatedPath::of(Seconds(0.005)) });
        // 1000 bytes take a millisecond; the second waits for the first.
        assert_eq!(slow.arrival(0, 1000).unwrap(), 6_000_000);
        assert_eq!(slow.arrival(500_000, 2000).unwrap(), 8_000_000);
        assert_eq!(slow.arrival(50_000_000, 1000).unwrap(), 56_000_000);
        // An overhead is part of the latency, and keeps the medium.
        let mut wifi = pacer(EmulatedPath { overhead: Seconds(0.002), ..EmulatedPath::of(Seconds(0.005)) });
        assert_eq!((wifi.arrival(0, 9).unwrap(), wifi.arrival(0, 9).unwrap()), (5_000_000, 7_000_000));
    }

    #[test]
    fn random_delays_have_their_median_and_follow_from_the_seed() {
        let path = EmulatedPath { sigma: 0.5, seed: 7, ..EmulatedPath::of(Seconds(0.002)) };
        let draw = |path: &EmulatedPath| {
            let mut pacer = pacer(path.clone());
            (0..2001).map(|_| pacer.delay()).collect::<Vec<f64>>()
        };
        let (first, again) = (draw(&path), draw(&path));
        assert_eq!(first, again);
        assert_ne!(first, draw(&EmulatedPath { seed: 8, ..path.clone() }));
        assert_ne!(first, draw(&EmulatedPath { stream: 1, ..path.clone() }));
        let mut sorted = first;
        sorted.sort_by(f64::total_cmp);
        // The median of 2001 draws is within 5 % of the distribution's.
        assert!((sorted[1000] / 0.002 - 1.0).abs() < 0.05, "{}", sorted[1000]);
        // 84.1 % are below the median times e^sigma.
        assert!((sorted[1683] / (0.002 * 0.5_f64.exp()) - 1.0).abs() < 0.1, "{}", sorted[1683]);
        // However they are drawn, messages do not overtake.
        let mut pacer = pacer(path);
        let arrivals: Vec<u64> = (0..100).map(|at| pacer.arrival(at * 1000, 10).unwrap()).collect();
        assert!(arrivals.is_sorted());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn frames_arrive_whole_and_not_early() {
        let path = EmulatedPath { bandwidth: Some(BytesPerSecond(100e6)), ..EmulatedPath::of(Seconds(0.02)) };
        let transport = transport_over(&path);
        let mut listener = transport.bind("a").await.unwrap();
        let mut near = transport.connect("a").await.unwrap();
        let mut far = listener.accept().await.unwrap();
        let begin = machine_nanos();
        let frame = |nonce: u64| Frame { message: Message::Ping { nonce }, payload: vec![7; 500_000] };
        for nonce in 0..3 {
            frame(nonce).write(&mut near).await.unwrap();
        }
        for nonce in 0..3 {
            assert_eq!(Frame::read(&mut far, 1 << 20).await.unwrap(), Some(frame(nonce)));
        }
        // 1.5 MB at 100 MB/s and 20 ms.
        assert!(machine_nanos() - begin >= 35_000_000, "{}", machine_nanos() - begin);
        drop(near);
        assert_eq!(Frame::read(&mut far, 1 << 20).await.unwrap(), None, "an end stays an end");
    }

    #[test]
    fn shared_medium_carries_one_message_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("wifi");
        std::fs::write(&file, "").unwrap();
        let path = EmulatedPath {
            overhead: Seconds(0.01),
            medium: Some(file.clone()),
            ..EmulatedPath::of(Seconds(0.01))
        };
        let begin = machine_nanos();
        let senders: Vec<_> = (0..3)
            .map(|_| {
                let path = path.clone();
                std::thread::spawn(move || pacer(path).arrival(begin, 5).unwrap())
            })
            .collect();
        let mut ends: Vec<u64> = senders.into_iter().map(|sender| sender.join().unwrap() - begin).collect();
        ends.sort_unstable();
        assert_eq!(ends, [10_000_000, 20_000_000, 30_000_000]);
        // The next waits for the one before to be off the medium, not for its arrival; and later it is free.
        let mut far = pacer(EmulatedPath { latency: Seconds(0.05), ..path.clone() });
        let mut after = |at: u64| far.arrival(begin + at * 1_000_000, 5).unwrap() - begin;
        let arrivals = [after(100), after(100), after(200)];
        assert_eq!(arrivals, [150_000_000, 160_000_000, 250_000_000]);
        for other in ["", "what", "20261122"] {
            std::fs::write(&file, other).unwrap();
            assert_eq!(pacer(path.clone()).arrival(begin, 5).is_ok(), other.is_empty(), "{other}");
        }
        std::fs::remove_file(&file).unwrap();
        assert!(Pacer::new(path, &AtomicU64::new(0)).is_err(), "a medium must be there");
    }

    #[tokio::test]
    async fn unknown_path_refuses_the_connection() {
        let transport = EmulatedTransport::new(
            MemoryTransport::default(),
            Arc::new(|_| Err(io::Error::other("no such path"))),
        );
        assert!(transport.connect("a").await.is_err());
    }
}
