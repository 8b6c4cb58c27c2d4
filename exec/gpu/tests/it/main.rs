//! Integration tests of the GPU backend, which compare GPU kernels with reference computations on the CPU.
//!
//! The tests use any available adapter, including a software driver. Without an adapter, each test prints `SKIPPED`
//! and passes.

mod attention;
mod converted;
mod gpu;
mod layouts;
mod matmuls;
mod models;
mod norms;
mod rings;
mod sequences;
mod timeouts;
mod tuning;
