//! Pending connections: a bounded number of connections that have not sent their first frame.
//!
//! Anybody can connect to a port, and each connection occupies a task until the deadline of its first frame. Of more
//! than 64 pending connections, the oldest one is closed, so an honest device, which sends its hello immediately, can
//! still connect. Attackers that connect faster than an honest device sends its hello can still block this device.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::task::AbortHandle;

/// Maximum number of pending connections, below the limit of open files. source: assumed, more than a home has devices
const MAX_PENDING: usize = 64;

/// The tasks that serve connections, oldest first, each with a flag that is set when the first frame has arrived.
#[derive(Default)]
pub struct PendingConnections(VecDeque<(Arc<AtomicBool>, AbortHandle)>);

/// A handle with which the task of a pending connection reports the first frame.
pub struct PendingConnection(Arc<AtomicBool>);

impl PendingConnection {
    /// Records that the first frame has arrived, so that the connection is no longer pending.
    pub fn mark_identified(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl PendingConnections {
    /// Serves a connection in a new task, and closes the oldest pending connection if 64 are pending.
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
