//! The constants of the latency model: what a layer, a window and the head cost on each device.
//!
//! prima.cpp paper, appendix A.3, the platform-specific constants:
//!
//! ```text
//! alpha = Fc + t_kv_cpu + b'/T_cpu            a layer on the CPU, nothing read from disk
//! beta  = Fg + t_kv_gpu + b'/T_gpu - alpha    what moving that layer to the GPU adds (0 without a GPU)
//! xi    = (t_ram_vram + t_vram_ram)(1 - UMA) + t_comm                              a window
//! x     = floor((cap - need(0 layers)) / b')  layers that memory holds
//! ```
//!
//! with `Fc = sum f_q/s_cpu,q`, `Fg = sum f_q/s_gpu,q`. The compute and memory parts are kept apart, because a
//! plan reports them apart. Limits are counted in layers of the model, so that they hold for any k:
//! `floor(floor(B/b')/k) = floor(B/(k b'))`.
//!
//! Not here: how the constants combine into a token's time. That is [`crate::latency`].

use crate::latency::hop_times::HopTimes;
use crate::problem::instance::{Device, Gpu, Instance, OperatingSystem, PerFormat};
use crate::problem::validation::InstanceError;
use crate::runtime_model::ReadRates;

/// The behaviour of a device whose share exceeds its memory: the paper's sets M1 to M4.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub enum MemoryCase {
    /// M1: macOS without Metal; rereads the excess.
    ReloadsExcessMacos,
    /// M2: macOS with Metal; rereads everything.
    ReloadsEverything,
    /// M3: Linux or Android; rereads the excess of the CPU share.
    ReloadsExcess,
    /// M4: the share fits, or must fit because the disk is slow.
    NoReload,
}

impl MemoryCase {
    pub fn set(self) -> u8 {
        match self {
            MemoryCase::ReloadsExcessMacos => 1,
            MemoryCase::ReloadsEverything => 2,
            MemoryCase::ReloadsExcess => 3,
            MemoryCase::NoReload => 4,
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct ModelCosts {
    pub layers: u32,
    /// b.
    pub layer_weight_bytes: f64,
    /// b', an integer below 2^50.
    pub layer_resident_bytes: i64,
    /// `b_i/V`: one row of the input embedding.
    pub row_bytes: f64,
    /// `b_i/V` rounded up: need > cap on integers is need rounded up > cap.
    pub row_bytes_up: i64,
    /// `b_o`.
    pub output_head_bytes: i64,
    /// Prefix sums of the layers' weight bytes: entry i is the first i layers.
    pub first_layers_bytes: Vec<i64>,
    /// Whether all layers have the same size, and the same time on each device.
    pub uniform_layers: bool,
    /// The largest excess of consecutive layers over their number times b. A planner that counts layers reserves it
    /// on GPUs once per window.
    pub max_run_surplus: i64,
    /// The sum of the excesses over b: an upper bound for any set of layers.
    pub total_surplus: i64,
}

#[derive(Debug, Clone)]
pub(crate) struct DeviceCosts {
    /// Fc: seconds of CPU arithmetic a layer.
    pub cpu_compute: f64,
    /// Fg: seconds of GPU arithmetic a layer; equal to Fc without a GPU.
    pub gpu_compute: f64,
    /// Fo: seconds of CPU arithmetic for the output head.
    pub output_compute: f64,
    /// `t_kv_cpu` + b'/`T_cpu`.
    pub cpu_memory: f64,
    /// `t_kv_gpu` + b'/`T_gpu`; equal to the CPU's without a GPU.
    pub gpu_memory: f64,
    /// (`t_ram_vram` + `t_vram_ram)(1` - UMA), a window.
    pub window_copy: f64,
    /// `t_comm` of a window; an estimate where it depends on the next device.
    pub hop: f64,
    /// (`b_i/V` + `b_o)/T_cpu`, on the head.
    pub head_memory: f64,
    /// `s_disk`.
    pub disk_read: f64,
    /// The read rates by access pattern; all are `s_disk` where nothing else is known.
    pub reads: ReadRates,
    /// Whether `s_disk` is under the threshold, so that the device's share must fit.
    pub slow_disk: bool,
    /// Whether GPU layers share the memory of CPU layers.
    pub metal: bool,
    /// `c_cpu`, with Metal + `c_gpu`.
    pub buffer_bytes: i64,
    /// `cap`: the number of layers that fit into its memory.
    pub capacity: i64,
    /// Prefix sums of the layers' seconds on the CPU and on the GPU with all weights in memory, where they are known.
    pub first_layers_seconds: Option<[Vec<f64>; 2]>,
    /// Fixed seconds of a window, CPU and GPU together.
    pub window_overheads: f64,
    /// Whether no layer takes longer on the GPU than on the CPU.
    pub gpu_never_slower: bool,
    /// Main memory available to a run including what other programs can swap out, on every system, unlike the paper's
    /// cap.
    pub steady_capacity: i64,
    /// Bytes for GPU layers as a worker and as the head; 0 without a GPU.
    pub gpu_bytes: [i64; 2],
    /// The memory case if the share does not fit.
    pub case_when_over: MemoryCase,
}

impl ModelCosts {
    pub(crate) fn new(instance: &Instance) -> Self {
        let model = &instance.model;
        let each =
            |layer: u32| model.layer_bytes.get(layer as usize).copied().unwrap_or(model.layer_weight_bytes);
        let mut first_layers_bytes = vec![0];
        for layer in 0..model.model_layers {
            first_layers_bytes.push(first_layers_bytes[layer as usize] + each(layer) as i64);
        }
        Self {
            max_run_surplus: heaviest_surplus(&first_layers_bytes, model.layer_weight_bytes as i64),
            total_surplus: (0..model.model_layers)
                .map(|layer| (each(layer) as i64 - model.layer_weight_bytes as i64).max(0))
                .sum(),
            first_layers_bytes,
            uniform_layers: all_equal(&model.layer_bytes)
                && instance
                    .devices
                    .iter()
                    .filter_map(|device| device.runtime.work.as_ref())
                    .all(|work| all_equal(&work.cpu_layers) && all_equal(&work.gpu_layers)),
            layers: model.model_layers,
            layer_weight_bytes: model.layer_weight_bytes as f64,
            layer_resident_bytes: model.layer_resident_bytes().unwrap_or(u64::MAX) as i64,
            row_bytes: model.input_embedding_bytes as f64 / model.vocabulary as f64,
            row_bytes_up: model.input_embedding_bytes.div_ceil(model.vocabulary.max(1)) as i64,
            output_head_bytes: model.output_head_bytes as i64,
        }
    }

    /// Returns `b_i/V` + `b_o` on the head, 0 elsewhere.
    pub(crate) fn head_bytes(&self, head: bool) -> f64 {
        if head { self.row_bytes + self.output_head_bytes as f64 } else { 0.0 }
    }

    /// Returns `b_i/V` on the head, 0 elsewhere.
    pub(crate) fn head_row(&self, head: bool) -> f64 {
        if head { self.row_bytes } else { 0.0 }
    }
}

fn all_equal<T: PartialEq>(all: &[T]) -> bool {
    all.windows(2).all(|pair| pair[0] == pair[1])
}

/// Returns the prefix sums, beginning with 0.
fn first(seconds: &[f64]) -> Vec<f64> {
    let sums = seconds.iter().scan(0.0, |sum, seconds| {
        *sum += seconds;
        Some(*sum)
    });
    std::iter::once(0.0).chain(sums).collect()
}

/// Returns the largest bytes(i..j) - (j - i) b.
fn heaviest_surplus(first_layers_bytes: &[i64], layer_weight_bytes: i64) -> i64 {
    let beyond = (0..).zip(first_layers_bytes).map(|(layers, bytes)| bytes - layers * layer_weight_bytes);
    let (mut least, mut surplus) = (0, 0);
    for beyond in beyond {
        least = least.min(beyond);
        surplus = surplus.max(beyond - least);
    }
    surplus
}

impl DeviceCosts {
    /// Computes the constants of device `index` of a validated instance.
    pub(crate) fn new(
        instance: &Instance,
        index: usize,
        model: &ModelCosts,
        hops: &HopTimes,
    ) -> Result<Self, InstanceError> {
        let device = &instance.devices[index];
        let resident = model.layer_resident_bytes as f64;
        let cpu_compute = seconds(&instance.model.layer_flops, &device.cpu_speed);
        let cpu_memory = device.cpu_cache_write + resident / device.cpu_memory_rate;
        let (gpu_compute, gpu_memory) = if device.gpu == Gpu::None {
            (cpu_compute, cpu_memory)
        } else {
            let compute = seconds(&instance.model.layer_flops, &device.gpu_speed);
            (compute, device.gpu_cache_write + resident / device.gpu_memory_rate)
        };
        let metal = device.gpu == Gpu::Metal;
        let (capacity, case_when_over) = memory(device);
        let work = device.runtime.work.as_ref();
        let costs = Self {
            cpu_compute,
            gpu_compute,
            output_compute: seconds(&instance.model.output_flops, &device.cpu_speed),
            cpu_memory,
            gpu_memory,
            window_copy: if device.unified_memory { 0.0 } else { device.to_gpu + device.from_gpu },
            hop: hops.of_sender[index],
            head_memory: model.head_bytes(true) / device.cpu_memory_rate,
            disk_read: device.disk_read,
            reads: device.runtime.reads.unwrap_or(ReadRates::all(device.disk_read)),
            slow_disk: device.disk_read < instance.slow_disk_threshold,
            metal,
            buffer_bytes: device.cpu_buffer_bytes as i64
                + if metal { device.gpu_buffer_bytes as i64 } else { 0 },
            capacity,
            first_layers_seconds: work.map(|work| [first(&work.cpu_layers), first(&work.gpu_layers)]),
            window_overheads: work.map_or(0.0, |work| work.output + work.cpu_window + work.gpu_window),
            gpu_never_slower: match work {
                Some(work) => work.gpu_layers.iter().zip(&work.cpu_layers).all(|(gpu, cpu)| gpu <= cpu),
                None => gpu_compute + gpu_memory <= cpu_compute + cpu_memory,
            },
            steady_capacity: (device.ram_available + device.can_swap.min(device.swap_available)) as i64,
            gpu_bytes: gpu_bytes(device, model),
            case_when_over,
        };
        // The division by the number of devices leaves room for the sum over all of them.
        if costs.worst_token(model, hops.longest(index)) < f64::MAX / (instance.devices.len() as f64) {
            Ok(costs)
        } else {
            Err(InstanceError::InfiniteTokenTime { place: device.place(index) })
        }
    }

    /// Returns an upper bound of the time that any plan spends on this device.
    fn worst_token(&self, model: &ModelCosts, longest_hop: f64) -> f64 {
        let layer = self.cpu_compute + self.gpu_compute + self.cpu_memory + self.gpu_memory;
        let work: f64 = self.first_layers_seconds.iter().flatten().filter_map(|sums| sums.last()).sum();
        let work = work + f64::from(model.layers) * self.window_overheads;
        let heavier = model.first_layers_bytes.last().map_or(0.0, |bytes| *bytes as f64);
        let bytes = (f64::from(model.layers) * model.layer_resident_bytes as f64).max(heavier)
            + model.head_bytes(true)
            + self.buffer_bytes as f64;
        work + f64::from(model.layers) * (layer + self.window_copy + longest_hop)
            + self.output_compute
            + self.head_memory
            // In a conflict everything is read twice.
            + 2.0 * bytes / self.disk_read.min(self.reads.slowest())
    }

    /// alpha: seconds of a layer on the CPU, nothing read from disk.
    pub(crate) fn cpu_layer(&self) -> f64 {
        self.cpu_compute + self.cpu_memory
    }

    /// alpha + beta: seconds of a layer on the GPU; as on the CPU without one.
    pub(crate) fn gpu_layer(&self) -> f64 {
        self.gpu_compute + self.gpu_memory
    }

    /// x: the model layers that memory holds; negative if not even the buffers fit.
    pub(crate) fn layers_that_fit(&self, head: bool, model: &ModelCosts) -> i64 {
        let head_bytes = if head { model.row_bytes_up + model.output_head_bytes } else { 0 };
        (self.capacity - self.buffer_bytes - head_bytes).div_euclid(model.layer_resident_bytes)
    }

    /// Returns how many model layers GPU memory holds, whichever layers they are, in this number of windows.
    pub(crate) fn gpu_layers_that_fit(&self, head: bool, model: &ModelCosts, windows: u32) -> i64 {
        let surplus = model.total_surplus.min(i64::from(windows).saturating_mul(model.max_run_surplus));
        (self.gpu_bytes[usize::from(head)] - surplus).max(0) / model.layer_resident_bytes
    }
}

/// Returns the sum over q of `f_q` / `s_q`; formats without work need no speed.
fn seconds(work: &PerFormat, speeds: &PerFormat) -> f64 {
    let busy = work.iter().filter(|(_, flops)| **flops > 0.0);
    busy.map(|(format, flops)| flops / speeds.get(format).copied().unwrap_or(f64::NAN)).sum()
}

/// Returns cap, and the memory case of a share that exceeds it.
fn memory(device: &Device) -> (i64, MemoryCase) {
    let ram = device.ram_available as i64;
    match (device.os, device.gpu) {
        (OperatingSystem::Macos, Gpu::Metal) => {
            (device.metal_available as i64, MemoryCase::ReloadsEverything)
        }
        (OperatingSystem::Macos, _) => (ram, MemoryCase::ReloadsExcessMacos),
        (OperatingSystem::Linux, _) => (ram, MemoryCase::ReloadsExcess),
        (OperatingSystem::Android, _) => {
            (ram + device.can_swap.min(device.swap_available) as i64, MemoryCase::ReloadsExcess)
        }
    }
}

/// Returns `d_cuda` - `c_gpu`, or `d_metal` - `c_gpu` - [head] `b_o`, as a worker and as the head; may be negative.
fn gpu_bytes(device: &Device, model: &ModelCosts) -> [i64; 2] {
    let buffers = device.gpu_buffer_bytes as i64;
    match device.gpu {
        Gpu::None => [0; 2],
        Gpu::Cuda => [device.cuda_available as i64 - buffers; 2],
        Gpu::Metal => {
            let worker = device.metal_available as i64 - buffers;
            [worker, worker - model.output_head_bytes]
        }
    }
}
