//! The wire protocol: transports, frames, messages, and how connections begin and carry activations.

mod accepted;
pub mod activations;
mod budget;
mod data_link;
mod frame;
mod handshake;
mod message;
mod tcp_statistics;
mod transport;

pub use crate::error::WireError;
pub use accepted::{AcceptedConnection, AcceptedConnections, ConnectionKind};
pub use budget::{ReceiveBudget, Reservation};
pub use data_link::{
    ActivationCounters, DataConnector, DataLinkEvent, DataLinkEventSink, MAX_DATA_CONNECTIONS, PreparedEpoch,
    ReceivedActivations, SharedPreparedEpoch, accept_activations, receive_activations,
    replace_prepared_epoch,
};
pub use frame::{ENCRYPTED_PREFIX, Frame, FrameHeader, MAX_DOCUMENT_PAYLOAD_BYTES};
pub use handshake::{WRITE_TIMEOUT, open_connection, read_hello, send_refusal, send_welcome, with_timeout};
pub use message::{
    ActivationCounts, ActivationsHeader, BrokenLink, ConnectionPurpose, EpochConfig, FileLengths, MAGIC,
    Message, PROTOCOL_VERSION, PeerAddress, WorkerInfo,
};
pub use tcp_statistics::TcpStatistics;
pub use transport::{ByteStream, Listener, MemoryTransport, TcpTransport, Transport, bind, set_tcp_options};
