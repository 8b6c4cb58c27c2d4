//! The worker's listener: dispatches connections by their purpose, and allows one session at a time.

use std::time::Duration;

use tokio::time::timeout;

use super::head_connection::HeadConnection;
use super::session::Session;
use super::worker::Worker;
use crate::error::{Result, RingError};
use crate::probe::answer_probes;
use crate::wire::{
    AcceptedConnection, AcceptedConnections, ConnectionKind, ConnectionPurpose, Listener,
    SharedPreparedEpoch, Transport, accept_activations, read_hello, replace_prepared_epoch, send_refusal,
};

/// The time limit for the previous session to stop its threads and to free its memory.
const ACQUIRE_DEADLINE: Duration = Duration::from_secs(5);
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

impl<T: Transport> Worker<T> {
    /// Serves connections until the returned future is dropped. `report` receives the result of each connection.
    pub async fn serve(
        &self,
        mut listener: T::Listener,
        report: impl Fn(Result<()>) + Clone + Send + Sync + 'static,
    ) -> std::convert::Infallible {
        let mut accepted = AcceptedConnections::default();
        loop {
            let stream = match listener.accept().await {
                Ok(stream) => stream,
                Err(error) => {
                    // The peer gave up, or too many files are open.
                    accepted.make_room();
                    report(Err(RingError::cannot_listen(&listener.address(), &error)));
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let (worker, report) = (self.clone(), report.clone());
            accepted.spawn(move |connection| async move {
                report(worker.serve_connection(stream, connection).await);
            });
        }
    }

    async fn serve_connection(&self, mut stream: T::Stream, connection: AcceptedConnection) -> Result<()> {
        let (session, purpose) = read_hello(&mut stream).await?;
        match purpose {
            ConnectionPurpose::Control => self.serve_session(stream, session, &connection).await,
            ConnectionPurpose::Data { from, epoch } => {
                let limit = self.source.max_activation_bytes();
                let prepared = &self.prepared_epoch;
                accept_activations(stream, prepared, session, (from, epoch), limit, &connection).await
            }
            ConnectionPurpose::Probe => {
                connection.set_kind(ConnectionKind::Probe);
                answer_probes(stream).await
            }
            ConnectionPurpose::Fetch => {
                Err(send_refusal(&mut stream, "this is a worker, and only a head serves layers".into()).await)
            }
        }
    }

    async fn serve_session(
        &self,
        mut stream: T::Stream,
        id: u64,
        connection: &AcceptedConnection,
    ) -> Result<()> {
        // The next head may connect before the previous session has ended.
        let Ok(_in_session) = timeout(ACQUIRE_DEADLINE, self.in_session.lock()).await else {
            let reason = "another head uses this worker; wait until that head is done, or stop it".into();
            return Err(send_refusal(&mut stream, reason).await);
        };
        connection.set_kind(ConnectionKind::Session);
        let _close_epoch = CloseEpoch(self.prepared_epoch.clone());
        Session::new(self.clone(), id, HeadConnection::new(stream)).serve().await
    }
}

/// Stops accepting activations when it is dropped, so that a worker accepts none after a session, even after a panic.
struct CloseEpoch(SharedPreparedEpoch);

impl Drop for CloseEpoch {
    fn drop(&mut self) {
        replace_prepared_epoch(&self.0, None);
    }
}
