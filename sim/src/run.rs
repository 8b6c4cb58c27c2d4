//! Entry points of the simulator: select the simulation for a plan and run it.

use hearth_core::memory::DeviceMemory;
use hearth_core::schedule::workload_passes;
use hearth_profiles::device::DeviceProfile;
use hearth_schema::scenario::Workload;
use hearth_schema::trace::Trace;

use crate::device::setup;
use crate::error::SimError;
use crate::input::{self, Input, ScenarioEvents, SimulationResult};
use crate::{ring, soc, tensor, trace};

/// Simulates a plan without events.
pub fn simulate(input: &Input) -> Result<Trace, SimError> {
    simulate_with_events(input, &ScenarioEvents::default()).map(|run| run.trace)
}

/// Simulates a plan under the events of a scenario.
pub fn simulate_with_events(
    input: &Input,
    scenario_events: &ScenarioEvents,
) -> Result<SimulationResult, SimError> {
    let devices = input::check_input(input)?;
    input::check_events(input, scenario_events)?;
    let header = trace::build_header(input, &devices);
    if let Some(tensor) = input.plan.kind.tensor_plan() {
        return Ok(SimulationResult::without_events(tensor::simulate(input, tensor, &devices, header)?));
    }
    let memory = |(index, device): (usize, &&DeviceProfile)| setup::device_memory(input, index, device);
    let memories: Vec<Option<DeviceMemory>> = devices.iter().enumerate().map(memory).collect();
    let drafts_fit = memories.iter().all(Option::is_some);
    let memories: Vec<DeviceMemory> = memories.into_iter().flatten().collect();
    let short =
        !input.options.ignore_memory_shortages && memories.iter().any(|memory| !memory.shortages.is_empty());
    if short || !drafts_fit {
        // Without drafts, because the passes of a run with drafts depend on which drafts are accepted.
        let passes = workload_passes(&Workload { speculation: None, ..input.cluster.workload.clone() });
        let pins = input.plan.simulation_only_reason().is_some();
        let unreclaimable = memories.iter().filter(|_| pins).map(|memory| memory.unreclaimable_memory);
        let shortages = memories.iter().flat_map(|memory| memory.shortages.clone()).collect();
        let trace = trace::out_of_memory_trace(header, passes, unreclaimable, shortages);
        let unreached_event_indices = (0..scenario_events.events.len()).collect();
        return Ok(SimulationResult { unreached_event_indices, ..SimulationResult::without_events(trace) });
    }
    let (device, memory) = (devices[0], &memories[0]);
    if let Some(soc) = soc::standalone_soc(input, scenario_events, device, memory) {
        return soc::simulate(input, soc, device, memory, header).map(SimulationResult::without_events);
    }
    ring::simulate(input, scenario_events, &devices, memories, header)
}
