//! The worker's listener: dispatches connections, and lets one session at a time have the worker.

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
/// The interval at which this is checked.
const ACQUIRE_RETRY: Duration = Duration::from_millis(5);
/// The pause after a connection that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The number of consecutive failures after which the listener counts as broken: half a minute.
const MAX_ACCEPT_FAILURES: u32 = 300;
/// A worker: a model, and at most one session.
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
        Self::with(transport, ModelSource::File(model), WorkerOptions { threads, ..WorkerOptions::default() })
    }

    /// A worker with a model, or one that fetches its layers.
    pub fn with(transport: T, source: ModelSource, options: WorkerOptions) -> Self {
        Self { transport, source, options, busy: Arc::default(), open_epoch: Arc::default() }
    }

    /// Serves connections until the listener fails. `report` gets a line for each session's end.
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
                    // A peer that gave up, or too many open files for a moment.
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
            pending.spawn(move |mark| async move { report(worker.connection(stream, mark).await) });
        }
    }

    async fn connection(&self, mut stream: T::Stream, mark: PendingConnection) -> Result<(), RingError> {
        let (session, purpose) = read_hello(&mut stream).await?;
        mark.identified();
        match purpose {
            Purpose::Control => self.control(stream, session).await,
            Purpose::Data { from, epoch } => {
                let limit = self.source.max_activation_bytes();
                accept_activations(stream, &self.open_epoch, session, (from, epoch), limit).await
            }
            Purpose::Probe => answer_probes(stream).await,
            Purpose::Fetch => Err(refuse(&mut stream, "only a head gives layers".into()).await),
        }
    }

    async fn control(&self, mut stream: T::Stream, id: u64) -> Result<(), RingError> {
        // A head that has just said goodbye may be followed at once by the next.
        let acquiring = async {
            while !self.try_acquire() {
                tokio::time::sleep(ACQUIRE_RETRY).await;
            }
        };
        if timeout(ACQUIRE_DEADLINE, acquiring).await.is_err() {
            let reason = "this worker is in another head's session; wait or stop that one".into();
            return Err(refuse(&mut stream, reason).await);
        }
        // However the session ends, a panic included, the worker is free again.
        let _guard = SessionGuard { busy: self.busy.clone(), open_epoch: self.open_epoch.clone() };
        let (transport, source, options) =
            (self.transport.clone(), self.source.clone(), self.options.clone());
        Session::new(id, HeadConnection::new(stream), transport, source, options, self.open_epoch.clone())
            .serve()
            .await
    }

    /// Takes the one session, if it is free.
    fn try_acquire(&self) -> bool {
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        !std::mem::replace(&mut *busy, true)
    }
}

/// A worker's one session; free again when this is dropped.
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
