//! A transport over TCP between hosts of the emulated network, for a process that is outside of their namespaces.

use std::io;
use std::net::{IpAddr, TcpListener, TcpStream};

use hearth_ring::wire::{TcpStatistics, TcpTransport, Transport, set_tcp_options};

use super::Namespace;

/// TCP as a host of the emulated network sees it: connections begin, and listeners are, at this host.
#[derive(Debug, Clone)]
pub struct HostTransport(pub Namespace);

impl HostTransport {
    /// Runs a blocking action in the namespace. A thread of the runtime cannot enter it, because it would stay there.
    async fn run<T: Send + 'static>(
        &self,
        action: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let namespace = self.0.clone();
        tokio::task::spawn_blocking(move || namespace.run(action)).await.map_err(io::Error::other)?
    }
}

impl Transport for HostTransport {
    type Stream = tokio::net::TcpStream;
    type Listener = tokio::net::TcpListener;

    async fn connect(&self, address: &str) -> io::Result<tokio::net::TcpStream> {
        let address = address.to_owned();
        let stream = self.run(move || TcpStream::connect(address)).await?;
        stream.set_nonblocking(true)?;
        let stream = tokio::net::TcpStream::from_std(stream)?;
        set_tcp_options(&stream)?;
        Ok(stream)
    }

    async fn bind(&self, address: &str) -> io::Result<tokio::net::TcpListener> {
        let address = address.to_owned();
        let listener = self.run(move || TcpListener::bind(address)).await?;
        listener.set_nonblocking(true)?;
        tokio::net::TcpListener::from_std(listener)
    }

    fn tcp_statistics(&self, stream: &tokio::net::TcpStream) -> Option<TcpStatistics> {
        TcpTransport.tcp_statistics(stream)
    }

    fn local_ip(&self, stream: &tokio::net::TcpStream) -> Option<IpAddr> {
        TcpTransport.local_ip(stream)
    }
}
