//! The search for a plan's workers that have no address in the plan.
//!
//! Workers announce themselves ([`super::announcement`]). Anybody on the network can announce anything under any name,
//! so an announcement is only a hint: the head connects to each address that goes with a name it searches for, and the
//! handshake decides. With a key only its holders pass; without one only addresses of this machine are tried. What the
//! search stores is bounded.
//!
//! Not here: addresses in the plan, which are used as they are.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use mdns_sd::{Receiver, ResolvedService, ServiceDaemon, ServiceEvent};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

use super::announcement::{
    AnnouncementError, MAX_NAME, MdnsScope, NAME, SERVICE, VERSION, cannot, daemon, is_name,
};
use crate::error::RingError;
use crate::wire::{PROTOCOL, Purpose, Transport, open_connection};

/// Announcements that one search reads; more are ignored.
/// source: assumed, more than any home has
const MAX_SERVICES: usize = 4096;
/// Addresses that are tried for one name.
/// source: assumed, a few networks of a few devices that claim one name
const MAX_CALLS: usize = 32;
/// Other names that an error lists.
const MAX_OTHERS: usize = 16;
/// Announcements that wait to be read.
const QUEUE_LEN: usize = 64;
/// The time limit for the handshake with one address. source: assumed, some round trips of a bad Wi-Fi
const CALL_DEADLINE: Duration = Duration::from_secs(2);
/// The extra time after all workers are found: another device may claim the same name, or a better address may arrive.
/// source: assumed, several round trips of a home network
const SETTLE: Duration = Duration::from_millis(300);
/// The interval at which the search checks whether it is complete.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Why the workers of a plan are not all found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DiscoveryError {
    /// Some are missing.
    #[error("not found within {seconds} s: {missing}{found}{others}")]
    Missing {
        seconds: u64,
        /// Names, each with what was seen.
        missing: String,
        found: String,
        others: String,
    },
    /// Two devices that both have the key have one name.
    #[error("two workers say that they are `{name}`: {addresses}")]
    Ambiguous {
        name: String,
        /// Their addresses.
        addresses: String,
    },
    /// Multicast DNS cannot be used.
    #[error(transparent)]
    Announcement(#[from] AnnouncementError),
}

impl From<DiscoveryError> for RingError {
    fn from(error: DiscoveryError) -> Self {
        RingError::Discovery { what: error.to_string(), hint: Some(error.hint().to_owned()) }
    }
}

impl DiscoveryError {
    /// How to fix it.
    pub fn hint(&self) -> &'static str {
        match self {
            DiscoveryError::Missing { .. } => {
                "start them with the same --key and `--name` (on loopback with `--announce always` too), give more time \
                 with `--discover SECONDS`, or write `address: HOST:PORT` into the plan"
            }
            DiscoveryError::Ambiguous { .. } => "give each its own --name",
            DiscoveryError::Announcement(error) => error.hint(),
        }
    }
}

/// One announcement, restricted to its valid entries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiscoveredService {
    /// What tells it from others of the same name.
    pub instance: String,
    /// The device's name.
    pub name: String,
    /// The protocol's version.
    pub version: String,
    /// Its address.
    pub addresses: Vec<SocketAddr>,
}

impl DiscoveredService {
    fn from_mdns(service: &ResolvedService) -> DiscoveredService {
        let property = |key: &str| service.get_property_val_str(key).unwrap_or_default().to_owned();
        // Sorted: the set's order is not fixed.
        let hosts: BTreeSet<IpAddr> = service.addresses.iter().map(mdns_sd::ScopedIp::to_ip_addr).collect();
        let addresses = hosts.into_iter().map(|host| SocketAddr::new(host, service.port)).collect();
        DiscoveredService {
            instance: service.fullname.clone(),
            name: property(NAME),
            version: property(VERSION),
            addresses,
        }
    }
}

/// How a connection attempt ended, if it has.
type CallResult = Option<Result<(), String>>;

/// The answers of one worker.
#[derive(Debug, Default)]
struct Candidates {
    /// For each address, the instance and the outcome of the connection attempt, if it has ended.
    calls: BTreeMap<SocketAddr, (String, CallResult)>,
    /// Announcements that could not be called at.
    rejected: BTreeSet<String>,
}

/// All answers of a search so far; their number is bounded.
#[derive(Debug)]
pub struct SearchState {
    wanted: BTreeMap<String, Candidates>,
    others: BTreeSet<String>,
    services: usize,
    ignored: usize,
    /// Whether only addresses of this machine are tried.
    loopback: bool,
}

impl SearchState {
    /// Starts a search for these names. With `loopback` only addresses of this machine are tried.
    pub fn new(names: &BTreeSet<String>, loopback: bool) -> SearchState {
        let wanted = names.iter().map(|name| (name.clone(), Candidates::default())).collect();
        SearchState { wanted, others: BTreeSet::new(), services: 0, ignored: 0, loopback }
    }

    /// Takes an announcement; the addresses to call for it.
    pub fn add(&mut self, service: &DiscoveredService) -> Vec<SocketAddr> {
        self.services += 1;
        if self.services > MAX_SERVICES || !is_name(&service.name) {
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
        if service.version != PROTOCOL.to_string() {
            let version = printable(&service.version);
            reject(format!("one that speaks protocol {version} of hearth, and this is {PROTOCOL}"));
            return vec![];
        }
        let mut fresh = Vec::new();
        for &address in service.addresses.iter().take(MAX_CALLS) {
            if wanted.calls.contains_key(&address) {
                continue;
            }
            if let Some(reason) = unusable_reason(address, self.loopback) {
                reject(format!("one at {address}, {reason}"));
            } else if wanted.calls.len() >= MAX_CALLS {
                reject("more than can be called".into());
            } else {
                wanted.calls.insert(address, (service.instance.clone(), None));
                fresh.push(address);
            }
        }
        fresh
    }

    /// A call has ended.
    pub fn called(&mut self, name: &str, address: SocketAddr, result: Result<(), String>) {
        let call = self.wanted.get_mut(name).and_then(|wanted| wanted.calls.get_mut(&address));
        if let Some((_, ended)) = call {
            *ended = Some(result);
        }
    }

    /// Whether a worker has answered for every name.
    pub fn is_complete(&self) -> bool {
        self.wanted.values().all(|wanted| wanted.answered().next().is_some())
    }

    /// Returns the address of each worker, or an error that names the missing workers and the reasons.
    pub fn result(&self, limit: Duration) -> Result<BTreeMap<String, String>, DiscoveryError> {
        let mut found = BTreeMap::new();
        let mut missing = Vec::new();
        for (name, wanted) in &self.wanted {
            let instances: BTreeSet<&str> = wanted.answered().map(|(_, instance)| instance).collect();
            if instances.len() > 1 {
                let addresses: Vec<String> =
                    wanted.answered().map(|(address, _)| address.to_string()).collect();
                return Err(DiscoveryError::Ambiguous {
                    name: printable(name),
                    addresses: addresses.join(", "),
                });
            }
            // Other devices of the ring reach it there too, which loopback is not for.
            let best = wanted.answered().min_by_key(|(address, _)| (address.ip().is_loopback(), *address));
            match best {
                Some((address, _)) => drop(found.insert(name.clone(), address.to_string())),
                None => missing.push(format!("`{}`{}", printable(name), wanted.summary())),
            }
        }
        if missing.is_empty() {
            return Ok(found);
        }
        let found = found.iter().map(|(name, at)| format!("`{}` at {at}", printable(name)));
        let mut others: Vec<String> =
            self.others.iter().map(|name| format!("`{}`", printable(name))).collect();
        if self.ignored > 0 {
            others.push(format!("{} more announcements", self.ignored));
        }
        Err(DiscoveryError::Missing {
            seconds: limit.as_secs(),
            missing: missing.join(", "),
            found: list(". Found: ", &found.collect::<Vec<_>>()),
            others: list(". Also heard of: ", &others),
        })
    }
}

impl Candidates {
    /// Addresses whose handshake went well, and of which instance.
    fn answered(&self) -> impl Iterator<Item = (SocketAddr, &str)> {
        let calls = self.calls.iter().filter(|(_, (_, ended))| *ended == Some(Ok(())));
        calls.map(|(address, (instance, _))| (*address, instance.as_str()))
    }

    /// The announcements of a worker that did not answer.
    fn summary(&self) -> String {
        let mut text = String::new();
        for (address, (_, ended)) in &self.calls {
            let reason = match ended {
                Some(Err(reason)) => reason,
                _ => "no answer",
            };
            let _ = write!(text, "{}{address}: {reason}", if text.is_empty() { " (" } else { "; " });
        }
        for rejected in &self.rejected {
            let _ = write!(text, "{}{rejected}", if text.is_empty() { " (" } else { "; " });
        }
        if text.is_empty() { " (nobody of that name announces itself)".into() } else { text + ")" }
    }
}

/// Why an address is not called.
fn unusable_reason(address: SocketAddr, loopback: bool) -> Option<&'static str> {
    let host = address.ip();
    if address.port() == 0 || host.is_unspecified() || host.is_multicast() {
        return Some("which is no address of a device");
    }
    if matches!(host, IpAddr::V6(host) if host.is_unicast_link_local()) {
        return Some("which needs the name of a network with it");
    }
    (loopback && !host.is_loopback()).then_some("which is not called without a key")
}

/// A name or version from the network, fit to be printed.
fn printable(text: &str) -> String {
    text.chars().take(MAX_NAME).flat_map(char::escape_debug).collect()
}

fn list(before: &str, items: &[String]) -> String {
    if items.is_empty() { String::new() } else { format!("{before}{}", items.join(", ")) }
}

/// A search; over when dropped.
struct Browser {
    daemon: ServiceDaemon,
    events: Receiver<ServiceEvent>,
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.daemon.shutdown();
    }
}

/// Announcements as they are read, until the receiver is gone.
fn services(scope: MdnsScope) -> Result<mpsc::Receiver<DiscoveredService>, DiscoveryError> {
    let daemon = daemon(scope)?;
    let events = daemon.browse(SERVICE).map_err(|error| cannot(&error))?;
    let search = Browser { daemon, events };
    let (sender, services) = mpsc::channel(QUEUE_LEN);
    tokio::task::spawn_blocking(move || {
        while !sender.is_closed() && !search.events.is_disconnected() {
            if let Ok(ServiceEvent::ServiceResolved(service)) = search.events.recv_timeout(POLL_INTERVAL) {
                let _ = sender.blocking_send(DiscoveredService::from_mdns(&service));
            }
        }
    });
    Ok(services)
}

/// Lists the services announced within `limit`, by name, with the most likely address of each. Connects to none of
/// them: these are hints, at most sixteen of them.
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

/// Takes an announcement of a name that is one, if there is room. An address on the network is better than one of this
/// machine only, and one with numbers that people know better than others.
fn record_hint(state: &mut BTreeMap<String, SocketAddr>, service: &DiscoveredService) {
    let known = state.contains_key(&service.name);
    if !is_name(&service.name) || (!known && state.len() >= MAX_OTHERS) {
        return;
    }
    let usable = service
        .addresses
        .iter()
        .take(MAX_CALLS)
        .filter(|address| unusable_reason(**address, false).is_none());
    let best = |address: &&SocketAddr| (address.ip().is_loopback(), address.is_ipv6(), **address);
    if let Some(address) = usable.min_by_key(best) {
        state.entry(service.name.clone()).or_insert(*address);
    }
}

/// Finds where the workers of these names listen. Whoever is said to be somewhere has answered the handshake there.
pub async fn find_workers<T: Transport>(
    transport: &T,
    names: &BTreeSet<String>,
    limit: Duration,
    scope: MdnsScope,
) -> Result<BTreeMap<String, String>, DiscoveryError> {
    let mut services = services(scope)?;
    let mut state = SearchState::new(names, !transport.is_encrypted());
    let mut calls = JoinSet::new();
    let mut until = Instant::now() + limit;
    let mut is_settling = false;
    loop {
        tokio::select! {
            () = sleep_until(until) => break,
            Some(service) = services.recv() => {
                for address in state.add(&service) {
                    let (transport, name) = (transport.clone(), service.name.clone());
                    calls.spawn(async move {
                        let result = try_call(&transport, &name, address).await;
                        (name, address, result)
                    });
                }
            }
            Some(called) = calls.join_next() => {
                if let Ok((name, address, result)) = called {
                    state.called(&name, address, result);
                }
                if state.is_complete() && !is_settling {
                    is_settling = true;
                    until = until.min(Instant::now() + SETTLE);
                }
            }
        }
    }
    state.result(limit)
}

/// Whether somebody with our key answers there.
async fn try_call<T: Transport>(transport: &T, name: &str, address: SocketAddr) -> Result<(), String> {
    let at = address.to_string();
    let calling = open_connection(transport, name, &at, 0, Purpose::Probe);
    match timeout(CALL_DEADLINE, calling).await {
        Ok(Ok(_)) => Ok(()),
        // The hint is given once, for all.
        Ok(Err(error)) => Err(error.what()),
        Err(_) => Err("no answer".into()),
    }
}

#[cfg(test)]
mod tests;
