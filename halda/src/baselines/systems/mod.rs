//! Plans of other systems, which keep all weights in memory of their own.
//!
//! Systems that hold their weights in memory of their own (prima.cpp paper, section 2 and Table 2): a module for each
//! family, after what that paper says of it. Their plans are simulated only.
//!
//! | name | shares out | by | weights | sums |
//! | --- | --- | --- | --- | --- |
//! | `exo` | layers | total memory | 16 bit on CPUs, 32 on GPUs, as they are on macOS | - |
//! | `dllama` | every layer | evenly over 2^n devices | 4 bit, the head loads all | all-gather in 8 bit |
//! | `tpi-llm` | every layer | evenly | 32 bit, a sliding window from disk | star |
//! | `hepti` | every layer | speed, within memory | 32 bit | star |
//! | `galaxy` | every layer | speed, then memory | 32 bit | ring |
//! | `airinfer` | every layer | evenly | 32 bit | over the air |
//!
//! The layer-to-device assignment and its latency model know one device a layer, so that these planners take the
//! cluster itself. What their plans do, the simulator says.
//!
//! Not here: the same rules over the assignment problem (`mem-total` for exo, `perf` for Galaxy), whose plans run.

mod even;
mod exo;
mod slices;
mod speed;

use hearth_core::Cluster;
use hearth_profiles::{Document, DocumentError, Format, Seconds};
use hearth_schema::plan::Origin;
use hearth_schema::plan::Plan;

/// Every name, in the order in which they are listed.
pub const NAMES: [&str; 6] = ["exo", "dllama", "tpi-llm", "hepti", "galaxy", "airinfer"];

/// The options of these planners.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SystemOptions {
    /// The format of the weights instead of the system's.
    pub weights_as: Option<Format>,
    /// `airinfer`: what one all-reduce takes.
    pub air_time: Option<Seconds>,
}

/// Why a system has no plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SystemError {
    /// No system is called so.
    #[error("no system is called `{name}`: use one of {}", NAMES.join(", "))]
    Unknown {
        /// What was asked for.
        name: String,
    },
    /// A workload that no such system takes.
    #[error(
        "`{system}` takes {takes}; take `{key}` out of the scenario's workload, or plan with another strategy"
    )]
    Workload {
        /// The system.
        system: &'static str,
        /// What it takes.
        takes: &'static str,
        /// What to take out.
        key: &'static str,
    },
    /// Every device is left out.
    #[error("`{system}` runs on none of these devices: {why}")]
    NoDevice {
        /// The system.
        system: &'static str,
        /// What they lack.
        why: &'static str,
    },
    /// The head is left out.
    #[error("`{system}` does not run on `{head}`, the head: {why}; choose another head")]
    NotTheHead {
        /// The system.
        system: &'static str,
        /// The head.
        head: String,
        /// Why.
        why: String,
    },
    /// All weights are to be in memory, and memory ends before.
    #[error(
        "`{system}` keeps all weights in memory as {format}, and memory holds {held} of the {whole} {unit}; use a \
         smaller format (`--weights-as q4_0`), a smaller model or more devices"
    )]
    OutOfMemory {
        /// The system.
        system: &'static str,
        /// The weights' format.
        format: String,
        /// What finds room.
        held: u64,
        /// What there is.
        whole: u64,
        /// Of what.
        unit: &'static str,
    },
    /// Not even a small window fits a device.
    #[error(
        "`{device}` has no room for two blocks of its slices: the largest takes {needed} beside {fixed} bytes"
    )]
    NoWindow {
        /// The device.
        device: String,
        /// Bytes of the largest block.
        needed: u64,
        /// Bytes of what has to be there besides.
        fixed: u64,
    },
    /// The cost of an all-reduce is an input.
    #[error(
        "`airinfer` needs the time of one all-reduce over the air; give it with `--air-time`, as `--air-time 2ms`"
    )]
    NoAirTime,
    /// An option that would be passed over.
    #[error("`{system}` does not take {option}; leave it out")]
    Unused {
        /// The system.
        system: &'static str,
        /// The option.
        option: &'static str,
    },
    /// The plan contradicts itself: a defect of the planner.
    #[error("the plan is not valid: {0}")]
    Invalid(#[from] DocumentError),
}

/// The plan of a system for a cluster.
pub fn plan(
    name: &str,
    cluster: &Cluster,
    scenario: &Origin,
    options: SystemOptions,
) -> Result<Plan, SystemError> {
    let Some(system) = NAMES.into_iter().find(|known| *known == name) else {
        return Err(SystemError::Unknown { name: name.to_owned() });
    };
    let refuse = |takes, key| Err(SystemError::Workload { system, takes, key });
    if cluster.workload.speculation.is_some() {
        return refuse("no draft model", "speculation");
    }
    if cluster.workload.sequences > 1 && system != "exo" {
        return refuse("one sequence at a time", "sequences");
    }
    if options.air_time.is_some() && system != "airinfer" {
        return Err(SystemError::Unused { system, option: "`--air-time`" });
    }
    if options.weights_as.is_some() && matches!(system, "exo" | "dllama") {
        return Err(SystemError::Unused { system, option: "`--weights-as`: its format is its own" });
    }
    let plan = match system {
        "exo" => exo::plan(cluster, scenario),
        "dllama" => Ok(even::dllama(cluster, scenario)),
        "tpi-llm" => even::tpi_llm(cluster, scenario, options),
        "hepti" => speed::hepti(cluster, scenario, options),
        "galaxy" => speed::galaxy(cluster, scenario, options),
        _ => even::airinfer(cluster, scenario, options),
    }?;
    plan.validate()?;
    Ok(plan)
}
