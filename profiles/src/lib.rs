//! Quantities with units, profiles of devices, links and models, GGUF headers, and measurements of this machine.

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr, clippy::exit))]

pub mod device;
pub mod document;
pub mod document_values;
pub mod format;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod gguf;
pub mod link;
pub mod measure;
pub mod model;
pub mod parts;
mod shipped;
pub mod uncertainty;
pub mod units;

pub use device::DeviceProfile;
pub use document::{Document, DocumentError};
pub use document_values::{FormatMap, Sourced};
pub use format::Format;
pub use link::Link;
pub use shipped::UnknownDocument;
pub use units::{Bytes, BytesPerSecond, Flops, FlopsPerSecond, Fraction, Layers, PerSecond, Seconds, Watts};
