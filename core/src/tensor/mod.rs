//! Tensor parallelism: the weights of each slice, and the messages of an all-reduce.
//!
//! The plan itself is [`hearth_schema::plan::tensor_parallel`].

pub mod collective;
pub mod slicing;

pub use collective::Collective;
pub use slicing::SlicedModel;

#[cfg(test)]
mod tests;
