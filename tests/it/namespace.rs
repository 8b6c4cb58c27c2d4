//! A network namespace in which tests can take a real link down.
//!
//! A pair of virtual Ethernet devices (`ip netns`, `ip link` of the package iproute2) connects the namespace with the
//! host. A link that is down drops all packets silently, like a router without power. Without root, tests are skipped.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

pub struct NetworkNamespace {
    pub name: String,
    pub host_address: String,
    pub namespace_address: String,
    /// The name of the network device on the host.
    link: String,
}

#[derive(Debug, Clone, Copy)]
pub enum LinkEnd {
    Namespace,
    Host,
}

static COUNT: AtomicU32 = AtomicU32::new(0);

/// Runs `ip`; the error contains its standard error.
fn ip(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(arguments).output().map_err(|error| format!("no `ip`: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(format!("`ip {}`: {stderr}", arguments.join(" ")))
}

impl NetworkNamespace {
    /// Creates a namespace, or prints the reason why the test is skipped.
    pub fn for_test(test: &str) -> Option<NetworkNamespace> {
        NetworkNamespace::new().map_err(|why| eprintln!("SKIPPED {test}: {why}")).ok()
    }

    fn new() -> Result<NetworkNamespace, String> {
        let (process, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::SeqCst));
        // The network for benchmarks (RFC 2544) has 2^15 subnets of four addresses, selected by process id and count.
        let net = (process.wrapping_mul(64).wrapping_add(count) % (1 << 15)) * 4;
        let address =
            |host: u32| format!("198.{}.{}.{}", 18 + (net >> 16), (net >> 8) & 255, (net & 255) + host);
        let namespace = NetworkNamespace {
            name: format!("hearth-{process}-{count}"),
            host_address: address(1),
            namespace_address: address(2),
            link: format!("h{process}x{count}"),
        };
        namespace.build()?;
        Ok(namespace)
    }

    fn build(&self) -> Result<(), String> {
        let NetworkNamespace { name, host_address, namespace_address: address_inside, link } = self;
        ip(&["netns", "add", name])?;
        ip(&["link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name])?;
        ip(&["addr", "add", &format!("{host_address}/30"), "dev", link])?;
        ip(&["link", "set", link, "up"])?;
        ip(&["-n", name, "addr", "add", &format!("{address_inside}/30"), "dev", "eth0"])?;
        ip(&["-n", name, "link", "set", "eth0", "up"])?;
        ip(&["-n", name, "link", "set", "lo", "up"])
    }

    pub fn set_link_up(&self, end: LinkEnd, up: bool) {
        let state = if up { "up" } else { "down" };
        match end {
            LinkEnd::Namespace => ip(&["-n", &self.name, "link", "set", "eth0", state]),
            LinkEnd::Host => ip(&["link", "set", &self.link, state]),
        }
        .expect("a link of ours");
    }
}

impl Drop for NetworkNamespace {
    fn drop(&mut self) {
        // The link must be deleted explicitly, because a namespace exists as long as a process in it.
        let _ = ip(&["link", "del", &self.link]);
        let _ = ip(&["netns", "del", &self.name]);
    }
}
