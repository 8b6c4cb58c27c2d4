//! GPU backend: computes layers of a model on a GPU, through wgpu.
//!
//! The design follows ML Drift: kernels are WGSL source, generated for the current device from logical tensors
//! ([`virtual_tensor`]); a pass is a graph of fused operations ([`graph`]) whose intermediate tensors share planned
//! memory ([`memory`]). The fastest tiling of the matmul kernels is selected by measurements on the device
//! ([`tuning`]). A device of a ring uses the GPU through [`backend`].

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr, clippy::exit))]

pub mod backend;
pub mod conversion;
pub mod device;
pub mod error;
pub mod graph;
pub mod kernels;
pub mod layers;
pub mod matrix;
pub mod measure;
pub mod memory;
pub mod tuning;
pub mod virtual_tensor;

pub use backend::{WarningSink, backend_factory};
pub use conversion::WeightConversion;
pub use device::{AdapterInfo, Capabilities, CapabilityMask, Gpu, enumerate_adapters};
pub use error::GpuError;
