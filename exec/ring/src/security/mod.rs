//! Security: the shared key, and transports encrypted with it.

mod encrypted;
mod key;
pub(crate) mod noise;

pub use encrypted::EncryptedTransport;
pub use key::{KEY_VARIABLE, Key, KeyError, create_secret_file, read_secret_file};
