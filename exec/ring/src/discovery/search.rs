//! Where do the workers of a plan listen, when nobody has written it down?
//!
//! They announce themselves ([`super::announcement`]). Anybody on the network can announce anything under any name, so
//! that what is heard is a hint and no more: the head calls at each address that goes with a name it looks for, and the
//! handshake decides. With a key only who has it passes; without one only addresses of this machine are called.
//! What is kept of what is heard is bounded, whatever comes.
//!
//! Not here: addresses that the plan says. They are used as they are and nobody is asked.

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

/// Announcements that are looked at in one search; what comes after is passed over.
/// source: assumed, more than any home has
const MAX_SIGHTINGS: usize = 4096;
/// Addresses that are called for one name.
/// source: assumed, a few networks of a few devices that claim one name
const MAX_CALLS: usize = 32;
/// Names that were not looked for and are told of.
const MAX_OTHERS: usize = 16;
/// Announcements that wait to be looked at.
const QUEUE: usize = 64;
/// For one address to answer the handshake.
/// source: assumed, some round trips of a bad Wi-Fi
const CALL_DEADLINE: Duration = Duration::from_secs(2);
/// After all are found: another device may claim a name, or a better address may come.
/// source: assumed, several round trips of a home's network
const SETTLE: Duration = Duration::from_millis(300);
/// Between two looks whether anybody still wants to hear.
const LOOK: Duration = Duration::from_millis(100);

/// Why the workers of a plan are not all found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DiscoveryError {
    /// Some are missing.
    #[error("not found within {seconds} s: {missing}{found}{others}")]
    Missing {
        /// How long it was looked for them.
        seconds: u64,
        /// Who, each with what was heard.
        missing: String,
        /// Who was found.
        found: String,
        /// Who else announces itself.
        others: String,
    },
    /// Two devices that both have the key have one name.
    #[error("two workers say that they are `{name}`: {addresses}")]
    Twice {
        /// The name.
        name: String,
        /// Where they listen.
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
            DiscoveryError::Twice { .. } => "give each its own --name",
            DiscoveryError::Announcement(error) => error.hint(),
        }
    }
}

/// One announcement, as far as it can be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sighting {
    /// What tells it from others of the same name.
    pub instance: String,
    /// The device's name.
    pub name: String,
    /// The protocol's version.
    pub version: String,
    /// Where it listens.
    pub addresses: Vec<SocketAddr>,
}

impl Sighting {
    fn of(service: &ResolvedService) -> Sighting {
        let told = |key: &str| service.get_property_val_str(key).unwrap_or_default().to_owned();
        // Sorted: the set's order is not fixed.
        let hosts: BTreeSet<IpAddr> = service.addresses.iter().map(mdns_sd::ScopedIp::to_ip_addr).collect();
        let addresses = hosts.into_iter().map(|host| SocketAddr::new(host, service.port)).collect();
        Sighting { instance: service.fullname.clone(), name: told(NAME), version: told(VERSION), addresses }
    }
}

/// How a call at an address ended.
type Called = Option<Result<(), String>>;

/// What was heard of one device that is looked for.
#[derive(Debug, Default)]
struct Wanted {
    /// By address: which instance, and how the call ended if it has.
    calls: BTreeMap<SocketAddr, (String, Called)>,
    /// Announcements that could not be called at.
    doubts: BTreeSet<String>,
}

/// What was heard so far; never more than it may be.
#[derive(Debug)]
pub struct Heard {
    wanted: BTreeMap<String, Wanted>,
    others: BTreeSet<String>,
    sightings: usize,
    passed_over: usize,
    /// Only addresses of this machine are called.
    loopback: bool,
}

impl Heard {
    /// Nothing yet, of these names. `loopback`: only addresses of this machine may be called.
    pub fn of(names: &BTreeSet<String>, loopback: bool) -> Heard {
        let wanted = names.iter().map(|name| (name.clone(), Wanted::default())).collect();
        Heard { wanted, others: BTreeSet::new(), sightings: 0, passed_over: 0, loopback }
    }

    /// Takes an announcement; the addresses to call for it.
    pub fn take(&mut self, sighting: &Sighting) -> Vec<SocketAddr> {
        self.sightings += 1;
        if self.sightings > MAX_SIGHTINGS || !is_name(&sighting.name) {
            self.passed_over += 1;
            return vec![];
        }
        let Some(wanted) = self.wanted.get_mut(&sighting.name) else {
            if self.others.len() < MAX_OTHERS {
                self.others.insert(sighting.name.clone());
            } else if !self.others.contains(&sighting.name) {
                self.passed_over += 1;
            }
            return vec![];
        };
        let mut doubt = |what: String| {
            if wanted.doubts.len() < MAX_OTHERS {
                wanted.doubts.insert(what);
            }
        };
        if sighting.version != PROTOCOL.to_string() {
            let version = shown(&sighting.version);
            doubt(format!("one that speaks protocol {version} of hearth, and this is {PROTOCOL}"));
            return vec![];
        }
        let mut fresh = Vec::new();
        for &address in sighting.addresses.iter().take(MAX_CALLS) {
            if wanted.calls.contains_key(&address) {
                continue;
            }
            if let Some(reason) = useless(address, self.loopback) {
                doubt(format!("one at {address}, {reason}"));
            } else if wanted.calls.len() >= MAX_CALLS {
                doubt("more than can be called".into());
            } else {
                wanted.calls.insert(address, (sighting.instance.clone(), None));
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

    /// Whether somebody has answered for every name.
    pub fn is_complete(&self) -> bool {
        self.wanted.values().all(|wanted| wanted.answered().next().is_some())
    }

    /// Where each is, or who is missing and why.
    pub fn result(&self, limit: Duration) -> Result<BTreeMap<String, String>, DiscoveryError> {
        let mut found = BTreeMap::new();
        let mut missing = Vec::new();
        for (name, wanted) in &self.wanted {
            let instances: BTreeSet<&str> = wanted.answered().map(|(_, instance)| instance).collect();
            if instances.len() > 1 {
                let addresses: Vec<String> =
                    wanted.answered().map(|(address, _)| address.to_string()).collect();
                return Err(DiscoveryError::Twice { name: shown(name), addresses: addresses.join(", ") });
            }
            // Other devices of the ring reach it there too, which loopback is not for.
            let best = wanted.answered().min_by_key(|(address, _)| (address.ip().is_loopback(), *address));
            match best {
                Some((address, _)) => drop(found.insert(name.clone(), address.to_string())),
                None => missing.push(format!("`{}`{}", shown(name), wanted.heard())),
            }
        }
        if missing.is_empty() {
            return Ok(found);
        }
        let found = found.iter().map(|(name, at)| format!("`{}` at {at}", shown(name)));
        let mut others: Vec<String> = self.others.iter().map(|name| format!("`{}`", shown(name))).collect();
        if self.passed_over > 0 {
            others.push(format!("{} more announcements", self.passed_over));
        }
        Err(DiscoveryError::Missing {
            seconds: limit.as_secs(),
            missing: missing.join(", "),
            found: list(". Found: ", &found.collect::<Vec<_>>()),
            others: list(". Also heard of: ", &others),
        })
    }
}

impl Wanted {
    /// Addresses whose handshake went well, and of which instance.
    fn answered(&self) -> impl Iterator<Item = (SocketAddr, &str)> {
        let calls = self.calls.iter().filter(|(_, (_, ended))| *ended == Some(Ok(())));
        calls.map(|(address, (instance, _))| (*address, instance.as_str()))
    }

    /// What was heard, though nobody answered.
    fn heard(&self) -> String {
        let mut text = String::new();
        for (address, (_, ended)) in &self.calls {
            let reason = match ended {
                Some(Err(reason)) => reason,
                _ => "no answer",
            };
            let _ = write!(text, "{}{address}: {reason}", if text.is_empty() { " (" } else { "; " });
        }
        for doubt in &self.doubts {
            let _ = write!(text, "{}{doubt}", if text.is_empty() { " (" } else { "; " });
        }
        if text.is_empty() { " (nobody of that name announces itself)".into() } else { text + ")" }
    }
}

/// Why an address is not called.
fn useless(address: SocketAddr, loopback: bool) -> Option<&'static str> {
    let host = address.ip();
    if address.port() == 0 || host.is_unspecified() || host.is_multicast() {
        return Some("which is no address of a device");
    }
    if matches!(host, IpAddr::V6(host) if host.is_unicast_link_local()) {
        return Some("which needs the name of a network with it");
    }
    (loopback && !host.is_loopback()).then_some("which is not called without a key")
}

/// A name or version that came from somewhere, fit to be shown.
fn shown(text: &str) -> String {
    text.chars().take(MAX_NAME).flat_map(char::escape_debug).collect()
}

fn list(before: &str, items: &[String]) -> String {
    if items.is_empty() { String::new() } else { format!("{before}{}", items.join(", ")) }
}

/// A search; over when dropped.
struct Search {
    daemon: ServiceDaemon,
    events: Receiver<ServiceEvent>,
}

impl Drop for Search {
    fn drop(&mut self) {
        let _ = self.daemon.shutdown();
    }
}

/// Announcements as they are heard, until nobody takes them any more.
fn sightings(medium: MdnsScope) -> Result<mpsc::Receiver<Sighting>, DiscoveryError> {
    let daemon = daemon(medium)?;
    let events = daemon.browse(SERVICE).map_err(|error| cannot(&error))?;
    let search = Search { daemon, events };
    let (sender, sightings) = mpsc::channel(QUEUE);
    tokio::task::spawn_blocking(move || {
        while !sender.is_closed() && !search.events.is_disconnected() {
            if let Ok(ServiceEvent::ServiceResolved(service)) = search.events.recv_timeout(LOOK) {
                let _ = sender.blocking_send(Sighting::of(&service));
            }
        }
    });
    Ok(sightings)
}

/// Who announces itself within a time, by name, with the likeliest of its addresses. Nobody is called: these are hints,
/// at most sixteen of them.
pub async fn listen(
    limit: Duration,
    medium: MdnsScope,
) -> Result<BTreeMap<String, SocketAddr>, DiscoveryError> {
    let mut sightings = sightings(medium)?;
    let (mut heard, mut count) = (BTreeMap::new(), 0);
    let until = Instant::now() + limit;
    loop {
        tokio::select! {
            () = sleep_until(until) => return Ok(heard),
            Some(sighting) = sightings.recv() => {
                count += 1;
                if count <= MAX_SIGHTINGS {
                    note(&mut heard, &sighting);
                }
            }
        }
    }
}

/// Takes an announcement of a name that is one, if there is room. An address on the network is better than one of this
/// machine only, and one with numbers that people know better than others.
fn note(heard: &mut BTreeMap<String, SocketAddr>, sighting: &Sighting) {
    let known = heard.contains_key(&sighting.name);
    if !is_name(&sighting.name) || (!known && heard.len() >= MAX_OTHERS) {
        return;
    }
    let usable =
        sighting.addresses.iter().take(MAX_CALLS).filter(|address| useless(**address, false).is_none());
    let best = |address: &&SocketAddr| (address.ip().is_loopback(), address.is_ipv6(), **address);
    if let Some(address) = usable.min_by_key(best) {
        heard.entry(sighting.name.clone()).or_insert(*address);
    }
}

/// Finds where the workers of these names listen. Whoever is said to be somewhere has answered the handshake there.
pub async fn find<T: Transport>(
    transport: &T,
    names: &BTreeSet<String>,
    limit: Duration,
    medium: MdnsScope,
) -> Result<BTreeMap<String, String>, DiscoveryError> {
    let mut sightings = sightings(medium)?;
    let mut heard = Heard::of(names, !transport.is_encrypted());
    let mut calls = JoinSet::new();
    let mut until = Instant::now() + limit;
    let mut is_settling = false;
    loop {
        tokio::select! {
            () = sleep_until(until) => break,
            Some(sighting) = sightings.recv() => {
                for address in heard.take(&sighting) {
                    let (transport, name) = (transport.clone(), sighting.name.clone());
                    calls.spawn(async move {
                        let result = try_call(&transport, &name, address).await;
                        (name, address, result)
                    });
                }
            }
            Some(called) = calls.join_next() => {
                if let Ok((name, address, result)) = called {
                    heard.called(&name, address, result);
                }
                if heard.is_complete() && !is_settling {
                    is_settling = true;
                    until = until.min(Instant::now() + SETTLE);
                }
            }
        }
    }
    heard.result(limit)
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
