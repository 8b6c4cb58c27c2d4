//! The lab: emulates the devices of a scenario as processes on one Linux machine.
//!
//! Each device of a scenario is a process of its own inside control groups that bound its memory and its
//! disk reads ([`groups`]), with its own copy of the model, because page cache is charged to whichever process
//! touches a page first. Everything is undone at the end, and what a crashed lab left behind is removed
//! by the next.
//!
//! Not here: plan, prediction and comparison, which are the command line's.

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr, clippy::exit))]
#![cfg(target_os = "linux")]

pub mod copies;
pub mod groups;
pub mod limited;
pub mod meter;
pub mod process;

pub use copies::ModelCopies;
pub use groups::{DeviceLimits, Group, Groups, Throttle};
pub use limited::{CommandUsage, CpuHog, LimitedCommand, MemoryHog};
pub use meter::{DeviceUsage, Meter, WatchedDevice};
pub use process::{Child, Placement, ProcessStopper, processors};

/// First part of the name of everything a lab makes; its process's number follows.
const PREFIX: &str = "hearth-lab-";

/// The process that made something of this name.
fn owner(name: &std::ffi::OsStr) -> Option<u32> {
    name.to_str()?.strip_prefix(PREFIX)?.split('-').next()?.parse().ok()
}

/// Whether a process is gone.
fn is_gone(process: u32) -> bool {
    !std::path::Path::new(&format!("/proc/{process}")).exists()
}

/// Why a lab cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// There are no writable control groups for memory, disk reads or processor time.
    #[error("cannot limit {what}: {why}")]
    NoGroups { what: &'static str, why: String },
    /// A control group file refuses a value.
    #[error("cannot write `{value}`: {why}")]
    Limit { path: String, value: String, why: String },
    #[error("cannot copy the model: {why}")]
    Copy { path: String, why: String },
    #[error("cannot drop the file from memory: {why}")]
    Cache { path: String, why: String },
    /// The process of a device cannot be started, or has exited; `why` is its last output.
    #[error("device `{name}` {what}: {why}")]
    Process { name: String, what: &'static str, why: String },
}

impl LabError {
    /// The file that the error is about.
    pub fn place(&self) -> Option<&str> {
        match self {
            LabError::Limit { path, .. } | LabError::Copy { path, .. } | LabError::Cache { path, .. } => {
                Some(path)
            }
            LabError::NoGroups { .. } | LabError::Process { .. } => None,
        }
    }

    /// A hint for a fix, if known.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            LabError::NoGroups { .. } => {
                Some("run as root on Linux with control groups, or leave the device's `limits` out")
            }
            LabError::Limit { .. } => Some("another control group above may allow less"),
            LabError::Copy { .. } => {
                Some("each device needs its own copy: free some space or give another --scratch folder")
            }
            LabError::Cache { .. } => Some("give a file that exists and can be read"),
            LabError::Process { .. } => None,
        }
    }
}
