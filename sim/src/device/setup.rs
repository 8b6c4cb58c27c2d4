//! Setup: builds the simulated devices of a run from their profiles and the plan.
//!
//! Each device gets a new page cache, disk, helper thread and draft model. `crate::ring::reconfiguration` decides what
//! a device keeps when the ring gets another plan.

use std::borrow::Cow;
use std::collections::{BTreeSet, VecDeque};

use hearth_core::expert_routes::ExpertRoutes;
use hearth_core::memory::DeviceMemory;
use hearth_core::memory::draft;
use hearth_core::schedule::{ModelPart, Schedule, parts_by_busy_period};
use hearth_core::weight_conversion::{converted_group, converted_model};
use hearth_profiles::device::{DeviceProfile, PageCachePolicy};
use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Bytes, BytesPerSecond, Seconds, Sourced};
use hearth_schema::plan::{PlannedDevice, Processor};
use hearth_schema::residency::Residency;

use super::context::Event;
use super::layout::WeightLayout;
use super::residency::{ManagedWeights, ReadAheadThread, WeightResidency};
use super::storage::Storage;
use super::{DeviceSim, ThreadState, cost_or_zero, idle_cpu};
use crate::engine::Engine;
use crate::input::Input;
use crate::page_cache::config::{PageCacheConfig, unwire_idle_time};
use crate::page_cache::{Access, Chunk, FetchResult};
use crate::random::{self, StreamPurpose};
use crate::resource::DiskSpeed;
use crate::speculation::Drafter;

/// The default read-ahead window of Linux, for device profiles without `disk.read_ahead`.
const DEFAULT_READ_AHEAD: Bytes = Bytes(128 << 10);

/// Returns the memory that the run can use on the device with this index in the plan, less the memory of the draft
/// model. Returns `None` if the draft model does not fit.
pub fn device_memory(input: &Input, index: usize, device: &DeviceProfile) -> Option<DeviceMemory> {
    let (cluster, plan) = (input.cluster, input.plan);
    let device = draft::device_without_draft(plan, index, cluster.draft_model.as_ref(), device)?;
    let mut memory =
        DeviceMemory::new(plan, index, &cluster.model, &device, input.options.ignore_memory_shortages);
    // The process has more memory than its profile states; the amount comes from the device's own random stream.
    let part = random::draw(cluster.seed, StreamPurpose::ProcessMemory, 0, index as u64);
    let process_memory = Bytes((input.options.max_extra_process_memory.as_f64() * part) as u64);
    memory.weight_cache = memory.weight_cache.saturating_sub(process_memory);
    Some(memory)
}

/// Returns, for each device of the plan, the model in the weight formats in which the device stores it.
pub fn stored_models<'a>(input: &Input<'a>) -> Vec<Cow<'a, ModelProfile>> {
    let (plan, model) = (input.plan, &input.cluster.model);
    let of = |(index, planned): (usize, &PlannedDevice)| {
        let residency = planned.residency;
        if !residency.uses_anonymous_memory() {
            return Cow::Borrowed(model);
        }
        let on_gpu =
            |layer: u32| (0..plan.rounds).any(|round| plan.gpu_window(index, round).contains(&layer));
        let as_planned = |layer: u32| residency.weight_format(on_gpu(layer));
        let mut own = converted_model(model, residency.conversion_format, as_planned);
        let output_format = residency.weight_format(plan.output_processor == Processor::Gpu);
        own.output_head = converted_group(&model.output_head, output_format);
        Cow::Owned(own)
    };
    plan.devices.iter().enumerate().map(of).collect()
}

/// Creates a device that executes `schedule` and has an empty page cache; `budget` is the memory that the run can use.
pub fn new_device<'a>(
    input: Input<'a>,
    device: &'a DeviceProfile,
    model: &'a ModelProfile,
    schedule: Schedule,
    device_id: usize,
    budget: &DeviceMemory,
    engine: &mut Engine<Event>,
) -> DeviceSim<'a> {
    let (plan, index, memory) = (schedule.plan().clone(), schedule.device_index(), budget.weight_cache);
    let options = plan.devices[index].residency;
    let managed = options.policy == Residency::Managed;
    let chunk = if managed { options.piece_bytes() } else { input.options.chunk_size };
    let layout = WeightLayout::new(&plan, index, model, chunk, device.gpu_maps_weights());
    // Pinned weights take the memory for all chunks of the file, and two more.
    let file_memory = chunk * (u64::from(layout.chunk_count) + 2);
    let memory = if options.uses_anonymous_memory() { memory.min(file_memory) } else { memory };
    let cache_config = PageCacheConfig {
        device: if options.uses_anonymous_memory() { &anonymous(device) } else { device },
        device_id,
        seed: input.cluster.seed,
        memory_budget: memory,
        file_chunks: layout.chunk_count,
        chunk_size: chunk,
    };
    let mut storage = storage(&cache_config);
    // A window of many chunks reads the experts beside the one that is used.
    if read_ahead_window(device) < chunk * 2 {
        storage.first_expert_chunk = layout.experts().first_chunk;
    }
    let residency: Box<dyn WeightResidency> = if managed {
        let chunks =
            |parts: &Vec<ModelPart>| parts.iter().flat_map(|part| layout.part_chunks(part)).collect();
        let busy_periods: Vec<Vec<Chunk>> = parts_by_busy_period(&plan, index).iter().map(chunks).collect();
        let cores = device.cpu.cores;
        let experts = model.shape.experts.as_ref();
        let positions = layout.experts().clone();
        Box::new(ManagedWeights::new(device_id, (options, cores), &busy_periods, memory, positions, experts))
    } else {
        // The executor reads nothing of a mixture ahead, because the router chooses the experts.
        let is_on_demand = model.shape.experts.is_some();
        let thread = ReadAheadThread::new(device_id, options, chunk, storage.readahead.window_chunks);
        Box::new(if is_on_demand { thread.on_demand() } else { thread })
    };
    // A tied embedding is read sequentially as the output matrix; anonymous memory cannot be advised.
    let in_order = model.shape.has_tied_embeddings
        || options.uses_anonymous_memory()
        || input.options.read_around_embedding_rows;
    let kv_format = plan.kv_cache_format.format();
    let draft = plan.draft_model.as_ref().zip(input.cluster.draft_model.as_ref()).filter(|_| index == 0);
    DeviceSim {
        id: device_id,
        device,
        drafter: draft.map(|(planned, model)| Drafter::new(device, model, kv_format, planned.processor)),
        model,
        uploads: budget.gpu_upload_per_layer.clone(),
        kv_format,
        schedule,
        seed: input.cluster.seed,
        storage,
        layout,
        residency,
        routes: model.shape.experts.map(|shape| ExpertRoutes {
            shape,
            recorded: input.cluster.routes.as_deref(),
            prompt_tokens: input.cluster.workload.prompt_tokens,
            seed: input.cluster.seed,
        }),
        reads_single_rows: managed || !in_order,
        inbox: VecDeque::new(),
        steps: VecDeque::new(),
        thread: ThreadState::Idle,
        after_computation: None,
        idle_since: 0,
        cpu: idle_cpu(device),
        cpu_timer: engine.new_timer(),
        wake_timer: engine.new_timer(),
        gpu_speed: 1.0,
        disk_timer: engine.new_timer(),
        disk_timer_at: None,
        rows: BTreeSet::new(),
        earlier_bytes_read: Bytes::ZERO,
    }
}

/// Returns the device with a page-cache policy for anonymous memory: LRU lists, or the formula of the prima.cpp paper.
fn anonymous(device: &DeviceProfile) -> DeviceProfile {
    let mut device = device.clone();
    if device.memory.page_cache != PageCachePolicy::PaperLinear {
        device.memory.page_cache = PageCachePolicy::TwoList;
    }
    device
}

/// Fills a device's page cache as earlier tokens would have done: with all weights that are assigned to the device if
/// they fit, otherwise with the chunks that the page-cache policy keeps after cyclic reads.
pub fn warm_page_cache(device: &mut DeviceSim) {
    let cache = &mut device.storage.cache;
    for chunk in device.residency.warm_chunks(&device.layout) {
        if cache.access(chunk) == Access::Absent && cache.prefetch_now(chunk) == FetchResult::Started {
            cache.on_arrival(chunk);
            cache.resume(chunk);
        }
    }
}

fn storage(cache_config: &PageCacheConfig) -> Storage {
    let PageCacheConfig { device, chunk_size: chunk, .. } = *cache_config;
    let sequential = device.disk.sequential_bandwidth.value;
    let or_sequential =
        |rate: &Option<Sourced<BytesPerSecond>>| rate.as_ref().map_or(sequential, |rate| rate.value);
    let prefetch_rate = or_sequential(&device.disk.populate_bandwidth);
    let speed = DiskSpeed {
        bandwidth: BytesPerSecond(sequential.0.max(prefetch_rate.0)),
        fault_read_rate: or_sequential(&device.disk.fault_bandwidth),
        prefetch_rate,
        throttle_rate: device.disk.bandwidth_limit.as_ref().map(|limit| limit.value),
        latency: cost_or_zero(device.disk.latency.as_ref()),
        piece_latency: device.disk.piece_latency(),
    };
    let mut storage = Storage::new(cache_config.build_page_cache(), read_ahead(device, chunk), speed, chunk);
    storage.unwire_after = unwire_idle_time(device).map(Seconds::to_nanos);
    if let Some(rate) = &device.disk.page_cache_throughput {
        storage.costs = storage.costs.with_page_cache_throughput(chunk, rate.value);
    }
    storage
}

/// Returns the read-ahead window of page faults.
///
/// The threads of a layer fault at several positions at once, so some threads compute while others wait, even if the
/// kernel's window is small. The simulator reads chunks in order, where a window that keeps the next chunk in
/// flight has this effect: four chunks, two of them before the missing chunk; a touch of the last starts the next read.
fn read_ahead(device: &DeviceProfile, chunk: Bytes) -> Bytes {
    let window = read_ahead_window(device);
    if device.cpu.cores > 1 { window.max(chunk * 4) } else { window }
}

/// Returns the read-ahead window of the device's kernel.
fn read_ahead_window(device: &DeviceProfile) -> Bytes {
    device.disk.read_ahead_window.as_ref().map_or(DEFAULT_READ_AHEAD, |window| window.value)
}
