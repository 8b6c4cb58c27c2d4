//! An emulated home network: each device is a host of its own, with an address and a TCP stack of its own.
//!
//! A host is a network namespace ([`Host`]) with one interface. A thread of the lab reads the packets that the hosts
//! send, and passes them to the packet emulator ([`PacketEmulator`]), which decides when and whether they arrive.

mod emulator;
mod host;
mod path;
mod queue;
mod transport;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use hearth_runtime::clock::machine_clock_nanos;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

pub use emulator::{PacketEmulator, Route};
pub use host::{Host, Namespace};
pub use transport::HostTransport;

use crate::LabError;

/// Time in nanoseconds.
type Nanos = u64;

/// A packet from one host to another.
#[derive(Debug)]
struct Packet {
    from: usize,
    to: usize,
    bytes: Vec<u8>,
}

/// Maximum number of hosts, whose addresses differ in the last byte.
const MAX_HOSTS: usize = 250;
/// Maximum time without a look at whether the network has ended.
const MAX_WAIT: Nanos = 100_000_000;
/// Packets that are read from one host before the next one, so that no host starves the others.
const MAX_PACKETS_AT_ONCE: usize = 64;

/// A running emulated network. It ends when this value is dropped.
pub struct VirtualNetwork {
    hosts: Arc<Vec<Host>>,
    emulator: Arc<Mutex<PacketEmulator>>,
    has_ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl VirtualNetwork {
    /// Creates `count` hosts and starts to carry their packets.
    pub fn start(count: usize, is_ipv6: bool, emulator: PacketEmulator) -> Result<VirtualNetwork, LabError> {
        let no_network = |error: io::Error| LabError::NoNetwork { why: error.to_string() };
        if count > MAX_HOSTS {
            return Err(LabError::NoNetwork {
                why: format!("{count} hosts, but at most {MAX_HOSTS} have addresses"),
            });
        }
        let hosts = (0..count).map(|number| Host::create(number, is_ipv6)).collect::<io::Result<Vec<Host>>>();
        let hosts = Arc::new(hosts.map_err(no_network)?);
        let emulator = Arc::new(Mutex::new(emulator));
        let has_ended = Arc::new(AtomicBool::new(false));
        let carried = (Arc::clone(&hosts), Arc::clone(&emulator), Arc::clone(&has_ended));
        let carry = move || carry_packets(&carried.0, &carried.1, &carried.2);
        let thread = std::thread::Builder::new().name("network".into()).spawn(carry).map_err(no_network)?;
        Ok(VirtualNetwork { hosts, emulator, has_ended, thread: Some(thread) })
    }

    pub fn host(&self, number: usize) -> &Host {
        &self.hosts[number]
    }

    /// Returns the number of packets that were lost at random, and the number that a queue dropped.
    pub fn loss_counts(&self) -> (u64, u64) {
        lock(&self.emulator).loss_counts()
    }
}

impl Drop for VirtualNetwork {
    fn drop(&mut self) {
        self.has_ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn lock(emulator: &Mutex<PacketEmulator>) -> MutexGuard<'_, PacketEmulator> {
    emulator.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads the packets of the hosts and delivers them when the emulator says so.
fn carry_packets(hosts: &[Host], emulator: &Mutex<PacketEmulator>, has_ended: &AtomicBool) {
    // If it fails, packets arrive a little later.
    let _ = rustix::thread::set_current_timer_slack(Some(std::num::NonZeroU64::MIN));
    let mut buffer = [0; host::MTU as usize + 64];
    while !has_ended.load(Ordering::Relaxed) {
        let wait = lock(emulator)
            .next_event_time()
            .map_or(MAX_WAIT, |at| at.saturating_sub(machine_clock_nanos()).min(MAX_WAIT));
        let timeout = Timespec { tv_sec: 0, tv_nsec: wait as _ };
        let mut readable: Vec<PollFd> = hosts
            .iter()
            .map(|host| PollFd::from_borrowed_fd(host.interface.as_fd(), PollFlags::IN))
            .collect();
        // After an interruption the descriptors are read in vain.
        let _ = poll(&mut readable, Some(&timeout));
        let mut emulator = lock(emulator);
        for (from, host) in hosts.iter().enumerate() {
            for _ in 0..MAX_PACKETS_AT_ONCE {
                let Ok(count) = host.interface.recv(&mut buffer) else { break };
                if let Some(to) = host::receiver(&buffer[..count]) {
                    emulator.send(machine_clock_nanos(), from, to, buffer[..count].to_vec());
                }
            }
        }
        while let Some((to, packet)) = emulator.pop_arrival(machine_clock_nanos()) {
            // A full interface loses the packet, as a real one does.
            let _ = hosts[to].interface.send(&packet);
        }
    }
}

/// Returns the routes between all pairs of `count` hosts.
pub fn routes_between(
    count: usize,
    mut route: impl FnMut(usize, usize) -> Route,
) -> BTreeMap<(usize, usize), Route> {
    let pairs = (0..count).flat_map(|from| (0..count).map(move |to| (from, to)));
    pairs.filter(|(from, to)| from != to).map(|(from, to)| ((from, to), route(from, to))).collect()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::time::Instant;

    use hearth_profiles::link::impairments::{Impairments, PacketLoss};
    use hearth_profiles::{BytesPerSecond, Fraction, Link, Seconds, Sourced};

    use super::*;

    /// Starts two hosts with a link of 5 ms and 20 Mbit/s; `None` without the permission to create namespaces.
    fn two_hosts(test: &str, is_ipv6: bool, impairments: &Impairments) -> Option<VirtualNetwork> {
        let link =
            Link::constant(Sourced::new(Seconds(0.005), "test"), Sourced::new(BytesPerSecond(2.5e6), "test"));
        let routes = routes_between(2, |_, _| Route::Wire(link.clone()));
        let network = VirtualNetwork::start(2, is_ipv6, PacketEmulator::new(routes, &[], impairments, 1));
        network.inspect_err(|error| eprintln!("SKIPPED {test}: {error}")).ok()
    }

    /// Sends `bytes` bytes from host 0 to host 1 and waits for a byte in return. Returns the seconds of this, and of an
    /// exchange of two bytes before.
    #[allow(clippy::disallowed_methods)] // real packets take real time
    fn exchange(network: &VirtualNetwork, bytes: usize) -> [f64; 2] {
        let there = SocketAddr::new(network.host(1).address, 0);
        let listener = network.host(1).namespace.run(move || TcpListener::bind(there)).expect("it listens");
        let address = listener.local_addr().expect("an address");
        let received = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a connection");
            let mut buffer = vec![0; bytes];
            for length in [1, bytes] {
                stream.read_exact(&mut buffer[..length]).expect("bytes");
                stream.write_all(&[1]).expect("it is sent");
            }
        });
        let mut stream =
            network.host(0).namespace.run(move || TcpStream::connect(address)).expect("it connects");
        stream.set_nodelay(true).expect("an option");
        let times = [1, bytes].map(|length| {
            let start = Instant::now();
            stream.write_all(&vec![7; length]).expect("it is sent");
            stream.read_exact(&mut [0]).expect("a reply");
            start.elapsed().as_secs_f64()
        });
        received.join().expect("everything is received");
        times
    }

    #[test]
    fn real_tcp_crosses_the_network() {
        for is_ipv6 in [false, true] {
            let test = "real_tcp_crosses_the_network";
            let Some(network) = two_hosts(test, is_ipv6, &Impairments::default()) else { return };
            let [short, long] = exchange(&network, 1_000_000);
            // One megabyte takes 0.4 s, and the round trip 10 ms; a loaded machine takes longer.
            assert!(short >= 0.01 && long >= 0.4, "{short} {long}");
        }
    }

    #[test]
    fn tcp_repeats_lost_packets() {
        let loss = Some(PacketLoss { rate: Fraction(0.03), burst: 1.0 });
        let impairments = Impairments { loss, ..Impairments::default() };
        let Some(network) = two_hosts("tcp_repeats_lost_packets", false, &impairments) else { return };
        exchange(&network, 500_000);
        assert!(network.loss_counts().0 > 0);
    }
}
