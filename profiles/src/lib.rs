//! What do we know about a device, a link and a model, and in which units?
//!
//! The leaf of the workspace: every other crate speaks in these terms.

pub mod format;
pub mod gguf;
pub mod model;
pub mod units;

pub use format::Format;
pub use units::{Bytes, BytesPerSecond, Flops, FlopsPerSecond, Fraction, Layers, Seconds};
