//! Plans of other systems, which pin all weights in memory.
//!
//! prima.cpp paper, section 2 and Table 2; one module per family. These plans can only be simulated.
//!
//! | name | distributes | by | weights | all-reduce |
//! | --- | --- | --- | --- | --- |
//! | `exo` | layers | total memory | 16 bit on CPUs, 32 on GPUs, original on macOS | - |
//! | `dllama` | every layer | evenly over 2^n devices | 4 bit, the head loads all | all-gather in 8 bit |
//! | `tpi-llm` | every layer | evenly | 32 bit, a sliding window from disk | star |
//! | `hepti` | every layer | speed, within memory | 32 bit | star |
//! | `galaxy` | every layer | speed, then memory | 32 bit | ring |
//! | `airinfer` | every layer | evenly | 32 bit | over the air |
//!
//! The layer-to-device assignment and its latency model assign each layer to one device, so these planners take the
//! cluster itself; the simulator evaluates their plans.
//!
//! Not here: the same rules for the assignment problem (`mem-total` for exo, `perf` for Galaxy), whose plans can be
//! executed.

mod even;
mod exo;
mod slices;
mod speed;

use hearth_core::Cluster;
use hearth_profiles::{Document, DocumentError, Format, Seconds};
use hearth_schema::plan::{Origin, Plan};

pub const NAMES: [&str; 6] = ["exo", "dllama", "tpi-llm", "hepti", "galaxy", "airinfer"];

#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SystemOptions {
    /// Overrides the system's format of weights.
    pub weights_as: Option<Format>,
    /// The time of one all-reduce (`airinfer`).
    pub air_time: Option<Seconds>,
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SystemError {
    #[error("no system is called `{name}`: use one of {}", NAMES.join(", "))]
    Unknown { name: String },
    #[error("`{system}` takes {takes}")]
    Workload { system: &'static str, takes: &'static str, key: &'static str },
    #[error("`{system}` runs on none of these devices: {why}")]
    NoDevice { system: &'static str, why: &'static str },
    #[error("`{system}` does not run on `{head}`, the head: {why}")]
    NotTheHead { system: &'static str, head: String, why: String },
    #[error(
        "`{system}` keeps all weights in memory as {format}, and memory holds {held} of the {whole} {unit}"
    )]
    OutOfMemory { system: &'static str, format: String, held: u64, whole: u64, unit: &'static str },
    #[error(
        "`{device}` has no memory for two blocks of its slices: the largest takes {needed} bytes, besides {fixed} bytes of cache and buffers"
    )]
    NoWindow { device: String, needed: u64, fixed: u64 },
    #[error("`airinfer` needs the time of one all-reduce over the air")]
    NoAirTime,
    #[error("`{system}` does not take {option}")]
    Unused { system: &'static str, option: &'static str },
    #[error("the plan is not valid: {0}")]
    Invalid(#[from] DocumentError),
}

impl SystemError {
    /// Returns what to change in the scenario or on the command line, if that is known.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Workload { key, .. } => {
                return Some(format!(
                    "take `{key}` out of the scenario's workload, or plan with another strategy"
                ));
            }
            Self::NotTheHead { .. } => "choose another head",
            Self::OutOfMemory { .. } => {
                "use a smaller format (`--weights-as q4_0`), a smaller model or more devices"
            }
            Self::NoAirTime => "give it with `--air-time`, such as `--air-time 2ms`",
            Self::Unused { .. } => "leave it out",
            Self::Unknown { .. } | Self::NoDevice { .. } | Self::NoWindow { .. } | Self::Invalid(_) => {
                return None;
            }
        };
        Some(hint.to_owned())
    }
}

/// Returns the validated plan of the system `name` for a cluster.
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
