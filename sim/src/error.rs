//! Errors of the simulator's input.
//!
//! A device that runs out of memory is no error but an outcome of the run, recorded in the trace.

use hearth_core::cluster::UnreachablePeer;
use hearth_core::memory::draft::DraftError;
use hearth_core::schedule::{GenerationError, ScheduleError};
use hearth_profiles::{DocumentError, Seconds};

/// Why a plan cannot be simulated.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SimError {
    /// The plan contradicts itself.
    #[error("the plan cannot be run: {0}")]
    Plan(#[from] DocumentError),
    /// The plan names a device that the scenario does not have.
    #[error(
        "plan devices[{place}] is `{name}`, which the scenario does not have; plan again from this scenario"
    )]
    UnknownDevice { place: usize, name: String },
    /// The plan was made for another model.
    #[error(
        "the plan is for `{planned}` and the scenario's model is `{given}`; plan again from this scenario"
    )]
    OtherModel { planned: String, given: String },
    /// GPU layers on a device without a usable GPU.
    #[error(
        "plan devices[{place}] `{name}` has {layers} GPU layers a window, but its profile {lack}; set `gpu_layers: 0` \
         or complete the profile"
    )]
    NoGpu { place: usize, name: String, layers: u32, lack: &'static str },
    /// A chunk size that the page cache does not support.
    #[error("chunks of {bytes} bytes: choose from 128 KiB to 8 MiB")]
    Chunk { bytes: u64 },
    /// A stream buffer so small that the model falls into too many pieces.
    #[error(
        "the plan's device {place} would stream the model in pieces of {bytes} bytes, which are too many: give it a \
         larger `stream_buffer`"
    )]
    Pieces { place: usize, bytes: u64 },
    /// Events for a plan that is not a ring of windows in the page cache.
    #[error(
        "events happen only to rings that the executor can run, and {why}; or remove the scenario's `events`"
    )]
    EventsWithoutRing { why: String },
    /// An event swaps memory where the profile knows of none.
    #[error(
        "an event swaps memory of `{device}` out, and its profile has no `memory.can_swap` or no swap space; add them or \
         remove the event"
    )]
    NoSwap { device: String },
    /// An event requests swapping although the page cache swaps automatically.
    #[error(
        "an event swaps memory of `{device}` out, and its page cache (`memory.page_cache`) makes that room by itself; \
         remove the event, or give the device a page cache without, as `two-list`"
    )]
    SwapsItself { device: String },
    /// The run takes longer than the simulator's limit.
    #[error(
        "after {tokens} tokens the simulated run has taken {at}, and goes on: some rate of a device or a link is far too \
         small"
    )]
    TooLong { tokens: u32, at: Seconds },
    /// Every device waits for another: a defect of the simulator.
    #[error("the simulated ring stands still after {tokens} tokens, at {at}: nothing more would ever happen")]
    Deadlock { tokens: u32, at: Seconds },
    /// The plan sends over a pair of devices that cannot reach each other.
    #[error(transparent)]
    UnreachablePeer(#[from] UnreachablePeer),
    /// Plan and scenario differ in their draft models or sequences.
    #[error(transparent)]
    Draft(#[from] DraftError),
    /// Unexpected tokens: a defect of the simulator.
    #[error(transparent)]
    Generation(#[from] GenerationError),
    /// The schedule refused an event, for example because the workload is longer than the plan's context.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
}
