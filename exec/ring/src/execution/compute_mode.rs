//! Where a stage computes: on a separate thread, or inline in its task.
//!
//! A computation takes milliseconds to seconds, during which heartbeats must continue, so it has a separate thread. A
//! single-threaded runtime with a simulated clock computes inline, so that the order of events is deterministic.

use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use crate::error::{Result, protocol_error};

/// Where a stage computes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ComputeMode {
    /// On a separate thread.
    #[default]
    OwnThread,
    /// In the task itself, which blocks its thread of the runtime meanwhile.
    Inline,
}

impl ComputeMode {
    /// Starts a computing task.
    pub fn spawn<T: Send + 'static>(self, task: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        match self {
            ComputeMode::OwnThread => {
                let runtime = Handle::current();
                tokio::task::spawn_blocking(move || runtime.block_on(task))
            }
            ComputeMode::Inline => tokio::spawn(task),
        }
    }

    /// Runs a computing task and waits for its result.
    pub async fn run<T: Send + 'static>(self, task: impl Future<Output = T> + Send + 'static) -> Result<T> {
        self.spawn(task).await.map_err(|error| protocol_error("this device's stage", error.to_string()))
    }
}
