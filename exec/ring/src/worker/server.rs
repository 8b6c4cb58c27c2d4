//! The worker's listener: dispatches connections by their purpose, and allows one session at a time.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::timeout;

use super::head_connection::HeadConnection;
use super::model_source::ModelSource;
use super::session::{Session, WorkerOptions};
use crate::error::RingError;
use crate::execution::LocalModel;
use crate::probe::answer_probes;
use crate::wire::{
    Listener, PendingConnection, PendingConnections, Purpose, SharedOpenEpoch, Transport, accept_activations,
    read_hello, refuse,
};

/// The time limit for the previous session to end: its threads stop and its memory is freed.
const ACQUIRE_DEADLINE: Duration = Duration::from_secs(5);
/// The interval at which the end of the previous session is checked.
const ACQUIRE_RETRY: Duration = Duration::from_millis(5);
/// The pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The number of consecutive failures after which the listener counts as broken: half a minute.
const MAX_ACCEPT_FAILURES: u32 = 300;

/// A worker, which computes layers in at most one session at a time.
#[derive(Clone)]
pub struct Worker<T: Transport> {
    transport: T,
    source: ModelSource,
    options: WorkerOptions,
    /// Whether a session uses the worker.
    busy: Arc<Mutex<bool>>,
    open_epoch: SharedOpenEpoch,
}

impl<T: Transport> Worker<T> {
    /// Creates a worker that computes layers of `model` with `threads` threads; 0 uses all cores.
    pub fn new(transport: T, model: Arc<LocalModel>, threads: usize) -> Self {
        Self::with_options(
            transport,
            ModelSource::File(model),
            WorkerOptions { threads, ..WorkerOptions::default() },
        )
    }

    /// Creates a worker whose layers come from `source`.
    pub fn with_options(transport: T, source: ModelSource, options: WorkerOptions) -> Self {
        Self { transport, source, options, busy: Arc::default(), open_epoch: Arc::default() }
    }

    /// Serves connections until the listener fails. `report` receives the result of each connection.
    pub async fn serve(
        &self,
        mut listener: T::Listener,
        report: impl Fn(Result<(), RingError>) + Clone + Send + Sync + 'static,
    ) -> RingError {
        let mut failures = 0;
        let mut pending = PendingConnections::default();
        loop {
            let stream = match listener.accept().await {
                Ok(stream) => stream,
                Err(error) if failures < MAX_ACCEPT_FAILURES => {
                    // The peer gave up, or too many files were open for a moment.
                    failures += 1;
                    report(Err(RingError::CannotListen {
                        address: listener.address(),
                        reason: error.to_string(),
                    }));
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
                Err(error) => {
                    let address = listener.address();
                    return RingError::CannotListen { address, reason: error.to_string() };
                }
            };
            failures = 0;
            let (worker, report) = (self.clone(), report.clone());
            let serve =
                move |connection| async move { report(worker.serve_connection(stream, connection).await) };
            pending.spawn(serve);
        }
    }

    async fn serve_connection(
        &self,
        mut stream: T::Stream,
        connection: PendingConnection,
    ) -> Result<(), RingError> {
        let (session, purpose) = read_hello(&mut stream).await?;
        connection.mark_identified();
        match purpose {
            Purpose::Control => self.serve_session(stream, session).await,
            Purpose::Data { from, epoch } => {
                let limit = self.source.max_activation_bytes();
                accept_activations(stream, &self.open_epoch, session, (from, epoch), limit).await
            }
            Purpose::Probe => answer_probes(stream).await,
            Purpose::Fetch => {
                Err(refuse(&mut stream, "this is a worker, and only a head serves layers".into()).await)
            }
        }
    }

    async fn serve_session(&self, mut stream: T::Stream, id: u64) -> Result<(), RingError> {
        // The next head may connect before the previous session has ended.
        let acquiring = async {
            while !self.try_acquire() {
                tokio::time::sleep(ACQUIRE_RETRY).await;
            }
        };
        if timeout(ACQUIRE_DEADLINE, acquiring).await.is_err() {
            let reason = "another head uses this worker; wait until it is done, or stop it".into();
            return Err(refuse(&mut stream, reason).await);
        }
        // Frees the worker however the session ends, even by a panic.
        let _guard = SessionGuard { busy: self.busy.clone(), open_epoch: self.open_epoch.clone() };
        let (transport, source, options) =
            (self.transport.clone(), self.source.clone(), self.options.clone());
        Session::new(id, HeadConnection::new(stream), transport, source, options, self.open_epoch.clone())
            .serve()
            .await
    }

    /// Marks the worker as busy. Returns false if it already is.
    fn try_acquire(&self) -> bool {
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        !std::mem::replace(&mut *busy, true)
    }
}

/// Marks the worker as free when dropped.
struct SessionGuard {
    busy: Arc<Mutex<bool>>,
    open_epoch: SharedOpenEpoch,
}

impl Drop for SessionGuard {
    fn drop(&mut self) {
        *self.open_epoch.lock().unwrap_or_else(PoisonError::into_inner) = None;
        *self.busy.lock().unwrap_or_else(PoisonError::into_inner) = false;
    }
}
