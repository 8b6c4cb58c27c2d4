//! The announcement of a worker by multicast DNS.
//!
//! A worker announces an instance of the service `_hearth._tcp.local` (RFC 6763 over RFC 6762): its name, its port, its
//! addresses on each network and the version of the ring protocol. The announcement has nothing about the model, the
//! key or the user of the worker. A peer that reads the announcement still needs the key to use the worker.

use std::net::SocketAddr;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use mdns_sd::{IfKind, ServiceDaemon, ServiceInfo};

use crate::wire::PROTOCOL_VERSION;

/// The DNS-SD service type that workers announce.
pub const SERVICE_TYPE: &str = "_hearth._tcp.local.";
/// The key of the device name in the TXT record. The name is not the instance label, because labels must be unique.
pub(super) const NAME_KEY: &str = "name";
pub(super) const VERSION_KEY: &str = "protocol";
/// Maximum length of a device name in bytes, equal to that of a DNS label. source: RFC 1035, section 2.3.4
pub const MAX_DEVICE_NAME_LEN: usize = 63;
/// The interval at which the size of the mDNS daemon's record cache is checked. source: assumed
const POLL_INTERVAL: Duration = Duration::from_secs(30);
/// Maximum number of cached records of peers before the mDNS daemon is restarted. source: assumed, a few megabytes
const MAX_RECORDS: i64 = 20_000;
const GOODBYE_DEADLINE: Duration = Duration::from_millis(500);

/// The port and the network interfaces for announcements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MdnsScope {
    pub port: u16,
    /// Whether to announce and listen on the loopback interface only.
    pub loopback_only: bool,
}

impl Default for MdnsScope {
    fn default() -> Self {
        Self { port: mdns_sd::MDNS_PORT, loopback_only: false }
    }
}

/// An error of multicast DNS, or an invalid device name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AnnouncementError {
    /// `name`, which is escaped and shortened, is not a valid device name.
    #[error(
        "`{name}` is not a device name: a name must have 1 to {MAX_DEVICE_NAME_LEN} bytes and no control characters"
    )]
    InvalidName { name: String },
    #[error("multicast DNS does not work on this device: {0}")]
    Multicast(#[from] mdns_sd::Error),
}

impl AnnouncementError {
    pub fn hint(&self) -> &'static str {
        match self {
            AnnouncementError::InvalidName { .. } => "give the device a different name with `--name`",
            AnnouncementError::Multicast(_) => "write the workers' addresses into the plan instead",
        }
    }
}

/// A running announcement of a worker. Dropping this value withdraws the announcement.
#[derive(Debug)]
pub struct Announcement {
    stop: Sender<()>,
    thread: Option<JoinHandle<()>>,
}

impl Announcement {
    /// Announces the worker `name`, which listens on `address`.
    pub fn start(name: &str, address: SocketAddr, scope: MdnsScope) -> Result<Self, AnnouncementError> {
        let service = service_info(name, address)?;
        let mut daemon = start_announcing(&service, scope)?;
        let (stop, stopped) = channel();
        let thread = std::thread::Builder::new().name("announcement".into()).spawn(move || {
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(POLL_INTERVAL) {
                if cached_records(&daemon) <= MAX_RECORDS {
                    continue;
                }
                // A new daemon begins with an empty cache.
                let _ = daemon.0.shutdown();
                if let Ok(restarted) = start_announcing(&service, scope) {
                    daemon = restarted;
                }
            }
            if let Ok(unregistered) = daemon.0.unregister(service.get_fullname()) {
                let _ = unregistered.recv_timeout(GOODBYE_DEADLINE);
            }
        });
        let thread = thread.map_err(|error| mdns_sd::Error::Msg(error.to_string()))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        let _ = self.stop.send(());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// An mDNS daemon, whose thread ends when this value is dropped.
pub(super) struct Daemon(pub(super) ServiceDaemon);

impl Daemon {
    pub(super) fn start(scope: MdnsScope) -> Result<Daemon, AnnouncementError> {
        let daemon = Daemon(ServiceDaemon::new_with_port(scope.port)?);
        if scope.loopback_only {
            daemon.0.disable_interface(IfKind::All)?;
            daemon.0.enable_interface(IfKind::LoopbackV4)?;
        }
        Ok(daemon)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.shutdown();
    }
}

fn start_announcing(service: &ServiceInfo, scope: MdnsScope) -> Result<Daemon, AnnouncementError> {
    let daemon = Daemon::start(scope)?;
    daemon.0.register(service.clone())?;
    Ok(daemon)
}

fn cached_records(daemon: &Daemon) -> i64 {
    let Ok(metrics) = daemon.0.get_metrics() else { return 0 };
    // A daemon that is too busy to answer has too many records.
    let Ok(metrics) = metrics.recv_timeout(POLL_INTERVAL) else { return i64::MAX };
    metrics.iter().filter(|(name, _)| name.starts_with("cached-")).map(|(_, count)| count).sum()
}

/// Returns whether a name is a valid device name: 1 to [`MAX_DEVICE_NAME_LEN`] bytes without control characters.
pub fn is_valid_device_name(name: &str) -> bool {
    (1..=MAX_DEVICE_NAME_LEN).contains(&name.len()) && !name.chars().any(char::is_control)
}

fn service_info(name: &str, address: SocketAddr) -> Result<ServiceInfo, AnnouncementError> {
    if !is_valid_device_name(name) {
        let name = name.escape_debug().take(2 * MAX_DEVICE_NAME_LEN).collect();
        return Err(AnnouncementError::InvalidName { name });
    }
    // An instance label must be unique in the network, but a device name need not be.
    let label = format!("hearth-{:016x}", rand::random::<u64>());
    let host = format!("{label}.local.");
    let version = PROTOCOL_VERSION.to_string();
    let properties = [(NAME_KEY, name), (VERSION_KEY, version.as_str())];
    let addresses: Vec<_> = if address.ip().is_unspecified() { vec![] } else { vec![address.ip()] };
    let service =
        ServiceInfo::new(SERVICE_TYPE, &label, &host, &addresses[..], address.port(), &properties[..])?;
    Ok(if addresses.is_empty() { service.enable_addr_auto() } else { service })
}

/// Returns the host name of this machine, if it is a valid device name.
pub fn host_name() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let name = name.or_else(|| std::env::var("HOSTNAME").or_else(|_| std::env::var("COMPUTERNAME")).ok());
    name.map(|name| name.trim().to_owned()).filter(|name| is_valid_device_name(name))
}
