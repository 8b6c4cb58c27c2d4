//! A network namespace with which a test takes a real link down.
//!
//! A pair of virtual Ethernet devices (`ip netns`, `ip link`; the package iproute2) connects it. A link that is down
//! carries nothing and reports nothing, like a router without power. Needs root; otherwise the test is skipped.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// A namespace with one link to here.
pub struct Namespace {
    pub name: String,
    /// The address of this side.
    pub here: String,
    pub inside: String,
    link: String,
}

#[derive(Debug, Clone, Copy)]
pub enum End {
    Inside,
    /// This side's.
    Here,
}

static COUNT: AtomicU32 = AtomicU32::new(0);

/// Runs `ip`; an error has its standard error.
fn ip(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(arguments).output().map_err(|error| format!("no `ip`: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(format!("`ip {}`: {stderr}", arguments.join(" ")))
}

impl Namespace {
    /// Creates a namespace, or prints why the test is skipped.
    pub fn for_test(test: &str) -> Option<Namespace> {
        Namespace::new().map_err(|why| eprintln!("SKIPPED {test}: {why}")).ok()
    }

    fn new() -> Result<Namespace, String> {
        let (process, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::SeqCst));
        // Four addresses each of the network for measurements (RFC 2544): 2^15 such nets, by process and count.
        let net = (process.wrapping_mul(64).wrapping_add(count) % (1 << 15)) * 4;
        let address =
            |host: u32| format!("198.{}.{}.{}", 18 + (net >> 16), (net >> 8) & 255, (net & 255) + host);
        let namespace = Namespace {
            name: format!("hearth-{process}-{count}"),
            here: address(1),
            inside: address(2),
            link: format!("h{process}x{count}"),
        };
        namespace.build()?;
        Ok(namespace)
    }

    fn build(&self) -> Result<(), String> {
        let Namespace { name, here, inside, link } = self;
        ip(&["netns", "add", name])?;
        ip(&["link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name])?;
        ip(&["addr", "add", &format!("{here}/30"), "dev", link])?;
        ip(&["link", "set", link, "up"])?;
        ip(&["-n", name, "addr", "add", &format!("{inside}/30"), "dev", "eth0"])?;
        ip(&["-n", name, "link", "set", "eth0", "up"])?;
        ip(&["-n", name, "link", "set", "lo", "up"])
    }

    /// Sets an end of the link up or down.
    pub fn set(&self, end: End, up: bool) {
        let state = if up { "up" } else { "down" };
        let set = match end {
            End::Inside => ip(&["-n", &self.name, "link", "set", "eth0", state]),
            End::Here => ip(&["link", "set", &self.link, state]),
        };
        set.expect("a link of ours");
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // The link first: a namespace exists as long as a process in it.
        let _ = ip(&["link", "del", &self.link]);
        let _ = ip(&["netns", "del", &self.name]);
    }
}
