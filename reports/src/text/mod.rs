//! Text: names from a trace are escaped, numbers are rounded so that columns add up.

pub mod escape;
pub mod numbers;
