//! The worker: serves one head after another with its layers.
//!
//! It listens, and each connection first states its purpose. A head's control connection opens a session: the worker
//! tells what model it has and follows the head's orders ([`session`]). It prepares for an epoch, from which it accepts
//! activations of that epoch only; it takes the plan and its place in it, and from then on computes ([`epoch`]). The
//! ring may be reconfigured in mid-session. The session ends when the head says goodbye, falls silent or disappears;
//! the worker then waits for the next.
//!
//! One session at a time: two heads would share its memory without knowing. Every wait has a deadline, and connections
//! that have not stated their purpose are bounded ([`crate::wire::PendingConnections`]).

mod epoch;
mod head_connection;
mod model_source;
mod server;
mod session;

pub use model_source::ModelSource;
pub use server::Worker;
pub use session::WorkerOptions;
