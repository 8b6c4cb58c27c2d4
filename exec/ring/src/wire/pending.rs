//! Pending connections: a bounded number of connections that have not sent their first frame.
//!
//! Anybody can connect to a port, and holds a connection and a task until the deadline of the first frame. When there
//! are too many, the oldest is closed, so that an honest device, which sends its hello at once, gets through between
//! those that only hold connections open.
//!
//! Not here: who has the key ([`crate::security`]). Peers that connect faster than an honest device can send its hello
//! still keep it out.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::task::AbortHandle;

/// Far fewer than a process may have open.
/// source: assumed, more than a home has devices
const MAX_PENDING: usize = 64;

/// Connections that have not sent their first frame, the oldest first.
#[derive(Default)]
pub struct PendingConnections(VecDeque<(Arc<AtomicBool>, AbortHandle)>);

/// The mark of one pending connection.
pub struct PendingConnection(Arc<AtomicBool>);

impl PendingConnection {
    /// Its first frame has come: it is not pending any more.
    pub fn identified(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl PendingConnections {
    /// Serves a connection in a task of its own, and closes the oldest pending one if there are too many.
    pub fn spawn<F>(&mut self, serve: impl FnOnce(PendingConnection) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.0.retain(|(is_identified, task)| !task.is_finished() && !is_identified.load(Ordering::Relaxed));
        if self.0.len() >= MAX_PENDING
            && let Some((_, oldest)) = self.0.pop_front()
        {
            oldest.abort();
        }
        let is_identified = Arc::new(AtomicBool::new(false));
        let task = tokio::spawn(serve(PendingConnection(is_identified.clone())));
        self.0.push_back((is_identified, task.abort_handle()));
    }
}
