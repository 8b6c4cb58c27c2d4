//! A transport with a fixed delay, to try a slow network on one machine.
//!
//! Connections deliver what this end writes a fixed time later, in order and at full bandwidth. Each end delays what it
//! sends, so that a link is slow in both directions if both ends use it. Time is the runtime's, to about a millisecond.
//!
//! Not here: bandwidth limits, delays that vary and shared media ([`super::paths`]); loss, which TCP turns into more
//! delay.

use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use crate::wire::{Listener, Transport};

/// The largest piece that is delayed as one.
/// source: assumed, about what a socket takes at once
const PIECE_BYTES: usize = 64 << 10;
/// The number of pieces in flight in one direction at which the writer blocks: 64 MiB, more than any pass has.
const MAX_PIECES: usize = 1024;

/// A network with a delay.
#[derive(Debug, Clone)]
pub struct DelayedTransport<T> {
    transport: T,
    delay: Duration,
}

impl<T> DelayedTransport<T> {
    /// Delays everything that is written by `delay`.
    pub fn new(transport: T, delay: Duration) -> Self {
        Self { transport, delay }
    }
}

/// The near end of a delayed connection.
#[derive(Debug)]
pub struct DelayedStream {
    near: DuplexStream,
    host: Option<IpAddr>,
}

/// The accepting end of a delayed network.
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

/// Puts a delay into the way out of a connection.
fn delayed<S>(stream: S, host: Option<IpAddr>, delay: Duration) -> DelayedStream
where
    S: AsyncRead + AsyncWrite + Send + 'static,
{
    let (near, far) = tokio::io::duplex(PIECE_BYTES);
    let (mut from_near, to_near) = tokio::io::split(far);
    let (from_peer, to_peer) = tokio::io::split(stream);
    let (pieces, mut due) = mpsc::channel::<(Instant, Vec<u8>)>(MAX_PIECES);
    tokio::spawn(async move {
        let mut buffer = vec![0; PIECE_BYTES];
        while let Ok(count @ 1..) = from_near.read(&mut buffer).await {
            if pieces.send((Instant::now() + delay, buffer[..count].to_vec())).await.is_err() {
                return;
            }
        }
    });
    let (arrived, now_due) = mpsc::channel(1);
    tokio::spawn(async move {
        while let Some((at, piece)) = due.recv().await {
            sleep_until(at).await;
            if arrived.send(piece).await.is_err() {
                return;
            }
        }
    });
    tokio::spawn(write_pieces(now_due, to_peer));
    tokio::spawn(copy_from_peer(from_peer, to_near));
    DelayedStream { near, host }
}

/// Writes pieces as they come, and an end after the last.
pub(super) async fn write_pieces(mut due: mpsc::Receiver<Vec<u8>>, mut to_peer: impl AsyncWrite + Unpin) {
    while let Some(piece) = due.recv().await {
        let written = match to_peer.write_all(&piece).await {
            Ok(()) => to_peer.flush().await,
            broken => broken,
        };
        if written.is_err() {
            return;
        }
    }
    let _ = to_peer.shutdown().await;
}

/// Hands on what the peer sends. However that way ends, this end reads an end.
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

    /// Under a paused clock: the delay is exact.
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
        assert!(begin.elapsed() < delay, "a writer does not wait for the way");
        for nonce in 0..3 {
            assert_eq!(Frame::read(&mut far, 1 << 20).await.unwrap(), Some(frame(nonce)));
        }
        // Tokio's clock has steps of a millisecond.
        assert!((delay..delay * 2).contains(&begin.elapsed()), "{:?}", begin.elapsed());
        drop(near);
        assert_eq!(Frame::read(&mut far, 1 << 20).await.unwrap(), None, "an end stays an end");
    }
}
