//! The worker: computes layers for one head at a time.
//!
//! The first frame of each connection states the purpose of the connection. The control connection of a head opens a
//! session, in which the worker executes the head's commands ([`session`]). The worker accepts only activations of the
//! epoch that it has prepared, and computes ([`epoch`]) when it has received the plan. The session ends when the head
//! says goodbye, does not respond or disconnects; the worker then waits for the next head.
//!
//! A worker has one session at a time, because two heads would plan with all of its memory. Every wait has a deadline.

mod epoch;
mod head_connection;
mod model_source;
mod server;
mod session;
#[expect(clippy::module_inception, reason = "the type that the folder is about")]
mod worker;

pub use model_source::ModelSource;
pub use worker::{Worker, WorkerOptions};
