//! Tensor parallelism: which bytes a slice has, and who sends what in an all-reduce.
//!
//! The plan itself is [`hearth_schema::plan::tensor`].

pub mod collective;
pub mod slicing;

pub use collective::Collective;
pub use slicing::SlicedModel;

#[cfg(test)]
mod tests;
