//! Where a stage computes: on a separate thread, or inline in its task.
//!
//! A computation takes milliseconds to seconds, during which heartbeats must continue, so it has a separate thread. A
//! single-threaded runtime with a simulated clock computes inline, so that the order of events is deterministic.

use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use crate::error::{Result, protocol_error};

/// The thread on which the layers of a stage are computed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ComputeMode {
    #[default]
    OwnThread,
    /// The thread of the async runtime that polls the task. The computation blocks this thread.
    Inline,
}

impl ComputeMode {
    /// Spawns `task`, which computes layers, on a separate thread or as a task of the async runtime.
    pub fn spawn<T: Send + 'static>(self, task: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        match self {
            ComputeMode::OwnThread => {
                let runtime = Handle::current();
                tokio::task::spawn_blocking(move || runtime.block_on(task))
            }
            ComputeMode::Inline => tokio::spawn(task),
        }
    }

    /// Spawns `task` like [`Self::spawn`] and waits for its result.
    pub async fn run<T: Send + 'static>(self, task: impl Future<Output = T> + Send + 'static) -> Result<T> {
        self.spawn(task).await.map_err(|error| protocol_error("this device's computation", error.to_string()))
    }
}
