//! Does the GPU compute what the plain CPU computes?
//!
//! On whatever adapter there is; a software driver will do. Without one each test says `SKIPPED` and passes.

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
