//! A transport that delays the sent bytes. A [`Shaper`] determines the delay.
//!
//! A device delays only the bytes that it sends, so delays in both directions need such a transport on both devices.
//!
//! Not here: packet loss, which TCP turns into more delay, and slow connection setup.

use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf};
use tokio::sync::mpsc;

use crate::wire::{ByteStream, Listener, Transport};

/// Delays the outgoing direction of connections.
pub trait Shaper: Clone + Send + Sync + 'static {
    /// The properties of the network path to a peer.
    type Path: Send;

    /// Returns the network path to the peer at an address or, without an address, to a peer that has connected.
    fn path(&self, address: Option<&str>) -> io::Result<Self::Path>;

    /// Returns a stream that forwards bytes to and from `stream`, and delays the outgoing bytes as on `path`.
    fn shape<S: ByteStream>(&self, path: Self::Path, stream: S) -> io::Result<DuplexStream>;
}

/// A transport whose connections are delayed by a [`Shaper`].
#[derive(Debug, Clone)]
pub struct ShapedTransport<T, D> {
    pub(super) transport: T,
    pub(super) shaper: D,
}

pub struct ShapedListener<L, D> {
    listener: L,
    shaper: D,
}

impl<T: Transport, D: Shaper> Transport for ShapedTransport<T, D> {
    type Stream = ShapedStream;
    type Listener = ShapedListener<T::Listener, D>;

    async fn connect(&self, address: &str) -> io::Result<ShapedStream> {
        let path = self.shaper.path(Some(address))?;
        let stream = self.transport.connect(address).await?;
        let local_ip = self.transport.local_ip(&stream);
        Ok(ShapedStream { near: self.shaper.shape(path, stream)?, local_ip })
    }

    async fn bind(&self, address: &str) -> io::Result<Self::Listener> {
        Ok(ShapedListener { listener: self.transport.bind(address).await?, shaper: self.shaper.clone() })
    }

    fn is_private(&self) -> bool {
        self.transport.is_private()
    }

    fn local_ip(&self, stream: &ShapedStream) -> Option<IpAddr> {
        stream.local_ip
    }
}

impl<L: Listener, D: Shaper> Listener for ShapedListener<L, D> {
    type Stream = ShapedStream;

    async fn accept(&mut self) -> io::Result<ShapedStream> {
        let stream = self.listener.accept().await?;
        // Only the end that connects needs its own address.
        Ok(ShapedStream { near: self.shaper.shape(self.shaper.path(None)?, stream)?, local_ip: None })
    }

    fn address(&self) -> String {
        self.listener.address()
    }
}

/// The maximum size of a chunk, and the maximum number of chunks in flight in one direction.
#[derive(Clone, Copy)]
pub(super) struct InFlightLimits {
    pub(super) max_chunk_bytes: usize,
    pub(super) max_chunks: usize,
}

/// Returns a stream whose written bytes are sent to `stream` in chunks. `due` returns the arrival time of a chunk of
/// the given length in bytes. `forward` starts a task or thread that moves each chunk from the first channel to the
/// second channel at its arrival time. Received bytes are not delayed. An error of `due` ends the connection.
pub(super) fn delay_outgoing<S: ByteStream, D: Send + 'static>(
    stream: S,
    limits: InFlightLimits,
    mut due: impl FnMut(usize) -> io::Result<D> + Send + 'static,
    forward: impl FnOnce(mpsc::Receiver<(D, Vec<u8>)>, mpsc::Sender<Vec<u8>>) -> io::Result<()>,
) -> io::Result<DuplexStream> {
    let (near, far) = tokio::io::duplex(limits.max_chunk_bytes);
    let (mut from_near, mut to_near) = tokio::io::split(far);
    let (mut from_peer, mut to_peer) = tokio::io::split(stream);
    let (chunks, waiting) = mpsc::channel(limits.max_chunks);
    let (arrived, mut arrived_rx) = mpsc::channel::<Vec<u8>>(1);
    tokio::spawn(async move {
        let mut buffer = vec![0; limits.max_chunk_bytes];
        while let Ok(count @ 1..) = from_near.read(&mut buffer).await {
            let Ok(at) = due(count) else { return };
            if chunks.send((at, buffer[..count].to_vec())).await.is_err() {
                return;
            }
        }
    });
    forward(waiting, arrived)?;
    tokio::spawn(async move {
        while let Some(chunk) = arrived_rx.recv().await {
            if to_peer.write_all(&chunk).await.is_err() || to_peer.flush().await.is_err() {
                return;
            }
        }
        let _ = to_peer.shutdown().await;
    });
    tokio::spawn(async move {
        let _ = tokio::io::copy(&mut from_peer, &mut to_near).await;
        // This end reads the end of the stream even after an error.
        let _ = to_near.shutdown().await;
    });
    Ok(near)
}

/// A connection whose outgoing bytes are delayed.
#[derive(Debug)]
pub struct ShapedStream {
    near: DuplexStream,
    local_ip: Option<IpAddr>,
}

impl AsyncRead for ShapedStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().near).poll_read(cx, buf)
    }
}

impl AsyncWrite for ShapedStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().near).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().near).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().near).poll_shutdown(cx)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::wire::{Frame, Message};

    /// Checks that three frames of 500 kB arrive whole and in order. Calls `on_written` before the frames are read.
    pub async fn check_frames_arrive_whole(transport: impl Transport, on_written: impl FnOnce()) {
        let mut listener = transport.bind("a").await.unwrap();
        let mut near = transport.connect("a").await.unwrap();
        let mut far = listener.accept().await.unwrap();
        let frame = |nonce: u64| Frame { message: Message::Ping { nonce }, payload: vec![7; 500_000] };
        for nonce in 0..3 {
            frame(nonce).write(&mut near).await.unwrap();
        }
        on_written();
        for nonce in 0..3 {
            assert_eq!(Frame::read(&mut far, 1 << 20).await.unwrap(), Some(frame(nonce)));
        }
        drop(near);
        assert_eq!(Frame::read(&mut far, 1 << 20).await.unwrap(), None, "the end of the stream arrives");
    }
}
