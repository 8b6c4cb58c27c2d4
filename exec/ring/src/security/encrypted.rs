//! Encrypted transports: connections that only holders of the key can read and write.
//!
//! [`EncryptedTransport`] wraps a transport: every connection begins with a handshake ([`super::noise`]) and then carries
//! messages of at most 65535 bytes, each two big-endian bytes of length and a ChaCha20-Poly1305 ciphertext under keys that only
//! this connection has. Message numbers are the nonces, so a message altered, repeated, left out or moved does not verify; the
//! connection then fails for good. Frames run over it as over any stream.
//!
//! The handshake happens at the first read or write, in the task that serves the connection, so a slow peer delays no
//! other.
//!
//! Not here: protection against a third party that closes a connection, or counts and times its bytes. An orderly end
//! is the protocol's `Goodbye`, not the end of the stream.

use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker, ready};

use snow::TransportState;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::key::Key;
use super::noise::{Side, handshake};
use crate::error::EncryptionError;
use crate::wire::{Listener, Transport};

/// Bytes of a message's length.
const LENGTH: usize = 2;
/// The longest ciphertext of a message.
const MAX_CIPHERTEXT: usize = 65535;
/// What authentication adds to a message.
const TAG: usize = 16;

/// A network whose connections are authenticated and encrypted under a key.
#[derive(Debug, Clone)]
pub struct EncryptedTransport<T> {
    transport: T,
    key: Key,
}

impl<T> EncryptedTransport<T> {
    /// Encrypts a transport's connections.
    pub fn new(transport: T, key: Key) -> Self {
        Self { transport, key }
    }
}

impl<T: Transport> Transport for EncryptedTransport<T> {
    type Stream = EncryptedStream<T::Stream>;
    type Listener = EncryptedListener<T::Listener>;

    async fn connect(&self, address: &str) -> io::Result<Self::Stream> {
        let link = self.transport.connect(address).await?;
        let local = self.transport.local_ip(&link);
        Ok(EncryptedStream { local, ..EncryptedStream::new(link, self.key.clone(), Side::Connecting) })
    }

    async fn bind(&self, address: &str) -> io::Result<Self::Listener> {
        Ok(EncryptedListener { listener: self.transport.bind(address).await?, key: self.key.clone() })
    }

    fn is_encrypted(&self) -> bool {
        true
    }

    fn local_ip(&self, stream: &Self::Stream) -> Option<IpAddr> {
        stream.local
    }
}

/// The accepting end of [`EncryptedTransport`].
#[derive(Debug)]
pub struct EncryptedListener<L> {
    listener: L,
    key: Key,
}

impl<L> Listener for EncryptedListener<L>
where
    L: Listener,
    L::Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    type Stream = EncryptedStream<L::Stream>;

    async fn accept(&mut self) -> io::Result<Self::Stream> {
        Ok(EncryptedStream::new(self.listener.accept().await?, self.key.clone(), Side::Accepting))
    }

    fn address(&self) -> String {
        self.listener.address()
    }
}

/// A connection that only holders of the key can use.
pub struct EncryptedStream<S> {
    state: State<S>,
    /// Both halves' tasks, while either may drive the handshake.
    halves: Arc<Halves>,
    local: Option<IpAddr>,
    incoming: Incoming,
    outgoing: Outgoing,
}

type Handshake<S> = Pin<Box<dyn Future<Output = Result<(S, Box<TransportState>), EncryptionError>> + Send>>;

enum State<S> {
    Handshaking(Handshake<S>),
    Open { link: S, cipher: Box<TransportState> },
    Failed(EncryptionError),
}

/// Received bytes.
#[derive(Default)]
struct Incoming {
    /// One message at most, and what came with it.
    ciphertext: Vec<u8>,
    /// The bytes of `ciphertext` received so far.
    held: std::ops::Range<usize>,
    /// A message's content.
    plain: Vec<u8>,
    /// How much of it was taken.
    taken: usize,
}

/// Encrypted bytes that the link has not taken yet.
#[derive(Default)]
struct Outgoing {
    ciphertext: Vec<u8>,
    written: usize,
}

/// The wakers of a reading and a writing task. A link remembers only the task that polled it last, but the
/// handshake, which reads and writes, can be driven by either.
#[derive(Default)]
struct Halves(Mutex<[Option<Waker>; 2]>);

impl Wake for Halves {
    fn wake(self: Arc<Self>) {
        let wakers = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        wakers.into_iter().flatten().for_each(Waker::wake);
    }
}

/// Which half of a connection asks.
#[derive(Clone, Copy)]
enum Half {
    Reading,
    Writing,
}

impl<S> EncryptedStream<S>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    fn new(link: S, key: Key, side: Side) -> Self {
        Self {
            state: State::Handshaking(Box::pin(handshake(link, key, side))),
            halves: Arc::default(),
            local: None,
            incoming: Incoming::default(),
            outgoing: Outgoing::default(),
        }
    }

    /// Completes the handshake.
    fn poll_open(&mut self, context: &Context<'_>, half: Half) -> Poll<io::Result<()>> {
        let State::Handshaking(handshake) = &mut self.state else { return Poll::Ready(self.usable()) };
        self.halves.0.lock().unwrap_or_else(PoisonError::into_inner)[half as usize] =
            Some(context.waker().clone());
        let both = Waker::from(self.halves.clone());
        self.state = match ready!(handshake.as_mut().poll(&mut Context::from_waker(&both))) {
            Ok((link, cipher)) => State::Open { link, cipher },
            Err(error) => State::Failed(error),
        };
        both.wake();
        Poll::Ready(self.usable())
    }

    fn usable(&self) -> io::Result<()> {
        match &self.state {
            State::Failed(error) => Err(error.clone().into()),
            State::Open { .. } | State::Handshaking(_) => Ok(()),
        }
    }

    fn fail<T>(&mut self, error: EncryptionError) -> Poll<io::Result<T>> {
        self.state = State::Failed(error.clone());
        Poll::Ready(Err(error.into()))
    }
}

impl<S> AsyncRead for EncryptedStream<S>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        ready!(this.poll_open(context, Half::Reading))?;
        loop {
            if buffer.remaining() == 0 || this.incoming.give(buffer) {
                return Poll::Ready(Ok(()));
            }
            let State::Open { link, cipher } = &mut this.state else { return Poll::Ready(this.usable()) };
            match this.incoming.open(cipher) {
                Ok(true) => continue,
                Ok(false) => {}
                Err(error) => return this.fail(error),
            }
            if ready!(this.incoming.poll_fill(link, context))? == 0 {
                let whole = this.incoming.held.is_empty();
                return Poll::Ready(if whole { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) });
            }
        }
    }
}

impl Incoming {
    /// Hands content over, if there is any.
    fn give(&mut self, buffer: &mut ReadBuf<'_>) -> bool {
        let rest = &self.plain[self.taken..];
        let count = rest.len().min(buffer.remaining());
        buffer.put_slice(&rest[..count]);
        self.taken += count;
        count > 0
    }

    /// Decrypts the next message if it has arrived completely.
    fn open(&mut self, cipher: &mut TransportState) -> Result<bool, EncryptionError> {
        let held = &self.ciphertext[self.held.clone()];
        let Some((length, rest)) = held.split_first_chunk::<LENGTH>() else { return Ok(false) };
        let length = usize::from(u16::from_be_bytes(*length));
        if length <= TAG {
            return Err(EncryptionError::Damaged);
        }
        let Some(ciphertext) = rest.get(..length) else { return Ok(false) };
        self.plain.resize(length, 0);
        let count = cipher.read_message(ciphertext, &mut self.plain).map_err(|_| EncryptionError::Damaged)?;
        self.plain.truncate(count);
        self.taken = 0;
        self.held.start += LENGTH + length;
        Ok(true)
    }

    /// Reads from the link into the room that is left; 0 bytes are its end.
    fn poll_fill(
        &mut self,
        link: &mut (impl AsyncRead + Unpin),
        context: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        self.ciphertext.resize(LENGTH + MAX_CIPHERTEXT, 0);
        if self.held.start > 0 {
            self.ciphertext.copy_within(self.held.clone(), 0);
            self.held = 0..self.held.len();
        }
        // A whole message would have been opened: there is room.
        let mut room = ReadBuf::new(&mut self.ciphertext[self.held.end..]);
        ready!(Pin::new(link).poll_read(context, &mut room))?;
        let count = room.filled().len();
        self.held.end += count;
        Poll::Ready(Ok(count))
    }
}

impl<S> AsyncWrite for EncryptedStream<S>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        ready!(this.poll_open(context, Half::Writing))?;
        let State::Open { link, cipher } = &mut this.state else { return Poll::Ready(Ok(0)) };
        ready!(this.outgoing.poll_drain(link, context))?;
        let count = bytes.len().min(MAX_CIPHERTEXT - TAG);
        if count == 0 {
            return Poll::Ready(Ok(0));
        }
        if let Err(error) = this.outgoing.encrypt(cipher, &bytes[..count]) {
            return this.fail(error);
        }
        // The bytes are taken; what the link does not take now goes with the next write or flush.
        match this.outgoing.poll_drain(link, context) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Ready(Ok(())) | Poll::Pending => Poll::Ready(Ok(count)),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        // Nothing is taken before the handshake is done, so there is nothing to flush.
        let State::Open { link, .. } = &mut this.state else { return Poll::Ready(this.usable()) };
        ready!(this.outgoing.poll_drain(link, context))?;
        Pin::new(link).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        match &mut this.state {
            State::Open { link, .. } => {
                ready!(this.outgoing.poll_drain(link, context))?;
                Pin::new(link).poll_shutdown(context)
            }
            State::Handshaking(_) => {
                // The handshake owns the link: both go.
                this.state = State::Failed(EncryptionError::Key { seen: "this end hung up first" });
                Poll::Ready(Ok(()))
            }
            State::Failed(_) => Poll::Ready(Ok(())),
        }
    }
}

impl Outgoing {
    /// Encrypts one message. The previous one has been sent.
    fn encrypt(&mut self, cipher: &mut TransportState, bytes: &[u8]) -> Result<(), EncryptionError> {
        let length = (bytes.len() + TAG) as u16;
        self.written = 0;
        self.ciphertext.resize(LENGTH + usize::from(length), 0);
        self.ciphertext[..LENGTH].copy_from_slice(&length.to_be_bytes());
        cipher.write_message(bytes, &mut self.ciphertext[LENGTH..])?;
        Ok(())
    }

    /// Writes to the link until nothing is left.
    fn poll_drain(
        &mut self,
        link: &mut (impl AsyncWrite + Unpin),
        context: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        while self.written < self.ciphertext.len() {
            let count = ready!(Pin::new(&mut *link).poll_write(context, &self.ciphertext[self.written..]))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.written += count;
        }
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests;
