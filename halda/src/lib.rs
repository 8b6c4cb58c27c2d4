//! Which device should run which layers of a model?
//!
//! The layer-to-device assignment (LDA) of the prima.cpp paper.

pub mod instance;
pub mod validation;

pub use instance::{Device, Gpu, Instance, Model, OperatingSystem};
pub use validation::InstanceError;
