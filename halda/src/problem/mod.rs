//! The layer-to-device assignment problem: instances with validation and conversion from a cluster, and assignments.

pub mod assignment;
mod from_cluster;
pub mod instance;
pub mod validation;

pub use from_cluster::{SLOW_DISK_THRESHOLD, exo_memory_by_device};
