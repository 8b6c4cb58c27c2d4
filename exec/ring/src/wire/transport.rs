//! Transports: TCP between processes, or pipes in memory between tasks of one process.
//!
//! The ring is generic over a [`Transport`], so that tests and real rings run the same code. Every transport delivers
//! bytes in order; a reader receives whole frames or an error.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncRead, AsyncWrite, DuplexStream};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use super::tcp_statistics::{TcpStatistics, read_tcp_statistics};
use crate::error::{Result, RingError};

pub trait ByteStream: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> ByteStream for S {}

/// A network on which a device connects to other devices and listens for connections.
pub trait Transport: Clone + Send + Sync + 'static {
    /// A connection, which delivers bytes in order in both directions.
    type Stream: ByteStream;
    type Listener: Listener<Stream = Self::Stream>;

    fn connect(&self, address: &str) -> impl Future<Output = io::Result<Self::Stream>> + Send;
    /// Listens on an address. Port 0 selects a free port.
    fn bind(&self, address: &str) -> impl Future<Output = io::Result<Self::Listener>> + Send;

    /// Returns whether only the devices of the ring can read and write the connections, because these are encrypted or
    /// do not leave this process.
    fn is_private(&self) -> bool {
        false
    }

    /// Returns what the kernel knows about a connection over TCP; `None` if it is not known.
    fn tcp_statistics(&self, _stream: &Self::Stream) -> Option<TcpStatistics> {
        None
    }

    /// Returns the local IP address of a connection, if the transport has IP addresses.
    fn local_ip(&self, _stream: &Self::Stream) -> Option<IpAddr> {
        None
    }
}

/// Accepts connections on an address.
pub trait Listener: Send + 'static {
    type Stream: ByteStream;
    fn accept(&mut self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
    /// Returns the address at which other devices can connect.
    fn address(&self) -> String;
}

/// A transport over TCP.
#[derive(Debug, Clone, Copy, Default)]
pub struct TcpTransport;

impl Transport for TcpTransport {
    type Stream = TcpStream;
    type Listener = TcpListener;

    async fn connect(&self, address: &str) -> io::Result<TcpStream> {
        let stream = TcpStream::connect(address).await?;
        set_tcp_options(&stream)?;
        Ok(stream)
    }

    async fn bind(&self, address: &str) -> io::Result<TcpListener> {
        TcpListener::bind(address).await
    }

    fn tcp_statistics(&self, stream: &TcpStream) -> Option<TcpStatistics> {
        read_tcp_statistics(stream)
    }

    fn local_ip(&self, stream: &TcpStream) -> Option<IpAddr> {
        stream.local_addr().ok().map(|address| address.ip())
    }
}

impl Listener for TcpListener {
    type Stream = TcpStream;

    async fn accept(&mut self) -> io::Result<TcpStream> {
        let (stream, _) = TcpListener::accept(self).await?;
        set_tcp_options(&stream)?;
        Ok(stream)
    }

    fn address(&self) -> String {
        self.local_addr().map_or_else(|error| format!("unknown ({error})"), |address| address.to_string())
    }
}

/// Sets the options of a connection of the ring. The activations of one token are a small write, so no write waits for
/// the next (`TCP_NODELAY`). On Linux the congestion control is CUBIC, because BBR, the default of some distributions,
/// takes the rate of these few bytes for the bandwidth, and spreads them out accordingly.
pub fn set_tcp_options(stream: &TcpStream) -> io::Result<()> {
    // If it fails, the kernel has no CUBIC, and its default is the best choice.
    #[cfg(target_os = "linux")]
    let _ = rustix::net::sockopt::set_tcp_congestion(stream, "cubic");
    stream.set_nodelay(true)
}

const PIPE_BYTES: usize = 1 << 20;

/// A transport over pipes between the tasks of one process. An address can be any string.
#[derive(Debug, Clone, Default)]
pub struct MemoryTransport {
    listeners: Arc<Mutex<BTreeMap<String, mpsc::UnboundedSender<DuplexStream>>>>,
}

#[derive(Debug)]
pub struct InMemoryListener {
    address: String,
    connections: mpsc::UnboundedReceiver<DuplexStream>,
}

impl Transport for MemoryTransport {
    type Stream = DuplexStream;
    type Listener = InMemoryListener;

    fn is_private(&self) -> bool {
        true
    }

    async fn connect(&self, address: &str) -> io::Result<DuplexStream> {
        let (here, there) = tokio::io::duplex(PIPE_BYTES);
        let listeners = self.listeners.lock().map_err(|_| io::Error::other("a peer panicked"))?;
        let sent = listeners.get(address).is_some_and(|listener| listener.send(there).is_ok());
        if sent { Ok(here) } else { Err(io::ErrorKind::ConnectionRefused.into()) }
    }

    async fn bind(&self, address: &str) -> io::Result<InMemoryListener> {
        let mut listeners = self.listeners.lock().map_err(|_| io::Error::other("a peer panicked"))?;
        let address =
            if address.ends_with(":0") { format!("pipe:{}", listeners.len()) } else { address.into() };
        if listeners.get(&address).is_some_and(|listener| !listener.is_closed()) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let (sender, connections) = mpsc::unbounded_channel();
        listeners.insert(address.clone(), sender);
        Ok(InMemoryListener { address, connections })
    }
}

impl Listener for InMemoryListener {
    type Stream = DuplexStream;

    async fn accept(&mut self) -> io::Result<DuplexStream> {
        self.connections.recv().await.ok_or_else(|| io::ErrorKind::ConnectionAborted.into())
    }

    fn address(&self) -> String {
        self.address.clone()
    }
}

/// Checks that a transport is private or an address is a loopback address. Anybody in the network could read a prompt
/// from the activations of a connection to another machine, and could pretend to be the other machine.
pub fn check_encrypted_or_loopback<T: Transport>(transport: &T, address: &str) -> Result<()> {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host).trim_matches(['[', ']']);
    let is_loopback = host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    if is_loopback || transport.is_private() {
        return Ok(());
    }
    Err(RingError::KeyRequired { address: address.into() })
}

/// Listens on an address. Fails if other machines can reach the address and the transport is not private.
pub async fn bind<T: Transport>(transport: &T, address: &str) -> Result<T::Listener> {
    check_encrypted_or_loopback(transport, address)?;
    transport.bind(address).await.map_err(|error| RingError::cannot_listen(address, &error))
}
