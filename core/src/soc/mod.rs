//! The SoC model: a phone that computes with a GPU and an NPU together.
//!
//! The model of the HeteroLLM paper's sections 3 and 4, for models with weights of about four bits and activations of
//! sixteen (W4A16). A layer is described by the shapes of its matrices ([`matmul`]):
//!
//! - [`npu`]: an array that is fast or slow by stage, order and shape of a product; or measured times ([`profiled`]);
//! - [`gpu`]: a processor with one speed, and the rest of a layer, which it always computes ([`rest`]);
//! - [`sync`]: the cost of waiting for one another, and how it is spent;
//! - [`graphs`]: the numbers of tokens that the NPU is ready for, covers of a prompt by them, and making new ones;
//! - [`solver`]: how a product is cut between both;
//! - [`prefill`] and [`decode`]: the stages of a layer under each strategy;
//! - [`Chip`]: one SoC working on one model, which planner and simulator both use;
//! - [`metrics`]: numbers of a trace: speeds, energy, how long the GPU's queue is held.
//!
//! Not here: running the stages one after another, which is the simulator's, and waiting for weights: they are at
//! hand.

mod chip;
pub mod decode;
pub mod gpu;
pub mod graphs;
pub mod matmul;
pub mod metrics;
pub mod npu;
pub mod prefill;
pub mod profiled;
pub mod rest;
pub mod solver;
pub mod stage;
pub mod sync;

pub use chip::{Chip, Forward};
pub use matmul::Matmul;
pub use metrics::SocMetrics;
pub use stage::Stage;
