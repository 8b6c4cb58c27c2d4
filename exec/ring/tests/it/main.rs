//! Integration tests of the ring.

mod flight;
mod parity;
mod profile;
mod storms;
mod strangers;
mod transport;
