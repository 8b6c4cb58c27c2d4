//! Integration tests of the runtime: whole models in one process.

mod architectures;
mod bad_files;
mod golden;
mod models;
mod packed;
mod public;
mod same_bits;
mod synth;
mod tokens;
mod weight_digests;
