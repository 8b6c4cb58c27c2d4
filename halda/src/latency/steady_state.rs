//! The steady-state model: the time of a token when every device reads ahead of its turn.
//!
//! The paper's objective adds computing and reading. But a device reads while the others compute, and how much of
//! that is hidden depends on the rounds, on its memory and on which policy decides what stays there. For a device with
//! `stage = T_comp + T_mem` and `k` windows, `share` bytes of CPU weights, `budget` for page cache beside what cannot
//! be reclaimed, and a disk of `f` bytes per second by page faults, `a` read ahead and `s` streamed ([`ReadRates`]; all
//! of them the paper's `s_disk` where nothing else is known):
//!
//! ```text
//! share fits in budget     own = stage                                     busy = 0
//! else, no prefetch        own = stage + read/f                            busy = 0
//! os, windowed             own = stage + (conflict + uncovered) read/f     busy = stage + read/a + conflict read/f
//! the same, paper's cache  own = stage + (conflict + uncovered) read/f     busy = stage + read/a
//! managed                  own = max(stage, (read - k q)/s)                busy = read/s
//! Metal over its set       own = stage                                     busy = stage + (share + gpu)/f
//!
//! T = max( sum of own + sum of hops ,  largest busy )
//! ```
//!
//! The head's token overhead is part of its stage. A share that fits is read again only if it is given up all the same:
//! behind the computation (`release`), or because less may be kept (`kept`).
//!
//! Where a device's work is known layer by layer, as from a profile, `stage` is what the simulator charges for it
//! ([`hearth_core::compute_cost`]: the longer of arithmetic and reading, not their sum as in the paper).
//!
//! `own` is what a device adds to a token whose reading is as far ahead as it can be; `busy` is how long its disk needs
//! for one token, and no token can be faster than the slowest disk. `read` is `share` where the system evicts what was
//! used longest ago. The paper's page cache keeps the excess out: it reads `share - budget`, and what is read ahead
//! takes the place of as many kept weights, which are read again themselves. A window of `w = share / k` is in conflict
//! with the one before it as far as both do not fit: `conflict = (w + ahead - budget) / w`, within 0 and 1, with
//! `ahead` = w or the prefetch budget, and without the first w if windows are given up behind the computation; what a
//! budget leaves `uncovered`, `1 - ahead / w`, is read when it is touched; the two are at most 1 together. A device
//! that manages its residency reads `share - kept` ([`hearth_core::residency::kept_bytes`]), through a buffer of q
//! bytes that is filled before each window and streams on while it computes. The head's first window follows its output
//! without a pause and is announced when that begins, so that before the output only the output's part is filled.
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

/// The time that a device adds to a token, and the time for which a token occupies it.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceTiming {
    /// The terms without hops; `disk` is the time that reading ahead cannot hide.
    pub terms: DeviceTerms,
    /// Seconds for which a token occupies the disk, and in a conflict the processor too: a lower bound of the token
    /// time.
    pub busy: f64,
}

/// The work of a device for a token, with the bytes of its own layers: layer sizes differ by some percent, and less
/// can decide whether a share fits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Portion {
    pub share: Share,
    pub cpu_bytes: i64,
    pub gpu_bytes: i64,
    /// Seconds of its layers, where their times are known one by one.
    pub work: Option<f64>,
}

/// The place of a window in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub ring_layers: u32,
    /// Layers of a round before the window.
    pub placed: u32,
}

/// The timing of a device with all its weights in memory.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ResidentTiming {
    terms: DeviceTerms,
    memory: Memory,
    /// Whether the share fits Metal's working set.
    within_metal: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Memory {
    /// Weights that the CPU reads per token.
    share: i64,
    /// The output head's part of them.
    output: i64,
    /// Page cache available for them.
    budget: i64,
    /// Weights wired by Metal for the GPU.
    wired: i64,
}

impl DeviceTiming {
    /// Returns the seconds that the device adds to a token, without hops.
    pub fn own(&self) -> f64 {
        self.terms.compute + self.terms.memory + self.terms.disk
    }
}

impl LatencyModel<'_> {
    /// Evaluates the token time and its terms in the steady state, with a residency for each device. The wait for the
    /// slowest disk, beyond the devices' own times, is added to the disk term of that device. Fails if the assignment
    /// breaks a memory rule.
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
        let portions = self.portions(assignment);
        let shares: Vec<Share> = portions.iter().map(|portion| portion.share).collect();
        let hops = self.communication(assignment, &shares);
        for (device, (portion, communication)) in portions.into_iter().zip(hops).enumerate() {
            let (head, residency) = (device == assignment.head, residencies.get(device).copied());
            let timing = self
                .timing(device, head, &portion, &residency.unwrap_or_default())
                .ok_or_else(|| self.too_small(device, head, &portion))?;
            if timing.busy > slowest.0 {
                slowest = (timing.busy, device);
            }
            devices.push(DeviceTerms { communication, ..timing.terms });
        }
        let own: f64 = devices.iter().map(DeviceTerms::seconds).sum();
        let waits = (slowest.1, (slowest.0 - own).max(0.0));
        devices[waits.0].disk += waits.1;
        Ok(Breakdown {
            seconds: own.max(slowest.0),
            devices,
            waits: Some(waits).filter(|(_, seconds)| *seconds > 0.0),
        })
    }

    /// Returns the memory constraints that an assignment breaks in the steady state.
    pub fn memory_violations(
        &self,
        assignment: &Assignment,
        residencies: &[ResidencyOptions],
    ) -> Vec<Violation> {
        let portions = self.portions(assignment).into_iter().enumerate();
        let broken = portions.filter_map(|(device, portion)| {
            let head = device == assignment.head;
            let residency = residencies.get(device).copied().unwrap_or_default();
            let timing = self.timing(device, head, &portion, &residency);
            timing.is_none().then(|| self.too_small(device, head, &portion))
        });
        broken.collect()
    }

    /// Returns the timing of a device, `None` if its memory is too small for what cannot be reclaimed, or if a slow
    /// disk would be read.
    pub fn timing(
        &self,
        device: usize,
        head: bool,
        portion: &Portion,
        residency: &ResidencyOptions,
    ) -> Option<DeviceTiming> {
        self.resident_timing(device, head, portion)
            .and_then(|resident_timing| self.reading(device, &resident_timing, residency))
    }

    /// Returns the timing of a device with all weights in memory; `None` if its memory is too small for what cannot
    /// be reclaimed.
    pub(crate) fn resident_timing(
        &self,
        device: usize,
        head: bool,
        portion: &Portion,
    ) -> Option<ResidentTiming> {
        let share = portion.share;
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
        // A page cache that keeps the excess out keeps the rest whatever Metal has wired.
        let keeps = self.instance().devices[device].runtime.rereads == Rereads::Excess;
        let within_metal = !costs.metal || share.gpu_layers == 0 || !terms.over || keeps;
        self.put_work(device, head, portion, &mut terms);
        let memory = self.memory(device, head, portion);
        terms.need = (costs.steady_capacity - memory.budget + memory.share) as f64;
        terms.capacity = costs.steady_capacity as u64;
        let too_small = memory.budget < 0 || (memory.share > 0 && memory.budget < MIN_WEIGHT_CACHE.0 as i64);
        let fits = !too_small && self.fits_gpu(device, head, portion);
        fits.then_some(ResidentTiming { terms, memory, within_metal })
    }

    /// Adds the time of rereading weights that do not stay; `None` if a slow disk would be read.
    pub(crate) fn reading(
        &self,
        device: usize,
        resident_timing: &ResidentTiming,
        residency: &ResidencyOptions,
    ) -> Option<DeviceTiming> {
        let (costs, runtime) = (&self.devices[device], &self.instance().devices[device].runtime);
        let ResidentTiming { terms, memory, within_metal } = resident_timing;
        let mut terms = terms.clone();
        if terms.share.layers == 0 {
            return Some(DeviceTiming { terms, busy: 0.0 });
        }
        // A page cache that keeps the excess out has no cliff to stay away from.
        terms.over = match runtime.rereads {
            Rereads::Excess => memory.share > memory.budget,
            Rereads::Everything => {
                // Faults read around what they touch, and the system keeps that for a while.
                let beside =
                    if residency.policy == Residency::Managed { 0 } else { MIN_WEIGHT_CACHE.0 as i64 };
                let budget = (memory.budget - beside).max(0) as u64;
                !fits(budget, memory.share as u64, runtime.processors)
            }
        };
        if !terms.over && *within_metal && !gives_up(residency, memory.share) {
            return Some(DeviceTiming { terms, busy: 0.0 });
        }
        if costs.slow_disk {
            return None;
        }
        terms.over |= !within_metal;
        let stage = terms.compute + terms.memory;
        let busy = if *within_metal {
            let windows = f64::from(terms.share.windows);
            let reading = Rereading { memory: *memory, stage, windows, reads: costs.reads };
            let (waits, busy) = reading.waits(runtime, residency);
            terms.disk = waits;
            busy
        } else {
            // Past its working set Metal gives everything up, whatever the residency.
            stage + (memory.share + memory.wired) as f64 / costs.reads.fault
        };
        Some(DeviceTiming { terms, busy })
    }

    /// Replaces the paper's compute terms by the known times of layers, windows and output.
    fn put_work(&self, device: usize, head: bool, portion: &Portion, terms: &mut DeviceTerms) {
        let (runtime, share) = (&self.instance().devices[device].runtime, portion.share);
        if let (Some(work), Some(seconds)) = (&runtime.work, portion.work) {
            let windows = f64::from(share.windows);
            terms.compute = seconds;
            terms.memory = 0.0;
            if head {
                terms.compute += self.output_on_gpu(device, portion).unwrap_or(work.output);
            }
            if share.gpu_layers < share.layers {
                terms.compute += windows * work.cpu_window;
            }
            if share.gpu_layers > 0 {
                terms.compute += windows * work.gpu_window;
                terms.memory += windows * self.devices[device].window_copy;
            }
        }
        if head {
            terms.compute += runtime.token_overhead;
        }
    }

    fn memory(&self, device: usize, head: bool, portion: &Portion) -> Memory {
        let (costs, model) = (&self.devices[device], &self.model);
        let kv = model.layer_resident_bytes - self.instance().model.layer_weight_bytes as i64;
        let (gpu, cpu) = (
            i64::from(portion.share.gpu_layers),
            i64::from(portion.share.layers) - i64::from(portion.share.gpu_layers),
        );
        let on_gpu = head && self.output_on_gpu(device, portion).is_some();
        let output = if on_gpu { 0 } else { model.output_head_bytes };
        let head_bytes = if head { output + model.row_bytes_up } else { 0 };
        // On Metal the GPU's layers lie in the same memory, and stay there within its working set.
        let wired = portion.gpu_bytes + if on_gpu { model.output_head_bytes } else { 0 };
        let (wired, gpu_kv) = if costs.metal { (wired, gpu * kv) } else { (0, 0) };
        let held = cpu * kv + gpu_kv + wired + costs.buffer_bytes;
        let output = if head { output } else { 0 };
        Memory { share: portion.cpu_bytes + head_bytes, output, budget: costs.steady_capacity - held, wired }
    }

    /// Returns whether GPU memory holds these layers, by their own bytes.
    pub(crate) fn fits_gpu(&self, device: usize, head: bool, portion: &Portion) -> bool {
        let available = self.devices[device].gpu_bytes[usize::from(head)];
        portion.share.gpu_layers == 0 || self.gpu_need(portion) <= available
    }

    /// Returns the seconds of the output head on the head's GPU if all its layers are there and it fits beside them,
    /// as [`crate::plan_document`] assigns it.
    fn output_on_gpu(&self, device: usize, portion: &Portion) -> Option<f64> {
        let work = self.instance().devices[device].runtime.work.as_ref()?;
        // Metal's bound for a head has room for the output already (paper, appendix A.3).
        let available = self.devices[device].gpu_bytes[0];
        let fits = portion.share.gpu_layers == portion.share.layers
            && self.gpu_need(portion) + self.model.output_head_bytes <= available;
        work.output_on_gpu.filter(|_| fits)
    }

    /// Returns the bytes of a portion's GPU layers and their cache.
    fn gpu_need(&self, portion: &Portion) -> i64 {
        let kv = self.model.layer_resident_bytes - self.instance().model.layer_weight_bytes as i64;
        portion.gpu_bytes + i64::from(portion.share.gpu_layers) * kv
    }

    /// Returns the work of a window of `window` layers, `gpu_layers` of them on the GPU, at a place of the ring.
    pub fn portion(&self, device: usize, place: Place, window: u32, gpu_layers: u32) -> Portion {
        let Place { ring_layers, placed } = place;
        let (rounds, remainder) = (self.model.layers / ring_layers, self.model.layers % ring_layers);
        let rest = remainder.saturating_sub(placed);
        let share = Share::new(window, gpu_layers, rounds, rest);
        let bytes = |start: u32, end: u32| {
            self.model.first_layers_bytes[end as usize] - self.model.first_layers_bytes[start as usize]
        };
        let seconds = self.devices[device].first_layers_seconds.as_ref();
        // A device without a GPU has no times of one.
        let took = |which: usize, start: u32, end: u32| {
            let sum = |layer: u32| seconds.and_then(|sums| sums[which].get(layer as usize)).copied();
            sum(end).zip(sum(start)).map_or(0.0, |(end, start)| end - start)
        };
        let (mut cpu_bytes, mut gpu_bytes, mut work) = (0, 0, 0.0);
        let mut add = |start: u32, layers: u32| {
            // A window that is only considered would begin earlier instead of running over the end.
            let start = start.min(self.model.layers.saturating_sub(layers));
            let layers = layers.min(self.model.layers);
            let split = start + gpu_layers.min(layers);
            gpu_bytes += bytes(start, split);
            cpu_bytes += bytes(split, start + layers);
            work += took(1, start, split) + took(0, split, start + layers);
        };
        (0..rounds).for_each(|round| add(round * ring_layers + placed, window));
        if rest > 0 {
            add(rounds * ring_layers + placed, window.min(rest));
        }
        Portion { share, cpu_bytes, gpu_bytes, work: seconds.map(|_| work) }
    }

    /// Returns the place of a device's window in the ring, or the place that it would have.
    pub(crate) fn place(&self, assignment: &Assignment, device: usize) -> Place {
        let order = match &assignment.order {
            Some(order) => order.clone(),
            None => ring_order(assignment.head, self.device_count()).collect(),
        };
        let before = order.into_iter().take_while(|other| *other != device);
        let placed = before.map(|other| assignment.window_layers[other]).sum();
        Place { ring_layers: assignment.ring_layers() as u32, placed }
    }

    /// Returns the work of each device, in the instance's order.
    pub(crate) fn portions(&self, assignment: &Assignment) -> Vec<Portion> {
        let devices = self.device_count();
        let ring_layers = assignment.ring_layers() as u32;
        let nothing = Portion { share: Share::default(), cpu_bytes: 0, gpu_bytes: 0, work: None };
        let (mut portions, mut placed) = (vec![nothing; devices], 0);
        for device in assignment.ring() {
            let (window, gpu) = (assignment.window_layers[device], assignment.gpu_layers[device]);
            portions[device] = self.portion(device, Place { ring_layers, placed }, window, gpu);
            placed += window;
        }
        portions
    }

    fn too_small(&self, device_index: usize, head: bool, portion: &Portion) -> Violation {
        let (costs, described) = (&self.devices[device_index], &self.instance().devices[device_index]);
        let memory = self.memory(device_index, head, portion);
        let (need, capacity) =
            ((costs.steady_capacity - memory.budget + memory.share) as f64, costs.steady_capacity as u64);
        let device = described.name.clone();
        let gpu_layers = portion.share.gpu_layers;
        if described.gpu == Gpu::None && gpu_layers > 0 {
            return Violation::NoGpu { device, gpu_layers };
        }
        if !self.fits_gpu(device_index, head, portion) {
            let (needed, available) = (self.gpu_need(portion), costs.gpu_bytes[usize::from(head)]);
            return Violation::GpuBytes { device, layers: gpu_layers, needed, available };
        }
        if memory.budget >= MIN_WEIGHT_CACHE.0 as i64 && costs.slow_disk {
            let threshold = self.instance().slow_disk_threshold;
            return Violation::SlowDiskOverloaded {
                device,
                need,
                capacity,
                disk_read: costs.disk_read,
                threshold,
            };
        }
        Violation::OutOfMemory { device, held: need - memory.share as f64, capacity }
    }
}

/// A share that is reread for each token, in part or whole.
struct Rereading {
    memory: Memory,
    stage: f64,
    windows: f64,
    reads: ReadRates,
}

impl Rereading {
    /// Returns the output's part of what the head uses between the end of a token and the first window of the next.
    fn output_of_first_visit(&self) -> f64 {
        let (output, share) = (self.memory.output as f64, self.memory.share as f64);
        output / (output + (share - output) / self.windows)
    }

    /// Returns the time that reading ahead cannot hide, and `busy`.
    fn waits(&self, runtime: &RuntimeModel, residency: &ResidencyOptions) -> (f64, f64) {
        let Rereading { stage, windows, reads, .. } = *self;
        let (share, budget) = (self.memory.share as u64, self.memory.budget as u64);
        if residency.policy == Residency::Managed {
            let read = (share - kept_bytes(budget, share, runtime.processors, residency)) as f64;
            let buffer = stream_bytes(budget, share, runtime.processors, residency) as f64;
            let visit = |filled: f64| ((read / windows - filled) / reads.stream).max(stage / windows);
            let first = visit(buffer.min(read / windows * self.output_of_first_visit()));
            let others = (windows - 1.0) * visit(buffer);
            let own = if self.memory.output > 0 { first + others } else { others + visit(buffer) };
            return ((own - stage).max(0.0), read / reads.stream);
        }
        let (share, budget) = (share as f64, budget as f64);
        let excess = runtime.rereads == Rereads::Excess && !residency.releases();
        let read = (share - if excess { budget } else { 0.0 }).max(0.0);
        let window = share / windows;
        let ahead = read_ahead(residency).min(window);
        if ahead <= 0.0 {
            return (read / reads.fault, 0.0);
        }
        let held = if residency.releases() { 0.0 } else { window };
        let conflict = ((held + ahead - budget) / window).clamp(0.0, 1.0);
        // What no budget covers, or was evicted in a conflict, is read when it is touched.
        let uncovered = 1.0 - ahead / window;
        if excess {
            let read = read + (windows * ahead).min(read).min(budget);
            let touched = (conflict + uncovered).min(1.0) * read / reads.fault;
            return (touched, stage + read / reads.ahead);
        }
        let touched = (conflict + uncovered).min(1.0) * read / reads.fault;
        (touched, stage + read / reads.ahead + conflict * read / reads.fault)
    }
}

/// Returns whether the residency releases weights although all of them fit.
fn gives_up(residency: &ResidencyOptions, share: i64) -> bool {
    match residency.policy {
        Residency::Managed => residency.max_kept(share as u64) < share as u64,
        Residency::Os | Residency::Windowed => residency.releases(),
        Residency::Pinned | Residency::Sliding => false,
    }
}

/// Returns the most bytes of a window that are read ahead.
fn read_ahead(residency: &ResidencyOptions) -> f64 {
    if residency.one_call {
        return 0.0;
    }
    residency.budget().map_or(f64::INFINITY, Bytes::as_f64)
}
