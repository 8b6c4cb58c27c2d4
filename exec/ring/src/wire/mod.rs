//! The wire protocol: transports, frames, messages, and how connections begin and carry activations.

pub mod activations;
mod data_link;
mod frame;
mod handshake;
mod message;
mod pending;
mod transport;

pub use crate::error::WireError;
pub use data_link::{Arrival, Cut, DataEvent, Deliver, Door, Sending, SharedDoor, admit, receive};
pub use frame::{Frame, MAX_DOCUMENT_PAYLOAD, SEALED};
pub use handshake::{WRITE_DEADLINE, call, hear, refuse, welcome, within};
pub use message::{FileOutline, MAGIC, Message, PROTOCOL, PeerAddress, Purpose, WorkerFacts};
pub use pending::{Known, Strangers};
pub use transport::{Listener, Memory, Network, Tcp, bind};
