//! The thread that a stage computes on.
//!
//! A computation takes milliseconds to seconds, in which heartbeats must continue, so it has a thread of its own. A
//! single-threaded runtime under a simulated clock computes inline, so that events have one order.

use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use crate::error::{RingError, protocol_error};

/// The thread that a stage computes on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ComputeMode {
    /// On a separate thread.
    #[default]
    OwnThread,
    /// In the task that serves them; nothing else happens in the runtime meanwhile.
    Inline,
}

impl ComputeMode {
    /// Runs a task that computes.
    pub fn spawn<F>(self, task: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        match self {
            ComputeMode::OwnThread => {
                let runtime = Handle::current();
                tokio::task::spawn_blocking(move || runtime.block_on(task))
            }
            ComputeMode::Inline => tokio::spawn(task),
        }
    }

    /// Runs a task that computes to its end.
    pub async fn run<F>(self, task: F) -> Result<F::Output, RingError>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        self.spawn(task).await.map_err(|error| protocol_error("this device's stage", &error.to_string()))
    }
}
