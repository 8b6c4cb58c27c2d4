//! Errors of a simulation.
//!
//! A device that runs out of memory is not an error but an outcome of the run, which the trace records.

use hearth_core::cluster::UnreachableReceiver;
use hearth_core::memory::draft::DraftError;
use hearth_core::schedule::{GenerationError, ScheduleError};
use hearth_profiles::{DocumentError, Seconds};

/// The reason why a plan cannot be simulated.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SimError {
    #[error("the plan is invalid: {0}")]
    InvalidPlan(#[from] DocumentError),
    #[error(
        "`devices[{index}]` of the plan is `{name}`, but the scenario has no device of that name; make a new \
         plan from this scenario"
    )]
    UnknownDevice { index: usize, name: String },
    #[error(
        "the plan is for model `{planned}`, but the scenario's model is `{given}`; make a new plan from this \
         scenario"
    )]
    OtherModel { planned: String, given: String },
    #[error(
        "device `{name}` of the plan (`devices[{index}]`) has {layers} GPU layers per window, but its device \
         profile {missing}; set `gpu_layers: 0` in the plan, or complete the profile"
    )]
    NoGpu { index: usize, name: String, layers: u32, missing: &'static str },
    #[error("the chunk size is {bytes} bytes; it must be from 128 KiB to 8 MiB")]
    UnsupportedChunkSize { bytes: u64 },
    #[error(
        "`devices[{index}]` of the plan divides the model into more than {max} pieces, because a piece has only \
         {bytes} bytes; set a larger `stream_buffer` for this device",
        max = crate::input::MAX_PIECES
    )]
    TooManyPieces { index: usize, bytes: u64 },
    /// Only plans that can be executed have events and arrivals.
    #[error("`{key}` of the scenario needs a plan that can be executed, but {why}, or remove `{key}`")]
    NotExecutable { key: &'static str, why: String },
    #[error(
        "an event swaps out memory of `{device}`, but its device profile does not have both \
         `memory.can_swap` and `memory.swap_available`; add the missing key, or remove the event"
    )]
    NoSwap { device: String },
    #[error(
        "an event swaps out memory of `{device}`, but its page cache (`memory.page_cache`) already swaps \
         automatically; remove the event, or set a page cache that does not swap, such as `two-list`"
    )]
    AutomaticSwap { device: String },
    #[error(
        "the simulated run is not complete after {at}, with {tokens} tokens so far; check the rates of the \
         devices and links in the scenario, because one of these rates is far too low"
    )]
    RunTooLong { tokens: u32, at: Seconds },
    /// Every device waits for a message from another device, which is a defect of the simulator.
    #[error(
        "the simulated ring is deadlocked after {tokens} tokens, at {at}; please report this defect of the \
         simulator with the scenario and the plan"
    )]
    Deadlock { tokens: u32, at: Seconds },
    #[error(transparent)]
    UnreachableReceiver(#[from] UnreachableReceiver),
    /// The plan and the scenario have different draft models or numbers of sequences, or the draft model is unusable.
    #[error(transparent)]
    Draft(#[from] DraftError),
    /// A pass returned tokens that no sequence expected, which is a defect of the simulator.
    #[error(transparent)]
    Generation(#[from] GenerationError),
    /// The schedule rejected an event, for example because the workload is longer than the plan's context.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
}
