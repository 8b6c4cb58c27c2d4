//! The layer-to-device assignment problem: instances (validated, or converted from a cluster) and assignments.

pub mod assignment;
mod from_cluster;
pub mod instance;
pub mod validation;

pub use from_cluster::{SLOW_DISK_THRESHOLD, exo_memory_by_device};
