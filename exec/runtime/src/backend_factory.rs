//! The interface through which the runtime creates a GPU backend.
//!
//! The GPU backend is a separate crate with many dependencies, so the runtime does not depend on it. Instead, the
//! command line passes a [`BackendFactory`], which creates a backend that computes some layers on the GPU and others on
//! the CPU.
//!
//! Not here: the choice of the layers that the GPU computes. It is part of the plan.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::{Backend, Cpu, KvCacheOptions, Weights};

/// A callback that receives the progress of an upload of weights to the GPU. The default callback does nothing.
#[derive(Clone, Default)]
pub struct UploadProgressReporter(Option<Arc<dyn Fn(u64, u64) -> bool + Send + Sync>>);

impl UploadProgressReporter {
    /// Wraps `report`, which receives the number of bytes uploaded so far and the total number of bytes, and returns
    /// whether the weights are still needed.
    pub fn new(report: impl Fn(u64, u64) -> bool + Send + Sync + 'static) -> UploadProgressReporter {
        UploadProgressReporter(Some(Arc::new(report)))
    }

    /// Reports that `done` of `total` bytes have been uploaded to the GPU. Returns whether the weights are still needed. An
    /// upload, which takes seconds, continues even if they are not.
    pub fn report(&self, done: u64, total: u64) -> bool {
        self.0.as_ref().is_none_or(|report| report(done, total))
    }
}

/// The options of a backend that computes some layers of a device on a GPU.
#[derive(Clone)]
pub struct BackendOptions {
    pub weights: Arc<Weights>,
    /// All layers that the device computes, as one range for each window.
    pub owned_layers: Vec<Range<u32>>,
    /// The layers that the GPU computes, as one range for each window that has layers on the GPU.
    pub gpu_layers: Vec<Range<u32>>,
    pub output_on_gpu: bool,
    pub kv_cache_options: KvCacheOptions,
    /// The function that rounds the hidden states after every layer, if any; with it, layers run one at a time.
    pub rounding: Option<fn(&mut [f32])>,
    /// The CPU threads that compute the layers that are not on the GPU, and all layers if the GPU fails.
    pub cpu: Cpu,
    /// Whether the CPU computes all layers if the GPU cannot be opened. If false, creating the backend fails instead.
    pub fallback_to_cpu: bool,
    pub progress: UploadProgressReporter,
}

impl BackendOptions {
    /// Returns the maximum size of the hidden states that a backend saves to recover from the loss of its GPU, in
    /// bytes: the inputs of `window_count` windows for all positions of all sequences.
    pub fn max_saved_hidden_bytes(window_count: usize, cache: KvCacheOptions, embedding_length: u32) -> u64 {
        let positions = u64::from(cache.sequences.max(1)) * u64::from(cache.context);
        let row_bytes = u64::from(embedding_length) * size_of::<f32>() as u64;
        (window_count as u64).saturating_mul(positions).saturating_mul(row_bytes)
    }
}

pub type BackendError = Box<dyn std::error::Error + Send + Sync>;

type CreateBackend = dyn Fn(BackendOptions) -> Result<Box<dyn Backend>, BackendError> + Send + Sync;

/// Creates backends that compute some layers of a device on a GPU.
#[derive(Clone)]
pub struct BackendFactory(Arc<CreateBackend>);

impl BackendFactory {
    /// Wraps `make`, which opens the GPU, uploads the weights of its layers and returns the backend.
    pub fn new(
        make: impl Fn(BackendOptions) -> Result<Box<dyn Backend>, BackendError> + Send + Sync + 'static,
    ) -> BackendFactory {
        BackendFactory(Arc::new(make))
    }

    /// Opens the GPU, uploads the weights of its layers and returns the backend.
    pub fn create(&self, options: BackendOptions) -> Result<Box<dyn Backend>, BackendError> {
        (self.0)(options)
    }
}

impl fmt::Debug for BackendFactory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BackendFactory")
    }
}
