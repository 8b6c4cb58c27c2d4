//! Security: the shared key, and transports encrypted with it.

mod encrypted;
mod key;
mod noise;

pub use encrypted::Sealed;
pub use key::{Key, KeyError, VARIABLE};
