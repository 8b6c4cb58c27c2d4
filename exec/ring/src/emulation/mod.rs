//! Emulation: transports that delay messages as the network links of real devices would.

mod delayed;
mod paths;
mod shaped;

pub use delayed::DelayedTransport;
pub use paths::{EmulatedPath, EmulatedTransport, PathLookup};
