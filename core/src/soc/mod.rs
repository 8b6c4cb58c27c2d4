//! The SoC model: a phone that computes with a GPU and an NPU together.
//!
//! It follows sections 3 and 4 of the HeteroLLM paper, for models with weights of about four bits and activations of
//! sixteen bits (W4A16). A layer is described by the shapes of its matrices ([`matmul`]):
//!
//! - [`npu`]: a systolic array whose speed depends on padding, order and shape of a matmul; or a table of measured
//!   times ([`profiled`]);
//! - [`gpu`]: a processor whose speed is the same for all shapes; it also computes all kernels other than matmuls
//!   ([`other_kernels`]);
//! - [`sync`]: the cost of synchronising both, and how a CPU thread waits for them;
//! - [`graphs`]: the batch sizes with a compiled NPU graph, sets of them that cover a prompt, and the time to build
//!   more;
//! - [`solver`]: how a matmul is split between GPU and NPU;
//! - [`interval`]: the work of both between two synchronisations;
//! - [`prefill`] and [`decode`]: the intervals of a layer with each strategy;
//! - [`SocLatencyModel`]: the latency model of one model on one SoC, which planner and simulator both use;
//! - [`metrics`]: speeds, energy and GPU queue occupancy of a trace.
//!
//! Not here: the simulation of the intervals (`hearth_sim`), and waiting for weights, which are all in memory here.

pub mod decode;
pub mod gpu;
pub mod graphs;
pub mod interval;
mod latency_model;
pub mod matmul;
pub mod metrics;
pub mod npu;
pub mod other_kernels;
pub mod prefill;
pub mod profiled;
pub mod solver;
pub mod sync;

pub use interval::SyncInterval;
pub use latency_model::{ForwardCost, SocLatencyModel};
pub use matmul::Matmul;
pub use metrics::SocMetrics;
