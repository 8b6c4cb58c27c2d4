//! Tensor parallelism: simulates a plan that slices every layer over all devices.
//!
//! The ranks go through the blocks of a token in lockstep ([`simulation`]): each computes its slice ([`rank`]), then an
//! all-reduce over the links adds the partial results. Computing a slice takes what [`hearth_core::compute_cost`] says;
//! the memory of a rank is in [`hearth_core::memory`]. If a device is out of memory the run ends before it begins, and
//! the trace has the shortage.
//!
//! Deviations: adding up, converting partial results and the elementwise rest of a layer cost nothing; loading the model
//! and distributing slices, which happens once, is over when the run begins, except for a sliding window.

mod loader;
mod rank;
mod simulation;

use hearth_core::memory::PinnedMemory;
use hearth_core::schedule::{ScheduleError, passes};
use hearth_profiles::device::Device;
use hearth_schema::pass::Pass;
use hearth_schema::plan::Plan;
use hearth_schema::plan::tensor::TensorPlan;
use hearth_schema::trace::{Header, Outcome, Shortage, Trace};

use crate::error::SimError;
use crate::input::Input;
use crate::trace::{self, TraceCollector};

use rank::Rank;
use simulation::TensorSimulation;

/// Runs a tensor-parallel plan on the devices of its cluster.
pub(crate) fn simulate(
    input: &Input,
    tensor: &TensorPlan,
    devices: &[&Device],
    header: Header,
) -> Result<Trace, SimError> {
    let passes = tensor.batched(passes(&input.cluster.workload));
    within_context(&passes, input.plan)?;
    let ignore = input.options.ignore_memory;
    let model = &input.cluster.model;
    let memories: Vec<PinnedMemory> = devices
        .iter()
        .enumerate()
        .filter_map(|(place, device)| PinnedMemory::new(input.plan, place, model, device, ignore))
        .collect();
    let shortages: Vec<Shortage> =
        memories.iter().enumerate().flat_map(|(place, held)| held.shortages(place)).collect();
    if !ignore && !shortages.is_empty() {
        let unreclaimable = memories.iter().map(PinnedMemory::main);
        return Ok(trace::out_of_memory(header, passes, unreclaimable, shortages));
    }
    let ranks = devices
        .iter()
        .zip(memories)
        .enumerate()
        .map(|(place, (device, held))| Rank::new(input, tensor, place, device, held))
        .collect();
    let (records, readings) = TensorSimulation::new(input, tensor, ranks, &passes).run()?;
    Ok(TraceCollector { header, records, readings }.finish(passes, Outcome::Ok))
}

/// Refuses a workload longer than the plan's context, as a ring's schedule does.
fn within_context(passes: &[Pass], plan: &Plan) -> Result<(), ScheduleError> {
    let beyond = passes
        .iter()
        .find(|pass| u64::from(pass.first_position) + u64::from(pass.tokens) > u64::from(plan.context));
    match beyond {
        None => Ok(()),
        Some(pass) => Err(ScheduleError::BadPass {
            pass: pass.index,
            tokens: pass.tokens,
            first: pass.first_position,
            context: plan.context,
        }),
    }
}
