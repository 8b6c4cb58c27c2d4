//! Linear costs and bounds of the integer program for fixed memory cases.
//!
//! prima.cpp paper, appendix A.3, from its Eq. 20 on. For fixed cases T is linear in w and n:
//!
//! ```text
//! T = k sum_m (a_m w_m + b_m n_m + xi_m) + kappa
//!
//! M1: a = alpha + b'/s_disk   b = 0                  w     >= x + 1
//! M2: a = alpha + b/s_disk    b = beta               w     >= x + 1
//! M3: a = alpha + b'/s_disk   b = beta - b'/s_disk   w - n >= x + 1
//! M4: a = alpha               b = beta               w <= x (macOS), w - n <= x (others)
//!
//! x     = floor((cap - need of no layers)/(k b'))       n <= floor(GPU memory/(k b'))
//! kappa = [head](Fo + (b_i/V + b_o)/T_cpu + b_i/V/s_disk + [not M4] b_o/s_disk)
//!       + sum over M1 and M3 of (c_cpu - cap)/s_disk
//! ```
//!
//! with alpha, beta and xi as in [`crate::latency::coefficients`]. A plan that uses all of the memory is in M4 here,
//! because need = cap fits, although Eq. 30-32 say "less than". For the memory cases that follow from a plan, T is
//! the time of [`crate::latency`], with one exception: if the head exceeds its memory by less than `b_i/V`, its disk
//! term is the excess and not `b_i/V`.
//!
//! **Public implementation.** According to its description, the public implementation of prima.cpp plans without
//! communication and copies (xi = 0), without memory bandwidth (`b'/T` in alpha and beta), and with a priority of
//! 1.01 for its master. [`CostTerms`] selects these. Deviation: its source was not available when this was written.
//! The priority is interpreted as "the head computes 1.01 times as fast". Writing the cache (`t_kv`) is still
//! counted, because it is not a bandwidth term.

use hearth_profiles::device::Os;

use super::integer_program::{DeviceColumns, IntegerProgram, SplitWindow};
use crate::latency::coefficients::DeviceCosts;
use crate::{GpuApi, LatencyModel, MemoryCase};

/// Which costs the objective of Algorithm 1 of the prima.cpp paper includes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostTerms {
    /// Whether xi is included: hops, and copies between memory and GPU. Without xi, more rounds take no more time.
    pub includes_window_costs: bool,
    /// Whether `b'/T` is included: the time of reading weights from memory.
    pub includes_weight_reads: bool,
    /// The factor by which the speed of the head's arithmetic is multiplied, to give the head more layers.
    pub head_priority: f64,
}

impl CostTerms {
    pub const PRIMA_CPP_PAPER: CostTerms =
        CostTerms { includes_window_costs: true, includes_weight_reads: true, head_priority: 1.0 };

    /// The terms of the public implementation of prima.cpp, according to decision 14.
    pub const PRIMA_CPP: CostTerms =
        CostTerms { includes_window_costs: false, includes_weight_reads: false, head_priority: 1.01 };
}

/// The linear objective for some devices of an instance. A `position` in its methods is an index into `devices`.
pub(crate) struct LinearCosts<'a, 'i> {
    pub model: &'a LatencyModel<'i>,
    /// The indices of the participating devices, ascending.
    pub devices: Vec<usize>,
    pub head: usize,
    coefficients: Vec<DeviceCoefficients>,
}

#[derive(Debug, Clone, Copy)]
struct DeviceCoefficients {
    /// alpha: the seconds of a layer on the CPU.
    layer: f64,
    /// beta: the seconds of a layer on the GPU minus those on the CPU.
    gpu: f64,
    /// xi: the seconds of a window for its hop and for the copies between main memory and GPU memory.
    window: f64,
    /// The part of kappa (the seconds that do not depend on w and n) that the device adds in memory case M4.
    fixed: f64,
}

impl<'a, 'i> LinearCosts<'a, 'i> {
    pub fn new(model: &'a LatencyModel<'i>, devices: Vec<usize>, head: usize, terms: CostTerms) -> Self {
        let coefficients =
            devices.iter().map(|device| coefficients(model, *device, *device == head, terms)).collect();
        Self { model, devices, head, coefficients }
    }

    pub(crate) fn device_costs(&self, position: usize) -> &'a DeviceCosts {
        &self.model.device_costs[self.devices[position]]
    }

    fn is_head(&self, position: usize) -> bool {
        self.devices[position] == self.head
    }

    /// Returns the memory case of the device at a position. `over` is whether the device exceeds its memory.
    pub(crate) fn memory_case(&self, position: usize, exceeds_memory: bool) -> MemoryCase {
        if exceeds_memory {
            self.device_costs(position).memory_case_if_exceeded
        } else {
            MemoryCase::NoReload
        }
    }

    pub(crate) fn exceeds_memory(&self, position: usize, layers: i64, gpu_layers: i64) -> bool {
        let costs = self.device_costs(position);
        let in_ram = if costs.uses_metal { layers } else { layers - gpu_layers };
        in_ram > costs.layers_that_fit(self.is_head(position), &self.model.sizes)
    }

    /// Returns the maximum number of GPU layers per window that GPU memory allows with these rounds; `None` without a
    /// GPU.
    pub(crate) fn max_gpu_layers(&self, position: usize, rounds: u32) -> Option<i64> {
        let has_gpu = self.model.instance().devices[self.devices[position]].gpu != GpuApi::None;
        let costs = self.device_costs(position);
        let fit = costs.gpu_layers_that_fit(self.is_head(position), &self.model.sizes, rounds);
        has_gpu.then_some(fit / i64::from(rounds))
    }

    pub(crate) fn integer_program(&self, exceeds_memory: &[bool], rounds: u32) -> IntegerProgram {
        let layers_per_round = i64::from(self.model.model_layers() / rounds);
        let columns = |(position, exceeds_memory): (usize, &bool)| {
            self.columns(position, *exceeds_memory, rounds, layers_per_round)
        };
        IntegerProgram { layers_per_round, devices: exceeds_memory.iter().enumerate().map(columns).collect() }
    }

    fn columns(
        &self,
        position: usize,
        exceeds_memory: bool,
        rounds: u32,
        layers_per_round: i64,
    ) -> DeviceColumns {
        let (window_cost, gpu_cost) = self.slopes(position, exceeds_memory);
        let costs = self.device_costs(position);
        let fit = costs.layers_that_fit(self.is_head(position), &self.model.sizes);
        let fit = fit.div_euclid(i64::from(rounds));
        let device = &self.model.instance().devices[self.devices[position]];
        let whole_window = device.os == Os::Macos;
        let unbounded = (0, layers_per_round);
        let bound = if exceeds_memory {
            ((fit + 1).max(0), layers_per_round)
        } else {
            (0, fit.min(layers_per_round))
        };
        let (window_bounds, cpu_layer_bounds) =
            if whole_window { (bound, unbounded) } else { (unbounded, bound) };
        let window_bounds = (window_bounds.0.max(1), window_bounds.1);
        let max_gpu_layers = self.max_gpu_layers(position, rounds).unwrap_or(0).min(layers_per_round);
        DeviceColumns { window_cost, gpu_cost, window_bounds, cpu_layer_bounds, max_gpu_layers }
    }

    /// Returns a and b of the device at a position: the seconds of a layer, and its additional seconds on the GPU.
    fn slopes(&self, position: usize, exceeds_memory: bool) -> (f64, f64) {
        let DeviceCoefficients { layer, gpu, .. } = self.coefficients[position];
        let disk = self.device_costs(position).disk_read_rate;
        let resident = self.model.sizes.layer_resident_bytes as f64 / disk;
        match self.memory_case(position, exceeds_memory) {
            MemoryCase::ReloadsExcessMacos => (layer + resident, 0.0),
            MemoryCase::ReloadsEverything => (layer + self.model.sizes.layer_weight_bytes / disk, gpu),
            MemoryCase::ReloadsExcess => (layer + resident, gpu - resident),
            MemoryCase::NoReload => (layer, gpu),
        }
    }

    /// Returns the sum of xi over the devices: the minimum seconds that each additional round adds to a token.
    pub(crate) fn additional_round_seconds(&self) -> f64 {
        self.coefficients.iter().map(|device| device.window).sum()
    }

    /// Returns the objective (T in seconds) of a plan with fixed memory cases.
    pub(crate) fn objective_seconds(
        &self,
        exceeds_memory: &[bool],
        rounds: u32,
        windows: &[SplitWindow],
    ) -> f64 {
        let seconds = |(position, (&exceeds_memory, window)): (usize, (&bool, &SplitWindow))| {
            let (a, b) = self.slopes(position, exceeds_memory);
            let layers = a * f64::from(window.layers) + b * f64::from(window.gpu_layers);
            f64::from(rounds) * (layers + self.coefficients[position].window)
                + self.fixed(position, exceeds_memory)
        };
        exceeds_memory.iter().zip(windows).enumerate().map(seconds).sum()
    }

    fn fixed(&self, position: usize, exceeds_memory: bool) -> f64 {
        let costs = self.device_costs(position);
        let reloads = match self.memory_case(position, exceeds_memory) {
            MemoryCase::NoReload => return self.coefficients[position].fixed,
            MemoryCase::ReloadsEverything => 0,
            MemoryCase::ReloadsExcessMacos | MemoryCase::ReloadsExcess => {
                costs.buffer_bytes - costs.memory_capacity_bytes
            }
        };
        let output = if self.is_head(position) { self.model.sizes.output_head_bytes } else { 0 };
        self.coefficients[position].fixed + (reloads + output) as f64 / costs.disk_read_rate
    }
}

fn coefficients(model: &LatencyModel, device: usize, head: bool, terms: CostTerms) -> DeviceCoefficients {
    let costs = &model.device_costs[device];
    let described = &model.instance().devices[device];
    let speed_up = if head { terms.head_priority } else { 1.0 };
    let (cpu_memory, gpu_memory) = match (terms.includes_weight_reads, described.gpu) {
        (true, _) => (costs.cpu_memory_seconds, costs.gpu_memory_seconds),
        (false, GpuApi::None) => (described.cpu_cache_write_seconds, described.cpu_cache_write_seconds),
        (false, _) => (described.cpu_cache_write_seconds, described.gpu_cache_write_seconds),
    };
    let layer = costs.cpu_compute_seconds / speed_up + cpu_memory;
    let head_memory = if terms.includes_weight_reads { costs.head_memory_seconds } else { 0.0 };
    let row = model.sizes.head_device_row_bytes(true) / costs.disk_read_rate;
    DeviceCoefficients {
        layer,
        gpu: costs.gpu_compute_seconds / speed_up + gpu_memory - layer,
        window: if terms.includes_window_costs { costs.window_copy_seconds + costs.hop_seconds } else { 0.0 },
        fixed: if head { costs.output_compute_seconds / speed_up + head_memory + row } else { 0.0 },
    }
}
