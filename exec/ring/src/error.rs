//! The errors of a ring: of frames, of encrypted connections, and of the ring as a whole.
//!
//! An error keeps what is wrong apart from how to fix it ([`RingError::what`], [`RingError::hint`]); `Display` joins
//! them in one line, for logs and for other devices.

use std::borrow::Cow;
use std::fmt;
use std::io;

use hearth_core::schedule::ScheduleError;

/// How to fix two ends that do not have the same key.
const SAME_KEY: &str = "give both ends the same --key";

/// Why a ring does not come up, or stops.
#[derive(Debug)]
pub enum RingError {
    /// No worker answers at this address.
    Unreachable {
        name: String,
        address: String,
        reason: String,
    },
    /// Not all workers of the plan were discovered.
    Discovery {
        what: String,
        hint: Option<String>,
    },
    /// A worker of the plan has no address.
    NoAddress {
        name: String,
    },
    CannotListen {
        address: String,
        reason: String,
    },
    /// The address can be reached from other machines, and there is no key.
    KeyRequired {
        address: String,
    },
    /// Two ends of a connection do not have the same key, or the connection was tampered with.
    KeyMismatch {
        name: String,
        reason: String,
        hint: Option<&'static str>,
    },
    /// The peer refuses, in its own words.
    Refused {
        name: String,
        reason: String,
    },
    /// A worker has another model than the plan was made for.
    ModelMismatch {
        name: String,
        expected: String,
        found: String,
    },
    /// A connection of a running ring ended.
    Disconnected {
        name: String,
        reason: String,
    },
    /// A device is lost, and the others cannot continue without it.
    CannotRecover {
        lost: String,
        reason: String,
    },
    /// Threads for the network cannot be started.
    Threads(io::Error),
    /// The run was cancelled.
    Interrupted,
    /// The folder for fetched layers cannot be used.
    FetchFolder {
        path: String,
        reason: String,
    },
    /// A wait went past its deadline.
    Deadline {
        what: String,
        seconds: f64,
        hint: &'static str,
    },
    /// A peer sent what cannot follow.
    Protocol {
        name: String,
        what: String,
    },
    /// A message out of turn.
    Schedule(ScheduleError),
    Wire(WireError),
    Compute(hearth_runtime::ExecError),
    /// The plan does not fit the model, the machine or the request.
    Plan {
        what: String,
        hint: Option<String>,
    },
}

impl RingError {
    /// A plan that cannot be used, where no flag or option would help.
    pub fn plan(what: impl Into<String>) -> RingError {
        RingError::Plan { what: what.into(), hint: None }
    }

    /// A plan that cannot be used, and how to change it.
    pub fn plan_with_hint(what: impl Into<String>, hint: impl Into<String>) -> RingError {
        RingError::Plan { what: what.into(), hint: Some(hint.into()) }
    }

    /// An error of the first frame to or from a peer.
    pub fn handshake(name: &str, error: &WireError) -> RingError {
        let (name, reason) = (name.into(), error.to_string());
        if matches!(error, WireError::Encrypted) || error.encryption().is_some() {
            RingError::KeyMismatch { name, reason, hint: error.hint() }
        } else {
            RingError::Disconnected { name, reason }
        }
    }

    /// What is wrong, without where and how to fix it.
    pub fn what(&self) -> String {
        match self {
            RingError::Unreachable { name, address, reason } => {
                format!("cannot reach worker `{name}` at {address}: {reason}")
            }
            RingError::Discovery { what, .. } | RingError::Plan { what, .. } => what.clone(),
            RingError::NoAddress { name } => format!("the plan gives worker `{name}` no address"),
            RingError::CannotListen { address, reason } => format!("cannot listen at {address}: {reason}"),
            RingError::KeyRequired { address } => format!(
                "{address} can be reached from other machines, and without a key anybody there could use the worker"
            ),
            RingError::KeyMismatch { name, reason, .. } => format!("no connection with `{name}`: {reason}"),
            RingError::Refused { name, reason } => format!("`{name}` refused: {reason}"),
            RingError::ModelMismatch { name, expected, found } => {
                format!("{name} has another model: the plan is for {expected}, its file is {found}")
            }
            RingError::Disconnected { name, reason } => format!("worker `{name}` is gone ({reason})"),
            RingError::CannotRecover { lost, reason } => {
                format!("the ring cannot go on: {lost}; and without it {reason}")
            }
            RingError::Threads(error) => format!("cannot start the threads that measure links: {error}"),
            RingError::Interrupted => "the run was interrupted".into(),
            RingError::FetchFolder { reason, .. } => format!("cannot keep fetched layers: {reason}"),
            RingError::Deadline { what, seconds, .. } => format!("{what} took longer than {seconds} s"),
            RingError::Protocol { name, what } => format!("`{name}` broke the protocol: {what}"),
            RingError::Schedule(error) => error.to_string(),
            RingError::Wire(error) => error.to_string(),
            RingError::Compute(error) => error.to_string(),
        }
    }

    /// The file or folder that the error is about.
    pub fn place(&self) -> Option<&str> {
        match self {
            RingError::FetchFolder { path, .. } => Some(path),
            _ => None,
        }
    }

    /// A hint for a fix, if known.
    pub fn hint(&self) -> Option<Cow<'_, str>> {
        let fixed = match self {
            RingError::Unreachable { address, .. } => {
                return Some(format!("start it with `hearth worker --listen {address} --model GGUF`").into());
            }
            RingError::Discovery { hint, .. } | RingError::Plan { hint, .. } => {
                return hint.as_deref().map(Cow::from);
            }
            RingError::NoAddress { .. } => "add `address: HOST:PORT` to it, or look for it with --discover",
            RingError::CannotListen { .. } => {
                "give HOST:PORT, as 127.0.0.1:9001, with an address of this machine and a port that no other program uses"
            }
            RingError::KeyRequired { .. } => "listen at 127.0.0.1, or give every device the same --key",
            RingError::KeyMismatch { hint, .. } => return hint.map(Cow::from),
            RingError::ModelMismatch { .. } => "give it the plan's model",
            RingError::Disconnected { .. } => "see its output and start it again",
            RingError::FetchFolder { .. } => "check the free space and the permissions of the folder",
            RingError::Deadline { hint, .. } => hint,
            RingError::Wire(error) => return error.hint().map(Cow::from),
            RingError::Refused { .. }
            | RingError::CannotRecover { .. }
            | RingError::Threads(_)
            | RingError::Interrupted
            | RingError::Protocol { .. }
            | RingError::Schedule(_)
            | RingError::Compute(_) => return None,
        };
        Some(fixed.into())
    }
}

impl fmt::Display for RingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what())?;
        if let Some(place) = self.place() {
            write!(f, " in {place}")?;
        }
        self.hint().map_or(Ok(()), |hint| write!(f, "; {hint}"))
    }
}

impl std::error::Error for RingError {}

impl From<ScheduleError> for RingError {
    fn from(error: ScheduleError) -> Self {
        RingError::Schedule(error)
    }
}

impl From<WireError> for RingError {
    fn from(error: WireError) -> Self {
        RingError::Wire(error)
    }
}

impl From<hearth_runtime::ExecError> for RingError {
    fn from(error: hearth_runtime::ExecError) -> Self {
        RingError::Compute(error)
    }
}

/// A peer that broke the protocol.
pub fn protocol_error(name: &str, what: &str) -> RingError {
    RingError::Protocol { name: name.into(), what: what.into() }
}

/// Why bytes are not a frame.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// A `header` or `payload` beyond its limit.
    #[error("a frame announces a {what} of {length} bytes; at most {limit} are taken")]
    TooLong { what: &'static str, length: usize, limit: usize },
    #[error("a frame's header cannot be read: {0}")]
    Header(String),
    /// The peer encrypts its connections and this end does not.
    #[error("the peer has a key and this end has none")]
    Encrypted,
    /// The stream ended inside a frame.
    #[error("the connection ended inside a frame")]
    Cut,
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl WireError {
    /// The error of the encrypted connection below, if that failed.
    fn encryption(&self) -> Option<&EncryptionError> {
        match self {
            WireError::Io(io) => io.get_ref()?.downcast_ref(),
            _ => None,
        }
    }

    fn hint(&self) -> Option<&'static str> {
        match (self, self.encryption()) {
            (WireError::Encrypted, _) | (_, Some(EncryptionError::Key { .. })) => Some(SAME_KEY),
            (_, Some(EncryptionError::Damaged)) => Some("look for who is between the devices"),
            _ => None,
        }
    }
}

/// Why an encrypted connection cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncryptionError {
    /// The handshake failed; `seen` is what the peer did.
    #[error("the connection cannot be encrypted ({seen}): the peer has no key or another one")]
    Key { seen: &'static str },
    /// A message does not verify.
    #[error("an encrypted message was altered or repeated on its way")]
    Damaged,
    #[error("the connection cannot be encrypted: {0}")]
    Cipher(String),
}

impl From<snow::Error> for EncryptionError {
    fn from(error: snow::Error) -> EncryptionError {
        EncryptionError::Cipher(error.to_string())
    }
}

impl From<EncryptionError> for io::Error {
    fn from(error: EncryptionError) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, error)
    }
}
