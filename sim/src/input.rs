//! Input and result of a simulation, and the checks of the input.

use hearth_core::Cluster;
use hearth_core::memory::draft;
use hearth_core::recovery::Replanner;
use hearth_profiles::device::{DeviceProfile, PageCachePolicy};
use hearth_profiles::{Bytes, Document};
use hearth_schema::Plan;
use hearth_schema::events::Change;
use hearth_schema::residency::Residency;
use hearth_schema::trace::Trace;

use crate::error::SimError;
use crate::page_cache::CHUNK_BYTES;

/// Maximum number of pieces that a model may have: more than a model of 1 TB has with the default stream buffer.
pub const MAX_PIECES: u64 = 1 << 24;

#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// The devices, links, model and workload of the scenario.
    pub cluster: &'a Cluster,
    pub plan: &'a Plan,
    pub options: &'a Options,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Chunk size of the simulated page cache. On devices with managed residency a chunk is a piece instead. A smaller
    /// size makes the simulation slower and more accurate.
    pub chunk_size: Bytes,
    /// Whether each page cache initially contains the weights that earlier tokens would have left in it.
    pub starts_warm: bool,
    /// Whether to run plans that need more memory than the devices have.
    pub ignore_memory_shortages: bool,
    /// Maximum memory of a device's process in addition to the memory that the device profile states. The random seed
    /// determines the actual amount, which matters if the weights of a device only just fit in its memory.
    pub max_extra_process_memory: Bytes,
    /// Whether a page fault at an embedding row also reads the pages around the row, as it does without `madvise`.
    pub read_around_embedding_rows: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            chunk_size: Bytes(CHUNK_BYTES),
            starts_warm: false,
            ignore_memory_shortages: false,
            max_extra_process_memory: Bytes::ZERO,
            read_around_embedding_rows: false,
        }
    }
}

/// The events of a scenario, and the planner that reacts to the loss of a device.
#[derive(Debug, Clone, Copy, Default)]
pub struct ScenarioEvents<'a> {
    pub events: &'a [hearth_schema::events::Event],
    /// The planner that makes a new plan when a device is lost; if `None`, the loss ends the run.
    pub replanner: Option<&'a dyn Replanner>,
    /// Whether the ring also changes its plan when devices become slower or have less memory, like a ring that serves.
    pub adapts: bool,
}

#[derive(Debug, Clone)]
pub struct SimulationResult {
    pub trace: Trace,
    /// The plans made during the run, in order of time.
    pub new_plans: Vec<Plan>,
    /// The indices of the scenario's events that had not begun when the run ended.
    pub unreached_event_indices: Vec<usize>,
}

impl SimulationResult {
    pub fn without_events(trace: Trace) -> Self {
        Self { trace, new_plans: vec![], unreached_event_indices: vec![] }
    }
}

/// Checks the input and returns the plan's devices in ring order.
pub fn check_input<'a>(input: &Input<'a>) -> Result<Vec<&'a DeviceProfile>, SimError> {
    let (cluster, plan) = (input.cluster, input.plan);
    plan.validate()?;
    if !((128 << 10)..=(8 << 20)).contains(&input.options.chunk_size.0) {
        return Err(SimError::UnsupportedChunkSize { bytes: input.options.chunk_size.0 });
    }
    if !plan.model.matches(&cluster.model) {
        let (planned, given) = (plan.model.name.clone(), cluster.model.name.clone());
        return Err(SimError::OtherModel { planned, given });
    }
    let mut devices = Vec::new();
    for (index, planned) in plan.devices.iter().enumerate() {
        let name = planned.name.clone();
        let Some(member) = cluster.member(&name) else { return Err(SimError::UnknownDevice { index, name }) };
        let missing = match &member.device.gpu {
            _ if planned.gpu_layers == 0 => None,
            None => Some("has no `gpu`"),
            Some(gpu) if gpu.matvec.is_empty() => Some("has no rate in `gpu.matvec`"),
            Some(_) => None,
        };
        if let Some(missing) = missing {
            return Err(SimError::NoGpu { index, name, layers: planned.gpu_layers, missing });
        }
        let residency = planned.residency;
        let piece = residency.piece_bytes().0.max(1);
        if residency.policy == Residency::Managed && cluster.model.total_bytes().0 / piece > MAX_PIECES {
            return Err(SimError::TooManyPieces { index, bytes: piece });
        }
        devices.push(&member.device);
    }
    if let Some(tensor) = plan.kind.tensor_plan() {
        tensor.validate_coverage(plan, &cluster.model.shape)?;
    }
    cluster.links.check_reachability(plan)?;
    draft::check_planned_draft(plan, cluster)?;
    Ok(devices)
}

/// Checks that the events and arrivals of the scenario can be simulated with the plan and the devices of the input.
pub fn check_events(input: &Input, scenario_events: &ScenarioEvents) -> Result<(), SimError> {
    let keys = [
        (!scenario_events.events.is_empty(), "events"),
        (input.cluster.workload.arrivals.is_some(), "workload.arrivals"),
    ];
    let key = keys.into_iter().find_map(|(is_given, key)| is_given.then_some(key));
    if let Some((key, why)) = key.zip(input.plan.simulation_only_reason()) {
        return Err(SimError::NotExecutable { key, why });
    }
    for event in scenario_events.events {
        let (Some(Change::Swap(_)), Some(name)) = (event.change(), &event.device) else { continue };
        let memory = input.cluster.member(name).map(|member| &member.device.memory);
        if memory.is_none_or(|memory| memory.obtainable_bytes() == memory.available_memory.value) {
            return Err(SimError::NoSwap { device: name.clone() });
        }
        let swaps_itself = [PageCachePolicy::Android, PageCachePolicy::Macos, PageCachePolicy::MacosMetal];
        if memory.is_some_and(|memory| swaps_itself.contains(&memory.page_cache)) {
            return Err(SimError::AutomaticSwap { device: name.clone() });
        }
    }
    Ok(())
}
