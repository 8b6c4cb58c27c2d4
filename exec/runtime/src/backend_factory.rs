//! The interface between the runtime and a GPU backend.
//!
//! The GPU backend is a crate of its own with many dependencies, so the runtime does not depend on it. The command
//! line passes a [`BackendFactory`], which creates the backend of a device. This backend computes some layers on the
//! GPU and the others on the CPU.
//!
//! Not here: which layers the GPU computes. The plan defines that.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::{Backend, Cpu, KvCacheOptions, Weights};

/// A callback that reports the progress of an upload to the GPU.
#[derive(Clone, Default)]
pub struct UploadProgressReporter(Option<Arc<dyn Fn(u64, u64) + Send + Sync>>);

impl UploadProgressReporter {
    /// Wraps `report`, which receives the number of bytes on the GPU and their total.
    pub fn new(report: impl Fn(u64, u64) + Send + Sync + 'static) -> UploadProgressReporter {
        UploadProgressReporter(Some(Arc::new(report)))
    }

    /// Reports that `done` of `total` bytes are on the GPU.
    pub fn report(&self, done: u64, total: u64) {
        if let Some(report) = &self.0 {
            report(done, total);
        }
    }
}

/// The layers and options of a device on which a GPU computes some layers.
#[derive(Clone)]
pub struct BackendOptions {
    pub weights: Arc<Weights>,
    /// All layers of the device, window by window.
    pub owned_layers: Vec<Range<u32>>,
    /// The layers on the GPU, window by window.
    pub gpu_layers: Vec<Range<u32>>,
    /// Whether the output matrix is on the GPU too.
    pub output_on_gpu: bool,
    /// The size and the number format of the KV caches.
    pub kv_cache_options: KvCacheOptions,
    /// The function that rounds the hidden rows after every layer, if there is one. With it, layers run one at a
    /// time.
    pub rounding: Option<fn(&mut [f32])>,
    /// The compute threads for the layers that are not on the GPU, or for all layers if the GPU fails.
    pub cpu: Cpu,
    /// Whether the CPU computes all layers if the GPU cannot be opened. If false, this is an error.
    pub fallback_to_cpu: bool,
    pub progress: UploadProgressReporter,
}

impl BackendOptions {
    /// Returns the maximum bytes of hidden rows that a backend saves in order to recover from the loss of its GPU:
    /// the inputs of all windows for all positions of the context.
    pub fn max_saved_hidden_bytes(windows: usize, cache: KvCacheOptions, embedding: u32) -> u64 {
        let rows =
            (windows as u64).saturating_mul(u64::from(cache.sequences.max(1)) * u64::from(cache.context));
        rows.saturating_mul(u64::from(embedding) * size_of::<f32>() as u64)
    }
}

/// An error of creating a backend.
pub type BackendError = Box<dyn std::error::Error + Send + Sync>;

type CreateBackend = dyn Fn(BackendOptions) -> Result<Box<dyn Backend>, BackendError> + Send + Sync;

/// Creates the backend of a device on which a GPU computes some layers.
#[derive(Clone)]
pub struct BackendFactory(Arc<CreateBackend>);

impl BackendFactory {
    /// Wraps `make`, which opens the GPU, uploads the layers and returns the backend.
    pub fn new(
        make: impl Fn(BackendOptions) -> Result<Box<dyn Backend>, BackendError> + Send + Sync + 'static,
    ) -> BackendFactory {
        BackendFactory(Arc::new(make))
    }

    /// Calls the wrapped function, which opens the GPU and uploads the layers.
    pub fn create(&self, options: BackendOptions) -> Result<Box<dyn Backend>, BackendError> {
        (self.0)(options)
    }
}

impl fmt::Debug for BackendFactory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BackendFactory")
    }
}
