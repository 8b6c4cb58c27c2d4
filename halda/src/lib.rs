//! Which device should run which layers of a model?
//!
//! The layer-to-device assignment (LDA) of the prima.cpp paper.

pub mod assignment;
pub mod coefficients;
pub mod constraints;
pub mod instance;
pub mod latency;
pub mod validation;

pub use assignment::{Assignment, Share, valid_rounds};
pub use coefficients::MemoryCase;
pub use constraints::{Rules, Violation, violations};
pub use instance::{Device, Gpu, Instance, Model, OperatingSystem};
pub use latency::{Breakdown, DeviceTerms, LatencyModel};
pub use validation::InstanceError;
