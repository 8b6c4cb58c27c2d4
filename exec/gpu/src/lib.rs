//! Layers of a model on a GPU, through wgpu.
//!
//! The design follows ML Drift: kernels are texts, generated for the current device against logical tensors
//! ([`virtual_tensor`]); a pass is a graph of few launches ([`graph`]) whose intermediate tensors share planned memory
//! ([`memory`]). The fastest variant of each kernel is selected for the device ([`tuning`]). [`backend`] is the
//! interface to the ring.

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

pub use backend::{WarningSink, accelerator};
pub use conversion::Conversion;
pub use device::{AdapterFacts, Capabilities, CapabilityMask, Gpu, adapters};
pub use error::GpuError;
