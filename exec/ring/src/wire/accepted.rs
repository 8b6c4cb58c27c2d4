//! The accepted connections of a device: a bounded number of connections that cost their peer nothing.
//!
//! Anybody can connect to a port, and each connection occupies a task and a file descriptor. A connection that has not
//! sent its first frame, or that only measures the link, is limited to a number of its kind: a further connection
//! closes the oldest. So an honest device, which sends its hello immediately, can still connect. Attackers that connect
//! faster than an honest device sends its hello can still block this device.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use tokio::task::AbortHandle;

/// Maximum number of connections of each [`ConnectionKind`] except sessions, below the limit of open files.
/// source: assumed, more than a home has devices
const MAX_OF_KIND: usize = 64;

/// The use of an accepted connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionKind {
    /// The first frame has not arrived, or the connection waits for the end of another session.
    Pending,
    /// The connection measures the link.
    Probe,
    /// The connection belongs to the session of this device.
    Session,
}

/// The tasks that serve connections, oldest first, each with its [`ConnectionKind`].
#[derive(Default)]
pub struct AcceptedConnections(VecDeque<(Arc<AtomicU8>, AbortHandle)>);

/// A handle with which the task of a connection reports the use of the connection.
pub struct AcceptedConnection(Arc<AtomicU8>);

impl AcceptedConnection {
    pub fn set_kind(&self, kind: ConnectionKind) {
        self.0.store(kind as u8, Ordering::Relaxed);
    }
}

impl AcceptedConnections {
    /// Serves a connection in a new task, and closes the oldest of each kind of which there are too many.
    pub fn spawn<F>(&mut self, serve: impl FnOnce(AcceptedConnection) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.0.retain(|(_, task)| !task.is_finished());
        let kind = Arc::new(AtomicU8::new(ConnectionKind::Pending as u8));
        let task = tokio::spawn(serve(AcceptedConnection(kind.clone())));
        self.0.push_back((kind, task.abort_handle()));
        for kind in [ConnectionKind::Pending, ConnectionKind::Probe] {
            while self.0.iter().filter(|(own, _)| is_of_kind(own, kind)).count() > MAX_OF_KIND {
                self.close_oldest(kind);
            }
        }
    }

    /// Closes the oldest connection of each kind except sessions, to free file descriptors.
    pub fn make_room(&mut self) {
        self.close_oldest(ConnectionKind::Probe);
        self.close_oldest(ConnectionKind::Pending);
    }

    fn close_oldest(&mut self, kind: ConnectionKind) {
        let oldest = self.0.iter().position(|(own, _)| is_of_kind(own, kind));
        if let Some((_, task)) = oldest.and_then(|index| self.0.remove(index)) {
            task.abort();
        }
    }
}

impl Drop for AcceptedConnections {
    fn drop(&mut self) {
        self.0.iter().for_each(|(_, task)| task.abort());
    }
}

fn is_of_kind(own: &AtomicU8, kind: ConnectionKind) -> bool {
    own.load(Ordering::Relaxed) == kind as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn oldest_connections_of_a_kind_are_closed() {
        let mut accepted = AcceptedConnections::default();
        // Spawns a connection of this kind, whose state lives as long as its task or its place in the list.
        let mut spawn = |kind| {
            let mut state = std::sync::Weak::new();
            accepted.spawn(|connection| {
                connection.set_kind(kind);
                state = Arc::downgrade(&connection.0);
                async move {
                    std::future::pending::<()>().await;
                    drop(connection);
                }
            });
            state
        };
        let sessions: Vec<_> = (0..200).map(|_| spawn(ConnectionKind::Session)).collect();
        let probes: Vec<_> = (0..200).map(|_| spawn(ConnectionKind::Probe)).collect();
        let pending: Vec<_> = (0..200).map(|_| spawn(ConnectionKind::Pending)).collect();
        // The aborted tasks end.
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        let is_open = |state: &std::sync::Weak<AtomicU8>| state.strong_count() > 0;
        assert!(sessions.iter().all(is_open), "sessions are not closed");
        for states in [&probes, &pending] {
            let (closed, open) = states.split_at(200 - MAX_OF_KIND);
            assert!(!closed.iter().any(is_open) && open.iter().all(is_open), "the oldest are closed");
        }
    }
}
