//! The steady-state model: the time per token if every device reads weights ahead while other devices compute.
//!
//! The prima.cpp paper's objective adds the times of computing and of reading from disk. But a device can read while
//! the others compute. How much of the reading this hides depends on the rounds, on the memory of the device and on
//! its residency policy. Consider a device with `stage = T_comp + T_mem`, `k` windows, `share` bytes of CPU weights,
//! `gpu` bytes of GPU weights, and a `budget` for page cache, which is its memory without what cannot be reclaimed.
//! Its disk reads `f` bytes per second by page faults, `a` by reading ahead and `s` by streaming ([`ReadRates`]; all
//! equal to the paper's `s_disk` if unknown). Then:
//!
//! ```text
//! share fits in budget     own = stage                                     busy = 0
//! else, no prefetch        own = stage + read/f                            busy = 0
//! os, windowed             own = stage + (conflict + uncovered) read/f     busy = stage + read/a + conflict read/f
//! os, paper's page cache   own = stage + (conflict + uncovered) read/f     busy = stage + read/a
//! managed                  own = max(stage, (read - k q)/s)                busy = read/s
//! Metal set exceeded       own = stage                                     busy = stage + (share + gpu)/f
//!
//! T = max( sum of own + sum of hops ,  largest busy )
//! ```
//!
//! The stage of the head includes its token overhead. A share that fits is read again only if its weights are
//! released anyway: after the computation (`release`), or because of a limit on the kept weights (`kept`).
//!
//! If the times of individual layers are known, for example from a profile, `stage` is the simulator's compute time
//! ([`hearth_core::compute_cost`]: the maximum of arithmetic and memory traffic, not their sum as in the paper).
//!
//! `own` is the time that a device adds to a token if its reading is as far ahead as possible. `busy` is the time
//! that its disk needs for one token, and no token can be faster than the slowest disk.
//!
//! `read` is `share` if the system evicts the least recently used pages. The paper's page cache keeps everything but
//! the excess: it reads `share - budget`, and weights that are read ahead replace as many kept weights.
//!
//! A window has `w = share / k` bytes, of which `ahead` are read ahead: w, or the prefetch budget. The fraction of
//! the window that does not fit beside the window before it is `conflict = (w + ahead - budget) / w`, limited to
//! 0..1. If windows are released after the computation, the first w in this formula is left out. The fraction that is
//! not read ahead is `uncovered = 1 - ahead / w`; it is read by page faults. The two fractions together are at most 1.
//!
//! With a mixture of experts, `own = stage + read/s` (managed) or `stage + read/f`, and `busy = 0`: the router chooses the
//! experts just before their use, so nothing is read ahead. `read` is what a token uses of the experts, times the miss
//! rate of a cache of experts in the memory that the other weights leave
//! ([`hearth_core::expert_routes::expected_miss_rate`]).
//!
//! A device with managed residency reads `share - kept` ([`hearth_core::residency::kept_bytes`]) through a buffer of
//! q bytes. The buffer is filled before each window, and streaming continues while the window is computed. The head
//! device computes its first window directly after the output head, and streaming for this window starts only when the
//! output head starts. So before the output head, the buffer contains only streamed weights of the output head.

use hearth_core::expert_routes::expected_miss_rate;
use hearth_core::memory::MIN_WEIGHT_CACHE;
use hearth_core::residency::{kept_bytes, stream_buffer_bytes, weights_fit};
use hearth_profiles::Bytes;
use hearth_schema::residency::{EvictionPolicy, Residency, ResidencyOptions};

use crate::latency::MEMORY_QUANTILES;
use crate::latency::constraints::shape_violations;
use crate::problem::assignment::ring_order;
use crate::{
    Assignment, DeviceTerms, ExpertReads, GpuApi, LatencyBreakdown, LatencyModel, LayerCounts, ReadRates,
    RereadScope, RoundWindow, RuntimeModel, Violation,
};

/// The seconds per token that count for a device that runs out of memory, in the mean over its uncertain memory.
/// source: assumed, longer than any useful token, so that a plan that may fail is the last choice
pub(crate) const OUT_OF_MEMORY_SECONDS: f64 = 1e4;

/// Returns whether a mean time includes that of a device that runs out of memory, in at least one of the quantiles.
pub(crate) fn may_run_out_of_memory(mean_seconds: f64) -> bool {
    mean_seconds >= OUT_OF_MEMORY_SECONDS / MEMORY_QUANTILES.len() as f64
}

/// The time that a device adds to a token, and the time for which a token occupies its disk.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceTiming {
    /// The terms of the device without hops. The disk term is the time of reading from disk that no computation hides.
    pub terms: DeviceTerms,
    /// The seconds for which a token occupies the disk of the device: a lower bound of the time per token.
    pub disk_busy_seconds: f64,
}

/// The layers that a device computes for a token, with the bytes of their weights and their compute time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DeviceWork {
    pub device: usize,
    pub is_head: bool,
    pub layer_counts: LayerCounts,
    pub cpu_weight_bytes: i64,
    pub gpu_weight_bytes: i64,
    /// The compute seconds of all layers of the device for one token; `None` if the layers were not timed.
    pub total_layer_seconds: Option<f64>,
}

pub(crate) struct ResidentTiming {
    device: usize,
    terms: DeviceTerms,
    memory: Memory,
    within_metal: bool,
}

/// The bytes of a device's weights, and of the memory that is available for them.
#[derive(Clone, Copy, Default)]
struct Memory {
    /// The bytes of the weights that the CPU reads for a token.
    share: i64,
    /// The bytes of the output head, if the CPU reads it for a token; else 0.
    output: i64,
    /// The bytes of memory available for the page cache of the weights that the CPU reads.
    budget: i64,
    /// The bytes of the weights on the GPU, which Metal keeps wired in main memory; 0 without Metal.
    wired: i64,
}

impl Memory {
    fn is_too_small(&self) -> bool {
        self.budget < 0 || (self.share > 0 && self.budget < MIN_WEIGHT_CACHE.0 as i64)
    }
}

impl DeviceTiming {
    /// Returns the seconds that the device adds to a token, without hops.
    pub fn seconds_without_hops(&self) -> f64 {
        self.terms.compute_seconds + self.terms.memory_seconds + self.terms.disk_seconds
    }
}

impl LatencyModel<'_> {
    /// Evaluates the time per token and its terms in the steady state, with a residency policy for each device. If a
    /// token waits for the slowest disk, the wait is added to the disk term of the device with this disk. Fails if the
    /// assignment has an invalid shape or violates a memory constraint.
    pub fn evaluate_steady_state(
        &self,
        assignment: &Assignment,
        residencies: &[ResidencyOptions],
    ) -> Result<LatencyBreakdown, Violation> {
        shape_violations(self, assignment).into_iter().next().map_or(Ok(()), Err)?;
        let hops = self.communication_seconds(assignment, &assignment.layer_counts(self.sizes.model_layers));
        let mut devices = Vec::with_capacity(self.device_count());
        let mut slowest = (0.0, 0);
        for (timing, communication) in self.device_timings(assignment, residencies).zip(hops) {
            let DeviceTiming { terms, disk_busy_seconds } = timing?;
            if disk_busy_seconds > slowest.0 {
                slowest = (disk_busy_seconds, devices.len());
            }
            devices.push(DeviceTerms { communication_seconds: communication, ..terms });
        }
        let own: f64 = devices.iter().map(DeviceTerms::seconds).sum();
        let disk_wait = (slowest.1, (slowest.0 - own).max(0.0));
        devices[disk_wait.0].disk_seconds += disk_wait.1;
        let slowest_disk_and_wait_seconds = Some(disk_wait).filter(|(_, seconds)| *seconds > 0.0);
        let seconds_per_token = own.max(slowest.0);
        Ok(LatencyBreakdown { seconds_per_token, devices, slowest_disk_and_wait_seconds })
    }

    /// Returns for each device its timing in the steady state, or the memory constraint that it violates.
    pub(crate) fn device_timings(
        &self,
        assignment: &Assignment,
        residencies: &[ResidencyOptions],
    ) -> impl Iterator<Item = Result<DeviceTiming, Violation>> {
        self.work_by_device(assignment).into_iter().map(move |work| {
            let residency = residencies.get(work.device).copied().unwrap_or_default();
            self.device_timing(&work, &residency).ok_or_else(|| self.memory_violation(&work))
        })
    }

    /// Returns the timing of a device. Returns `None` if its GPU layers do not fit in GPU memory, if the memory that
    /// cannot be reclaimed exceeds main memory, or if a slow disk would be read.
    pub fn device_timing(&self, work: &DeviceWork, residency: &ResidencyOptions) -> Option<DeviceTiming> {
        self.add_reread_time(&self.resident_timing(work)?, residency)
    }

    /// Returns the timing of a device with all weights in memory. Returns `None` if its GPU layers do not fit in GPU
    /// memory, or the memory that cannot be reclaimed exceeds main memory.
    pub(crate) fn resident_timing(&self, work: &DeviceWork) -> Option<ResidentTiming> {
        let DeviceWork { device, layer_counts: share, .. } = *work;
        let mut terms = self.device_latency_terms(device, work.is_head, share);
        (terms.disk_seconds, terms.communication_seconds) = (0.0, 0.0);
        if share.layers == 0 {
            return Some(ResidentTiming { device, terms, memory: Memory::default(), within_metal: true });
        }
        let costs = &self.device_costs[device];
        // The paper's page cache keeps all but the excess, independent of what Metal keeps wired.
        let keeps = self.instance().devices[device].runtime.reread_scope == RereadScope::Excess;
        let within_metal = !costs.uses_metal || share.gpu_layers == 0 || !terms.exceeds_memory || keeps;
        self.apply_known_times(work, &mut terms);
        let memory = self.memory(work);
        terms.required_memory_bytes =
            (costs.steady_state_capacity_bytes - memory.budget + memory.share) as f64;
        terms.memory_capacity_bytes = costs.steady_state_capacity_bytes as u64;
        let fits = !memory.is_too_small() && self.fits_gpu_memory(work);
        fits.then_some(ResidentTiming { device, terms, memory, within_metal })
    }

    /// Adds the time of reading weights that did not stay in memory, as the mean over the quantiles of the device's
    /// uncertain memory. Returns `None` if this would read a slow disk.
    pub(crate) fn add_reread_time(
        &self,
        resident_timing: &ResidentTiming,
        residency: &ResidencyOptions,
    ) -> Option<DeviceTiming> {
        let device = resident_timing.device;
        let as_described = self.add_reread_time_with(resident_timing, residency, 0)?;
        let uncertainty = self.instance().devices[device].runtime.memory_uncertainty;
        if uncertainty == 0.0 || !self.averages_memory {
            return Some(as_described);
        }
        let capacity = self.device_costs[device].steady_state_capacity_bytes as f64;
        let (mut disk_seconds, mut disk_busy_seconds) = (0.0, 0.0);
        for quantile in MEMORY_QUANTILES {
            let additional = capacity * (uncertainty * quantile).exp_m1();
            match self.add_reread_time_with(resident_timing, residency, additional as i64) {
                Some(timing) => {
                    disk_seconds += timing.terms.disk_seconds;
                    disk_busy_seconds += timing.disk_busy_seconds;
                }
                None => disk_seconds += OUT_OF_MEMORY_SECONDS,
            }
            // The first quantile has the least memory. With more, nothing is read either.
            if disk_seconds + disk_busy_seconds == 0.0 {
                return Some(as_described);
            }
        }
        let count = MEMORY_QUANTILES.len() as f64;
        let terms = DeviceTerms { disk_seconds: disk_seconds / count, ..as_described.terms };
        Some(DeviceTiming { terms, disk_busy_seconds: disk_busy_seconds / count })
    }

    /// Adds the time of reading weights that did not stay in memory, of which the device has some additional bytes; they
    /// may be negative. Returns `None` if this would read a slow disk, or if memory is too small for a run.
    fn add_reread_time_with(
        &self,
        resident_timing: &ResidentTiming,
        residency: &ResidencyOptions,
        additional_memory: i64,
    ) -> Option<DeviceTiming> {
        let ResidentTiming { device, terms, memory, within_metal } = resident_timing;
        let memory = &Memory { budget: memory.budget + additional_memory, ..*memory };
        let (costs, runtime) = (&self.device_costs[*device], &self.instance().devices[*device].runtime);
        let mut terms = terms.clone();
        if terms.layer_counts.layers == 0 {
            return Some(DeviceTiming { terms, disk_busy_seconds: 0.0 });
        }
        if memory.is_too_small() {
            return None;
        }
        // With the paper's page cache the time has no jump where the share exceeds memory, so no reserve is needed.
        terms.exceeds_memory = match runtime.reread_scope {
            RereadScope::Excess => memory.share > memory.budget,
            RereadScope::Everything => {
                // Page faults also read pages around the faulting one, which stay in memory for some time.
                let reserve =
                    if residency.policy == Residency::Managed { 0 } else { MIN_WEIGHT_CACHE.0 as i64 };
                let budget = (memory.budget - reserve).max(0) as u64;
                !weights_fit(budget, memory.share as u64, runtime.cpu_count)
            }
        };
        if !terms.exceeds_memory && *within_metal && !releases_fitting_weights(residency, memory.share) {
            return Some(DeviceTiming { terms, disk_busy_seconds: 0.0 });
        }
        // A device with less memory than described reads even a slow disk.
        if costs.has_slow_disk && additional_memory >= 0 {
            return None;
        }
        terms.exceeds_memory |= !within_metal;
        let stage = terms.compute_seconds + terms.memory_seconds;
        let busy = if *within_metal {
            let (wait, busy) = wait_and_busy(&terms, memory, costs.read_rates, runtime, residency);
            terms.disk_seconds = wait;
            busy
        } else {
            // If the working set is exceeded, Metal releases all weights under any residency.
            stage + (memory.share + memory.wired) as f64 / costs.read_rates.fault_read_rate
        };
        Some(DeviceTiming { terms, disk_busy_seconds: busy })
    }

    /// Replaces the paper's compute terms with the times of the runtime model, if known, and adds the token overhead.
    fn apply_known_times(&self, device_work: &DeviceWork, terms: &mut DeviceTerms) {
        let DeviceWork { device, is_head: head, layer_counts: share, .. } = *device_work;
        let runtime = &self.instance().devices[device].runtime;
        if let (Some(work), Some(seconds)) = (&runtime.compute_times, device_work.total_layer_seconds) {
            let windows = f64::from(share.windows);
            terms.compute_seconds = seconds;
            terms.memory_seconds = 0.0;
            if head {
                terms.compute_seconds += self.output_on_gpu(device_work).unwrap_or(work.cpu_output_seconds);
            }
            if share.gpu_layers < share.layers {
                terms.compute_seconds += windows * work.cpu_window_overhead_seconds;
            }
            if share.gpu_layers > 0 {
                terms.compute_seconds += windows * work.gpu_window_overhead_seconds;
                terms.memory_seconds += windows * self.device_costs[device].window_copy_seconds;
            }
        }
        if head {
            terms.compute_seconds += runtime.token_overhead_seconds;
        }
    }

    fn memory(&self, work: &DeviceWork) -> Memory {
        let (costs, model) = (&self.device_costs[work.device], &self.sizes);
        let kv = self.layer_cache_bytes();
        let gpu = i64::from(work.layer_counts.gpu_layers);
        let cpu = i64::from(work.layer_counts.layers) - gpu;
        let on_gpu = work.is_head && self.output_on_gpu(work).is_some();
        let output = if on_gpu { 0 } else { model.output_head_bytes };
        let head_bytes = if work.is_head { output + model.row_bytes_ceil } else { 0 };
        // With Metal the weights of GPU layers are in main memory too, where they stay wired.
        let wired = work.gpu_weight_bytes + if on_gpu { model.output_head_bytes } else { 0 };
        let (wired, gpu_kv) = if costs.uses_metal { (wired, gpu * kv) } else { (0, 0) };
        let unreclaimable = cpu * kv + gpu_kv + wired + costs.buffer_bytes;
        Memory {
            share: work.cpu_weight_bytes + head_bytes,
            output: if work.is_head { output } else { 0 },
            budget: costs.steady_state_capacity_bytes - unreclaimable,
            wired,
        }
    }

    pub(crate) fn fits_gpu_memory(&self, work: &DeviceWork) -> bool {
        let available = self.device_costs[work.device].gpu_memory_bytes_by_role[usize::from(work.is_head)];
        work.layer_counts.gpu_layers == 0 || self.gpu_need(work) <= available
    }

    /// Returns the seconds of the output head on the GPU; `None` if the CPU computes the output head. It is on the GPU
    /// if all layers of the device are on the GPU and it fits beside them, as in [`crate::plan_document`].
    fn output_on_gpu(&self, work: &DeviceWork) -> Option<f64> {
        let times = self.instance().devices[work.device].runtime.compute_times.as_ref()?;
        // For a head with Metal, the bytes of the role `head` already exclude the output (paper, appendix A.3).
        let available = self.device_costs[work.device].gpu_memory_bytes_by_role[0];
        let fits = work.layer_counts.gpu_layers == work.layer_counts.layers
            && self.gpu_need(work) + self.sizes.output_head_bytes <= available;
        times.gpu_output_seconds.filter(|_| fits)
    }

    fn gpu_need(&self, work: &DeviceWork) -> i64 {
        work.gpu_weight_bytes + i64::from(work.layer_counts.gpu_layers) * self.layer_cache_bytes()
    }

    fn layer_cache_bytes(&self) -> i64 {
        self.sizes.layer_resident_bytes - self.instance().model.layer_weight_bytes as i64
    }

    /// Returns the work of a device that has this window in every round, with `gpu_layers` of its layers on the GPU.
    pub fn device_work(&self, window: RoundWindow, gpu_layers: u32) -> DeviceWork {
        let (rounds, rest) = window.whole_rounds_and_rest(self.sizes.model_layers);
        let layer_counts = window.layer_counts(self.sizes.model_layers, gpu_layers);
        let RoundWindow { device, is_head, layers_per_round, layers_before_window, window_layers } = window;
        let sums = &self.sizes.layer_bytes_prefix_sums;
        let bytes = |start: u32, end: u32| sums[end as usize] - sums[start as usize];
        let seconds = self.device_costs[device].layer_seconds_prefix_sums.as_ref();
        // Without a GPU there are no times of GPU layers, and the sum is 0.
        let layers_time = |which: usize, start: u32, end: u32| {
            let sum = |layer: u32| seconds.and_then(|sums| sums[which].get(layer as usize)).copied();
            sum(end).zip(sum(start)).map_or(0.0, |(end, start)| end - start)
        };
        let (mut cpu_weight_bytes, mut gpu_weight_bytes, mut work) = (0, 0, 0.0);
        let mut add = |start: u32, layers: u32| {
            // A window that would run past the last layer is moved to an earlier start.
            let start = start.min(self.sizes.model_layers.saturating_sub(layers));
            let layers = layers.min(self.sizes.model_layers);
            let split = start + gpu_layers.min(layers);
            gpu_weight_bytes += bytes(start, split);
            cpu_weight_bytes += bytes(split, start + layers);
            work += layers_time(1, start, split) + layers_time(0, split, start + layers);
        };
        (0..rounds).for_each(|round| add(round * layers_per_round + layers_before_window, window_layers));
        if rest > 0 {
            add(rounds * layers_per_round + layers_before_window, window_layers.min(rest));
        }
        let total_layer_seconds = seconds.map(|_| work);
        DeviceWork { device, is_head, layer_counts, cpu_weight_bytes, gpu_weight_bytes, total_layer_seconds }
    }

    /// Returns the window of a device in a round. A device without layers has an empty window at its place in
    /// the ring of all devices.
    pub(crate) fn round_window(&self, assignment: &Assignment, device: usize) -> RoundWindow {
        let full_ring = || ring_order(assignment.head, self.device_count()).collect();
        let order: Vec<usize> = assignment.ring_order.clone().unwrap_or_else(full_ring);
        let before = order.into_iter().take_while(|other| *other != device);
        let layers_before_window = before.map(|other| assignment.window_layers[other]).sum();
        let (is_head, layers_per_round) = (device == assignment.head, assignment.layers_per_round() as u32);
        let window_layers = assignment.window_layers[device];
        RoundWindow { device, is_head, layers_per_round, layers_before_window, window_layers }
    }

    pub(crate) fn work_by_device(&self, assignment: &Assignment) -> Vec<DeviceWork> {
        let without_layers =
            |device| DeviceWork { device, is_head: device == assignment.head, ..DeviceWork::default() };
        let mut works: Vec<DeviceWork> = (0..self.device_count()).map(without_layers).collect();
        let (layers_per_round, mut layers_before_window) = (assignment.layers_per_round() as u32, 0);
        for device in assignment.ring() {
            let (is_head, window_layers) = (device == assignment.head, assignment.window_layers[device]);
            let window =
                RoundWindow { device, is_head, layers_per_round, layers_before_window, window_layers };
            works[device] = self.device_work(window, assignment.gpu_layers[device]);
            layers_before_window += window_layers;
        }
        works
    }

    /// Returns the memory constraint that a device violates if [`Self::device_timing`] returns `None` for its work.
    fn memory_violation(&self, work: &DeviceWork) -> Violation {
        let (costs, described) = (&self.device_costs[work.device], &self.instance().devices[work.device]);
        let memory = self.memory(work);
        let needed_bytes = (costs.steady_state_capacity_bytes - memory.budget + memory.share) as f64;
        let capacity = costs.steady_state_capacity_bytes as u64;
        let device = described.name.clone();
        let gpu_layers = work.layer_counts.gpu_layers;
        if described.gpu == GpuApi::None && gpu_layers > 0 {
            return Violation::NoGpu { device, gpu_layers };
        }
        if !self.fits_gpu_memory(work) {
            let (needed_bytes, available_bytes) =
                (self.gpu_need(work), costs.gpu_memory_bytes_by_role[usize::from(work.is_head)]);
            return Violation::GpuBytesExceedMemory { device, gpu_layers, needed_bytes, available_bytes };
        }
        if memory.budget >= MIN_WEIGHT_CACHE.0 as i64 && costs.has_slow_disk {
            let (read_rate, min_rate) = (costs.disk_read_rate, self.instance().slow_disk_threshold);
            return Violation::SlowDiskOverloaded { device, needed_bytes, capacity, read_rate, min_rate };
        }
        let unreclaimable_bytes = needed_bytes - memory.share as f64;
        Violation::OutOfMemory { device, unreclaimable_bytes, capacity }
    }
}

/// Returns the seconds per token for which a device waits for rereads, and those for which its disk is busy.
fn wait_and_busy(
    terms: &DeviceTerms,
    memory: &Memory,
    reads: ReadRates,
    runtime: &RuntimeModel,
    residency: &ResidencyOptions,
) -> (f64, f64) {
    let (stage, windows) =
        (terms.compute_seconds + terms.memory_seconds, f64::from(terms.layer_counts.windows));
    let (share, budget) = (memory.share as u64, memory.budget as u64);
    if let Some(experts) = runtime.experts {
        return (wait_for_experts(experts, memory, reads, runtime, residency), 0.0);
    }
    if residency.policy == Residency::Managed {
        let read = (share - kept_bytes(budget, share, runtime.cpu_count, residency)) as f64;
        let buffer = stream_buffer_bytes(budget, share, runtime.cpu_count, residency) as f64;
        let span = |filled: f64| ((read / windows - filled) / reads.stream_read_rate).max(stage / windows);
        // Between its output and the end of the first window, the head uses the output and one window.
        let (output, all) = (memory.output as f64, share as f64);
        let output_fraction = output / (output + (all - output) / windows);
        let first = span(buffer.min(read / windows * output_fraction));
        let others = (windows - 1.0) * span(buffer);
        let own = if memory.output > 0 { first + others } else { others + span(buffer) };
        return ((own - stage).max(0.0), read / reads.stream_read_rate);
    }
    let (share, budget) = (share as f64, budget as f64);
    let excess = runtime.reread_scope == RereadScope::Excess && !residency.evicts_after_use();
    let read = (share - if excess { budget } else { 0.0 }).max(0.0);
    let window = share / windows;
    let max_ahead = residency.max_prefetch().map_or(f64::INFINITY, Bytes::as_f64);
    let ahead = if residency.prefetch_in_one_call { 0.0 } else { max_ahead.min(window) };
    if ahead <= 0.0 {
        return (read / reads.fault_read_rate, 0.0);
    }
    let previous = if residency.evicts_after_use() { 0.0 } else { window };
    let conflict = ((previous + ahead - budget) / window).clamp(0.0, 1.0);
    // Weights that are not read ahead, or are evicted in a conflict, are read by page faults.
    let uncovered = 1.0 - ahead / window;
    let read = if excess { read + (windows * ahead).min(read).min(budget) } else { read };
    let faults = (conflict + uncovered).min(1.0) * read / reads.fault_read_rate;
    let again = if excess { 0.0 } else { conflict * read / reads.fault_read_rate };
    (faults, stage + read / reads.read_ahead_rate + again)
}

/// Returns the seconds per token for which a device with layers of a mixture waits for weights. Nothing is read ahead,
/// because the router chooses the experts of a layer just before their use.
///
/// Deviation: the computation with experts in memory hides none of the reading.
fn wait_for_experts(
    expert_reads: ExpertReads,
    memory: &Memory,
    reads: ReadRates,
    runtime: &RuntimeModel,
    residency: &ResidencyOptions,
) -> f64 {
    let ExpertReads { weight_share, used_share, in_use_bytes, read_around, .. } = expert_reads;
    let (share, budget) = (memory.share as f64, memory.budget as f64);
    let experts = (share - memory.output as f64) * weight_share;
    let others = share - experts;
    let is_managed = residency.policy == Residency::Managed;
    let (kept, rate) = if is_managed {
        let budget = (memory.budget as u64).saturating_sub(in_use_bytes);
        let kept = kept_bytes(budget, memory.share as u64, runtime.cpu_count, residency);
        (kept as f64, reads.stream_read_rate)
    } else {
        (budget, reads.fault_read_rate)
    };
    let cached = ((kept - others) / experts.max(1.0)).max(0.0);
    // The paper's page cache keeps all but the excess.
    let keeps = is_managed || runtime.reread_scope == RereadScope::Excess;
    let is_lru = !keeps || residency.expert_eviction == Some(EvictionPolicy::Lru);
    let miss_rate = expected_miss_rate(cached, used_share, is_lru);
    let missing = used_share * experts * miss_rate;
    let missing = if is_managed { missing } else { (missing * read_around).min(experts) };
    // The missing experts of a layer are requested together.
    let layers = experts / expert_reads.layer_bytes as f64;
    let layers_with_misses = layers * (1.0 - (1.0 - miss_rate).powi(expert_reads.used as i32));
    let latency = if is_managed { layers_with_misses * expert_reads.latency_seconds } else { 0.0 };
    let excess = (others - kept).max(0.0);
    let missing_others = if keeps || excess == 0.0 { excess } else { others };
    (missing + missing_others) / rate + latency
}

/// Returns whether a residency policy releases weights of `share` bytes although all of them fit in memory.
fn releases_fitting_weights(residency: &ResidencyOptions, share: i64) -> bool {
    match residency.policy {
        Residency::Managed => residency.max_kept_bytes(share as u64) < share as u64,
        Residency::Os | Residency::Windowed => residency.evicts_after_use(),
        Residency::Pinned | Residency::Sliding => false,
    }
}
