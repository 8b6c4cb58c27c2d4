//! The interface through which a GPU backend is handed to the runtime.
//!
//! A backend for GPUs is a crate of its own, heavier than all of this one, and the command line hands it in: an
//! [`Accelerator`] makes the backend of a place in the ring, of which it may compute some layers itself and leave the
//! others to the processors.
//!
//! Not here: which layers those are. The plan says that.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::backend::{Backend, CacheOptions};
use crate::cpu::Cpu;
use crate::weights::Weights;

/// Reports how many bytes of how many are on the GPU.
#[derive(Clone, Default)]
pub struct Progress(Option<Arc<dyn Fn(u64, u64) + Send + Sync>>);

impl Progress {
    pub fn new(report: impl Fn(u64, u64) + Send + Sync + 'static) -> Progress {
        Progress(Some(Arc::new(report)))
    }

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

/// The layers of a device, part of which are on a GPU.
#[derive(Debug, Clone)]
pub struct AcceleratedPlace {
    pub weights: Arc<Weights>,
    /// All layers of the device, window by window.
    pub owned: Vec<Range<u32>>,
    /// The layers on the GPU, window by window.
    pub accelerated: Vec<Range<u32>>,
    /// Whether the output matrix is on the GPU too.
    pub output: bool,
    /// The size of the caches.
    pub cache: CacheOptions,
    /// A function applied to the hidden rows after every layer; with it layers run one at a time.
    pub after_layer: Option<fn(&mut [f32])>,
    /// Computes the other layers, and all of them if the GPU fails.
    pub cpu: Cpu,
    /// Whether the processors compute the layers of a GPU that cannot be opened, as in a run that has begun.
    pub fallback_to_cpu: bool,
    pub progress: Progress,
}

impl AcceleratedPlace {
    /// Bytes of the rows that are uploaded to these windows in a context, which a backend may have to keep for the case
    /// that its GPU is lost.
    pub fn kept_bytes(windows: usize, cache: CacheOptions, embedding: u32) -> u64 {
        let rows =
            (windows as u64).saturating_mul(u64::from(cache.sequences.max(1)) * u64::from(cache.context));
        rows.saturating_mul(u64::from(embedding) * size_of::<f32>() as u64)
    }
}

/// An error of making a backend.
pub type BackendError = Box<dyn std::error::Error + Send + Sync>;

type Make = dyn Fn(AcceleratedPlace) -> Result<Box<dyn Backend>, BackendError> + Send + Sync;

/// A constructor of GPU backends.
#[derive(Clone)]
pub struct Accelerator(Arc<Make>);

impl Accelerator {
    pub fn new(
        make: impl Fn(AcceleratedPlace) -> Result<Box<dyn Backend>, BackendError> + Send + Sync + 'static,
    ) -> Accelerator {
        Accelerator(Arc::new(make))
    }

    pub fn backend(&self, place: AcceleratedPlace) -> Result<Box<dyn Backend>, BackendError> {
        (self.0)(place)
    }
}

impl fmt::Debug for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Accelerator")
    }
}
