//! Units, devices, links and models: the terms of every other crate, and the measurements of this machine.

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr, clippy::exit))]

pub mod device;
pub mod document;
pub mod format;
pub mod gguf;
pub mod link;
pub mod measure;
pub mod model;
pub mod per_format;
pub mod sourced;
pub mod units;

pub use device::Device;
pub use document::{Document, DocumentError};
pub use format::Format;
pub use link::Link;
pub use per_format::PerFormat;
pub use sourced::Sourced;
pub use units::{Bytes, BytesPerSecond, Flops, FlopsPerSecond, Fraction, Layers, PerSecond, Seconds, Watts};
