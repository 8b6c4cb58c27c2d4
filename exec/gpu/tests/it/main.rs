//! Comparison of the GPU with the plain CPU.
//!
//! The tests use whatever adapter there is; a software driver will do. Without one each test prints `SKIPPED` and
//! passes.

mod attention;
mod converted;
mod deadlines;
mod gpu;
mod layouts;
mod models;
mod norms;
mod products;
mod rings;
mod sequences;
mod tuning;
