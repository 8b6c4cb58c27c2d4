//! How does a GPU compute the layers that a plan gives it?
//!
//! In the manner of ML Drift: kernels are texts, generated for the device at hand against logical tensors
//! ([`virtual_tensor`]); a pass is a graph of few launches ([`graph`]), and its intermediate tensors share memory by
//! plan ([`memory`]).

pub mod graph;
pub mod memory;
pub mod virtual_tensor;
