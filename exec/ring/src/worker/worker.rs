//! A worker and its options.

use std::sync::Arc;

use hearth_runtime::BackendFactory;
use tokio::sync::Mutex;

use super::model_source::ModelSource;
use crate::execution::{ComputeMode, LocalModel, Verification};
use crate::wire::{SharedPreparedEpoch, Transport};

#[derive(Debug, Clone, Default)]
pub struct WorkerOptions {
    /// Number of compute threads; 0 uses all cores.
    pub threads: usize,
    pub compute_mode: ComputeMode,
    /// Creates the GPU backend for fetched layers; a local model has its own factory.
    pub backend_factory: Option<BackendFactory>,
    /// Compares fetched weights with the digests in the plan; a local model has its own verification.
    pub verification: Option<Verification>,
}

/// A worker, which computes layers in at most one session at a time.
#[derive(Clone)]
pub struct Worker<T: Transport> {
    pub(super) transport: T,
    pub(super) source: ModelSource,
    pub(super) options: WorkerOptions,
    pub(super) prepared_epoch: SharedPreparedEpoch,
    /// Locked while a session uses the worker.
    pub(super) in_session: Arc<Mutex<()>>,
}

impl<T: Transport> Worker<T> {
    /// Creates a worker that computes layers of `model` with `threads` threads; 0 threads use all cores.
    pub fn new(transport: T, model: Arc<LocalModel>, threads: usize) -> Self {
        let options = WorkerOptions { threads, ..WorkerOptions::default() };
        Self::with_options(transport, ModelSource::File(model), options)
    }

    pub fn with_options(transport: T, source: ModelSource, options: WorkerOptions) -> Self {
        Self { transport, source, options, prepared_epoch: Arc::default(), in_session: Arc::default() }
    }
}
