//! The interface between the runtime and a GPU backend.
//!
//! The GPU backend is a crate of its own with many dependencies, so the runtime does not depend on it. The command
//! line passes an [`Accelerator`], which creates the backend of a device. It computes some layers on the GPU and the
//! others on the CPU.
//!
//! Not here: which layers the GPU computes. The plan defines that.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::backend::{Backend, CacheOptions};
use crate::cpu::Cpu;
use crate::weights::Weights;

/// A callback that reports the progress of an upload to the GPU.
#[derive(Clone, Default)]
pub struct Progress(Option<Arc<dyn Fn(u64, u64) + Send + Sync>>);

impl Progress {
    /// Wraps `report`, which receives the number of bytes on the GPU and their total.
    pub fn new(report: impl Fn(u64, u64) + Send + Sync + 'static) -> Progress {
        Progress(Some(Arc::new(report)))
    }

    /// Reports that `done` of `total` bytes are on the GPU.
    pub fn report(&self, done: u64, total: u64) {
        if let Some(report) = &self.0 {
            report(done, total);
        }
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Progress")
    }
}

/// The layers and options of a device on which a GPU computes some layers.
#[derive(Debug, Clone)]
pub struct AcceleratorOptions {
    pub weights: Arc<Weights>,
    /// All layers of the device, window by window.
    pub owned: Vec<Range<u32>>,
    /// The layers on the GPU, window by window.
    pub accelerated: Vec<Range<u32>>,
    /// Whether the output matrix is on the GPU too.
    pub output: bool,
    /// The size of the KV caches.
    pub cache: CacheOptions,
    /// A function that is applied to the hidden rows after every layer. With it, layers run one at a time.
    pub after_layer: Option<fn(&mut [f32])>,
    /// The CPU, which computes the other layers, and all layers if the GPU fails.
    pub cpu: Cpu,
    /// Whether the CPU computes all layers if the GPU cannot be opened, as in a run that has already started.
    pub fallback_to_cpu: bool,
    pub progress: Progress,
}

impl AcceleratorOptions {
    /// Returns the maximum bytes of hidden rows that a backend saves in order to recover from the loss of its GPU:
    /// the inputs of all windows for all positions of the context.
    pub fn saved_row_bytes(windows: usize, cache: CacheOptions, embedding: u32) -> u64 {
        let rows =
            (windows as u64).saturating_mul(u64::from(cache.sequences.max(1)) * u64::from(cache.context));
        rows.saturating_mul(u64::from(embedding) * size_of::<f32>() as u64)
    }
}

/// An error of creating a backend.
pub type BackendError = Box<dyn std::error::Error + Send + Sync>;

type Make = dyn Fn(AcceleratorOptions) -> Result<Box<dyn Backend>, BackendError> + Send + Sync;

/// A constructor of GPU backends.
#[derive(Clone)]
pub struct Accelerator(Arc<Make>);

impl Accelerator {
    /// Wraps `make`, which creates the backend of a device.
    pub fn new(
        make: impl Fn(AcceleratorOptions) -> Result<Box<dyn Backend>, BackendError> + Send + Sync + 'static,
    ) -> Accelerator {
        Accelerator(Arc::new(make))
    }

    /// Creates the backend of a device.
    pub fn backend(&self, options: AcceleratorOptions) -> Result<Box<dyn Backend>, BackendError> {
        (self.0)(options)
    }
}

impl fmt::Debug for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Accelerator")
    }
}
