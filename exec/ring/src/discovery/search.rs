//! The search for the workers that have no address in the plan.
//!
//! Workers announce themselves ([`super::announcement`]). Anybody on the network can announce any name, so the head
//! connects to each address that is announced with a wanted name, and tries a handshake. With a key, only devices that
//! have the key are accepted; without a key, only addresses of this machine are tried. Memory use is bounded.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use mdns_sd::{ResolvedService, ServiceEvent};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

use super::announcement::{
    AnnouncementError, Daemon, MAX_DEVICE_NAME_LEN, MdnsScope, NAME_KEY, SERVICE_TYPE, VERSION_KEY,
    is_valid_device_name,
};
use crate::error::RingError;
use crate::wire::{ConnectionPurpose, PROTOCOL_VERSION, Transport, open_connection};

/// Maximum number of announcements that a search reads. source: assumed, more than any home has
const MAX_SERVICES: usize = 4096;
/// Maximum number of addresses that are tried for one device name. source: assumed, a few devices on a few networks
const MAX_ADDRESSES: usize = 32;
/// Maximum number of announced names that are not searched for, and of rejection reasons, in an error message.
const MAX_OTHERS: usize = 16;
const QUEUE_LEN: usize = 64;
/// The time limit for the handshake with one address. source: assumed, several round trips over poor Wi-Fi
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(2);
/// The additional time after all workers are found, in which another device with the same name or a better address of a
/// worker may be announced. source: assumed, several round trips of a home network
const SETTLE_TIME: Duration = Duration::from_millis(300);
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// An error of a search for workers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DiscoveryError {
    /// Some workers were not found: `missing` has their names and the reasons. `found` lists the other workers, and
    /// `others` the announcements of other names, each as a sentence or empty.
    #[error("workers not found within {seconds} s: {missing}{found}{others}")]
    MissingWorkers { seconds: u64, missing: String, found: String, others: String },
    /// Two devices with the key have the same name.
    #[error("two workers have the name `{name}`: {addresses}")]
    AmbiguousName { name: String, addresses: String },
    #[error(transparent)]
    Announcement(#[from] AnnouncementError),
}

impl From<DiscoveryError> for RingError {
    fn from(error: DiscoveryError) -> Self {
        RingError::Discovery { what: error.to_string(), hint: Some(error.hint().to_owned()) }
    }
}

impl DiscoveryError {
    pub fn hint(&self) -> &'static str {
        match self {
            DiscoveryError::MissingWorkers { .. } => {
                "start the workers with the same `--key`, with these names as `--name`, and on loopback with \
                 `--announce always`; or search longer with `--discover SECONDS`, or write `address: HOST:PORT` \
                 into the plan"
            }
            DiscoveryError::AmbiguousName { .. } => "give each worker its own `--name`",
            DiscoveryError::Announcement(error) => error.hint(),
        }
    }
}

/// An announcement of a worker that was received from the network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiscoveredService {
    /// The full DNS-SD name of the announced instance, which is unique in the network.
    pub instance: String,
    pub name: String,
    /// The announced version of the ring protocol.
    pub protocol_version: String,
    pub addresses: Vec<SocketAddr>,
}

impl DiscoveredService {
    fn from_mdns(service: &ResolvedService) -> DiscoveredService {
        let property = |key: &str| service.get_property_val_str(key).unwrap_or_default().to_owned();
        // Sorted, because the order of the hash set is not fixed.
        let hosts: BTreeSet<IpAddr> = service.addresses.iter().map(mdns_sd::ScopedIp::to_ip_addr).collect();
        let addresses = hosts.into_iter().map(|host| SocketAddr::new(host, service.port)).collect();
        let (name, version) = (property(NAME_KEY), property(VERSION_KEY));
        DiscoveredService { instance: service.fullname.clone(), name, protocol_version: version, addresses }
    }
}

/// The result of a connection attempt, or `None` while the attempt is running.
type AttemptResult = Option<Result<(), String>>;

#[derive(Debug, Default)]
struct Candidates {
    /// For each address, the announced instance and the result of the connection attempt.
    attempts: BTreeMap<SocketAddr, (String, AttemptResult)>,
    /// Announced addresses that were not tried, with the reason.
    rejected: BTreeSet<String>,
}

/// The state of a search for workers. Its size is bounded.
#[derive(Debug)]
pub struct SearchState {
    wanted: BTreeMap<String, Candidates>,
    others: BTreeSet<String>,
    services: usize,
    ignored: usize,
    loopback_only: bool,
}

impl SearchState {
    /// Starts a search for the workers `names`. If `loopback_only` is set, only addresses of this machine are tried.
    pub fn new(names: &BTreeSet<String>, loopback_only: bool) -> SearchState {
        let wanted = names.iter().map(|name| (name.clone(), Candidates::default())).collect();
        SearchState { wanted, others: BTreeSet::new(), services: 0, ignored: 0, loopback_only }
    }

    /// Adds an announcement. Returns the announced addresses to which a connection must be tried.
    pub fn add(&mut self, service: &DiscoveredService) -> Vec<SocketAddr> {
        self.services += 1;
        if self.services > MAX_SERVICES || !is_valid_device_name(&service.name) {
            self.ignored += 1;
            return vec![];
        }
        let Some(wanted) = self.wanted.get_mut(&service.name) else {
            if self.others.len() < MAX_OTHERS {
                self.others.insert(service.name.clone());
            } else if !self.others.contains(&service.name) {
                self.ignored += 1;
            }
            return vec![];
        };
        let mut reject = |what: String| {
            if wanted.rejected.len() < MAX_OTHERS {
                wanted.rejected.insert(what);
            }
        };
        if service.protocol_version != PROTOCOL_VERSION.to_string() {
            let version = printable(&service.protocol_version);
            reject(format!(
                "announced with protocol version {version}, but this device has {PROTOCOL_VERSION}"
            ));
            return vec![];
        }
        let mut new = Vec::new();
        for &address in service.addresses.iter().take(MAX_ADDRESSES) {
            if wanted.attempts.contains_key(&address) {
                continue;
            }
            if let Some(reason) = unusable_reason(address, self.loopback_only) {
                reject(format!("{address}: {reason}"));
            } else if wanted.attempts.len() >= MAX_ADDRESSES {
                reject(format!("more than {MAX_ADDRESSES} announced addresses"));
            } else {
                wanted.attempts.insert(address, (service.instance.clone(), None));
                new.push(address);
            }
        }
        new
    }

    pub fn record_result(&mut self, name: &str, address: SocketAddr, result: Result<(), String>) {
        let attempt = self.wanted.get_mut(name).and_then(|wanted| wanted.attempts.get_mut(&address));
        if let Some((_, ended)) = attempt {
            *ended = Some(result);
        }
    }

    /// Returns whether a worker was found for every name.
    pub fn is_complete(&self) -> bool {
        self.wanted.values().all(|wanted| wanted.verified().next().is_some())
    }

    /// Returns the address of each worker by name, or an error with the missing workers and the time limit `limit`.
    pub fn worker_addresses(&self, limit: Duration) -> Result<BTreeMap<String, String>, DiscoveryError> {
        let mut found = BTreeMap::new();
        let mut missing = Vec::new();
        for (name, wanted) in &self.wanted {
            let instances: BTreeSet<&str> = wanted.verified().map(|(_, instance)| instance).collect();
            if instances.len() > 1 {
                let addresses: Vec<_> = wanted.verified().map(|(address, _)| address.to_string()).collect();
                let (name, addresses) = (printable(name), addresses.join(", "));
                return Err(DiscoveryError::AmbiguousName { name, addresses });
            }
            // Other devices of the ring cannot reach the worker at a loopback address.
            let best = wanted.verified().min_by_key(|(address, _)| (address.ip().is_loopback(), *address));
            match best {
                Some((address, _)) => drop(found.insert(name.clone(), address.to_string())),
                None => missing.push(format!("`{}`{}", printable(name), wanted.summary())),
            }
        }
        if missing.is_empty() {
            return Ok(found);
        }
        let found = found.iter().map(|(name, at)| format!("`{}` at {at}", printable(name)));
        let mut others: Vec<_> = self.others.iter().map(|name| format!("`{}`", printable(name))).collect();
        if self.ignored > 0 {
            others.push(format!("and {} more", self.ignored));
        }
        Err(DiscoveryError::MissingWorkers {
            seconds: limit.as_secs(),
            missing: missing.join(", "),
            found: list(". Found: ", &found.collect::<Vec<_>>()),
            others: list(". Other announcements: ", &others),
        })
    }
}

impl Candidates {
    /// Returns the addresses whose handshake succeeded, with their announced instances.
    fn verified(&self) -> impl Iterator<Item = (SocketAddr, &str)> {
        let succeeded = self.attempts.iter().filter(|(_, (_, ended))| *ended == Some(Ok(())));
        succeeded.map(|(address, (instance, _))| (*address, instance.as_str()))
    }

    /// Describes the failed attempts and the rejected addresses of a worker that was not found.
    fn summary(&self) -> String {
        let attempts = self.attempts.iter().map(|(address, (_, ended))| match ended {
            Some(Err(reason)) => format!("{address}: {reason}"),
            _ => format!("{address}: no response"),
        });
        let reasons: Vec<String> = attempts.chain(self.rejected.iter().cloned()).collect();
        if reasons.is_empty() {
            return " (no worker with this name is announced)".into();
        }
        format!(" ({})", reasons.join("; "))
    }
}

fn unusable_reason(address: SocketAddr, loopback_only: bool) -> Option<&'static str> {
    let host = address.ip();
    if address.port() == 0 || host.is_unspecified() || host.is_multicast() {
        return Some("not a valid address of a device");
    }
    if matches!(host, IpAddr::V6(host) if host.is_unicast_link_local()) {
        return Some("a link-local address, which is not usable without an interface name");
    }
    (loopback_only && !host.is_loopback()).then_some("not tried without a key")
}

/// Shortens and escapes text from the network, so that it can be printed.
fn printable(text: &str) -> String {
    text.chars().take(MAX_DEVICE_NAME_LEN).flat_map(char::escape_debug).collect()
}

fn list(before: &str, items: &[String]) -> String {
    if items.is_empty() { String::new() } else { format!("{before}{}", items.join(", ")) }
}

/// Starts receiving announcements, until the returned receiver is dropped.
fn services(scope: MdnsScope) -> Result<mpsc::Receiver<DiscoveredService>, DiscoveryError> {
    let daemon = Daemon::start(scope)?;
    let events = daemon.0.browse(SERVICE_TYPE).map_err(AnnouncementError::from)?;
    let (sender, services) = mpsc::channel(QUEUE_LEN);
    tokio::task::spawn_blocking(move || {
        // Dropped with this task, even if the runtime never starts it.
        let _daemon = daemon;
        while !sender.is_closed() && !events.is_disconnected() {
            if let Ok(ServiceEvent::ServiceResolved(service)) = events.recv_timeout(POLL_INTERVAL) {
                let _ = sender.blocking_send(DiscoveredService::from_mdns(&service));
            }
        }
    });
    Ok(services)
}

/// Lists the workers that are announced within `limit`, by name, with the best address of each worker. Does not connect
/// to the workers, so the result is not verified. Lists at most 16 workers.
pub async fn browse(
    limit: Duration,
    scope: MdnsScope,
) -> Result<BTreeMap<String, SocketAddr>, DiscoveryError> {
    let mut services = services(scope)?;
    let (mut state, mut count) = (BTreeMap::new(), 0);
    let until = Instant::now() + limit;
    loop {
        tokio::select! {
            () = sleep_until(until) => return Ok(state),
            Some(service) = services.recv() => {
                count += 1;
                if count <= MAX_SERVICES {
                    record_hint(&mut state, &service);
                }
            }
        }
    }
}

/// Stores the best address of an announcement, unless its name is invalid or the list is full. Network addresses are
/// better than loopback addresses, and IPv4 addresses are better than IPv6 addresses.
fn record_hint(state: &mut BTreeMap<String, SocketAddr>, service: &DiscoveredService) {
    let known = state.contains_key(&service.name);
    if !is_valid_device_name(&service.name) || (!known && state.len() >= MAX_OTHERS) {
        return;
    }
    let considered = service.addresses.iter().take(MAX_ADDRESSES);
    let usable = considered.filter(|address| unusable_reason(**address, false).is_none());
    let best = |address: &&SocketAddr| (address.ip().is_loopback(), address.is_ipv6(), **address);
    if let Some(address) = usable.min_by_key(best) {
        state.entry(service.name.clone()).or_insert(*address);
    }
}

/// Returns the addresses of the workers with these names, each of which has completed a handshake.
pub async fn find_workers<T: Transport>(
    transport: &T,
    names: &BTreeSet<String>,
    limit: Duration,
    scope: MdnsScope,
) -> Result<BTreeMap<String, String>, DiscoveryError> {
    let mut services = services(scope)?;
    let mut state = SearchState::new(names, !transport.is_private());
    let mut attempts = JoinSet::new();
    let mut until = Instant::now() + limit;
    let mut is_settling = false;
    loop {
        tokio::select! {
            () = sleep_until(until) => break,
            Some(service) = services.recv() => {
                for address in state.add(&service) {
                    let (transport, name) = (transport.clone(), service.name.clone());
                    attempts.spawn(async move {
                        let result = try_handshake(&transport, &name, address).await;
                        (name, address, result)
                    });
                }
            }
            Some(ended) = attempts.join_next() => {
                if let Ok((name, address, result)) = ended {
                    state.record_result(&name, address, result);
                }
                if state.is_complete() && !is_settling {
                    is_settling = true;
                    until = until.min(Instant::now() + SETTLE_TIME);
                }
            }
        }
    }
    state.worker_addresses(limit)
}

/// Tries a handshake with the device at an address. Returns the reason if it fails.
async fn try_handshake<T: Transport>(transport: &T, name: &str, address: SocketAddr) -> Result<(), String> {
    let at = address.to_string();
    let connecting = open_connection(transport, name, &at, 0, ConnectionPurpose::Probe);
    match timeout(HANDSHAKE_DEADLINE, connecting).await {
        Ok(Ok(_)) => Ok(()),
        // Without its hint: the search has one hint for all addresses.
        Ok(Err(error)) => Err(error.what()),
        Err(_) => Err("no response".into()),
    }
}

#[cfg(test)]
mod tests;
