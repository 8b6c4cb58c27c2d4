//! The worker: serves one head after another with its layers.
//!
//! It listens, and each connection first says what it is for. A head's control connection opens a session: the worker
//! tells what model it has and follows the head's orders (`Session`). It prepares for an epoch, which opens its door
//! to those who will send it activations and to nobody else; it takes the plan and its place in it, and from then on
//! its node computes (`epoch`). A ring may give way to another in mid-session. The session ends when the head
//! says goodbye, falls silent or disappears; the worker then waits for the next.
//!
//! One session at a time: two heads would share its memory without knowing. Every wait has a deadline. Strangers who
//! connect and say nothing are few at a time: when there are too many the one that has said nothing longest is sent
//! away, so that they cannot use up what the system has of connections.

mod epoch;
mod head_connection;
mod model_source;
mod server;
mod session;

pub use model_source::ModelSource;
pub use server::Worker;
pub use session::WorkerOptions;
