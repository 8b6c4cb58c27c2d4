//! HTTP connections: accepts connections, and closes those that occupy resources without need.
//!
//! A connection is closed if a request does not arrive within its time limit, or if the client reads nothing of a
//! response for [`WRITE_DEADLINE`]. The time to compute a response is not limited. A device that opens many connections
//! cannot shut out others: of more than [`MAX_CONNECTIONS`] connections, the one that has been silent longest is
//! closed, and if request bodies occupy more than [`MAX_BUFFERED_BYTES`], the unfinished body that has been silent
//! longest is dropped. A connection whose request waits for the ring or for being parsed is not closed for others.

use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, Sleep};
use tokio_rustls::TlsAcceptor;

/// Maximum number of open connections. source: assumed, below the usual limit of 1024 open files
const MAX_CONNECTIONS: usize = 512;
/// Maximum size of all request bodies that have not been parsed, in bytes. source: assumed, 16 of the largest bodies
const MAX_BUFFERED_BYTES: usize = 64 << 20;
/// Maximum size of the buffer from which the head of a request is read, in bytes. source: assumed; a browser's is
/// smaller
const HEAD_BUFFER_BYTES: usize = 16 << 10;
/// Maximum time until the head of a request (request line and headers) has arrived, counted from the start of the
/// connection or from the end of the previous response.
/// source: assumed; clients keep connections open for their next request
const HEAD_DEADLINE: Duration = Duration::from_mins(1);
/// Maximum time in which a client reads nothing while all send buffers are full.
/// source: assumed; a client program reads its socket without waiting for its user
const WRITE_DEADLINE: Duration = Duration::from_mins(1);
/// The pause after a failed attempt to accept a connection. source: assumed
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Accepts and serves HTTP connections, encrypted by `tls` if it is given, until the task is cancelled.
pub async fn serve(listener: TcpListener, router: Router, tls: Option<TlsAcceptor>) {
    let open = Arc::new(OpenConnections::default());
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // Too many files may be open.
            open.close_longest_silent(|_| true);
            tokio::time::sleep(ACCEPT_RETRY).await;
            continue;
        };
        open.make_room().await;
        // Chunks of a streamed response must not wait for more data.
        let _ = stream.set_nodelay(true);
        let connection = open.add();
        let task = tokio::spawn(serve_connection(stream, connection.clone(), router.clone(), tls.clone()));
        connection.set_task(task.abort_handle());
    }
}

async fn serve_connection(
    stream: TcpStream,
    connection: Connection,
    router: Router,
    tls: Option<TlsAcceptor>,
) {
    let stream = MonitoredStream { stream, connection: connection.clone(), deadline: None };
    let router = TowerToHyperService::new(router);
    let service = hyper::service::service_fn(|mut request: hyper::Request<hyper::body::Incoming>| {
        request.extensions_mut().insert(connection.clone());
        hyper::service::Service::call(&router, request)
    });
    // An error needs no handling: the client sees that its connection was closed.
    let Some(tls) = tls else {
        let _ = http_protocol().serve_connection(TokioIo::new(stream), service).await;
        return;
    };
    if let Ok(Ok(stream)) = tokio::time::timeout(HEAD_DEADLINE, tls.accept(stream)).await {
        let _ = http_protocol().serve_connection(TokioIo::new(stream), service).await;
    }
}

/// Returns the HTTP protocol with its limits.
pub(crate) fn http_protocol() -> http1::Builder {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_DEADLINE).max_buf_size(HEAD_BUFFER_BYTES);
    http
}

/// The open connections of a server, by number.
#[derive(Default)]
struct OpenConnections {
    states: Mutex<BTreeMap<u64, Arc<ConnectionState>>>,
    next_number: AtomicU64,
    /// The size of all request bodies that have not been parsed, in bytes.
    buffered: AtomicUsize,
    /// Wakes the task that waits for a connection to be closed, or to be one that can be closed.
    closed: Notify,
}

struct ConnectionState {
    number: u64,
    task: Mutex<Option<AbortHandle>>,
    /// The time of the last read or written byte.
    last_activity: Mutex<Instant>,
    /// The size of the request body that has arrived so far, in bytes; 0 after it has been parsed.
    body_bytes: AtomicUsize,
    /// The number of requests that have arrived completely and have no complete response.
    responding: AtomicUsize,
}

/// A handle to an open connection; a request has it as an extension. The connection counts as open until all handles
/// are dropped.
#[derive(Clone)]
pub struct Connection(Arc<ConnectionGuard>);

struct ConnectionGuard {
    state: Arc<ConnectionState>,
    open: Arc<OpenConnections>,
}

impl OpenConnections {
    fn states(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<ConnectionState>>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(self: &Arc<Self>) -> Connection {
        let state = Arc::new(ConnectionState {
            number: self.next_number.fetch_add(1, Ordering::Relaxed),
            task: Mutex::default(),
            last_activity: Mutex::new(Instant::now()),
            body_bytes: AtomicUsize::new(0),
            responding: AtomicUsize::new(0),
        });
        self.states().insert(state.number, state.clone());
        Connection(Arc::new(ConnectionGuard { state, open: self.clone() }))
    }

    /// Waits until a connection can be added. Closes the connection that has been silent longest if there are too many.
    async fn make_room(&self) {
        loop {
            let closed = self.closed.notified();
            if self.states().len() < MAX_CONNECTIONS || self.close_longest_silent(|_| true) {
                return;
            }
            // All connections wait for a response.
            closed.await;
        }
    }

    /// Closes the connection that has been silent longest, of those that are not waiting for a response and for which
    /// `is_candidate` returns true. Returns false if there is none.
    fn close_longest_silent(&self, is_candidate: impl Fn(&ConnectionState) -> bool) -> bool {
        let mut states = self.states();
        let candidates = states
            .values()
            .filter(|state| state.responding.load(Ordering::Relaxed) == 0 && is_candidate(state));
        let Some(silent) = candidates.min_by_key(|state| state.last_activity()).cloned() else {
            return false;
        };
        states.remove(&silent.number);
        drop(states);
        let bytes = silent.body_bytes.swap(0, Ordering::Relaxed);
        self.buffered.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(task) = &*silent.task.lock().unwrap_or_else(PoisonError::into_inner) {
            task.abort();
        }
        true
    }
}

impl ConnectionState {
    fn last_activity(&self) -> Instant {
        *self.last_activity.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record_activity(&self) {
        *self.last_activity.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }
}

impl Connection {
    fn set_task(&self, task: AbortHandle) {
        *self.0.state.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
    }

    /// Adds bytes to the request body that this connection buffers. Drops other unfinished bodies if all bodies
    /// together are too large. Returns false if there is no room.
    pub fn try_buffer(&self, bytes: usize) -> bool {
        let ConnectionGuard { state, open } = &*self.0;
        while open.buffered.load(Ordering::Relaxed) + bytes > MAX_BUFFERED_BYTES {
            let has_body = |other: &ConnectionState| {
                other.number != state.number && other.body_bytes.load(Ordering::Relaxed) > 0
            };
            if !open.close_longest_silent(has_body) {
                return false;
            }
        }
        open.buffered.fetch_add(bytes, Ordering::Relaxed);
        state.body_bytes.fetch_add(bytes, Ordering::Relaxed);
        true
    }

    /// Records that the buffered request body has been parsed or dropped.
    pub fn release_body(&self) {
        let bytes = self.0.state.body_bytes.swap(0, Ordering::Relaxed);
        self.0.open.buffered.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Returns a guard during whose lifetime the connection waits for a response, and is not closed for others.
    pub fn begin_response(&self) -> ResponseGuard {
        self.0.state.responding.fetch_add(1, Ordering::Relaxed);
        ResponseGuard(self.clone())
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        let bytes = self.state.body_bytes.swap(0, Ordering::Relaxed);
        self.open.buffered.fetch_sub(bytes, Ordering::Relaxed);
        self.open.states().remove(&self.state.number);
        self.open.closed.notify_waiters();
    }
}

/// See [`Connection::begin_response`].
pub struct ResponseGuard(Connection);

impl Drop for ResponseGuard {
    fn drop(&mut self) {
        let ConnectionGuard { state, open } = &*self.0.0;
        state.responding.fetch_sub(1, Ordering::Relaxed);
        // The connection can now be closed for others.
        open.closed.notify_waiters();
    }
}

/// A stream that records when bytes are read or written, and whose writes fail if the peer reads nothing for
/// [`WRITE_DEADLINE`].
struct MonitoredStream<S> {
    stream: S,
    connection: Connection,
    /// The timer until the current write fails; `None` while the stream accepts bytes.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl<S: Unpin> MonitoredStream<S> {
    fn with_deadline<T>(
        &mut self,
        cx: &mut Context,
        write: impl FnOnce(Pin<&mut S>, &mut Context) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        let result = write(Pin::new(&mut self.stream), cx);
        if result.is_ready() {
            self.connection.0.state.record_activity();
            self.deadline = None;
            return result;
        }
        let deadline = self.deadline.get_or_insert_with(|| Box::pin(tokio::time::sleep(WRITE_DEADLINE)));
        deadline.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for MonitoredStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if result.is_ready() {
            self.connection.0.state.record_activity();
        }
        result
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for MonitoredStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.with_deadline(cx, |stream, cx| stream.poll_write(cx, bytes))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context) -> Poll<io::Result<()>> {
        // Nothing is written here, so a flush is no activity.
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context) -> Poll<io::Result<()>> {
        self.with_deadline(cx, AsyncWrite::poll_shutdown)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn slow_client_is_kept_and_stalled_client_is_disconnected() {
        let (stream, mut theirs) = tokio::io::duplex(8);
        let connection = Arc::new(OpenConnections::default()).add();
        let mut ours = MonitoredStream { stream, connection, deadline: None };
        let reader = tokio::spawn(async move {
            for _ in 0..4 {
                tokio::time::sleep(WRITE_DEADLINE / 2).await;
                theirs.read_exact(&mut [0; 8]).await.expect("eight bytes");
            }
            theirs
        });
        ours.write_all(&[0; 40]).await.expect("a slow reader is kept");
        let _open = reader.await.expect("the reader finishes");
        let error = ours.write_all(&[0; 8]).await.expect_err("a stalled reader is disconnected");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    /// Adds a connection with a task, and waits so that it has been silent longer than later connections.
    async fn add(open: &Arc<OpenConnections>) -> (Connection, tokio::task::JoinHandle<()>) {
        let connection = open.add();
        let task = tokio::spawn(std::future::pending());
        connection.set_task(task.abort_handle());
        tokio::time::sleep(Duration::from_millis(1)).await;
        (connection, task)
    }

    #[tokio::test(start_paused = true)]
    async fn longest_silent_connection_makes_room() {
        let open = Arc::new(OpenConnections::default());
        let (busy, busy_task) = add(&open).await;
        let response = busy.begin_response();
        let (_oldest, oldest_task) = add(&open).await;
        let mut others = Vec::new();
        for _ in 2..MAX_CONNECTIONS {
            others.push(add(&open).await);
        }
        open.make_room().await;
        assert!(oldest_task.await.expect_err("it is aborted").is_cancelled());
        assert!(!busy_task.is_finished() && others.iter().all(|(_, task)| !task.is_finished()));
        drop(response);
        let _new = add(&open).await;
        open.make_room().await;
        assert!(busy_task.await.expect_err("it is aborted").is_cancelled(), "its response is complete");
    }

    #[tokio::test(start_paused = true)]
    async fn unfinished_bodies_have_a_limit() {
        let open = Arc::new(OpenConnections::default());
        let ((small, small_task), (large, large_task)) = (add(&open).await, add(&open).await);
        assert!(large.try_buffer(MAX_BUFFERED_BYTES - 10) && small.try_buffer(10));
        small.0.state.record_activity();
        assert!(small.try_buffer(1), "the other body makes room");
        assert!(large_task.await.expect_err("it is aborted").is_cancelled() && !small_task.is_finished());
        assert!(!small.try_buffer(MAX_BUFFERED_BYTES), "larger than the limit");
        small.release_body();
        drop(large);
        assert_eq!(open.buffered.load(Ordering::Relaxed), 0);
    }
}
