//! Encrypted transports: connections that only holders of the key can read and write.
//!
//! [`EncryptedTransport`] wraps another transport. Every connection begins with a handshake ([`super::noise`]), in the
//! task that serves the connection, so that a slow peer delays no other peer. Then it carries messages: a length of
//! two big-endian bytes and a ChaCha20-Poly1305 ciphertext of at most 65535 bytes, under keys that only this
//! connection has. The nonces are message numbers, so a message that was altered, replayed, omitted or reordered fails
//! authentication, and the connection then fails permanently.
//!
//! Not here: protection against a third party that closes a connection, or analyses the number and the timing of its
//! bytes. A session ends with the message `Goodbye`, not with the end of the stream.

use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker, ready};

use snow::TransportState;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::key::Key;
use super::noise::{HandshakeRole, handshake};
use crate::error::EncryptionError;
use crate::wire::{ByteStream, Listener, TcpStatistics, Transport};

const LENGTH_BYTES: usize = 2;
const MAX_CIPHERTEXT_BYTES: usize = 65535;
const TAG_BYTES: usize = 16;

/// A transport whose connections are authenticated and encrypted with a key.
#[derive(Debug, Clone)]
pub struct EncryptedTransport<T> {
    transport: T,
    key: Key,
}

impl<T> EncryptedTransport<T> {
    pub fn new(transport: T, key: Key) -> Self {
        Self { transport, key }
    }
}

impl<T: Transport> Transport for EncryptedTransport<T> {
    type Stream = EncryptedStream<T::Stream>;
    type Listener = EncryptedListener<T::Listener>;

    async fn connect(&self, address: &str) -> io::Result<Self::Stream> {
        let link = self.transport.connect(address).await?;
        let local_ip = self.transport.local_ip(&link);
        let stream = EncryptedStream::new(link, self.key.clone(), HandshakeRole::Initiator);
        Ok(EncryptedStream { local_ip, ..stream })
    }

    async fn bind(&self, address: &str) -> io::Result<Self::Listener> {
        Ok(EncryptedListener { listener: self.transport.bind(address).await?, key: self.key.clone() })
    }

    fn is_private(&self) -> bool {
        true
    }

    fn tcp_statistics(&self, stream: &Self::Stream) -> Option<TcpStatistics> {
        match &stream.state {
            State::Open { link, .. } => self.transport.tcp_statistics(link),
            State::Handshaking(_) | State::Failed(_) => None,
        }
    }

    fn local_ip(&self, stream: &Self::Stream) -> Option<IpAddr> {
        stream.local_ip
    }
}

#[derive(Debug)]
pub struct EncryptedListener<L> {
    listener: L,
    key: Key,
}

impl<L: Listener> Listener for EncryptedListener<L> {
    type Stream = EncryptedStream<L::Stream>;

    async fn accept(&mut self) -> io::Result<Self::Stream> {
        Ok(EncryptedStream::new(self.listener.accept().await?, self.key.clone(), HandshakeRole::Responder))
    }

    fn address(&self) -> String {
        self.listener.address()
    }
}

pub struct EncryptedStream<S> {
    state: State<S>,
    /// The wakers of the reading and the writing half; either half may drive the handshake.
    halves: Arc<HalfWakers>,
    local_ip: Option<IpAddr>,
    incoming: Incoming,
    outgoing: Outgoing,
}

type Handshake<S> = Pin<Box<dyn Future<Output = Result<(S, Box<TransportState>), EncryptionError>> + Send>>;

enum State<S> {
    Handshaking(Handshake<S>),
    Open { link: S, cipher: Box<TransportState> },
    Failed(EncryptionError),
}

#[derive(Default)]
struct Incoming {
    /// The receive buffer, for one encrypted message and bytes of the following messages.
    ciphertext: Vec<u8>,
    /// The range of `ciphertext` that has been received but not decrypted.
    encrypted: std::ops::Range<usize>,
    /// The plaintext of the message that was decrypted last.
    plain: Vec<u8>,
    read: usize,
}

#[derive(Default)]
struct Outgoing {
    ciphertext: Vec<u8>,
    written: usize,
}

/// The wakers of the reading and the writing task. The underlying connection wakes only the task that polled it last,
/// but either task may drive the handshake, which reads and writes, so both tasks are woken.
#[derive(Default)]
struct HalfWakers(Mutex<[Option<Waker>; 2]>);

impl Wake for HalfWakers {
    fn wake(self: Arc<Self>) {
        let wakers = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        wakers.into_iter().flatten().for_each(Waker::wake);
    }
}

#[derive(Clone, Copy)]
enum Half {
    Reading,
    Writing,
}

impl<S: ByteStream> EncryptedStream<S> {
    fn new(link: S, key: Key, role: HandshakeRole) -> Self {
        Self {
            state: State::Handshaking(Box::pin(handshake(link, key, role))),
            halves: Arc::default(),
            local_ip: None,
            incoming: Incoming::default(),
            outgoing: Outgoing::default(),
        }
    }

    fn poll_open(&mut self, cx: &Context<'_>, half: Half) -> Poll<io::Result<()>> {
        let State::Handshaking(handshake) = &mut self.state else { return Poll::Ready(self.check_usable()) };
        let waker = Some(cx.waker().clone());
        self.halves.0.lock().unwrap_or_else(PoisonError::into_inner)[half as usize] = waker;
        let both = Waker::from(self.halves.clone());
        self.state = match ready!(handshake.as_mut().poll(&mut Context::from_waker(&both))) {
            Ok((link, cipher)) => State::Open { link, cipher },
            Err(error) => State::Failed(error),
        };
        both.wake();
        Poll::Ready(self.check_usable())
    }

    fn check_usable(&self) -> io::Result<()> {
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

impl<S: ByteStream> AsyncRead for EncryptedStream<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_open(cx, Half::Reading))?;
        loop {
            if buf.remaining() == 0 || this.incoming.copy_plain(buf) {
                return Poll::Ready(Ok(()));
            }
            let State::Open { link, cipher } = &mut this.state else {
                return Poll::Ready(this.check_usable());
            };
            match this.incoming.decrypt_next(cipher) {
                Ok(true) => continue,
                Ok(false) => {}
                Err(error) => return this.fail(error),
            }
            if ready!(this.incoming.poll_fill(link, cx))? == 0 {
                let whole = this.incoming.encrypted.is_empty();
                let end = if whole { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
                return Poll::Ready(end);
            }
        }
    }
}

impl Incoming {
    fn copy_plain(&mut self, buf: &mut ReadBuf<'_>) -> bool {
        let rest = &self.plain[self.read..];
        let count = rest.len().min(buf.remaining());
        buf.put_slice(&rest[..count]);
        self.read += count;
        count > 0
    }

    /// Decrypts the next message if it has arrived completely. Returns whether a message was decrypted.
    fn decrypt_next(&mut self, cipher: &mut TransportState) -> Result<bool, EncryptionError> {
        let encrypted = &self.ciphertext[self.encrypted.clone()];
        let Some((length, rest)) = encrypted.split_first_chunk::<LENGTH_BYTES>() else { return Ok(false) };
        let length = usize::from(u16::from_be_bytes(*length));
        if length <= TAG_BYTES {
            return Err(EncryptionError::Damaged);
        }
        let Some(ciphertext) = rest.get(..length) else { return Ok(false) };
        self.plain.resize(length, 0);
        let count = cipher.read_message(ciphertext, &mut self.plain).map_err(|_| EncryptionError::Damaged)?;
        self.plain.truncate(count);
        self.read = 0;
        self.encrypted.start += LENGTH_BYTES + length;
        Ok(true)
    }

    /// Reads from the link into the free part of the buffer. Returns the number of bytes; 0 is the end of the stream.
    fn poll_fill(&mut self, link: &mut impl ByteStream, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        self.ciphertext.resize(LENGTH_BYTES + MAX_CIPHERTEXT_BYTES, 0);
        if self.encrypted.start > 0 {
            self.ciphertext.copy_within(self.encrypted.clone(), 0);
            self.encrypted = 0..self.encrypted.len();
        }
        // The buffer has free space, because a complete message would have been decrypted.
        let mut free = ReadBuf::new(&mut self.ciphertext[self.encrypted.end..]);
        ready!(Pin::new(link).poll_read(cx, &mut free))?;
        let count = free.filled().len();
        self.encrypted.end += count;
        Poll::Ready(Ok(count))
    }
}

impl<S: ByteStream> AsyncWrite for EncryptedStream<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(this.poll_open(cx, Half::Writing))?;
        let State::Open { link, cipher } = &mut this.state else { return Poll::Ready(Ok(0)) };
        ready!(this.outgoing.poll_drain(link, cx))?;
        let count = bytes.len().min(MAX_CIPHERTEXT_BYTES - TAG_BYTES);
        if count == 0 {
            return Poll::Ready(Ok(0));
        }
        if let Err(error) = this.outgoing.encrypt(cipher, &bytes[..count]) {
            return this.fail(error);
        }
        // The bytes are accepted. Those that the link does not accept now are sent with the next write or flush.
        match this.outgoing.poll_drain(link, cx) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Ready(Ok(())) | Poll::Pending => Poll::Ready(Ok(count)),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        // No bytes are accepted before the handshake is complete, so there is nothing to flush.
        let State::Open { link, .. } = &mut this.state else { return Poll::Ready(this.check_usable()) };
        ready!(this.outgoing.poll_drain(link, cx))?;
        Pin::new(link).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        match &mut this.state {
            State::Open { link, .. } => {
                ready!(this.outgoing.poll_drain(link, cx))?;
                Pin::new(link).poll_shutdown(cx)
            }
            State::Handshaking(_) => {
                // The handshake owns the link: both are dropped.
                let cause = "this end closed the connection first";
                this.state = State::Failed(EncryptionError::Handshake { cause });
                Poll::Ready(Ok(()))
            }
            State::Failed(_) => Poll::Ready(Ok(())),
        }
    }
}

impl Outgoing {
    /// Encrypts one message. The previous message must have been written completely.
    fn encrypt(&mut self, cipher: &mut TransportState, bytes: &[u8]) -> Result<(), EncryptionError> {
        let length = (bytes.len() + TAG_BYTES) as u16;
        self.written = 0;
        self.ciphertext.resize(LENGTH_BYTES + usize::from(length), 0);
        self.ciphertext[..LENGTH_BYTES].copy_from_slice(&length.to_be_bytes());
        cipher.write_message(bytes, &mut self.ciphertext[LENGTH_BYTES..])?;
        Ok(())
    }

    fn poll_drain(&mut self, link: &mut impl ByteStream, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.written < self.ciphertext.len() {
            let count = ready!(Pin::new(&mut *link).poll_write(cx, &self.ciphertext[self.written..]))?;
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
