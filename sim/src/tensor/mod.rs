//! Tensor parallelism: simulates a plan that slices every layer over all devices.
//!
//! For each block of a token every rank computes its slice ([`rank`]), then an all-reduce over the links adds the
//! partial results ([`simulation`]). [`hearth_core::compute_cost`] gives the time of a slice, [`hearth_core::memory`]
//! the memory of a rank. If a device has too little memory, nothing is simulated, and the trace states the shortage.
//!
//! Deviation: adding and converting partial results, and the elementwise operations of a layer, take no time. The model
//! is loaded and its slices are distributed before the run begins, except for a sliding window.

mod loader;
mod rank;
mod simulation;

use hearth_core::memory::PinnedMemory;
use hearth_core::schedule::{ScheduleError, workload_passes};
use hearth_profiles::device::DeviceProfile;
use hearth_schema::pass::Pass;
use hearth_schema::plan::Plan;
use hearth_schema::plan::tensor_parallel::TensorParallelPlan;
use hearth_schema::trace::{Header, Outcome, ShortageRecord, Trace};

use crate::error::SimError;
use crate::input::Input;
use crate::trace::{self, TraceCollector};

use rank::Rank;
use simulation::TensorSimulation;

pub(crate) fn simulate(
    input: &Input,
    tensor: &TensorParallelPlan,
    devices: &[&DeviceProfile],
    header: Header,
) -> Result<Trace, SimError> {
    let passes = tensor.split_passes(workload_passes(&input.cluster.workload));
    check_context(&passes, input.plan)?;
    let ignore = input.options.ignore_memory_shortages;
    let model = &input.cluster.model;
    let memory = |(index, device): (usize, &&DeviceProfile)| {
        PinnedMemory::new(input.plan, index, model, device, ignore)
    };
    let memories: Vec<PinnedMemory> = devices.iter().enumerate().filter_map(memory).collect();
    let shortages: Vec<ShortageRecord> =
        memories.iter().enumerate().flat_map(|(index, memory)| memory.shortages(index)).collect();
    if !ignore && !shortages.is_empty() {
        let unreclaimable = memories.iter().map(PinnedMemory::unreclaimable_memory);
        return Ok(trace::out_of_memory_trace(header, passes, unreclaimable, shortages));
    }
    let new_rank = |(index, (device, memory))| Rank::new(input, tensor, index, device, memory);
    let ranks = devices.iter().copied().zip(memories).enumerate().map(new_rank).collect();
    let (records, readings) = TensorSimulation::new(input, tensor, ranks, &passes).run()?;
    Ok(TraceCollector { header, records, readings }.finish(passes, Outcome::Ok))
}

/// Checks that the workload fits in the context length of the plan, as the schedule of a ring does.
fn check_context(passes: &[Pass], plan: &Plan) -> Result<(), ScheduleError> {
    let end = |pass: &Pass| u64::from(pass.first_position) + u64::from(pass.tokens);
    let context = plan.context_length;
    let beyond = passes.iter().find(|pass| end(pass) > u64::from(context));
    beyond.map_or(Ok(()), |&Pass { index: pass, tokens, first_position: first, .. }| {
        Err(ScheduleError::BadPass { pass, tokens, first, context })
    })
}
