//! A transport that emulates the network paths between other devices on one machine.
//!
//! Messages that this device sends arrive as late as on a given [`EmulatedPath`]. A message waits until the medium is
//! free, occupies it for the overhead plus its transmission time at the bandwidth, and arrives after a delay, which
//! may be random. The medium belongs to one connection (a cable) or is shared (Wi-Fi): all paths of a shared medium
//! name the same file, which contains the time at which the medium is free again.
//!
//! Each outgoing direction has a thread that sleeps with a precision of nanoseconds, because Tokio's timer has a
//! precision of a millisecond. The overhead of this thread and of the underlying connection is not subtracted
//! from the delay; [`crate::probe`] can measure this overhead.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hearth_profiles::{BytesPerSecond, Seconds};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use tokio::io::DuplexStream;

use super::shaped::{InFlightLimits, ShapedTransport, Shaper, delay_outgoing};
use crate::wire::ByteStream;
use hearth_runtime::clock::machine_clock_nanos;

/// Limits of the messages (chunks) in flight. source: assumed; larger than the activations of a common batch
const LIMITS: InFlightLimits = InFlightLimits { max_chunk_bytes: 1 << 20, max_chunks: 256 };

/// Maximum time for which waiting messages can occupy a medium, in nanoseconds: an hour. source: assumed
const MAX_OCCUPIED: u64 = 3_600_000_000_000;

/// The emulated network path from this device to a peer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EmulatedPath {
    /// The one-way latency, with `overhead` but without the transmission time; the median if the latency is random.
    pub latency: Seconds,
    /// The standard deviation of the logarithm of the latency; 0 for a constant latency.
    #[serde(default)]
    pub sigma: f64,
    /// The time that a message occupies the medium in addition to its transmission time.
    #[serde(default)]
    pub overhead: Seconds,
    /// The bandwidth of the medium; unlimited if absent.
    #[serde(default)]
    pub bandwidth: Option<BytesPerSecond>,
    /// The file of a shared medium; absent if the medium is not shared.
    #[serde(rename = "medium", default)]
    pub shared_medium_file: Option<PathBuf>,
    #[serde(default)]
    pub seed: u64,
    /// The number of the random stream of this network path. Paths with different streams have independent delays.
    #[serde(default, rename = "stream")]
    pub rng_stream: u64,
}

impl EmulatedPath {
    /// Creates a network path with a constant latency, without a bandwidth limit.
    pub fn with_latency(latency: Seconds) -> Self {
        Self { latency, ..Self::default() }
    }

    fn occupied_nanos(&self, bytes: usize) -> u64 {
        let transmission = self.bandwidth.map_or(0.0, |rate| bytes as f64 / rate.0.max(1.0));
        nanos(self.overhead.0 + transmission)
    }
}

fn nanos(seconds: f64) -> u64 {
    (seconds.max(0.0) * 1e9) as u64
}

/// Returns the network path to the peer at an address or, without an address, to a peer that has connected.
pub type PathLookup = Arc<dyn Fn(Option<&str>) -> io::Result<EmulatedPath> + Send + Sync>;

/// A transport that delays the sent bytes as on emulated network paths.
pub type EmulatedTransport<T> = ShapedTransport<T, PathShaper>;

/// A [`Shaper`] that delays messages as on the network path to each peer.
#[derive(Clone)]
pub struct PathShaper {
    paths: PathLookup,
    /// The number of connections that have been shaped, which selects the random delays of the next connection.
    connection_count: Arc<AtomicU64>,
}

impl<T> EmulatedTransport<T> {
    /// Creates a transport that delays everything that is sent to a peer as on the network path to that peer.
    pub fn new(transport: T, paths: PathLookup) -> Self {
        Self { transport, shaper: PathShaper { paths, connection_count: Arc::default() } }
    }
}

impl Shaper for PathShaper {
    type Path = EmulatedPath;

    fn path(&self, address: Option<&str>) -> io::Result<EmulatedPath> {
        (self.paths)(address)
    }

    fn shape<S: ByteStream>(&self, path: EmulatedPath, stream: S) -> io::Result<DuplexStream> {
        let mut pacer = Pacer::new(path, &self.connection_count)?;
        let arrival = move |bytes| pacer.arrival(machine_clock_nanos(), bytes);
        delay_outgoing(stream, LIMITS, arrival, |mut waiting, arrived| {
            let forward = move || {
                set_timer_slack();
                while let Some((at, message)) = waiting.blocking_recv() {
                    std::thread::sleep(Duration::from_nanos(at.saturating_sub(machine_clock_nanos())));
                    if arrived.blocking_send(message).is_err() {
                        return;
                    }
                }
            };
            std::thread::Builder::new().name("link".into()).spawn(forward).map(drop)
        })
    }
}

/// Computes the arrival time of each message of a connection.
#[derive(Debug)]
struct Pacer {
    path: EmulatedPath,
    medium: Option<File>,
    random: ChaCha8Rng,
    /// The time at which the medium is free again, in nanoseconds.
    free_at: u64,
    /// The arrival time of the last message, in nanoseconds.
    last_arrival: u64,
}

impl Pacer {
    fn new(path: EmulatedPath, connection_count: &AtomicU64) -> io::Result<Self> {
        let mut random = ChaCha8Rng::seed_from_u64(path.seed);
        // The low 16 bits number the connections of a path.
        let connection = connection_count.fetch_add(1, Ordering::Relaxed) & 0xffff;
        random.set_stream((path.rng_stream << 16) | connection);
        let open = |path| File::options().read(true).write(true).open(path);
        let medium = path.shared_medium_file.as_ref().map(open).transpose()?;
        Ok(Self { path, medium, random, free_at: 0, last_arrival: 0 })
    }

    /// Returns the arrival time, in nanoseconds, of a message that is sent at `now`, or later when the medium is free.
    fn arrival(&mut self, now: u64, bytes: usize) -> io::Result<u64> {
        let occupied = self.path.occupied_nanos(bytes);
        self.free_at = match &self.medium {
            None => self.free_at.max(now) + occupied,
            Some(medium) => occupy(medium, now, occupied)?,
        };
        let sent = self.free_at;
        let after = (self.delay() - self.path.overhead.0).max(0.0);
        // Messages of one connection arrive in order.
        self.last_arrival = self.last_arrival.max(sent + nanos(after));
        Ok(self.last_arrival)
    }

    fn delay(&mut self) -> f64 {
        let (median, sigma) = (self.path.latency.0, self.path.sigma);
        if sigma <= 0.0 { median } else { median * (sigma * normal(&mut self.random)).exp() }
    }
}

/// Occupies a shared medium for `duration` nanoseconds, starting at `from` or when it is free. Returns the end time.
///
/// The file is locked only while its content is updated, so that a suspended process does not block the medium for
/// other processes. A file with a time that is more than [`MAX_OCCUPIED`] after `from` is rejected as invalid.
fn occupy(mut medium: &File, from: u64, duration: u64) -> io::Result<u64> {
    medium.lock()?;
    let mut free = Vec::new();
    medium.rewind()?;
    medium.read_to_end(&mut free)?;
    let free = match <[u8; 8]>::try_from(free.as_slice()) {
        Ok(free) => u64::from_le_bytes(free),
        // The file of a new medium is empty.
        Err(_) if free.is_empty() => 0,
        Err(_) => return Err(invalid_medium()),
    };
    if free > from.saturating_add(MAX_OCCUPIED) {
        return Err(invalid_medium());
    }
    let until = free.max(from).saturating_add(duration);
    medium.rewind()?;
    medium.write_all(&until.to_le_bytes())?;
    medium.unlock()?;
    Ok(until)
}

fn invalid_medium() -> io::Error {
    let what = "the file of the shared medium has no valid time: replace it with an empty file";
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Draws from the standard normal distribution (Box and Muller, 1958).
fn normal(random: &mut ChaCha8Rng) -> f64 {
    let mut uniform = || (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
    let (radius, angle) = (1.0 - uniform(), uniform());
    (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
}

/// Lets this thread sleep with a precision of a microsecond; by default the kernel may wake a thread 50 us late.
fn set_timer_slack() {
    // If it fails, messages arrive later, as on systems other than Linux.
    #[cfg(target_os = "linux")]
    let _ = rustix::thread::set_current_timer_slack(Some(std::num::NonZeroU64::MIN));
}

#[cfg(test)]
mod tests {
    use super::super::shaped::tests::check_frames_arrive_whole;
    use super::*;
    use crate::wire::{MemoryTransport, Transport};

    fn pacer(path: EmulatedPath) -> Pacer {
        Pacer::new(path, &AtomicU64::new(0)).unwrap()
    }

    #[test]
    fn messages_queue_for_their_bytes_and_arrive_after_the_latency() {
        let path = EmulatedPath::with_latency(Seconds(0.005));
        let mut slow = pacer(EmulatedPath { bandwidth: Some(BytesPerSecond(1e6)), ..path.clone() });
        // 1000 bytes take a millisecond; the second waits for the first.
        assert_eq!(slow.arrival(0, 1000).unwrap(), 6_000_000);
        assert_eq!(slow.arrival(500_000, 2000).unwrap(), 8_000_000);
        assert_eq!(slow.arrival(50_000_000, 1000).unwrap(), 56_000_000);
        // The overhead is part of the latency, and occupies the medium.
        let mut wifi = pacer(EmulatedPath { overhead: Seconds(0.002), ..path });
        assert_eq!((wifi.arrival(0, 9).unwrap(), wifi.arrival(0, 9).unwrap()), (5_000_000, 7_000_000));
    }

    #[test]
    fn random_delays_have_their_median_and_follow_from_the_seed() {
        let path = EmulatedPath { sigma: 0.5, seed: 7, ..EmulatedPath::with_latency(Seconds(0.002)) };
        let draw = |path: &EmulatedPath| {
            let mut pacer = pacer(path.clone());
            (0..2001).map(|_| pacer.delay()).collect::<Vec<f64>>()
        };
        let (first, again) = (draw(&path), draw(&path));
        assert_eq!(first, again);
        assert_ne!(first, draw(&EmulatedPath { seed: 8, ..path.clone() }));
        assert_ne!(first, draw(&EmulatedPath { rng_stream: 1, ..path.clone() }));
        let mut sorted = first;
        sorted.sort_by(f64::total_cmp);
        // The median of 2001 draws is within 5 % of the distribution's.
        assert!((sorted[1000] / 0.002 - 1.0).abs() < 0.05, "{}", sorted[1000]);
        // 84.1 % are below the median times e^sigma.
        assert!((sorted[1683] / (0.002 * 0.5_f64.exp()) - 1.0).abs() < 0.1, "{}", sorted[1683]);
        // Messages arrive in order, whatever delays are drawn.
        let mut pacer = pacer(path);
        let arrivals: Vec<u64> = (0..100).map(|at| pacer.arrival(at * 1000, 10).unwrap()).collect();
        assert!(arrivals.is_sorted());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn frames_arrive_whole_and_not_early() {
        let unlimited = EmulatedPath::with_latency(Seconds(0.02));
        let path = EmulatedPath { bandwidth: Some(BytesPerSecond(100e6)), ..unlimited };
        let paths: PathLookup = Arc::new(move |_| Ok(path.clone()));
        let begin = machine_clock_nanos();
        check_frames_arrive_whole(EmulatedTransport::new(MemoryTransport::default(), paths), || ()).await;
        // 1.5 MB at 100 MB/s and 20 ms.
        assert!(machine_clock_nanos() - begin >= 35_000_000, "{}", machine_clock_nanos() - begin);
    }

    #[test]
    fn shared_medium_carries_one_message_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("wifi");
        std::fs::write(&file, "").unwrap();
        let path = EmulatedPath {
            overhead: Seconds(0.01),
            shared_medium_file: Some(file.clone()),
            ..EmulatedPath::with_latency(Seconds(0.01))
        };
        let begin = machine_clock_nanos();
        let senders: Vec<_> = (0..3)
            .map(|_| {
                let path = path.clone();
                std::thread::spawn(move || pacer(path).arrival(begin, 5).unwrap())
            })
            .collect();
        let mut ends: Vec<u64> = senders.into_iter().map(|sender| sender.join().unwrap() - begin).collect();
        ends.sort_unstable();
        assert_eq!(ends, [10_000_000, 20_000_000, 30_000_000]);
        // A message waits until the medium is free, not until the previous message has arrived.
        let mut far = pacer(EmulatedPath { latency: Seconds(0.05), ..path.clone() });
        let mut after = |at: u64| far.arrival(begin + at * 1_000_000, 5).unwrap() - begin;
        let arrivals = [after(100), after(100), after(200)];
        assert_eq!(arrivals, [150_000_000, 160_000_000, 250_000_000]);
        for other in ["", "what", "20261122"] {
            std::fs::write(&file, other).unwrap();
            assert_eq!(pacer(path.clone()).arrival(begin, 5).is_ok(), other.is_empty(), "{other}");
        }
        std::fs::remove_file(&file).unwrap();
        assert!(Pacer::new(path, &AtomicU64::new(0)).is_err(), "the file of a medium must exist");
    }

    #[tokio::test]
    async fn unknown_path_refuses_the_connection() {
        let paths: PathLookup = Arc::new(|_| Err(io::Error::other("no such path")));
        let transport = EmulatedTransport::new(MemoryTransport::default(), paths);
        assert!(transport.connect("a").await.is_err());
    }
}
