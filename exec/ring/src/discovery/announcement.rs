//! The announcement of a worker by multicast DNS.
//!
//! A worker is an instance of the service `_hearth._tcp.local` (RFC 6763 over RFC 6762): its name, its port, its
//! addresses on each network and the version of the protocol. Nothing of its model, its key or its user is announced. A
//! peer that reads it still needs the key.
//!
//! Not here: the search ([`super::search`]).

use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use mdns_sd::{IfKind, ServiceDaemon, ServiceInfo};

use crate::wire::PROTOCOL;
use hearth_runtime::clock::wall_nanos;

/// What workers announce.
pub const SERVICE: &str = "_hearth._tcp.local.";
/// The port of multicast DNS.
/// source: RFC 6762, section 3
pub const PORT: u16 = mdns_sd::MDNS_PORT;
/// The key under which the name stands, whose instance label is made unique.
pub(super) const NAME: &str = "name";
/// The key under which the protocol's version stands.
pub(super) const VERSION: &str = "protocol";
/// A name is at most so long, in bytes: a label of DNS.
/// source: RFC 1035, section 2.3.4
pub const MAX_NAME: usize = 63;
/// The interval at which the record cache of the mDNS daemon is checked. source: assumed
const POLL_INTERVAL: Duration = Duration::from_secs(30);
/// The number of cached records after which the mDNS daemon is restarted: peers on the network decide how many there
/// are. source: assumed, some megabytes
const MAX_RECORDS: i64 = 20_000;
/// The time limit for sending the goodbye message.
const GOODBYE: Duration = Duration::from_millis(500);

/// Where announcements are sent and received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MdnsScope {
    pub port: u16,
    /// Whether to announce and listen on the loopback interface only.
    pub loopback: bool,
}

impl Default for MdnsScope {
    fn default() -> Self {
        Self { port: PORT, loopback: false }
    }
}

/// Why announcing or discovering workers failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AnnouncementError {
    /// The name is none.
    #[error(
        "`{name}` cannot be announced as a name: it is empty, longer than {MAX_NAME} bytes or has control characters"
    )]
    Name {
        /// The given value.
        name: String,
    },
    /// The system does not let it.
    #[error("multicast DNS does not work here: {reason}")]
    Multicast {
        /// The reason.
        reason: String,
    },
}

impl AnnouncementError {
    /// How to fix it.
    pub fn hint(&self) -> &'static str {
        match self {
            AnnouncementError::Name { .. } => "give the device another with --name",
            AnnouncementError::Multicast { .. } => "write the workers' addresses into the plan instead",
        }
    }
}

/// A worker's announcement, withdrawn when dropped.
#[derive(Debug)]
pub struct Announcement {
    stop: Sender<()>,
    guard: Option<JoinHandle<()>>,
}

impl Announcement {
    /// Announces the worker of this name at this address.
    pub fn start(
        name: &str,
        listening: SocketAddr,
        scope: MdnsScope,
    ) -> Result<Announcement, AnnouncementError> {
        let service = service(name, listening)?;
        let mut daemon = announced(&service, scope)?;
        let (stop, stopped) = channel();
        let guard = std::thread::Builder::new().name("announcement".into()).spawn(move || {
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(POLL_INTERVAL) {
                if cached_records(&daemon) <= MAX_RECORDS {
                    continue;
                }
                // The old one has said all it had to say; if there is no new one now, there is at the next look.
                let _ = daemon.shutdown();
                if let Ok(anew) = announced(&service, scope) {
                    daemon = anew;
                }
            }
            if let Ok(gone) = daemon.unregister(service.get_fullname()) {
                let _ = gone.recv_timeout(GOODBYE);
            }
            let _ = daemon.shutdown();
        });
        let guard = guard.map_err(|error| AnnouncementError::Multicast { reason: error.to_string() })?;
        Ok(Announcement { stop, guard: Some(guard) })
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        let _ = self.stop.send(());
        if let Some(guard) = self.guard.take() {
            let _ = guard.join();
        }
    }
}

/// The system's end of multicast DNS, on these networks.
pub(super) fn daemon(scope: MdnsScope) -> Result<ServiceDaemon, AnnouncementError> {
    let daemon = ServiceDaemon::new_with_port(scope.port).map_err(|error| cannot(&error))?;
    if scope.loopback {
        daemon.disable_interface(IfKind::All).map_err(|error| cannot(&error))?;
        daemon.enable_interface(IfKind::LoopbackV4).map_err(|error| cannot(&error))?;
    }
    Ok(daemon)
}

pub(super) fn cannot(error: &mdns_sd::Error) -> AnnouncementError {
    AnnouncementError::Multicast { reason: error.to_string() }
}

fn announced(service: &ServiceInfo, scope: MdnsScope) -> Result<ServiceDaemon, AnnouncementError> {
    let daemon = daemon(scope)?;
    daemon.register(service.clone()).map_err(|error| cannot(&error))?;
    Ok(daemon)
}

/// Returns the number of records of other devices that the daemon caches.
fn cached_records(daemon: &ServiceDaemon) -> i64 {
    let Ok(metrics) = daemon.get_metrics() else { return 0 };
    // One that is too busy to say has too many.
    let Ok(metrics) = metrics.recv_timeout(POLL_INTERVAL) else { return i64::MAX };
    let records: std::collections::BTreeMap<String, i64> = metrics.into_iter().collect();
    records.iter().filter(|(name, _)| name.starts_with("cached-")).map(|(_, count)| count).sum()
}

/// Whether a device can have this name.
pub fn is_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len()) && !name.chars().any(char::is_control)
}

fn service(name: &str, listening: SocketAddr) -> Result<ServiceInfo, AnnouncementError> {
    if !is_name(name) {
        return Err(AnnouncementError::Name { name: name.escape_debug().take(2 * MAX_NAME).collect() });
    }
    // The label of an instance must be unlike all others on the network, and a device's name need not be.
    let label = name.bytes().chain(wall_nanos().to_le_bytes()).chain(listening.port().to_le_bytes());
    // FNV-1a, 64 bits.
    let label = label.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let (label, host) = (format!("hearth-{label:016x}"), format!("hearth-{label:016x}.local."));
    let version = PROTOCOL.to_string();
    let properties = [(NAME, name), (VERSION, version.as_str())];
    let addresses: Vec<IpAddr> = if listening.ip().is_unspecified() { vec![] } else { vec![listening.ip()] };
    let service = ServiceInfo::new(SERVICE, &label, &host, &addresses[..], listening.port(), &properties[..])
        .map_err(|error| cannot(&error))?;
    Ok(if addresses.is_empty() { service.enable_addr_auto() } else { service })
}

/// The host name of this machine, if it is valid as a device name.
pub fn host_name() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let name = name.or_else(|| std::env::var("HOSTNAME").or_else(|_| std::env::var("COMPUTERNAME")).ok());
    name.map(|name| name.trim().to_owned()).filter(|name| is_name(name))
}
