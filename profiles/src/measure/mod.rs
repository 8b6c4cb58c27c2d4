//! What can this machine do, measured now?
//!
//! The one module of this crate that touches hardware and reads clocks.

pub mod memory;
