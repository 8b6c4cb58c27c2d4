//! Conversion of a cluster (devices, links and a model) to an [`Instance`].
//!
//! Each symbol of the prima.cpp paper, Table 6, is taken from the resolved cluster as follows:
//!
//! | symbol | source |
//! | --- | --- |
//! | devices | the members in the scenario's order, rotated so that the head is device 0 |
//! | b, `f_q` | the mean layer: with mixed quantisation layers differ, but sums over many layers hardly do |
//! | `b_i`, `b_o`, `f_{q,out}` | the input embedding; the output norm and the output head |
//! | `n_kv` | the context of each sequence, so that memory suffices for a full cache |
//! | `s_{cpu,q}` | matrix-vector products with weights in cache; an unmeasured format gets the nearest one's speed |
//! | `t_kv` | copying the keys and values of one token and layer |
//! | `t_ram_vram`, `t_vram_ram` | copying one activation vector to the GPU and back |
//! | `t_comm` | sending one activation vector to each other device; none without a link in the scenario |
//! | `s_disk` | sequential reading on Linux and Android, random reading on macOS |
//! | `c_cpu` | compute buffers, and the small tensors that every device stores |
//!
//! Deviation: two costs of a layer have no symbol in the paper: attention over the mean cache length, and a fixed
//! overhead. If a profile has them, they are added to `t_kv_cpu`. All other properties of a device are in its
//! [`RuntimeModel`].
//!
//! Deviations: an f32 KV cache counts as an f16 cache of twice the tokens. If a GPU shares memory without
//! Metal, its memory is subtracted from RAM. Every GPU on macOS is used through Metal.
//!
//! `hop_seconds` is the hop time to the next device in the ring of all devices, or 0 without a link. Hop times by pair
//! override it. The memory of a draft model is subtracted from the head. CPU rates are those that a CPU quota sustains.

use hearth_core::compute_cost::{ComputeCost, os_read_ahead_rate, stream_rate};
use hearth_core::memory::draft;
use hearth_core::residency::in_use_bytes;
use hearth_core::{Cluster, Member};
use hearth_profiles::device::{Gpu, GpuKind, Memory, Os, PageCachePolicy};
use hearth_profiles::model::{ModelProfile, TensorGroup};
use hearth_profiles::{Bytes, BytesPerSecond, Flops, FlopsPerSecond, Format, Seconds};
use hearth_schema::pass::Pass;
use hearth_schema::residency::{Residency, ResidencyOptions};

use crate::problem::assignment::ring_order;
use crate::problem::instance::{Device, GpuApi, Instance, Model, ValuesByFormat};
use crate::runtime_model::{ComputeTimes, ExpertReads, ReadRates, RereadScope, RuntimeModel};

/// The default read rate below which a disk must not be read for every token. source: prima.cpp, public implementation
pub const SLOW_DISK_THRESHOLD: BytesPerSecond = BytesPerSecond(1e8);

impl Instance {
    /// Returns the assignment problem of a cluster. Disks slower than `slow_disk` must not be read for every token.
    pub fn from_cluster(cluster: &Cluster, slow_disk: Option<BytesPerSecond>) -> Self {
        let cluster = &*draft::cluster_without_draft(cluster);
        let order: Vec<usize> = ring_order(cluster.head, cluster.members.len()).collect();
        let in_ring = |(position, &index): (usize, &usize)| {
            let next = order[(position + 1) % order.len()];
            let neighbour_hop = hop(cluster, index, next).unwrap_or(Seconds(0.0));
            let mut member = cluster.members[index].clone();
            member.device.cpu = member.device.cpu.with_sustained_rates();
            device(cluster, &member, neighbour_hop)
        };
        let row = |&from: &usize| order.iter().map(|&to| Some(hop(cluster, from, to)?.0)).collect();
        let hops = order.iter().map(row).collect();
        Self {
            name: cluster.model.name.clone(),
            slow_disk_threshold: slow_disk.unwrap_or(SLOW_DISK_THRESHOLD).0,
            model: model(cluster),
            devices: order.iter().enumerate().map(in_ring).collect(),
            pair_hop_seconds: Some(hops),
        }
    }
}

/// Returns the memory in bytes that exo counts on each device, in the instance's order: the available memory of a
/// discrete GPU if there is one (profiles do not record its total), else the total RAM.
pub fn exo_memory_by_device(cluster: &Cluster) -> Vec<u64> {
    let total = |member: usize| {
        let profile = &cluster.members[member].device;
        let own_memory = profile.gpu.as_ref().filter(|gpu| !gpu.unified_memory);
        own_memory.map_or(&profile.memory.total_memory, |gpu| &gpu.memory_available).value.0
    };
    ring_order(cluster.head, cluster.members.len()).map(total).collect()
}

/// Returns the time to send one activation vector from one member to another: 0 to itself, `None` without a link.
fn hop(cluster: &Cluster, from: usize, to: usize) -> Option<Seconds> {
    if from == to {
        return Some(Seconds(0.0));
    }
    let (sender, receiver) = (&cluster.members[from], &cluster.members[to]);
    let link = cluster.links.link_between(&sender.name, &receiver.name)?;
    Some(link.message_time(cluster.activation_format.bytes_per_token(&cluster.model.shape)))
}

fn model(cluster: &Cluster) -> Model {
    let profile = &cluster.model;
    let shape = &profile.shape;
    // The cache size of the mean layer is counted in tokens with f16 elements of two bytes.
    let format = cluster.kv_cache_format.format();
    let cache = shape.cache_bytes(cluster.context_length, format).0;
    let cache = cache.saturating_mul(u64::from(cluster.workload.sequences));
    let token = 2 * (shape.attention().key_width() + shape.attention().value_width());
    let f16_tokens = cache.div_ceil(token * u64::from(shape.layers.0));
    Model {
        name: profile.name.clone(),
        model_layers: shape.layers.0,
        hidden_size: u64::from(shape.embedding_length),
        key_heads: u64::from(shape.kv_heads),
        key_head_dim: u64::from(shape.key_length),
        value_heads: u64::from(shape.kv_heads),
        value_head_dim: u64::from(shape.value_length),
        cached_tokens: f16_tokens,
        vocab_size: u64::from(shape.vocab_size),
        layer_weight_bytes: profile.mean_layer_bytes().0,
        input_embedding_bytes: profile.input_embedding_bytes().0,
        output_head_bytes: profile.output_head_bytes().0,
        layer_flops: work(&profile.mean_layer()),
        output_flops: work(&profile.output_head),
        weight_bytes_by_layer: (0..shape.layers.0).map(|layer| profile.layer_bytes(layer).0).collect(),
    }
}

/// Returns the floating-point operations of a tensor group for one token, by weight format.
fn work(group: &TensorGroup) -> ValuesByFormat {
    group.totals_by_format().map(|(format, share)| (format.name().to_owned(), share.flops.0)).collect()
}

/// Returns the GPU of a device; `None` if GPUs do not support the KV cache of the scenario or the architecture.
fn usable_gpu<'a>(cluster: &Cluster, member: &'a Member) -> Option<&'a Gpu> {
    let is_supported = cluster.kv_cache_format.is_supported_on_gpus()
        && cluster.model.shape.architecture.spec().has_gpu_kernels;
    member.device.gpu.as_ref().filter(|_| is_supported)
}

fn device(cluster: &Cluster, member: &Member, hop: Seconds) -> Device {
    let profile = &member.device;
    let model = &cluster.model;
    let (os, memory) = (profile.os, &profile.memory);
    let gpu = usable_gpu(cluster, member);
    let kind = match gpu.map(|gpu| gpu.kind) {
        None => GpuApi::None,
        Some(kind) if os == Os::Macos || kind == GpuKind::Metal => GpuApi::Metal,
        Some(_) => GpuApi::Cuda,
    };
    let activation = model.shape.hidden_state_bytes();
    let new_cache = new_cache_bytes(cluster);
    let gpu_bytes = gpu.map_or(0, |gpu| gpu.memory_available.value.0);
    let shared = kind == GpuApi::Cuda && gpu.is_some_and(|gpu| gpu.unified_memory);
    let soc = soc_rates(cluster, member);
    let cache_write = profile.cpu.kv_copy.transfer_time(new_cache) + layer_extras(cluster, member);
    // If the free swap space is unknown, it does not limit swapping.
    let swap = memory.swap_available.as_ref().or(memory.can_swap.as_ref());
    Device {
        name: member.name.clone(),
        os,
        gpu: kind,
        cpu_speed: speeds(model, |format| match soc {
            Some((speed, _)) => Some(speed),
            None => profile.cpu.matvec_rate(format),
        }),
        gpu_speed: gpu
            .map_or_else(ValuesByFormat::new, |gpu| speeds(model, |format| gpu.matvec_rate(format))),
        cpu_memory_rate: soc.map_or(profile.cpu.read_bandwidth.value.0, |(_, rate)| rate.0),
        gpu_memory_rate: gpu.map_or(0.0, |gpu| gpu.read_bandwidth.value.0),
        cpu_cache_write_seconds: cache_write.0,
        gpu_cache_write_seconds: gpu.map_or(0.0, |gpu| gpu_layer_extras(gpu, new_cache).0),
        gpu_upload_seconds: gpu.map_or(0.0, |gpu| gpu.upload.transfer_time(activation).0),
        gpu_download_seconds: gpu.map_or(0.0, |gpu| gpu.download.transfer_time(activation).0),
        unified_memory: gpu.is_some_and(|gpu| gpu.unified_memory),
        hop_seconds: hop.0,
        disk_read_rate: profile.disk_read_rate().0,
        ram_available: memory.available_memory.value.0.saturating_sub(if shared { gpu_bytes } else { 0 }),
        metal_available: if kind == GpuApi::Metal { gpu_bytes } else { 0 },
        cuda_available: if kind == GpuApi::Cuda { gpu_bytes } else { 0 },
        swappable_bytes: memory.can_swap.as_ref().map_or(0, |bytes| bytes.value.0),
        swap_available: swap.map_or(0, |bytes| bytes.value.0),
        cpu_buffer_bytes: (profile.cpu.compute_buffer.value + model.shared_tensors.bytes()).0,
        gpu_buffer_bytes: gpu.map_or(0, |gpu| gpu.compute_buffer.value.0),
        runtime: runtime(cluster, member),
    }
}

/// Returns the runtime model of a cluster member. If the scenario does not fix the residency policy, a planner may
/// choose `os` and, except on macOS, where individual pages cannot be released, also `managed`.
fn runtime(cluster: &Cluster, member: &Member) -> RuntimeModel {
    let (profile, managed) = (&member.device, ResidencyOptions::with_policy(Residency::Managed));
    let os = ResidencyOptions::default();
    let open = if profile.os == Os::Macos { vec![os] } else { vec![os, managed] };
    let model = &cluster.model;
    let experts = model.shape.experts.map(|experts| {
        let largest = model.layers.iter().map(|layer| layer.expert_bytes().0).max().unwrap_or(0);
        let largest = largest / u64::from(experts.count);
        let window = profile.disk.read_ahead_window.as_ref().map_or(0.0, |window| window.value.as_f64());
        ExpertReads {
            weight_share: model.mean_layer().expert_bytes().as_f64() / model.mean_layer().bytes().as_f64(),
            used_share: experts.share_used(),
            in_use_bytes: in_use_bytes(&experts, largest),
            used: experts.used,
            layer_bytes: model.mean_layer().expert_bytes().0,
            latency_seconds: profile.disk.piece_latency().0,
            // An expert has three matrices, one in each tensor.
            read_around: 1.0 + window / (largest as f64 / 3.0).max(1.0),
        }
    });
    RuntimeModel {
        allowed_residencies: member.residency.map_or(open, |residency| vec![residency]),
        reread_scope: match profile.memory.page_cache {
            PageCachePolicy::PaperLinear => RereadScope::Excess,
            // The other policies read a share that does not fit again almost completely for every token.
            _ => RereadScope::Everything,
        },
        memory_uncertainty: memory_uncertainty(&profile.memory),
        experts,
        cpu_count: profile.cpu.cores,
        token_overhead_seconds: profile.cpu.token_overhead.as_ref().map_or(0.0, |cost| cost.value.0),
        read_rates: Some(ReadRates {
            fault_read_rate: profile.disk.fault_read_rate().0,
            read_ahead_rate: os_read_ahead_rate(&profile.disk).0,
            stream_read_rate: stream_rate(&profile.disk).0,
        }),
        compute_times: Some(compute_times(cluster, member)),
    }
}

/// Returns the uncertainty of the memory that a run can use, which consists of available memory and of memory of other
/// programs that can be swapped out.
fn memory_uncertainty(memory: &Memory) -> f64 {
    let parts = [Some(&memory.available_memory), memory.can_swap.as_ref()].into_iter().flatten();
    let (sum, variance) = parts.fold((0.0, 0.0), |(sum, variance): (f64, f64), part| {
        let bytes = part.value.as_f64();
        (sum + bytes, variance + (bytes * part.relative_uncertainty()).powi(2))
    });
    if sum > 0.0 { variance.sqrt() / sum } else { 0.0 }
}

/// Returns the compute times of one token as in the simulator, at the mean length of the KV cache during the run.
fn compute_times(cluster: &Cluster, member: &Member) -> ComputeTimes {
    let (profile, model) = (&member.device, &cluster.model);
    let pass = Pass::new(0, mean_length(cluster), 1, true);
    let element = cluster.kv_cache_format.format();
    let layers = |work: &ComputeCost| {
        (0..model.shape.layers.0).map(|layer| work.layer_time(layer, &[pass]).0).collect()
    };
    let cpu = ComputeCost::for_main_memory(profile, model, element);
    let own_gpu = usable_gpu(cluster, member);
    let gpu = own_gpu.map(|gpu| ComputeCost::for_gpu(gpu, model, element));
    let gpu_window_overhead = own_gpu.and_then(|gpu| gpu.window_overhead.as_ref());
    ComputeTimes {
        cpu_layer_seconds: layers(&cpu),
        gpu_layer_seconds: gpu.as_ref().map_or_else(Vec::new, &layers),
        cpu_output_seconds: cpu.output_time(1).0,
        gpu_output_seconds: gpu.as_ref().map(|gpu| gpu.output_time(1).0),
        cpu_window_overhead_seconds: profile.cpu.window_overhead.as_ref().map_or(0.0, |cost| cost.value.0),
        gpu_window_overhead_seconds: gpu_window_overhead.map_or(0.0, |cost| cost.value.0),
    }
}

/// Converts the simulated time of a layer on a SoC to rates of the prima.cpp paper's latency model: a memory rate with
/// which a layer takes this time, and a compute rate with which arithmetic adds 1 %. Returns `None` without a SoC.
fn soc_rates(cluster: &Cluster, member: &Member) -> Option<(FlopsPerSecond, BytesPerSecond)> {
    // As in `ComputeCost`, a SoC is not used for a model whose layers differ.
    member.device.soc.as_ref().filter(|_| cluster.model.shape.has_equal_layers())?;
    let (model, element) = (&cluster.model, cluster.kv_cache_format.format());
    let work = ComputeCost::for_main_memory(&member.device, model, element);
    let time = work.layer_time(0, &[Pass::new(0, mean_length(cluster), 1, false)]);
    Some((model.mean_layer().flops() / (time * 0.01), model.mean_layer_bytes() / time))
}

/// Returns the time of a layer for attention over the mean length of the KV cache, and for activations, plus the fixed
/// overhead of a layer.
fn layer_extras(cluster: &Cluster, member: &Member) -> Seconds {
    let cpu = &member.device.cpu;
    let length = mean_length(cluster);
    let shape = &cluster.model.shape;
    let work: Flops = shape.mixers().map(|mixer| mixer.flops(length)).sum();
    let mean = work / f64::from(shape.layers.0);
    let attention = cpu.attention_rate.as_ref().map_or(Seconds(0.0), |rate| mean / rate.value);
    let bytes: Bytes = (0..shape.layers.0).map(|layer| shape.layer_activation_bytes(layer)).sum();
    let mean = Bytes(bytes.0 / u64::from(shape.layers.0));
    let activations = cpu.activation_bandwidth.as_ref().map_or(Seconds(0.0), |rate| mean / rate.value);
    attention + activations + cpu.layer_overhead.as_ref().map_or(Seconds(0.0), |cost| cost.value)
}

/// Returns the time of a GPU layer for copying keys and values, plus the fixed overhead of a layer.
fn gpu_layer_extras(gpu: &Gpu, new_cache: Bytes) -> Seconds {
    gpu.kv_copy.transfer_time(new_cache) + gpu.layer_overhead.as_ref().map_or(Seconds(0.0), |cost| cost.value)
}

/// Returns the size of the keys and values of one token in the mean layer.
fn new_cache_bytes(cluster: &Cluster) -> Bytes {
    let (shape, format) = (&cluster.model.shape, cluster.kv_cache_format.format());
    let all: Bytes = (0..shape.layers.0).map(|layer| shape.new_cache_bytes(layer, 1, format)).sum();
    Bytes(all.0.div_ceil(u64::from(shape.layers.0)))
}

fn mean_length(cluster: &Cluster) -> u32 {
    let workload = &cluster.workload;
    workload.prompt_tokens.saturating_add(workload.generated_tokens / 2).min(cluster.context_length)
}

fn speeds(model: &ModelProfile, rate: impl Fn(Format) -> Option<FlopsPerSecond>) -> ValuesByFormat {
    let mean = model.mean_layer();
    let totals = mean.totals_by_format().chain(model.output_head.totals_by_format());
    totals.filter_map(|(format, _)| Some((format.name().to_owned(), rate(format)?.0))).collect()
}
