//! Error types of the ring: errors of frames, of encrypted connections, and of the ring as a whole.
//!
//! A [`RingError`] keeps the problem ([`RingError::what`]) and the hint ([`RingError::hint`]) separate. `Display` joins
//! them into one line, for logs and for messages to other devices.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::path::Path;

use hearth_core::schedule::ScheduleError;

/// The hint for two devices that do not have the same key.
const SAME_KEY: &str = "give both devices the same `--key`";

/// Maximum length of a reason that another device sends. source: assumed, a few lines of a terminal
const MAX_REASON_CHARS: usize = 500;

pub type Result<T, E = RingError> = std::result::Result<T, E>;

/// An error that prevents a ring from starting or stops a running ring.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// The worker `name` cannot be reached at `address`.
    Unreachable { name: String, address: String, reason: String },
    /// The search for the addresses of the workers failed.
    Discovery { what: String, hint: Option<String> },
    /// A worker of the plan has no address.
    NoAddress { name: String },
    /// The address cannot be bound, or no connection can be accepted on it.
    CannotListen { address: String, reason: String },
    /// Without a key, a device connects and listens only on loopback, and the address is not a loopback address.
    KeyRequired { address: String },
    /// The two devices of a connection do not have the same key, or a third party has tampered with the connection.
    KeyMismatch { name: String, reason: String, hint: Option<&'static str> },
    /// The device `name` refused the connection or a command, and sent the `reason`.
    Refused { name: String, reason: String },
    /// The model of a device is not the one that the plan was made for.
    ModelMismatch { name: String, expected: String, found: String },
    /// The connection to the device `name` ended unexpectedly.
    Disconnected { name: String, reason: String },
    /// A device is lost, and the remaining devices cannot continue without it.
    CannotRecover { lost: String, reason: String },
    /// The threads that measure the links to other devices cannot be started.
    ThreadStart(io::Error),
    /// The run was cancelled.
    Interrupted,
    /// The folder for fetched layers cannot be used.
    UnusableFetchFolder { path: String, reason: String },
    /// An operation did not finish before its deadline.
    Deadline { what: String, seconds: f64, hint: &'static str },
    /// The device `name` violated the protocol, for example with an unexpected message.
    Protocol { name: String, what: String },
    /// The device with ring index `sender_index` sent activations that no correct device sends.
    InvalidActivations { sender_index: u16, what: String },
    /// The schedule rejected an event, for example a plan that does not fit the current plan.
    Schedule(#[from] ScheduleError),
    /// A frame cannot be read or written.
    Wire(#[from] WireError),
    /// The layers cannot be loaded or computed.
    Compute(#[from] hearth_runtime::ExecError),
    /// The weights of a part of the model differ from their digests in the plan. `files` are the paths of the files.
    DamagedWeights { parts: String, files: String },
    /// The plan does not fit the model, the machine or the request.
    InvalidPlan { what: String, hint: Option<String> },
}

impl RingError {
    pub fn invalid_plan(what: impl Into<String>) -> RingError {
        RingError::InvalidPlan { what: what.into(), hint: None }
    }

    pub fn invalid_plan_with_hint(what: impl Into<String>, hint: impl Into<String>) -> RingError {
        RingError::InvalidPlan { what: what.into(), hint: Some(hint.into()) }
    }

    pub fn cannot_listen(address: &str, error: &io::Error) -> RingError {
        RingError::CannotListen { address: address.into(), reason: error.to_string() }
    }

    pub fn unusable_fetch_folder(path: &Path, error: &io::Error) -> RingError {
        RingError::UnusableFetchFolder { path: path.display().to_string(), reason: error.to_string() }
    }

    /// Creates the error for a refusal with a reason that another device has sent, of which a limited part is kept.
    pub fn refused(name: &str, reason: &str) -> RingError {
        RingError::Refused { name: name.into(), reason: reason.chars().take(MAX_REASON_CHARS).collect() }
    }

    pub fn disconnected(name: &str, reason: impl Into<String>) -> RingError {
        RingError::Disconnected { name: name.into(), reason: reason.into() }
    }

    /// Converts an error of the handshake with the peer `name`: an encryption error becomes a
    /// [`RingError::KeyMismatch`], any other error a [`RingError::Disconnected`].
    pub fn handshake_failed(name: &str, error: &WireError) -> RingError {
        if matches!(error, WireError::PeerEncrypts) || error.encryption().is_some() {
            RingError::KeyMismatch { name: name.into(), reason: error.to_string(), hint: error.hint() }
        } else {
            RingError::disconnected(name, error.to_string())
        }
    }

    /// Returns the error message without the file path and the hint.
    pub fn what(&self) -> String {
        match self {
            RingError::Unreachable { name, address, reason } => {
                format!("cannot reach worker `{name}` at {address}: {reason}")
            }
            RingError::Discovery { what, .. } | RingError::InvalidPlan { what, .. } => what.clone(),
            RingError::NoAddress { name } => format!("worker `{name}` has no address in the plan"),
            RingError::CannotListen { address, reason } => format!("cannot listen on {address}: {reason}"),
            RingError::KeyRequired { address } => {
                format!(
                    "{address} is not a loopback address, and connections without a key are not encrypted"
                )
            }
            RingError::KeyMismatch { name, reason, .. } => format!("connection to `{name}` failed: {reason}"),
            RingError::Refused { name, reason } => format!("`{name}` refused the request: {reason}"),
            RingError::ModelMismatch { name, expected, found } => {
                format!("{name} has a different model than the plan: {found} instead of {expected}")
            }
            RingError::Disconnected { name, reason } => format!("lost the connection to `{name}` ({reason})"),
            RingError::CannotRecover { lost, reason } => {
                format!("the ring cannot continue: {lost}; {reason}")
            }
            RingError::ThreadStart(error) => format!("cannot start the threads that measure links: {error}"),
            RingError::Interrupted => "the run was interrupted".into(),
            RingError::UnusableFetchFolder { reason, .. } => format!("cannot store fetched layers: {reason}"),
            RingError::Deadline { what, seconds, .. } => format!("{what} took longer than {seconds} s"),
            RingError::Protocol { name, what } => format!("protocol error ({name}): {what}"),
            RingError::InvalidActivations { sender_index, what } => {
                format!("device {sender_index} sent invalid activations: {what}")
            }
            RingError::Schedule(error) => error.to_string(),
            RingError::Wire(error) => error.to_string(),
            RingError::Compute(error) => error.to_string(),
            RingError::DamagedWeights { parts, .. } => {
                format!("the digests in the plan do not match the weights of {parts}")
            }
        }
    }

    /// Returns the files or the folder that the error is about, if there are any.
    pub fn path(&self) -> Option<&str> {
        match self {
            RingError::UnusableFetchFolder { path, .. } | RingError::DamagedWeights { files: path, .. } => {
                Some(path)
            }
            _ => None,
        }
    }

    pub fn hint(&self) -> Option<Cow<'_, str>> {
        let fixed = match self {
            RingError::Unreachable { name, address, .. } => {
                let hint = format!("run `hearth worker --listen {address} --model GGUF` on `{name}`");
                return Some(hint.into());
            }
            RingError::Discovery { hint, .. } | RingError::InvalidPlan { hint, .. } => {
                return hint.as_deref().map(Cow::from);
            }
            RingError::NoAddress { .. } => "add `address: HOST:PORT` to the plan, or use `--discover`",
            RingError::CannotListen { .. } => {
                "give HOST:PORT, for example 127.0.0.1:9001, with an address of this machine and a free port"
            }
            RingError::KeyRequired { .. } => {
                "make a key with `hearth key ring.key` and give every device `--key ring.key`, \
                 or use addresses of this machine (127.0.0.1, ::1)"
            }
            RingError::KeyMismatch { hint, .. } => return hint.map(Cow::from),
            RingError::ModelMismatch { .. } => "give the device the model file that the plan was made for",
            RingError::Disconnected { .. } => "check the output of the other device and start it again",
            RingError::UnusableFetchFolder { .. } => "check the free space and the permissions of the folder",
            RingError::DamagedWeights { .. } => {
                "download the model again, and write its packed weights again; or plan again with `--hash-weights` if the file is \
                 right"
            }
            RingError::Deadline { hint, .. } => hint,
            RingError::Wire(error) => return error.hint().map(Cow::from),
            _ => return None,
        };
        Some(fixed.into())
    }
}

impl fmt::Display for RingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what())?;
        if let Some(path) = self.path() {
            write!(f, " in {path}")?;
        }
        self.hint().map_or(Ok(()), |hint| write!(f, "; {hint}"))
    }
}

pub fn protocol_error(name: &str, what: impl Into<String>) -> RingError {
    RingError::Protocol { name: name.into(), what: what.into() }
}

/// An error of reading or writing a frame.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// A header or payload (`what`) is longer than its limit, both in bytes.
    #[error("a frame announces a {what} of {length} bytes; the limit is {limit} bytes")]
    TooLong { what: &'static str, length: usize, limit: usize },
    #[error("the header of a frame is invalid: {0}")]
    InvalidHeader(String),
    /// The peer encrypts its connections and this device does not.
    #[error("the other device has a key and this device has none")]
    PeerEncrypts,
    #[error("the connection ended in the middle of a frame")]
    Truncated,
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl WireError {
    /// Whether the peer sent something that no correct device sends; otherwise the connection ended or was tampered
    /// with.
    pub fn is_fault(&self) -> bool {
        matches!(self, WireError::TooLong { .. } | WireError::InvalidHeader(_))
    }

    /// Returns the encryption error that caused this error, if there is one.
    fn encryption(&self) -> Option<&EncryptionError> {
        if let WireError::Io(io) = self { io.get_ref()?.downcast_ref() } else { None }
    }

    fn hint(&self) -> Option<&'static str> {
        match (self, self.encryption()) {
            (WireError::PeerEncrypts, _) | (_, Some(EncryptionError::Handshake { .. })) => Some(SAME_KEY),
            (_, Some(EncryptionError::Damaged)) => {
                Some("check the network: somebody between the devices may be changing messages")
            }
            _ => None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncryptionError {
    /// The handshake failed. `cause` is a sentence, for example that the peer does not respond.
    #[error("the encryption handshake failed because {cause}: the peer has no key or a different key")]
    Handshake { cause: &'static str },
    /// A message failed authentication.
    #[error("an encrypted message was altered or replayed during transmission")]
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
