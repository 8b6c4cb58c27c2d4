//! Integration tests of the ring.

mod faults;
mod fixture;
mod in_flight;
mod mixtures;
mod parity;
mod profile;
mod transport;
mod unauthorized_peers;
