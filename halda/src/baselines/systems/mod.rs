//! Planners of other systems, which pin weights in memory.
//!
//! The systems are those of the prima.cpp paper, section 2 and Table 2. Their plans can only be simulated.
//!
//! | name | unit | distribution | weights | all-reduce |
//! | --- | --- | --- | --- | --- |
//! | `exo` | layers | by total memory | 16 bit on CPUs, 32 bit on GPUs, original format on macOS | - |
//! | `dllama` | slices of every layer | even, over 2^n devices | 4 bit, the head loads all | all-gather in 8 bit |
//! | `tpi-llm` | slices of every layer | even | 32 bit, a sliding window from disk | star |
//! | `hepti` | slices of every layer | by speed, within memory | 32 bit | star |
//! | `galaxy` | slices of every layer | by speed, then by memory | 32 bit | ring |
//! | `airinfer` | slices of every layer | even | 32 bit | over the air |
//!
//! The layer-to-device assignment problem cannot express slices, so the input of these planners is the cluster.
//!
//! Not here: strategies with the same rules and executable plans (`mem-total` for exo, `perf` for Galaxy).

mod even;
mod exo;
mod slices;
mod speed;

use hearth_core::Cluster;
use hearth_profiles::{Document, DocumentError, Format, Seconds};
use hearth_schema::plan::{Plan, ScenarioRecord};

/// The names of the systems for which plans can be made and simulated.
pub const SYSTEM_NAMES: [&str; 6] = ["exo", "dllama", "tpi-llm", "hepti", "galaxy", "airinfer"];

#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SystemPlanOptions {
    /// The format to which the devices convert the weights; `None` for the default of the system.
    pub weight_format: Option<Format>,
    /// The time of one all-reduce over the air, for `airinfer`.
    pub all_reduce_time: Option<Seconds>,
}

/// Why the planner of another system returns no plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SystemPlanError {
    #[error("no system is called `{name}`: use one of {}", SYSTEM_NAMES.join(", "))]
    UnknownSystem { name: String },
    #[error("`{system}` supports {supports}")]
    UnsupportedWorkload { system: &'static str, supports: &'static str, key: &'static str },
    #[error("plans of `{system}` for {model} are not supported")]
    UnsupportedModel { system: &'static str, model: &'static str },
    #[error("`{system}` runs on none of these devices: {why}")]
    NoUsableDevice { system: &'static str, why: &'static str },
    #[error("`{system}` does not run on the head `{head}`: {why}")]
    UnsupportedHead { system: &'static str, head: String, why: &'static str },
    #[error(
        "`{system}` keeps all weights in memory as {format}, but memory holds only {fitting} of the {total} \
         {unit}"
    )]
    OutOfMemory { system: &'static str, format: String, fitting: u64, total: u64, unit: &'static str },
    #[error(
        "`{device}` has too little memory for two blocks of its slices: the largest block takes {needed} bytes, in \
         addition to {fixed} bytes of cache and buffers"
    )]
    NoSlidingWindow { device: String, needed: u64, fixed: u64 },
    #[error("`airinfer` needs the time of one all-reduce over the air")]
    MissingAllReduceTime,
    #[error("`{system}` does not support {option}")]
    UnsupportedOption { system: &'static str, option: &'static str },
    #[error("the plan is not valid: {0}")]
    Invalid(#[from] DocumentError),
}

impl SystemPlanError {
    /// Returns what to change in the scenario or on the command line, if that is known.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::UnsupportedWorkload { key, .. } => {
                return Some(format!("remove `{key}` from the scenario's workload, or use another strategy"));
            }
            Self::UnsupportedHead { .. } => "set `head: true` on a different device",
            Self::OutOfMemory { .. } => {
                "use a smaller format (`--weights-as q4_0`), a smaller model or more devices"
            }
            Self::MissingAllReduceTime => "set it with `--air-time`, for example `--air-time 2ms`",
            Self::UnsupportedOption { .. } => "omit the option",
            Self::UnsupportedModel { .. } => "use another strategy, or a dense model",
            Self::UnknownSystem { .. }
            | Self::NoUsableDevice { .. }
            | Self::NoSlidingWindow { .. }
            | Self::Invalid(_) => return None,
        };
        Some(hint.to_owned())
    }
}

type PlanResult = Result<Plan, SystemPlanError>;

/// Returns the validated plan of the system `name` for a cluster. Fails if no system has this name, or the system has
/// no plan for this cluster and these options.
pub fn plan(
    name: &str,
    cluster: &Cluster,
    scenario: &ScenarioRecord,
    options: SystemPlanOptions,
) -> Result<Plan, SystemPlanError> {
    let Some(system) = SYSTEM_NAMES.into_iter().find(|known| *known == name) else {
        return Err(SystemPlanError::UnknownSystem { name: name.to_owned() });
    };
    let unsupported = |supports, key| Err(SystemPlanError::UnsupportedWorkload { system, supports, key });
    if cluster.workload.speculation.is_some() {
        return unsupported("no draft model", "speculation");
    }
    if cluster.workload.sequences > 1 && system != "exo" {
        return unsupported("only one sequence at a time", "sequences");
    }
    if cluster.model.shape.experts.is_some() && system != "exo" {
        return Err(SystemPlanError::UnsupportedModel { system, model: "mixtures of experts" });
    }
    if options.all_reduce_time.is_some() && system != "airinfer" {
        return Err(SystemPlanError::UnsupportedOption { system, option: "`--air-time`" });
    }
    if options.weight_format.is_some() && matches!(system, "exo" | "dllama") {
        return Err(SystemPlanError::UnsupportedOption { system, option: "`--weights-as`" });
    }
    let plan = match system {
        "exo" => exo::plan(cluster, scenario),
        "dllama" => Ok(even::dllama(cluster, scenario)),
        "tpi-llm" => even::tpi_llm(cluster, scenario, options),
        "hepti" => speed::plan_by_speed(&speed::HEPTI, cluster, scenario, options),
        "galaxy" => speed::plan_by_speed(&speed::GALAXY, cluster, scenario, options),
        _ => even::airinfer(cluster, scenario, options),
    }?;
    plan.validate()?;
    Ok(plan)
}
