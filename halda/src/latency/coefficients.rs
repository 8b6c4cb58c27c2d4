//! Coefficients of the latency model: the costs of a layer, a window and the output head on each device.
//!
//! These are the platform-specific constants of the prima.cpp paper, appendix A.3, with its symbols (see GLOSSARY.md):
//!
//! ```text
//! alpha = Fc + t_kv_cpu + b'/T_cpu            a layer on the CPU, without reading from disk
//! beta  = Fg + t_kv_gpu + b'/T_gpu - alpha    the change if this layer is on the GPU (0 without a GPU)
//! xi    = (t_ram_vram + t_vram_ram)(1 - UMA) + t_comm                              a window
//! x     = floor((cap - need(0 layers)) / b')  the layers that fit in memory
//! ```
//!
//! with `Fc = sum f_q/s_cpu,q` and `Fg = sum f_q/s_gpu,q`. A device has `cap` bytes of memory, of which buffers and, on
//! the head device, the output head take need(0 layers). Limits on memory are counted in layers of the model, so they
//! hold for any number k of rounds: in B bytes, a window can have `floor(floor(B/b')/k) = floor(B/(k b'))` layers.

use std::ops::AddAssign;

use hearth_profiles::device::Os;

use crate::latency::hop_times::HopTimes;
use crate::problem::instance::ValuesByFormat;
use crate::{Device, GpuApi, Instance, InstanceError, ReadRates};

/// Which weights a device reads again from disk for every token: the sets M1 to M4 of the prima.cpp paper.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub enum MemoryCase {
    /// M1: macOS without Metal. The device's weights exceed memory, and the excess is read again.
    ReloadsExcessMacos,
    /// M2: macOS with Metal. The device's weights exceed the working set, and all of them are read again.
    ReloadsEverything,
    /// M3: Linux or Android. The weights of the CPU layers exceed memory, and the excess is read again.
    ReloadsExcess,
    /// M4: the device's weights fit in memory, or must fit because the disk is too slow.
    #[default]
    NoReload,
}

impl MemoryCase {
    /// Returns the number of the memory case in the prima.cpp paper: 1 for M1 to 4 for M4.
    pub fn number(self) -> u8 {
        self as u8 + 1
    }
}

#[derive(Debug, Clone)]
pub(crate) struct ModelSizes {
    pub model_layers: u32,
    /// b, the bytes of weights of a layer in the prima.cpp paper's model, in which all layers are equal.
    pub layer_weight_bytes: f64,
    /// b' of the prima.cpp paper: the bytes of weights and KV cache of a layer, at most 2^50.
    pub layer_resident_bytes: i64,
    /// `b_i/V` of the prima.cpp paper: the bytes of a row of the input embedding.
    pub row_bytes: f64,
    /// The bytes of a row of the input embedding, rounded up, so that memory needs can be checked on integers.
    pub row_bytes_ceil: i64,
    /// `b_o` of the prima.cpp paper: the bytes of the output norm and head.
    pub output_head_bytes: i64,
    /// Entry i is the sum of the weight bytes of the first i layers.
    pub layer_bytes_prefix_sums: Vec<i64>,
    /// Whether all layers have the same size and, on each device, the same time.
    pub has_uniform_layers: bool,
    /// The maximum sum of (bytes - `layer_weight_bytes`) over consecutive layers, which a window reserves in GPU
    /// memory.
    pub max_consecutive_excess_bytes: i64,
    /// The sum of the bytes by which individual layers exceed [`Self::layer_weight_bytes`].
    pub total_excess_bytes: i64,
}

#[derive(Debug, Clone)]
pub(crate) struct DeviceCosts {
    /// Fc of the prima.cpp paper: the seconds of CPU arithmetic per layer.
    pub cpu_compute_seconds: f64,
    /// Fg of the prima.cpp paper: the seconds of GPU arithmetic per layer; without a GPU those of the CPU.
    pub gpu_compute_seconds: f64,
    /// Fo of the prima.cpp paper: the seconds of CPU arithmetic for the output head.
    pub output_compute_seconds: f64,
    /// `t_kv_cpu` + b'/`T_cpu`: the seconds of memory traffic per layer on the CPU.
    pub cpu_memory_seconds: f64,
    /// `t_kv_gpu` + b'/`T_gpu`: the seconds of memory traffic per layer on the GPU; without a GPU those of the CPU.
    pub gpu_memory_seconds: f64,
    /// (`t_ram_vram` + `t_vram_ram`) (1 - UMA): the seconds per window of copying the hidden state to the GPU and back.
    pub window_copy_seconds: f64,
    /// `t_comm`: the seconds of the hop after a window; an estimate if hops depend on the next device.
    pub hop_seconds: f64,
    /// (`b_i/V` + `b_o`)/`T_cpu`: the additional seconds of memory traffic per token if the device is the head.
    pub head_memory_seconds: f64,
    /// `s_disk` of the prima.cpp paper: the disk throughput in bytes per second.
    pub disk_read_rate: f64,
    pub read_rates: ReadRates,
    /// Whether the disk is slower than the instance's threshold, so the device's weights must fit in memory.
    pub has_slow_disk: bool,
    /// Whether the GPU is used through Metal, so GPU and CPU layers share memory.
    pub uses_metal: bool,
    /// `c_cpu`, with Metal `c_cpu` + `c_gpu`: the bytes of the compute buffers in main memory.
    pub buffer_bytes: i64,
    /// `cap`: the bytes of memory for layers, buffers and the output head.
    pub memory_capacity_bytes: i64,
    /// Prefix sums of the layers' compute seconds on the CPU and on the GPU; `None` if the layers were not timed.
    pub layer_seconds_prefix_sums: Option<[Vec<f64>; 2]>,
    /// The maximum overhead of a window in seconds: on the CPU plus on the GPU, plus the output head on the CPU.
    pub max_overhead_seconds: f64,
    pub is_gpu_never_slower: bool,
    /// The bytes of RAM that a run can use, including memory of other programs that can be swapped out.
    pub steady_state_capacity_bytes: i64,
    /// The bytes available for GPU layers if the device is a worker, and if it is the head; 0 without a GPU.
    pub gpu_memory_bytes_by_role: [i64; 2],
    pub memory_case_if_exceeded: MemoryCase,
}

impl ModelSizes {
    pub(crate) fn new(instance: &Instance) -> Self {
        let model = &instance.model;
        let mean = model.layer_weight_bytes;
        let layer_bytes: Vec<i64> = (0..model.model_layers as usize)
            .map(|layer| model.weight_bytes_by_layer.get(layer).copied().unwrap_or(mean) as i64)
            .collect();
        let surpluses = layer_bytes.iter().map(|bytes| bytes - mean as i64);
        // The surplus of the heaviest run that ends at a layer, and the maximum so far.
        let (_, max_run_surplus) = surpluses.clone().fold((0, 0), |(run, most), surplus| {
            let run = (run + surplus).max(0);
            (run, most.max(run))
        });
        let mut times = instance.devices.iter().filter_map(|device| device.runtime.compute_times.as_ref());
        let equal_times =
            times.all(|work| all_equal(&work.cpu_layer_seconds) && all_equal(&work.gpu_layer_seconds));
        Self {
            max_consecutive_excess_bytes: max_run_surplus,
            total_excess_bytes: surpluses.map(|surplus| surplus.max(0)).sum(),
            layer_bytes_prefix_sums: prefix_sums(&layer_bytes),
            has_uniform_layers: all_equal(&model.weight_bytes_by_layer) && equal_times,
            model_layers: model.model_layers,
            layer_weight_bytes: model.layer_weight_bytes as f64,
            layer_resident_bytes: model.layer_resident_bytes().unwrap_or(u64::MAX) as i64,
            row_bytes: model.input_embedding_bytes as f64 / model.vocab_size as f64,
            row_bytes_ceil: model.input_embedding_bytes.div_ceil(model.vocab_size.max(1)) as i64,
            output_head_bytes: model.output_head_bytes as i64,
        }
    }

    /// Returns `b_i/V` + `b_o`, the bytes that only the head reads; 0 on other devices.
    pub(crate) fn head_device_bytes(&self, is_head: bool) -> f64 {
        if is_head { self.row_bytes + self.output_head_bytes as f64 } else { 0.0 }
    }

    /// Returns `b_i/V`, the bytes of one row of the input embedding; 0 on devices other than the head.
    pub(crate) fn head_device_row_bytes(&self, is_head: bool) -> f64 {
        if is_head { self.row_bytes } else { 0.0 }
    }
}

fn all_equal<T: PartialEq>(all: &[T]) -> bool {
    all.windows(2).all(|pair| pair[0] == pair[1])
}

fn prefix_sums<T: Copy + Default + AddAssign>(values: &[T]) -> Vec<T> {
    let sums = values.iter().scan(T::default(), |sum, value| {
        *sum += *value;
        Some(*sum)
    });
    std::iter::once(T::default()).chain(sums).collect()
}

impl DeviceCosts {
    pub(crate) fn new(
        instance: &Instance,
        index: usize,
        model: &ModelSizes,
        hops: &HopTimes,
    ) -> Result<Self, InstanceError> {
        let device = &instance.devices[index];
        let resident = model.layer_resident_bytes as f64;
        let cpu_compute_seconds = seconds(&instance.model.layer_flops, &device.cpu_speed);
        let cpu_memory_seconds = device.cpu_cache_write_seconds + resident / device.cpu_memory_rate;
        let (gpu_compute_seconds, gpu_memory_seconds) = if device.gpu == GpuApi::None {
            (cpu_compute_seconds, cpu_memory_seconds)
        } else {
            let compute = seconds(&instance.model.layer_flops, &device.gpu_speed);
            (compute, device.gpu_cache_write_seconds + resident / device.gpu_memory_rate)
        };
        let window_copy_seconds =
            if device.unified_memory { 0.0 } else { device.gpu_upload_seconds + device.gpu_download_seconds };
        let metal = device.gpu == GpuApi::Metal;
        let (capacity, memory_case_if_exceeded) = capacity_and_case(device);
        let work = device.runtime.compute_times.as_ref();
        let rate = device.disk_read_rate;
        let same_rates = ReadRates { fault_read_rate: rate, read_ahead_rate: rate, stream_read_rate: rate };
        let costs = Self {
            cpu_compute_seconds,
            gpu_compute_seconds,
            output_compute_seconds: seconds(&instance.model.output_flops, &device.cpu_speed),
            cpu_memory_seconds,
            gpu_memory_seconds,
            window_copy_seconds,
            hop_seconds: hops.sender_hop_seconds[index],
            head_memory_seconds: model.head_device_bytes(true) / device.cpu_memory_rate,
            disk_read_rate: device.disk_read_rate,
            read_rates: device.runtime.read_rates.unwrap_or(same_rates),
            has_slow_disk: device.disk_read_rate < instance.slow_disk_threshold,
            uses_metal: metal,
            buffer_bytes: device.cpu_buffer_bytes as i64
                + if metal { device.gpu_buffer_bytes as i64 } else { 0 },
            memory_capacity_bytes: capacity,
            layer_seconds_prefix_sums: work
                .map(|work| [prefix_sums(&work.cpu_layer_seconds), prefix_sums(&work.gpu_layer_seconds)]),
            max_overhead_seconds: work.map_or(0.0, |work| {
                work.cpu_output_seconds + work.cpu_window_overhead_seconds + work.gpu_window_overhead_seconds
            }),
            is_gpu_never_slower: match work {
                Some(work) => {
                    work.gpu_layer_seconds.iter().zip(&work.cpu_layer_seconds).all(|(gpu, cpu)| gpu <= cpu)
                }
                None => gpu_compute_seconds + gpu_memory_seconds <= cpu_compute_seconds + cpu_memory_seconds,
            },
            steady_state_capacity_bytes: ram_and_swap(device),
            gpu_memory_bytes_by_role: gpu_bytes(device, model),
            memory_case_if_exceeded,
        };
        // Divided by the number of devices, so that the sum over all devices is finite too.
        let limit = f64::MAX / instance.devices.len() as f64;
        let is_finite = costs.max_token_seconds(model, hops.max_hop_seconds(index)) < limit;
        let error = || InstanceError::InfiniteTokenTime { place: device.label(index) };
        is_finite.then_some(costs).ok_or_else(error)
    }

    /// Returns an upper bound of the seconds that this device adds to a token in any plan.
    fn max_token_seconds(&self, model: &ModelSizes, max_hop_seconds: f64) -> f64 {
        let layer = self.cpu_compute_seconds
            + self.gpu_compute_seconds
            + self.cpu_memory_seconds
            + self.gpu_memory_seconds;
        let work: f64 = self.layer_seconds_prefix_sums.iter().flatten().filter_map(|sums| sums.last()).sum();
        let work = work + f64::from(model.model_layers) * self.max_overhead_seconds;
        let heavier = model.layer_bytes_prefix_sums.last().map_or(0.0, |bytes| *bytes as f64);
        let bytes = (f64::from(model.model_layers) * model.layer_resident_bytes as f64).max(heavier)
            + model.head_device_bytes(true)
            + self.buffer_bytes as f64;
        let ReadRates { fault_read_rate: fault, read_ahead_rate: read_ahead, stream_read_rate: stream } =
            self.read_rates;
        work + f64::from(model.model_layers) * (layer + self.window_copy_seconds + max_hop_seconds)
            + self.output_compute_seconds
            + self.head_memory_seconds
            // If windows evict each other, all bytes are read twice.
            + 2.0 * bytes / self.disk_read_rate.min(fault.min(read_ahead).min(stream))
    }

    pub(crate) fn cpu_layer_seconds(&self) -> f64 {
        self.cpu_compute_seconds + self.cpu_memory_seconds
    }

    /// Returns the seconds of a layer on the GPU (alpha + beta); equal to those on the CPU (alpha) without a GPU.
    pub(crate) fn gpu_layer_seconds(&self) -> f64 {
        self.gpu_compute_seconds + self.gpu_memory_seconds
    }

    /// Returns x, the number of layers that fit in main memory; negative if not even the buffers fit.
    pub(crate) fn layers_that_fit(&self, is_head: bool, model: &ModelSizes) -> i64 {
        let without_layers = self.required_memory_bytes(is_head, model, 0);
        (self.memory_capacity_bytes - without_layers).div_euclid(model.layer_resident_bytes)
    }

    /// Returns need, the bytes of main memory for buffers, layers and, on the head device, the output head.
    pub(crate) fn required_memory_bytes(&self, is_head: bool, model: &ModelSizes, layers: i64) -> i64 {
        let head_bytes = if is_head { model.row_bytes_ceil + model.output_head_bytes } else { 0 };
        self.buffer_bytes + head_bytes + layers * model.layer_resident_bytes
    }

    /// Returns the number of layers in `windows` windows that fit in GPU memory, whichever layers these windows have.
    pub(crate) fn gpu_layers_that_fit(&self, is_head: bool, model: &ModelSizes, windows: u32) -> i64 {
        let surplus = model
            .total_excess_bytes
            .min(i64::from(windows).saturating_mul(model.max_consecutive_excess_bytes));
        (self.gpu_memory_bytes_by_role[usize::from(is_head)] - surplus).max(0) / model.layer_resident_bytes
    }
}

/// Returns the compute seconds: the sum of operations / speed over all weight formats that have operations.
fn seconds(work: &ValuesByFormat, speeds: &ValuesByFormat) -> f64 {
    let used = work.iter().filter(|(_, flops)| **flops > 0.0);
    used.map(|(format, flops)| flops / speeds.get(format).copied().unwrap_or(f64::NAN)).sum()
}

/// Returns the bytes of memory for layers, buffers and output head (cap), and the memory case if they need more.
fn capacity_and_case(device: &Device) -> (i64, MemoryCase) {
    let ram = device.ram_available as i64;
    match (device.os, device.gpu) {
        (Os::Macos, GpuApi::Metal) => (device.metal_available as i64, MemoryCase::ReloadsEverything),
        (Os::Macos, _) => (ram, MemoryCase::ReloadsExcessMacos),
        (Os::Linux | Os::Windows, _) => (ram, MemoryCase::ReloadsExcess),
        (Os::Android, _) => (ram_and_swap(device), MemoryCase::ReloadsExcess),
    }
}

/// Returns the bytes of RAM that a run can use, including memory of other programs that can be swapped out.
fn ram_and_swap(device: &Device) -> i64 {
    (device.ram_available + device.swappable_bytes.min(device.swap_available)) as i64
}

/// Returns the bytes available for GPU layers if the device is a worker, and if it is the head: `d_cuda` - `c_gpu` with
/// CUDA, and `d_metal` - `c_gpu` with Metal, where the head also needs `b_o`. Both may be negative.
fn gpu_bytes(device: &Device, model: &ModelSizes) -> [i64; 2] {
    let buffers = device.gpu_buffer_bytes as i64;
    match device.gpu {
        GpuApi::None => [0; 2],
        GpuApi::Cuda => [device.cuda_available as i64 - buffers; 2],
        GpuApi::Metal => {
            let worker = device.metal_available as i64 - buffers;
            [worker, worker - model.output_head_bytes]
        }
    }
}
