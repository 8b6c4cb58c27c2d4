//! Emulation: transports that deliver as late as the links of other devices would.

mod delayed;
mod paths;

pub use delayed::DelayedTransport;
pub use paths::{EmulatedPath, EmulatedPaths, EmulatedTransport};
