//! Escaping of names from a trace, and rounding of numbers such that printed columns add up.

pub mod escape;
pub mod numbers;
