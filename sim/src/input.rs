//! Input and result of a simulation, and the checks before it starts.

use hearth_core::Cluster;
use hearth_core::memory::draft;
use hearth_core::recovery::Replanner;
use hearth_profiles::device::{Device, PageCachePolicy};
use hearth_profiles::model::DigestMatch;
use hearth_profiles::{Bytes, Document};
use hearth_schema::Plan;
use hearth_schema::events::Change;
use hearth_schema::residency::Residency;
use hearth_schema::trace::Trace;

use crate::error::SimError;
use crate::page_cache::CHUNK_BYTES;

/// More pieces than a model of a terabyte has with the default stream buffer.
const MAX_PIECES: u64 = 1 << 24;

/// The input of a simulation.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// The resolved scenario.
    pub cluster: &'a Cluster,
    pub plan: &'a Plan,
    pub options: &'a Options,
}

/// Options of a simulation.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// The chunk size of the page cache, except for devices with managed residency. Smaller is slower and closer to the
    /// kernel.
    pub chunk: Bytes,
    /// Whether memory starts in the state that earlier tokens would have left.
    pub warm: bool,
    /// Whether every pinned part is taken to fit its memory.
    pub ignore_memory: bool,
    /// The most memory that a device's process may hold beyond its profile; the seed decides how much. Where a share
    /// just fits, this and the position of a token's first fault (the embedding row, which aligns the read-ahead)
    /// decide what a token reads.
    pub process_spread: Bytes,
    /// Whether an embedding row is read with its surroundings, as by an engine that gives the system no advice.
    pub rows_read_around: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            chunk: Bytes(CHUNK_BYTES),
            warm: false,
            ignore_memory: false,
            process_spread: Bytes::ZERO,
            rows_read_around: false,
        }
    }
}

/// What disturbs a ring while it runs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Disturbances<'a> {
    pub events: &'a [hearth_schema::events::Event],
    /// Plans again when a device is lost.
    pub replanner: Option<&'a dyn Replanner>,
}

/// The result of a simulation.
#[derive(Debug, Clone)]
pub struct Run {
    pub trace: Trace,
    /// The plans made during the run, in order.
    pub plans: Vec<Plan>,
    /// The indices of the events that had not begun when the run ended.
    pub unreached_events: Vec<usize>,
}

impl Run {
    pub fn undisturbed(trace: Trace) -> Self {
        Self { trace, plans: vec![], unreached_events: vec![] }
    }
}

/// Checks the input; returns the plan's devices in ring order.
pub fn check<'a>(input: &Input<'a>) -> Result<Vec<&'a Device>, SimError> {
    let (cluster, plan) = (input.cluster, input.plan);
    plan.validate()?;
    if !((128 << 10)..=(8 << 20)).contains(&input.options.chunk.0) {
        return Err(SimError::Chunk { bytes: input.options.chunk.0 });
    }
    let same_shape = cluster.model.shape_digest() == plan.model.shape_digest;
    let same_file = plan
        .model
        .digest
        .as_ref()
        .is_some_and(|digest| cluster.model.matches(digest) != DigestMatch::Different);
    if plan.model.layers != cluster.model.shape.layers.0 || !(same_shape || same_file) {
        let (planned, given) = (plan.model.name.clone(), cluster.model.name.clone());
        return Err(SimError::OtherModel { planned, given });
    }
    let mut devices = Vec::new();
    for (place, planned) in plan.devices.iter().enumerate() {
        let name = planned.name.clone();
        let Some(member) = cluster.member(&name) else { return Err(SimError::UnknownDevice { place, name }) };
        let lack = match &member.device.gpu {
            _ if planned.gpu_layers == 0 => None,
            None => Some("has no `gpu`"),
            Some(gpu) if gpu.matvec.is_empty() => Some("has no rate in `gpu.matvec`"),
            Some(_) => None,
        };
        if let Some(lack) = lack {
            return Err(SimError::NoGpu { place, name, layers: planned.gpu_layers, lack });
        }
        let residency = planned.residency;
        let piece = residency.piece().0.max(1);
        if residency.policy == Residency::Managed && cluster.model.total_bytes().0 / piece > MAX_PIECES {
            return Err(SimError::Pieces { place, bytes: piece });
        }
        devices.push(&member.device);
    }
    if let Some(tensor) = plan.kind.tensor() {
        tensor.validate_cover(plan, &cluster.model.shape)?;
    }
    cluster.links.check_plan(plan)?;
    draft::check(plan, cluster)?;
    Ok(devices)
}

/// Refuses events that cannot happen to these devices.
pub fn check_events(input: &Input, disturbances: &Disturbances) -> Result<(), SimError> {
    if let Some(why) = input.plan.only_simulated().filter(|_| !disturbances.events.is_empty()) {
        return Err(SimError::EventsWithoutRing { why });
    }
    for event in disturbances.events {
        let (Some(Change::Swap(_)), Some(name)) = (event.change(), &event.device) else { continue };
        let memory = input.cluster.member(name).map(|member| &member.device.memory);
        if memory.is_none_or(|memory| memory.obtainable() == memory.available.value) {
            return Err(SimError::NoSwap { device: name.clone() });
        }
        let by_itself = [PageCachePolicy::Android, PageCachePolicy::Macos, PageCachePolicy::MacosMetal];
        if memory.is_some_and(|memory| by_itself.contains(&memory.page_cache)) {
            return Err(SimError::SwapsItself { device: name.clone() });
        }
    }
    Ok(())
}
