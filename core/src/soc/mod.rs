//! The SoC model: a phone that computes with a GPU and an NPU together.
//!
//! The model follows sections 3 and 4 of the HeteroLLM paper, for models with weights of about four bits and
//! activations of sixteen bits (W4A16). A layer consists of matmuls ([`matmul`]) and of other kernels of the GPU.
//! [`npu`], [`gpu`] and [`sync`] compute the costs, [`solver`] splits a matmul between GPU and NPU, and [`prefill`] and
//! [`decode`] list the work of both between two synchronisations ([`interval`]) for each strategy.
//!
//! Not here: the simulation of the intervals (`hearth_sim`), and waiting for weights, which are all in memory.

pub mod decode;
pub mod gpu;
pub mod graphs;
pub mod interval;
mod latency_model;
pub mod matmul;
pub mod matmul_times;
pub mod metrics;
pub mod npu;
pub mod prefill;
pub mod solver;
pub mod sync;

pub use interval::SyncInterval;
pub use latency_model::{ForwardCost, SocLatencyModel};
pub use matmul::Matmul;
pub use metrics::SocMetrics;
