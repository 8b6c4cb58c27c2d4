//! How does a plan run on real devices?
//!
//! Weights are mapped ([`Weights`]), a stage of the ring runs layers over rows of activations ([`Stage`]), the
//! head turns tokens into rows and rows into logits ([`Head`]), a tokenizer and a sampler stand at the ends.
//! Kernels have one reduction order, so that results do not depend on threads, batches, windows or processors.

pub mod accelerator;
pub mod backend;
pub mod cache;
pub mod chat;
pub mod clock;
pub mod cost;
pub mod cpu;
pub mod error;
pub mod fetched;
pub mod head;
pub mod hyperparameters;
pub mod kernels;
#[cfg(target_os = "linux")]
pub mod lab;
pub mod memory;
pub mod oracle;
pub mod pool;
pub mod profile;
pub mod residency;
pub mod ring;
pub mod rope;
mod rows;
pub mod sampler;
pub mod speed;
pub mod stage;
pub mod synth;
mod tensors;
pub mod tokenizer;
pub mod weights;

pub use accelerator::{AcceleratedPlace, Accelerator, NoBackend, Progress};
pub use backend::{Backend, CacheOptions};
pub use cache::CacheFormat;
pub use chat::{ChatTemplate, Message};
pub use cost::ComputeCost;
pub use cpu::{Cpu, CpuLayers};
pub use error::ExecError;
pub use head::Head;
pub use oracle::Oracle;
pub use pool::{Pool, PoolOptions};
pub use sampler::{Sampler, SamplerOptions};
pub use stage::Stage;
pub use tokenizer::{TextStream, Tokenizer};
pub use weights::{Extent, Weights};
