//! A host of the emulated network: a network namespace with one interface, whose packets the emulator carries.
//!
//! The namespace has no name. It exists as long as this process or a device's process uses it, so that nothing is left
//! behind when the lab is killed.

use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;

use netconfig_rs::Interface;
use netconfig_rs::sys::InterfaceExt;
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};
use tun_rs::{DeviceBuilder, SyncDevice};

/// Maximum size of a packet: the payload of an Ethernet frame. source: IEEE 802.3
pub const MTU: u16 = 1500;

#[derive(Debug, Clone)]
pub struct Namespace(Arc<File>);

/// A host of the emulated network.
pub struct Host {
    pub namespace: Namespace,
    pub address: IpAddr,
    /// The packets that the host sends, and those that it receives.
    pub(super) interface: SyncDevice,
}

/// Returns the address of the host with a number.
pub fn address(number: usize, is_ipv6: bool) -> IpAddr {
    let last = number as u8 + 1;
    if is_ipv6 {
        // source: RFC 4193, a unique local address
        IpAddr::V6(Ipv6Addr::new(0xfd77, 0x6865, 0x6172, 0, 0, 0, 0, u16::from(last)))
    } else {
        // source: RFC 1918, a private address
        IpAddr::V4(Ipv4Addr::new(10, 77, 0, last))
    }
}

/// Returns the number of the host to which a packet goes; `None` if it goes to none of them.
pub fn receiver(packet: &[u8]) -> Option<usize> {
    let to = match packet.first()? >> 4 {
        4 => IpAddr::V4(Ipv4Addr::from(<[u8; 4]>::try_from(packet.get(16..20)?).ok()?)),
        6 => IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(packet.get(24..40)?).ok()?)),
        _ => return None,
    };
    let last = match to {
        IpAddr::V4(to) => to.octets()[3],
        IpAddr::V6(to) => to.octets()[15],
    };
    let number = usize::from(last).checked_sub(1)?;
    (address(number, to.is_ipv6()) == to).then_some(number)
}

impl Host {
    /// Creates a namespace with an interface. Needs the capability `CAP_NET_ADMIN`.
    pub fn create(number: usize, is_ipv6: bool) -> io::Result<Host> {
        // On a thread of its own, because a thread that has left its namespace does not return to it.
        let create = move || {
            // SAFETY: only this thread changes its namespace; it shares no file descriptors or memory differently.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET)? };
            let namespace = Namespace(Arc::new(File::open("/proc/thread-self/ns/net")?));
            let address = address(number, is_ipv6);
            let interface = DeviceBuilder::new().name("home").mtu(MTU);
            let interface = match address {
                IpAddr::V4(address) => interface.ipv4(address, 24, None),
                IpAddr::V6(address) => interface.ipv6(address, 64),
            };
            let interface = interface.build_sync()?;
            let loopback = Interface::try_from_name("lo").and_then(|loopback| loopback.set_up(true));
            loopback.map_err(|error| io::Error::other(error.to_string()))?;
            interface.set_nonblocking(true)?;
            Ok(Host { namespace, address, interface })
        };
        on_new_thread(create)
    }
}

impl AsFd for Namespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Namespace {
    /// Runs `action` in the namespace. Sockets that it creates belong to the namespace also afterwards.
    pub fn run<T: Send + 'static>(
        &self,
        action: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let namespace = self.clone();
        on_new_thread(move || {
            namespace.enter()?;
            action()
        })
    }

    fn enter(&self) -> io::Result<()> {
        Ok(move_into_link_name_space(self.as_fd(), Some(LinkNameSpaceType::Network))?)
    }

    /// Starts the process of `command` in the namespace.
    pub fn hold(&self, command: &mut Command) {
        let namespace = self.clone();
        // SAFETY: between fork and exec only one system call is made, and nothing is allocated.
        unsafe { command.pre_exec(move || namespace.enter()) };
    }
}

fn on_new_thread<T: Send + 'static>(
    action: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    std::thread::spawn(action).join().map_err(|_| io::Error::other("a thread panicked"))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receivers_of_packets_are_found() {
        let mut packet = vec![0x45; 20];
        packet[16..20].copy_from_slice(&[10, 77, 0, 3]);
        assert_eq!(receiver(&packet), Some(2));
        packet[16] = 11;
        assert_eq!(receiver(&packet), None);
        let mut packet = vec![0x60; 40];
        let IpAddr::V6(to) = address(4, true) else { panic!("an address of IPv6") };
        packet[24..].copy_from_slice(&to.octets());
        assert_eq!(receiver(&packet), Some(4));
        for broken in [&[][..], &[0x45], &packet[..30], &[0; 60]] {
            assert_eq!(receiver(broken), None);
        }
    }
}
