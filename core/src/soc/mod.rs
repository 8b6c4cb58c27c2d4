//! How long does a phone take that computes with a GPU and an NPU together?
//!
//! The model of the HeteroLLM paper's sections 3 and 4, for models whose weights have about four bits and whose activations
//! have sixteen (W4A16). Four matrices' shapes are all that matters of a layer ([`matmul`]):
//!
//! - [`npu`]: an array that is fast or slow by stage, order and shape of a product; or what was measured
//!   ([`profiled`]);
//! - [`gpu`]: a processor with one speed, and the rest of a layer, which it always computes ([`rest`]);
//! - [`sync`]: what waiting for one another costs, and how it is spent;
//! - [`graphs`]: the numbers of tokens that the NPU is ready for, covers of a prompt by them, and making new ones;
//! - [`solver`]: how a product is cut between both;
//! - [`prefill`] and [`decode`]: the stages of a layer under each strategy;
//! - [`Chip`]: one SoC working on one model, which planner and simulator both ask;
//! - [`metrics`]: what a trace tells of it: speeds, energy, how long the GPU's queue is held.
//!
//! Not here: running the stages one after another, which is the simulator's, and waiting for weights: they are at hand.

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
