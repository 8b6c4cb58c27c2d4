//! The worker: computes layers for one head at a time.
//!
//! The first frame of each connection states its purpose. The control connection of a head opens a session: the
//! worker describes its model and executes the head's commands ([`session`]). When it has prepared an epoch, it
//! accepts only activations of that epoch. When it has received the plan and its place in the ring, it computes
//! ([`epoch`]). The ring may be reconfigured during a session. The session ends when the head says goodbye, does not
//! respond or disconnects; the worker then waits for the next head.
//!
//! A worker has one session at a time, because two heads would both use its memory without knowing it. Every wait has
//! a deadline, and the number of connections that have not stated their purpose is bounded
//! ([`crate::wire::PendingConnections`]).

mod epoch;
mod head_connection;
mod model_source;
mod server;
mod session;

pub use model_source::ModelSource;
pub use server::Worker;
pub use session::WorkerOptions;
