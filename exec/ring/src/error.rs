//! The errors of a ring: of frames, of encrypted connections, and of the ring as a whole.

use std::io;

use hearth_core::schedule::ScheduleError;

/// Why a ring does not come up, or stops.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// Nobody answers at a worker's address.
    #[error(
        "cannot reach worker `{name}` at {address}: {why}; start it with `hearth worker --listen {address} --model GGUF`"
    )]
    Unreachable {
        /// The worker.
        name: String,
        /// Its address.
        address: String,
        /// What the system said.
        why: String,
    },
    /// Not all workers of the plan announce themselves.
    #[error("{0}")]
    Discovery(String),
    /// A worker of the plan has no address.
    #[error(
        "the plan gives worker `{name}` no address; add `address: HOST:PORT` to it, or look for it with --discover"
    )]
    NoAddress {
        /// The worker.
        name: String,
    },
    /// The address to listen at cannot be had.
    #[error(
        "cannot listen at {address}: {why}; say HOST:PORT, as 127.0.0.1:9001, with an address of this machine and a port \
         that no other program uses"
    )]
    CannotListen {
        /// The address.
        address: String,
        /// What the system said.
        why: String,
    },
    /// A worker listens beyond this machine although nothing authenticates who connects.
    #[error(
        "{address} can be reached from other machines, and without a key anybody there could use the worker; listen at 127.0.0.1, or give every device the same --key"
    )]
    NotLoopback {
        /// The address.
        address: String,
    },
    /// Two ends of a connection do not have the same key.
    #[error("no connection with `{name}`: {why}")]
    Key {
        /// Who.
        name: String,
        /// What was seen, and how to mend it.
        why: String,
    },
    /// The peer says no.
    #[error("`{name}` refused: {reason}")]
    Refused {
        /// Who.
        name: String,
        /// Why.
        reason: String,
    },
    /// The worker has another model than the plan was made for.
    #[error(
        "{name} has another model: the plan is for {expected}, its file is {found}; give it the plan's model"
    )]
    AnotherModel {
        /// Who.
        name: String,
        /// The plan's digest.
        expected: String,
        /// The worker's.
        found: String,
    },
    /// A worker's connection ended in mid-run.
    #[error("worker `{name}` is gone ({why}); see its output and start it again")]
    Gone {
        /// Who.
        name: String,
        /// What was seen.
        why: String,
    },
    /// A device is gone, and the others cannot go on without it.
    #[error("the ring cannot go on: {lost}; and without it {reason}")]
    CannotGoOn {
        /// Who is gone, and why.
        lost: String,
        /// Why the rest cannot hold the model, without a full stop.
        reason: String,
    },
    /// Threads for the network cannot be had.
    #[error("cannot start the threads that measure links: {source}")]
    Threads {
        /// What the system said.
        source: io::Error,
    },
    /// Somebody wants the run to end.
    #[error("the run was interrupted")]
    Interrupted,
    /// The folder for fetched layers cannot be used.
    #[error(
        "cannot keep fetched layers in {path}: {why}; see whether there is room and it may be written to"
    )]
    Cache {
        /// The folder or file.
        path: String,
        /// What the system said.
        why: String,
    },
    /// A wait went past its deadline.
    #[error("{what} took longer than {seconds} s; {hint}")]
    Deadline {
        /// What was waited for.
        what: String,
        /// The deadline.
        seconds: f64,
        /// What to try.
        hint: &'static str,
    },
    /// A peer sent what cannot follow.
    #[error("`{name}` broke the protocol: {what}")]
    Protocol {
        /// Who.
        name: String,
        /// What came.
        what: String,
    },
    /// A message out of turn.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// A frame that is none.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// A computation failed.
    #[error(transparent)]
    Compute(#[from] hearth_runtime::ExecError),
    /// The plan does not fit the model or the machine.
    #[error("{0}")]
    Plan(String),
}

impl RingError {
    /// Why a first frame did not come from, or go to, the peer of this name.
    pub fn greeting(name: &str, error: &WireError) -> RingError {
        let of_key = match error {
            WireError::Sealed => true,
            WireError::Io(io) => {
                io.get_ref().is_some_and(<dyn std::error::Error + Send + Sync>::is::<SealError>)
            }
            WireError::TooLong { .. } | WireError::Header(_) | WireError::Cut => false,
        };
        if of_key {
            RingError::Key { name: name.into(), why: error.to_string() }
        } else {
            RingError::Gone { name: name.into(), why: error.to_string() }
        }
    }
}

/// A peer that broke the protocol.
pub fn strange(name: &str, what: &str) -> RingError {
    RingError::Protocol { name: name.into(), what: what.into() }
}

/// Why bytes are not a frame.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// A length beyond its limit.
    #[error("a frame announces a {what} of {length} bytes; at most {limit} are taken")]
    TooLong {
        /// `header` or `payload`.
        what: &'static str,
        /// What was announced.
        length: usize,
        /// What is allowed here.
        limit: usize,
    },
    /// The header is not one.
    #[error("a frame's header cannot be read: {0}")]
    Header(String),
    /// The peer's connections are sealed and this end's are not.
    #[error("the peer has a key and this end has none; give both ends the same --key")]
    Sealed,
    /// The stream ended inside a frame.
    #[error("the connection ended inside a frame")]
    Cut,
    /// The connection failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Why a sealed connection cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// The handshake failed.
    #[error(
        "the connection cannot be sealed ({seen}): the peer has no key or another one; give both ends the same --key"
    )]
    Key {
        /// What the peer did.
        seen: &'static str,
    },
    /// A message does not verify.
    #[error("a sealed message was altered or repeated on its way; look for who is between the devices")]
    Damaged,
    /// The cipher cannot go on.
    #[error("the connection cannot be sealed: {0}")]
    Cipher(String),
}

impl From<snow::Error> for SealError {
    fn from(error: snow::Error) -> SealError {
        SealError::Cipher(error.to_string())
    }
}

impl From<SealError> for io::Error {
    fn from(error: SealError) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, error)
    }
}
