//! Layers of a model on a GPU, through wgpu.
//!
//! In the manner of ML Drift: kernels are texts, generated for the device at hand against logical tensors
//! ([`virtual_tensor`]); a pass is a graph of few launches ([`graph`]), and its intermediate tensors share memory by
//! plan ([`memory`]). Each kernel has variants, of which the device at hand selects one ([`tuning`]), and [`backend`] makes
//! of it what a node of the ring computes with.

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

pub use backend::{Notes, accelerator};
pub use conversion::Conversion;
pub use device::{AdapterFacts, Capabilities, Gpu, Mask, adapters};
pub use error::GpuError;
