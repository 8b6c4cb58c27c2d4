//! A transport with a fixed delay, for tests of a slow network on one machine.
//!
//! Bytes that this end writes arrive after a fixed delay, in order and at full bandwidth. Each end delays only what
//! it sends, so a link is slow in both directions if both ends use this transport. The timer of the runtime has a
//! precision of about a millisecond.
//!
//! Not here: bandwidth limits, random delays and shared media ([`super::paths`]); packet loss, which TCP turns into
//! more delay.

use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use crate::wire::{Listener, Transport};

/// Maximum size of a chunk that is delayed as a whole, in bytes.
/// source: assumed, about the buffer of a socket
const MAX_CHUNK_BYTES: usize = 64 << 10;
/// Maximum number of chunks in flight in one direction before the writer blocks: 64 MiB, more than the largest pass.
const MAX_CHUNKS_IN_FLIGHT: usize = 1024;

/// A transport that delays everything it sends by a fixed time.
#[derive(Debug, Clone)]
pub struct DelayedTransport<T> {
    transport: T,
    delay: Duration,
}

impl<T> DelayedTransport<T> {
    /// Delays everything that is sent over `transport` by `delay`.
    pub fn new(transport: T, delay: Duration) -> Self {
        Self { transport, delay }
    }
}

/// This end of a delayed connection.
#[derive(Debug)]
pub struct DelayedStream {
    near: DuplexStream,
    host: Option<IpAddr>,
}

/// The accepting end of a [`DelayedTransport`].
#[derive(Debug)]
pub struct DelayedListener<L> {
    listener: L,
    delay: Duration,
}

impl DelayedStream {
    pub(super) fn new(near: DuplexStream, host: Option<IpAddr>) -> Self {
        Self { near, host }
    }

    pub(super) fn host(&self) -> Option<IpAddr> {
        self.host
    }
}

impl<T: Transport> Transport for DelayedTransport<T> {
    type Stream = DelayedStream;
    type Listener = DelayedListener<T::Listener>;

    async fn connect(&self, address: &str) -> io::Result<DelayedStream> {
        let stream = self.transport.connect(address).await?;
        let host = self.transport.local_ip(&stream);
        Ok(delayed(stream, host, self.delay))
    }

    async fn bind(&self, address: &str) -> io::Result<Self::Listener> {
        Ok(DelayedListener { listener: self.transport.bind(address).await?, delay: self.delay })
    }

    fn is_encrypted(&self) -> bool {
        self.transport.is_encrypted()
    }

    fn local_ip(&self, stream: &DelayedStream) -> Option<IpAddr> {
        stream.host
    }
}

impl<L> Listener for DelayedListener<L>
where
    L: Listener,
    L::Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    type Stream = DelayedStream;

    async fn accept(&mut self) -> io::Result<DelayedStream> {
        // Only the end that connects needs the host.
        Ok(delayed(self.listener.accept().await?, None, self.delay))
    }

    fn address(&self) -> String {
        self.listener.address()
    }
}

/// Delays the outgoing direction of a connection.
fn delayed<S>(stream: S, host: Option<IpAddr>, delay: Duration) -> DelayedStream
where
    S: AsyncRead + AsyncWrite + Send + 'static,
{
    let (near, far) = tokio::io::duplex(MAX_CHUNK_BYTES);
    let (mut from_near, to_near) = tokio::io::split(far);
    let (from_peer, to_peer) = tokio::io::split(stream);
    let (chunks, mut due) = mpsc::channel::<(Instant, Vec<u8>)>(MAX_CHUNKS_IN_FLIGHT);
    tokio::spawn(async move {
        let mut buffer = vec![0; MAX_CHUNK_BYTES];
        while let Ok(count @ 1..) = from_near.read(&mut buffer).await {
            if chunks.send((Instant::now() + delay, buffer[..count].to_vec())).await.is_err() {
                return;
            }
        }
    });
    let (arrived, now_due) = mpsc::channel(1);
    tokio::spawn(async move {
        while let Some((at, chunk)) = due.recv().await {
            sleep_until(at).await;
            if arrived.send(chunk).await.is_err() {
                return;
            }
        }
    });
    tokio::spawn(write_chunks(now_due, to_peer));
    tokio::spawn(copy_from_peer(from_peer, to_near));
    DelayedStream { near, host }
}

/// Writes chunks to the peer as they arrive, and shuts the connection down after the last one.
pub(super) async fn write_chunks(mut due: mpsc::Receiver<Vec<u8>>, mut to_peer: impl AsyncWrite + Unpin) {
    while let Some(chunk) = due.recv().await {
        let written = match to_peer.write_all(&chunk).await {
            Ok(()) => to_peer.flush().await,
            broken => broken,
        };
        if written.is_err() {
            return;
        }
    }
    let _ = to_peer.shutdown().await;
}

/// Forwards the bytes that the peer sends, without delay. This end reads the end of the stream even after an error.
pub(super) async fn copy_from_peer(
    mut from_peer: impl AsyncRead + Unpin,
    mut to_near: impl AsyncWrite + Unpin,
) {
    let _ = tokio::io::copy(&mut from_peer, &mut to_near).await;
    let _ = to_near.shutdown().await;
}

impl AsyncRead for DelayedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.near).poll_read(context, buffer)
    }
}

impl AsyncWrite for DelayedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.near).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.near).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.near).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::MemoryTransport;
    use crate::wire::{Frame, Message};

    /// The clock is paused, so that the delay is exact.
    #[tokio::test(start_paused = true)]
    async fn delayed_frames_arrive_later_and_whole() {
        let delay = Duration::from_millis(5);
        let transport = DelayedTransport::new(MemoryTransport::default(), delay);
        let mut listener = transport.bind("a").await.unwrap();
        let mut near = transport.connect("a").await.unwrap();
        let mut far = listener.accept().await.unwrap();
        let begin = Instant::now();
        let frame = |nonce: u64| Frame { message: Message::Ping { nonce }, payload: vec![7; 300_000] };
        for nonce in 0..3 {
            frame(nonce).write(&mut near).await.unwrap();
        }
        assert!(begin.elapsed() < delay, "a writer does not wait for the delay");
        for nonce in 0..3 {
            assert_eq!(Frame::read(&mut far, 1 << 20).await.unwrap(), Some(frame(nonce)));
        }
        // Tokio's clock has steps of a millisecond.
        assert!((delay..delay * 2).contains(&begin.elapsed()), "{:?}", begin.elapsed());
        drop(near);
        assert_eq!(Frame::read(&mut far, 1 << 20).await.unwrap(), None, "the end of the stream arrives");
    }
}
