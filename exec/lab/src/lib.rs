//! The lab: emulates the devices of a scenario as processes on one Linux machine.
//!
//! Each device of a scenario is a process in separate control groups, which limit its memory, disk reads and CPU time
//! ([`cgroups`]). Each device has a separate copy of the model, because page cache is charged to the control group
//! that first accesses a page. All changes to the machine are undone at the end, or by the next lab after a crash.
//!
//! Not here: the plan, the prediction, and their comparison with the run, which belong to the command line.

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr, clippy::exit))]
#![cfg(target_os = "linux")]

pub mod cgroups;
pub mod copies;
pub mod limited_command;
pub mod meter;
pub mod network;
pub mod process;

pub use cgroups::{Cgroup, CgroupHierarchy, DeviceLimits, ThrottleCounter};
pub use copies::ModelCopies;
pub use limited_command::{CommandRunner, CommandUsage, CpuHog, MemoryHog};
pub use meter::{DeviceUsage, Meter, WatchedDevice};
pub use network::VirtualNetwork;
pub use process::{DeviceProcess, FreezeHandle, Placement};

/// Prefix of the names of all control groups and folders that a lab creates. The ID of the lab process follows.
const PREFIX: &str = "hearth-lab-";

/// Returns the ID of the lab process that created the control group or folder of this name.
fn owner(name: &std::ffi::OsStr) -> Option<u32> {
    name.to_str()?.strip_prefix(PREFIX)?.split('-').next()?.parse().ok()
}

fn has_exited(process: u32) -> bool {
    !std::path::Path::new(&format!("/proc/{process}")).exists()
}

/// An error of setting up or running a lab.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// The resource `what` cannot be limited, because control groups are missing or not writable; `why` has details.
    #[error("cannot limit {what}: {why}")]
    NoGroups { what: &'static str, why: String },
    /// A control group rejects the value of a limit; `path` is the file of the limit.
    #[error("cannot set a limit of the control group to `{value}`: {why}")]
    Limit { path: String, value: String, why: String },
    /// The hosts of the emulated network cannot be created; `why` has details.
    #[error("cannot create the hosts of the emulated network: {why}")]
    NoNetwork { why: String },
    #[error("cannot copy the model: {why}")]
    Copy { path: String, why: String },
    #[error("cannot drop the file from the page cache: {why}")]
    Cache { path: String, why: String },
    /// The process of a device or program cannot be started, does not respond, or has exited; `why` has details.
    #[error("the process of `{name}` {what}: {why}")]
    Process { name: String, what: &'static str, why: String },
}

impl LabError {
    /// Returns the path of the file that caused the error, if it is known.
    pub fn path(&self) -> Option<&str> {
        match self {
            Self::Limit { path, .. } | Self::Copy { path, .. } | Self::Cache { path, .. } => Some(path),
            Self::NoGroups { .. } | Self::NoNetwork { .. } | Self::Process { .. } => None,
        }
    }

    pub fn hint(&self) -> Option<&'static str> {
        Some(match self {
            LabError::NoGroups { .. } => "run as root with control groups, or remove the device's `limits`",
            LabError::Limit { .. } => "set a limit that is at most the limit of the parent control group",
            LabError::NoNetwork { .. } => {
                "run as root on Linux with `/dev/net/tun`, or set `links.emulation: delays`"
            }
            LabError::Copy { .. } => "free disk space, or set another folder with `--scratch`",
            LabError::Cache { .. } => "choose a file that exists and is readable",
            LabError::Process { .. } => return None,
        })
    }
}
