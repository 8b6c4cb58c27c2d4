//! hearth-exec

pub mod synth;
