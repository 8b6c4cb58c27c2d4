//! Emulation: transports that deliver as late as the links of other devices would.

mod delayed;
mod emulated;

pub use delayed::Delayed;
pub use emulated::{Emulated, Way, Ways};
