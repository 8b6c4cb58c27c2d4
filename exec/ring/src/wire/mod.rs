//! The wire protocol: transports, frames, messages, and how connections begin and carry activations.

pub mod activations;
mod data_link;
mod frame;
mod handshake;
mod message;
mod pending;
mod transport;

pub use crate::error::WireError;
pub use data_link::{
    DataConnector, DataLinkEvent, DataLinkEventSink, PreparedEpoch, ReceivedActivations, SharedPreparedEpoch,
    accept_activations, receive_activations,
};
pub use frame::{ENCRYPTED_PREFIX, Frame, MAX_DOCUMENT_PAYLOAD_BYTES};
pub use handshake::{WRITE_TIMEOUT, open_connection, read_hello, send_refusal, send_welcome, with_timeout};
pub use message::{
    ActivationsHeader, BrokenLink, ConnectionPurpose, EpochConfig, FileLengths, MAGIC, Message,
    PROTOCOL_VERSION, PeerAddress, WorkerInfo,
};
pub use pending::{PendingConnection, PendingConnections};
pub use transport::{ByteStream, Listener, MemoryTransport, TcpTransport, Transport, bind};
