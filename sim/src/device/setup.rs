//! Of what are the devices and links of a run made?
//!
//! A device's profile and its part of a plan become a page cache, a disk, a reader ahead and a draft model; the
//! cluster's links become wires and air between slots. All of it is new: what of it stays when a ring gets another
//! plan is `crate::ring::reconfiguration`'s business.
//!
//! Not here: what they do to each other (`crate::run`).

use std::borrow::Cow;

use hearth_core::conversion::converted;
use hearth_core::conversion::model_as;
use hearth_core::draft;
use hearth_core::schedule::ModelPart;
use hearth_core::schedule::Schedule;
use hearth_core::schedule::visits;
use hearth_profiles::device::{Device, PageCachePolicy};
use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Bytes, BytesPerSecond, Seconds};
use hearth_schema::Plan;
use hearth_schema::plan::PlannedDevice;
use hearth_schema::plan::Processor;
use hearth_schema::residency::Residency;

use super::Parts;
use super::budget::Budget;
use super::layout::Layout;
use super::residency::{ManagedStream, ReadAhead, WeightResidency};
use super::storage::Storage;
use crate::input::Input;
use crate::page_cache::for_device::{Placed, unwired_after};
use crate::page_cache::{Access, Chunk, Fetch};
use crate::random::{self, Purpose};
use crate::resource::DiskSpeed;
use crate::speculation::Drafter;

/// The read-ahead of an untuned Linux, where a profile does not say.
const USUAL_READ_AHEAD: Bytes = Bytes(128 << 10);

/// The memory of a device at a place of the plan, beside its draft model; none if that does not fit.
pub fn budget(input: &Input, place: usize, device: &Device) -> Option<Budget> {
    let (cluster, plan) = (input.cluster, input.plan);
    let device = draft::beside(plan, place, cluster.draft.as_ref(), device)?;
    let mut budget = Budget::new(plan, place, &cluster.model, &device, input.options.ignore_memory);
    budget.cache = budget.cache.saturating_sub(held_more(input, place));
    Some(budget)
}

/// What a device's process holds beyond its profile, drawn from a stream of its own.
fn held_more(input: &Input, place: usize) -> Bytes {
    let part = random::draw(input.cluster.seed, Purpose::Process, 0, place as u64);
    Bytes((input.options.process_spread.as_f64() * part) as u64)
}

/// The model as each device has it: where weights are pinned, in the formats that they are converted to.
pub fn models<'a>(input: &Input<'a>) -> Vec<Cow<'a, ModelProfile>> {
    let (plan, model) = (input.plan, &input.cluster.model);
    let of = |(place, planned): (usize, &PlannedDevice)| {
        let residency = planned.residency;
        if !residency.holds() {
            return Cow::Borrowed(model);
        }
        let on_gpu =
            |layer: u32| (0..plan.rounds).any(|round| plan.gpu_window(place, round).contains(&layer));
        let as_planned = |layer: u32| residency.format_on(on_gpu(layer));
        let mut own = model_as(model, residency.weights_as, as_planned);
        own.output = converted(&model.output, residency.format_on(plan.output == Processor::Gpu));
        Cow::Owned(own)
    };
    plan.devices.iter().enumerate().map(of).collect()
}

/// A device's part of the plan of its schedule, with an empty page cache.
pub fn parts<'a>(
    input: Input<'a>,
    device: &'a Device,
    model: &'a ModelProfile,
    schedule: Schedule,
    slot: usize,
    budget: &Budget,
) -> Parts<'a> {
    let (plan, place, memory) = (schedule.plan().clone(), schedule.device(), budget.cache);
    let options = plan.devices[place].residency;
    let managed = options.policy == Residency::Managed;
    let chunk = if managed { options.piece() } else { input.options.chunk };
    let layout = Layout::new(&plan, place, model, chunk, device.gpu_maps_weights());
    let memory = if options.holds() { memory.min(whole(&layout, chunk)) } else { memory };
    let kept_by = if options.holds() { &anonymous(device) } else { device };
    let storage = storage((kept_by, slot, input.cluster.seed), &layout, memory, chunk);
    let residency = if managed {
        let visits = chunks_of(&layout, &visits(&plan, place));
        let (cores, chunks) = (device.cpu.cores, layout.chunks());
        WeightResidency::Managed(Box::new(ManagedStream::new(slot, options, &visits, memory, cores, chunks)))
    } else {
        WeightResidency::System(ReadAhead::new(slot, options, chunk, storage.window()))
    };
    // A table that is the output matrix as well is read in order; memory of its own is nobody's to advise.
    let in_order = model.shape.tied_embeddings || options.holds() || input.options.rows_read_around;
    Parts {
        slot,
        device,
        drafter: drafter(&input, &plan, place, device),
        model,
        uploads: budget.uploads.clone(),
        kv_element: Bytes(plan.kv_cache.element_bytes()),
        schedule,
        seed: input.cluster.seed,
        storage,
        layout,
        residency,
        rows_alone: managed || !in_order,
    }
}

/// The draft model, on the head of a plan that has one.
fn drafter<'a>(input: &Input<'a>, plan: &Plan, place: usize, device: &'a Device) -> Option<Drafter<'a>> {
    let (planned, model) = (plan.draft.as_ref()?, input.cluster.draft.as_ref()?);
    let kv_element = Bytes(plan.kv_cache.element_bytes());
    (place == 0).then(|| Drafter::new(device, model, kv_element, planned.processor))
}

/// The chunks of each visit, in the order of use.
fn chunks_of(layout: &Layout, visits: &[Vec<ModelPart>]) -> Vec<Vec<Chunk>> {
    let chunks = |parts: &Vec<ModelPart>| parts.iter().flat_map(|part| layout.part(part)).collect();
    visits.iter().map(chunks).collect()
}

/// The device with its own memory kept as anonymous pages are: by two lists, or by the paper's formula.
fn anonymous(device: &Device) -> Device {
    let mut device = device.clone();
    if device.memory.page_cache != PageCachePolicy::PaperLinear {
        device.memory.page_cache = PageCachePolicy::TwoList;
    }
    device
}

/// Memory for the whole file.
fn whole(layout: &Layout, chunk: Bytes) -> Bytes {
    chunk * (u64::from(layout.chunks()) + 2)
}

/// Leaves memory as tokens before the run would have: a share that fits is there; of one that does not, what the page
/// cache keeps when it is read round and round.
pub fn warm(storage: &mut Storage, layout: &Layout, residency: &WeightResidency) {
    let chunks: Vec<Chunk> = match residency {
        WeightResidency::System(_) => layout.own().chain(layout.own()).collect(),
        WeightResidency::Managed(stream) => stream.kept().collect(),
    };
    let cache = storage.cache().cache();
    for chunk in chunks {
        if cache.access(chunk) == Access::Absent && cache.prefetch_now(chunk) == Fetch::Started {
            cache.arrived(chunk);
            cache.resume(chunk);
        }
    }
}

fn storage(
    (device, slot, seed): (&Device, usize, u64),
    layout: &Layout,
    cache: Bytes,
    chunk: Bytes,
) -> Storage {
    let sequential = device.disk.sequential.value;
    let or_sequential = |rate: &Option<hearth_profiles::Sourced<BytesPerSecond>>| {
        rate.as_ref().map_or(sequential, |rate| rate.value)
    };
    let explicit = or_sequential(&device.disk.populate);
    let speed = DiskSpeed {
        bandwidth: BytesPerSecond(sequential.0.max(explicit.0)),
        fault: or_sequential(&device.disk.fault),
        explicit,
        throttle: device.disk.limit.as_ref().map(|limit| limit.value),
        latency: device.disk.latency.as_ref().map_or(Seconds(0.0), |latency| latency.value),
    };
    let read_ahead = read_ahead(device, chunk);
    let placed = Placed { device, place: slot, seed, room: cache, share: layout.chunks(), chunk };
    Storage::with_chunks(placed.policy(), read_ahead, speed, chunk)
        .unwired_after(unwired_after(device))
        .turned_over_at(device.disk.turnover.as_ref().map(|rate| rate.value))
}

/// How far reading by faults runs ahead of computing.
///
/// Threads that share a layer's rows fault at as many places at once, so that some compute while others wait, be
/// the kernel's window ever so small. In the order of chunks that is a window which keeps the next chunk under
/// way: four chunks, half of it behind the miss and a quarter ahead of the marker.
fn read_ahead(device: &Device, chunk: Bytes) -> Bytes {
    let window = device.disk.read_ahead.as_ref().map_or(USUAL_READ_AHEAD, |window| window.value);
    if device.cpu.cores > 1 { window.max(chunk * 4) } else { window }
}
