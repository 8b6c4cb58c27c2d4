//! The steady-state model: the time per token if every device reads weights ahead while other devices compute.
//!
//! The paper's objective adds the times of computing and of reading from disk. But a device can read while the others
//! compute. How much of the reading this hides depends on the rounds, on the memory of the device and on its
//! residency policy. Consider a device with `stage = T_comp + T_mem`, `k` windows, `share` bytes of CPU weights, and
//! a `budget` for page cache, which is its memory without what cannot be reclaimed. Its disk reads `f` bytes per
//! second by page faults, `a` by reading ahead and `s` by streaming ([`ReadRates`]; all equal to the paper's `s_disk`
//! if unknown). Then:
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
//! If the times of single layers are known, for example from a profile, `stage` is the compute time of the simulator
//! ([`hearth_core::compute_cost`]: the maximum of arithmetic and memory traffic, not their sum as in the paper).
//!
//! `own` is the time that a device adds to a token if its reading is as far ahead as possible. `busy` is the time
//! that its disk needs for one token, and no token can be faster than the slowest disk.
//!
//! `read` is `share` if the system evicts the least recently used pages. The paper's page cache keeps everything but
//! the excess: it reads `share - budget`, and weights that are read ahead replace as many kept weights, which then
//! have to be read again too.
//!
//! A window has `w = share / k` bytes, of which `ahead` are read ahead: w, or the prefetch budget. The fraction of
//! the window that does not fit beside the window before it is `conflict = (w + ahead - budget) / w`, limited to
//! 0..1, and without the first w if windows are released after the computation. The fraction that is not read ahead
//! is `uncovered = 1 - ahead / w`; it is read by page faults. The two fractions together are at most 1.
//!
//! A device with managed residency reads `share - kept` ([`hearth_core::residency::kept_bytes`]) through a buffer of
//! q bytes. The buffer is filled before each window, and streaming continues while the window is computed. The head
//! computes its first window directly after its output, and that window is announced only when the output begins. So
//! before the output the buffer contains only the output's part of the streamed weights.
//!
//! Not here: the search ([`crate::solvers::overlap`]).

use hearth_core::memory::MIN_WEIGHT_CACHE;
use hearth_core::residency::{fits, kept_bytes, stream_bytes};
use hearth_profiles::Bytes;
use hearth_schema::residency::{Residency, ResidencyOptions};

use crate::latency::constraints::{Violation, shape_violations};
use crate::latency::{Breakdown, DeviceTerms, LatencyModel};
use crate::problem::assignment::{Assignment, Share, ring_order};
use crate::problem::instance::Gpu;
use crate::runtime_model::{ReadRates, Rereads, RuntimeModel};

/// The time that a device adds to a token, and the time for which a token occupies its disk.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceTiming {
    /// The terms without hops. `disk` is the time of reading that is not hidden.
    pub terms: DeviceTerms,
    /// The seconds for which a token occupies the disk, or in a conflict the disk and the processor: a lower bound of
    /// the time per token.
    pub busy_seconds: f64,
}

/// The work of a device for a token. The weight bytes are those of its actual layers, because layers differ in size
/// by a few percent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceWork {
    pub share: Share,
    /// The weight bytes of the layers on the CPU.
    pub cpu_bytes: i64,
    /// The weight bytes of the layers on the GPU.
    pub gpu_bytes: i64,
    /// The compute seconds of all layers; `None` if the times of single layers are unknown.
    pub layer_seconds: Option<f64>,
}

/// The position of a window in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundOffset {
    /// W: the layers of a whole round.
    pub ring_layers: u32,
    /// The layers of a round before the window.
    pub layers_before: u32,
}

/// The timing of a device with all its weights in memory.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ResidentTiming {
    terms: DeviceTerms,
    memory: Memory,
    /// Whether the share fits in Metal's working set.
    within_metal: bool,
}

/// The weights of a device and the memory for them, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Memory {
    /// The weights that the CPU reads per token.
    share: i64,
    /// The part of `share` that is the output head.
    output: i64,
    /// The memory available for the page cache of `share`.
    budget: i64,
    /// The weights of GPU layers that Metal keeps wired.
    wired: i64,
}

impl DeviceTiming {
    /// Returns the seconds that the device adds to a token, without hops.
    pub fn own_seconds(&self) -> f64 {
        self.terms.compute + self.terms.memory + self.terms.disk
    }
}

impl LatencyModel<'_> {
    /// Evaluates the time per token and its terms in the steady state, with a residency for each device. If a token
    /// waits for the slowest disk, the wait is added to the disk term of that device.
    ///
    /// # Errors
    /// If the assignment has an invalid shape or violates a memory constraint.
    pub fn steady_state(
        &self,
        assignment: &Assignment,
        residencies: &[ResidencyOptions],
    ) -> Result<Breakdown, Violation> {
        if let Some(violation) = shape_violations(self, assignment).into_iter().next() {
            return Err(violation);
        }
        let mut devices = Vec::with_capacity(self.device_count());
        let mut slowest = (0.0, 0);
        let works = self.work_by_device(assignment);
        let shares: Vec<Share> = works.iter().map(|device_work| device_work.share).collect();
        let hops = self.communication(assignment, &shares);
        for (device, (device_work, communication)) in works.into_iter().zip(hops).enumerate() {
            let (head, residency) = (device == assignment.head, residencies.get(device).copied());
            let timing = self
                .timing(device, head, &device_work, &residency.unwrap_or_default())
                .ok_or_else(|| self.memory_violation(device, head, &device_work))?;
            if timing.busy_seconds > slowest.0 {
                slowest = (timing.busy_seconds, device);
            }
            devices.push(DeviceTerms { communication, ..timing.terms });
        }
        let own: f64 = devices.iter().map(DeviceTerms::seconds).sum();
        let disk_wait = (slowest.1, (slowest.0 - own).max(0.0));
        devices[disk_wait.0].disk += disk_wait.1;
        Ok(Breakdown {
            seconds: own.max(slowest.0),
            devices,
            disk_wait: Some(disk_wait).filter(|(_, seconds)| *seconds > 0.0),
        })
    }

    /// Returns the memory constraints that an assignment violates in the steady state.
    pub fn memory_violations(
        &self,
        assignment: &Assignment,
        residencies: &[ResidencyOptions],
    ) -> Vec<Violation> {
        let works = self.work_by_device(assignment).into_iter().enumerate();
        let violations = works.filter_map(|(device, device_work)| {
            let head = device == assignment.head;
            let residency = residencies.get(device).copied().unwrap_or_default();
            let timing = self.timing(device, head, &device_work, &residency);
            timing.is_none().then(|| self.memory_violation(device, head, &device_work))
        });
        violations.collect()
    }

    /// Returns the timing of a device. Returns `None` if the layers do not fit in GPU memory, if main memory is too
    /// small for what cannot be reclaimed, or if a slow disk would be read.
    pub fn timing(
        &self,
        device: usize,
        head: bool,
        device_work: &DeviceWork,
        residency: &ResidencyOptions,
    ) -> Option<DeviceTiming> {
        self.resident_timing(device, head, device_work)
            .and_then(|resident_timing| self.add_rereading(device, &resident_timing, residency))
    }

    /// Returns the timing of a device with all weights in memory. Returns `None` if the layers do not fit in GPU
    /// memory, or if main memory is too small for what cannot be reclaimed.
    pub(crate) fn resident_timing(
        &self,
        device: usize,
        head: bool,
        device_work: &DeviceWork,
    ) -> Option<ResidentTiming> {
        let share = device_work.share;
        let mut terms = self.terms(device, head, share);
        (terms.disk, terms.communication) = (0.0, 0.0);
        if share.layers == 0 {
            return Some(ResidentTiming {
                terms,
                memory: Memory { share: 0, output: 0, budget: 0, wired: 0 },
                within_metal: true,
            });
        }
        let costs = &self.devices[device];
        // The paper's page cache keeps all but the excess, independent of what Metal keeps wired.
        let keeps = self.instance().devices[device].runtime.rereads == Rereads::Excess;
        let within_metal = !costs.metal || share.gpu_layers == 0 || !terms.exceeds_memory || keeps;
        self.apply_known_times(device, head, device_work, &mut terms);
        let memory = self.memory(device, head, device_work);
        terms.need = (costs.steady_state_capacity - memory.budget + memory.share) as f64;
        terms.capacity = costs.steady_state_capacity as u64;
        let too_small = memory.budget < 0 || (memory.share > 0 && memory.budget < MIN_WEIGHT_CACHE.0 as i64);
        let fits = !too_small && self.fits_gpu(device, head, device_work);
        fits.then_some(ResidentTiming { terms, memory, within_metal })
    }

    /// Adds the time of reading weights that did not stay in memory. Returns `None` if a slow disk would be read.
    pub(crate) fn add_rereading(
        &self,
        device: usize,
        resident_timing: &ResidentTiming,
        residency: &ResidencyOptions,
    ) -> Option<DeviceTiming> {
        let (costs, runtime) = (&self.devices[device], &self.instance().devices[device].runtime);
        let ResidentTiming { terms, memory, within_metal } = resident_timing;
        let mut terms = terms.clone();
        if terms.share.layers == 0 {
            return Some(DeviceTiming { terms, busy_seconds: 0.0 });
        }
        // With the paper's page cache the time has no jump where the share exceeds memory, so no reserve is needed.
        terms.exceeds_memory = match runtime.rereads {
            Rereads::Excess => memory.share > memory.budget,
            Rereads::Everything => {
                // Page faults also read pages around the faulting one, which stay in memory for some time.
                let reserve =
                    if residency.policy == Residency::Managed { 0 } else { MIN_WEIGHT_CACHE.0 as i64 };
                let budget = (memory.budget - reserve).max(0) as u64;
                !fits(budget, memory.share as u64, runtime.processors)
            }
        };
        if !terms.exceeds_memory && *within_metal && !releases_fitting_weights(residency, memory.share) {
            return Some(DeviceTiming { terms, busy_seconds: 0.0 });
        }
        if costs.slow_disk {
            return None;
        }
        terms.exceeds_memory |= !within_metal;
        let stage = terms.compute + terms.memory;
        let busy = if *within_metal {
            let windows = f64::from(terms.share.windows);
            let reading = Rereading { memory: *memory, stage, windows, reads: costs.read_rates };
            let (wait, busy) = reading.wait_and_busy(runtime, residency);
            terms.disk = wait;
            busy
        } else {
            // If the working set is exceeded, Metal releases all weights under any residency.
            stage + (memory.share + memory.wired) as f64 / costs.read_rates.fault
        };
        Some(DeviceTiming { terms, busy_seconds: busy })
    }

    /// Replaces the paper's compute terms with the known times of layers, windows and output, and adds the token
    /// overhead.
    fn apply_known_times(
        &self,
        device: usize,
        head: bool,
        device_work: &DeviceWork,
        terms: &mut DeviceTerms,
    ) {
        let (runtime, share) = (&self.instance().devices[device].runtime, device_work.share);
        if let (Some(work), Some(seconds)) = (&runtime.work_times, device_work.layer_seconds) {
            let windows = f64::from(share.windows);
            terms.compute = seconds;
            terms.memory = 0.0;
            if head {
                terms.compute += self.output_on_gpu(device, device_work).unwrap_or(work.cpu_output);
            }
            if share.gpu_layers < share.layers {
                terms.compute += windows * work.cpu_window_overhead;
            }
            if share.gpu_layers > 0 {
                terms.compute += windows * work.gpu_window_overhead;
                terms.memory += windows * self.devices[device].window_copy;
            }
        }
        if head {
            terms.compute += runtime.token_overhead;
        }
    }

    /// Returns the weights of a device and the memory that remains for them beside buffers and cache.
    fn memory(&self, device: usize, head: bool, device_work: &DeviceWork) -> Memory {
        let (costs, model) = (&self.devices[device], &self.model);
        let kv = model.layer_resident_bytes - self.instance().model.layer_weight_bytes as i64;
        let (gpu, cpu) = (
            i64::from(device_work.share.gpu_layers),
            i64::from(device_work.share.layers) - i64::from(device_work.share.gpu_layers),
        );
        let on_gpu = head && self.output_on_gpu(device, device_work).is_some();
        let output = if on_gpu { 0 } else { model.output_head_bytes };
        let head_bytes = if head { output + model.row_bytes_ceil } else { 0 };
        // With Metal the weights of GPU layers are in main memory too, where they stay wired.
        let wired = device_work.gpu_bytes + if on_gpu { model.output_head_bytes } else { 0 };
        let (wired, gpu_kv) = if costs.metal { (wired, gpu * kv) } else { (0, 0) };
        let held = cpu * kv + gpu_kv + wired + costs.buffer_bytes;
        let output = if head { output } else { 0 };
        let share = device_work.cpu_bytes + head_bytes;
        Memory { share, output, budget: costs.steady_state_capacity - held, wired }
    }

    /// Returns whether the GPU layers fit in GPU memory, by their actual bytes.
    pub(crate) fn fits_gpu(&self, device: usize, head: bool, device_work: &DeviceWork) -> bool {
        let available = self.devices[device].gpu_bytes[usize::from(head)];
        device_work.share.gpu_layers == 0 || self.gpu_need(device_work) <= available
    }

    /// Returns the seconds of the output head on the GPU of the head; `None` if it is computed on the CPU. As in
    /// [`crate::plan_document`], it is on the GPU if all layers are on the GPU and it fits beside them.
    fn output_on_gpu(&self, device: usize, device_work: &DeviceWork) -> Option<f64> {
        let work = self.instance().devices[device].runtime.work_times.as_ref()?;
        // For a head with Metal, `gpu_bytes[1]` already excludes the output (paper, appendix A.3).
        let available = self.devices[device].gpu_bytes[0];
        let fits = device_work.share.gpu_layers == device_work.share.layers
            && self.gpu_need(device_work) + self.model.output_head_bytes <= available;
        work.gpu_output.filter(|_| fits)
    }

    /// Returns the bytes of the GPU layers and their cache.
    fn gpu_need(&self, device_work: &DeviceWork) -> i64 {
        let kv = self.model.layer_resident_bytes - self.instance().model.layer_weight_bytes as i64;
        device_work.gpu_bytes + i64::from(device_work.share.gpu_layers) * kv
    }

    /// Returns the work of a device with `window` layers per round, `gpu_layers` of them on the GPU, at an offset in
    /// the round.
    pub fn device_work(
        &self,
        device: usize,
        offset: RoundOffset,
        window: u32,
        gpu_layers: u32,
    ) -> DeviceWork {
        let RoundOffset { ring_layers, layers_before } = offset;
        let (rounds, remainder) = (self.model.layers / ring_layers, self.model.layers % ring_layers);
        let rest = remainder.saturating_sub(layers_before);
        let share = Share::new(window, gpu_layers, rounds, rest);
        let bytes = |start: u32, end: u32| {
            self.model.layer_bytes_prefix_sums[end as usize]
                - self.model.layer_bytes_prefix_sums[start as usize]
        };
        let seconds = self.devices[device].layer_seconds_prefix_sums.as_ref();
        // Without a GPU there are no times of GPU layers, and the sum is 0.
        let layers_time = |which: usize, start: u32, end: u32| {
            let sum = |layer: u32| seconds.and_then(|sums| sums[which].get(layer as usize)).copied();
            sum(end).zip(sum(start)).map_or(0.0, |(end, start)| end - start)
        };
        let (mut cpu_bytes, mut gpu_bytes, mut work) = (0, 0, 0.0);
        let mut add = |start: u32, layers: u32| {
            // A window that would run past the last layer is moved to an earlier start.
            let start = start.min(self.model.layers.saturating_sub(layers));
            let layers = layers.min(self.model.layers);
            let split = start + gpu_layers.min(layers);
            gpu_bytes += bytes(start, split);
            cpu_bytes += bytes(split, start + layers);
            work += layers_time(1, start, split) + layers_time(0, split, start + layers);
        };
        (0..rounds).for_each(|round| add(round * ring_layers + layers_before, window));
        if rest > 0 {
            add(rounds * ring_layers + layers_before, window.min(rest));
        }
        DeviceWork { share, cpu_bytes, gpu_bytes, layer_seconds: seconds.map(|_| work) }
    }

    /// Returns the offset of a device's window in the round. For a device without layers it is where its window would
    /// be.
    pub(crate) fn round_offset(&self, assignment: &Assignment, device: usize) -> RoundOffset {
        let order = match &assignment.order {
            Some(order) => order.clone(),
            None => ring_order(assignment.head, self.device_count()).collect(),
        };
        let before = order.into_iter().take_while(|other| *other != device);
        let layers_before = before.map(|other| assignment.window_layers[other]).sum();
        RoundOffset { ring_layers: assignment.ring_layers() as u32, layers_before }
    }

    /// Returns the work of each device, in the instance's order.
    pub(crate) fn work_by_device(&self, assignment: &Assignment) -> Vec<DeviceWork> {
        let devices = self.device_count();
        let ring_layers = assignment.ring_layers() as u32;
        let nothing = DeviceWork { share: Share::default(), cpu_bytes: 0, gpu_bytes: 0, layer_seconds: None };
        let (mut works, mut layers_before) = (vec![nothing; devices], 0);
        for device in assignment.ring() {
            let (window, gpu) = (assignment.window_layers[device], assignment.gpu_layers[device]);
            works[device] = self.device_work(device, RoundOffset { ring_layers, layers_before }, window, gpu);
            layers_before += window;
        }
        works
    }

    /// Returns the violated constraint of a device that has no timing.
    fn memory_violation(&self, device_index: usize, head: bool, device_work: &DeviceWork) -> Violation {
        let (costs, described) = (&self.devices[device_index], &self.instance().devices[device_index]);
        let memory = self.memory(device_index, head, device_work);
        let (need, capacity) = (
            (costs.steady_state_capacity - memory.budget + memory.share) as f64,
            costs.steady_state_capacity as u64,
        );
        let device = described.name.clone();
        let gpu_layers = device_work.share.gpu_layers;
        if described.gpu == Gpu::None && gpu_layers > 0 {
            return Violation::NoGpu { device, gpu_layers };
        }
        if !self.fits_gpu(device_index, head, device_work) {
            let (needed, available) = (self.gpu_need(device_work), costs.gpu_bytes[usize::from(head)]);
            return Violation::GpuBytes { device, layers: gpu_layers, needed, available };
        }
        if memory.budget >= MIN_WEIGHT_CACHE.0 as i64 && costs.slow_disk {
            let threshold = self.instance().slow_disk_threshold;
            return Violation::SlowDiskOverloaded {
                device,
                need,
                capacity,
                disk_read_rate: costs.disk_read_rate,
                threshold,
            };
        }
        Violation::OutOfMemory { device, held: need - memory.share as f64, capacity }
    }
}

/// A share that is read again for each token, completely or in part.
struct Rereading {
    memory: Memory,
    stage: f64,
    windows: f64,
    reads: ReadRates,
}

impl Rereading {
    /// Returns the output's fraction of the weights that the head uses from the output of a token to the end of its
    /// first window of the next token.
    fn output_fraction_of_first_visit(&self) -> f64 {
        let (output, share) = (self.memory.output as f64, self.memory.share as f64);
        output / (output + (share - output) / self.windows)
    }

    /// Returns the seconds of reading that are not hidden, and those for which a token occupies the disk.
    fn wait_and_busy(&self, runtime: &RuntimeModel, residency: &ResidencyOptions) -> (f64, f64) {
        let Rereading { stage, windows, reads, .. } = *self;
        let (share, budget) = (self.memory.share as u64, self.memory.budget as u64);
        if residency.policy == Residency::Managed {
            let read = (share - kept_bytes(budget, share, runtime.processors, residency)) as f64;
            let buffer = stream_bytes(budget, share, runtime.processors, residency) as f64;
            let visit = |filled: f64| ((read / windows - filled) / reads.stream).max(stage / windows);
            let first = visit(buffer.min(read / windows * self.output_fraction_of_first_visit()));
            let others = (windows - 1.0) * visit(buffer);
            let own = if self.memory.output > 0 { first + others } else { others + visit(buffer) };
            return ((own - stage).max(0.0), read / reads.stream);
        }
        let (share, budget) = (share as f64, budget as f64);
        let excess = runtime.rereads == Rereads::Excess && !residency.releases();
        let read = (share - if excess { budget } else { 0.0 }).max(0.0);
        let window = share / windows;
        let ahead = max_read_ahead(residency).min(window);
        if ahead <= 0.0 {
            return (read / reads.fault, 0.0);
        }
        let held = if residency.releases() { 0.0 } else { window };
        let conflict = ((held + ahead - budget) / window).clamp(0.0, 1.0);
        // Weights that are not read ahead, or are evicted in a conflict, are read by page faults.
        let uncovered = 1.0 - ahead / window;
        if excess {
            let read = read + (windows * ahead).min(read).min(budget);
            let faults = (conflict + uncovered).min(1.0) * read / reads.fault;
            return (faults, stage + read / reads.read_ahead);
        }
        let faults = (conflict + uncovered).min(1.0) * read / reads.fault;
        (faults, stage + read / reads.read_ahead + conflict * read / reads.fault)
    }
}

/// Returns whether the residency policy releases weights of a share that fits in memory.
fn releases_fitting_weights(residency: &ResidencyOptions, share: i64) -> bool {
    match residency.policy {
        Residency::Managed => residency.max_kept(share as u64) < share as u64,
        Residency::Os | Residency::Windowed => residency.releases(),
        Residency::Pinned | Residency::Sliding => false,
    }
}

/// Returns the maximum number of bytes of a window that are read ahead.
fn max_read_ahead(residency: &ResidencyOptions) -> f64 {
    if residency.one_call {
        return 0.0;
    }
    residency.max_prefetch().map_or(f64::INFINITY, Bytes::as_f64)
}
