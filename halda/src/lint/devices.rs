//! Findings about a single device in a plan.

use hearth_core::Member;
use hearth_core::memory::{DeviceMemory, MIN_TAKEN_MEMORY, MemoryBudget};
use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Bytes, BytesPerSecond};
use hearth_schema::Plan;
use hearth_schema::plan::PlannedDevice;
use hearth_schema::residency::Residency;

use super::{Finding, Severity};

/// The share of the weights in memory that a device should be allowed to keep. source: assumed, because a part is
/// needed to read the others
const MIN_KEPT: f64 = 0.8;

pub(super) struct DeviceCheck<'p> {
    pub plan: &'p Plan,
    pub device_index: usize,
    pub planned_device: &'p PlannedDevice,
    pub member: &'p Member,
    pub model: &'p ModelProfile,
    pub budget: MemoryBudget,
}

impl DeviceCheck<'_> {
    fn at(&self, key: &str) -> String {
        format!("plan devices[{}] `{}`{key}", self.device_index, self.planned_device.name)
    }

    pub fn findings(&self, slow_disk: BytesPerSecond) -> Vec<Finding> {
        let mut found = Vec::new();
        self.gpu(&mut found);
        let before = found.len();
        self.memory(&mut found);
        let fails = found[before..].iter().any(|finding| finding.severity == Severity::Error);
        if !fails {
            found.extend(self.memory_of_others());
            found.extend(self.small_kept_set());
        }
        if !fails && self.budget.reloads_weights() {
            self.reading(slow_disk, &mut found);
        }
        found
    }

    /// Reports a plan that needs memory which other programs hold before the run.
    fn memory_of_others(&self) -> Option<Finding> {
        let (plan, index, device) = (self.plan, self.device_index, &self.member.device);
        let taken = DeviceMemory::new(plan, index, self.model, device, false).taken_from_others(device);
        (taken >= MIN_TAKEN_MEMORY).then(|| {
            let what = format!(
                "`{}` needs {taken} of memory that other programs hold: the run is as fast as predicted only if the system \
                 swaps them out",
                self.planned_device.name
            );
            let fix = "close other programs, or set `values: {memory.can_swap: 0 B}` at the device for a plan without it";
            Finding::note("swap-relied-on", self.at(""), what, fix)
        })
    }

    /// Reports a managed device that may keep fewer weights than it has memory for.
    fn small_kept_set(&self) -> Option<Finding> {
        let kept = self.planned_device.residency.kept_set_limit?;
        let useful = self.budget.weights.min(self.budget.weight_cache);
        (kept.as_f64() < MIN_KEPT * useful.as_f64()).then(|| {
            let what = format!(
                "`{}` may keep {kept} of weights, but uses {} for each token and has memory for {useful} of them: it reads \
                 the rest again for every token",
                self.planned_device.name, self.budget.weights
            );
            let fix = "raise or remove `kept` of its residency";
            Finding::warning("budget-below-working-set", self.at(".residency.kept"), what, fix)
        })
    }

    fn gpu(&self, found: &mut Vec<Finding>) {
        let (name, layers) = (&self.planned_device.name, self.planned_device.gpu_layers);
        if layers == 0 {
            return;
        }
        let usable = self.member.device.gpu.as_ref().filter(|gpu| !gpu.matvec.is_empty());
        let Some(gpu) = usable else {
            let what = format!("`{name}` has {layers} GPU layers per window, but no GPU with a known speed");
            let fix = "set `gpu_layers: 0`, or complete `gpu` in the device's profile";
            found.push(Finding::error("no-gpu", self.at(".gpu_layers"), what, fix));
            return;
        };
        let (needed, available) = (self.budget.needed_gpu_memory, gpu.memory_available.value);
        if self.budget.mapped_gpu_weights > Bytes::ZERO {
            self.working_set(needed, available, found);
        } else if needed > available {
            let what = format!(
                "weights, cache and buffers take {needed} of GPU memory on `{name}`, which has {available}"
            );
            let fix = "lower `gpu_layers` or `context`";
            found.push(Finding::error("gpu-memory", self.at(".gpu_layers"), what, fix));
        }
    }

    fn working_set(&self, needed: Bytes, available: Bytes, found: &mut Vec<Finding>) {
        let Some(wired) = self.budget.max_wired_weights.filter(|&wired| self.budget.weights > wired) else {
            return;
        };
        let (name, share) = (&self.planned_device.name, self.budget.weights);
        let what = format!(
            "Metal's working set on `{name}` is {available}, of which the GPU layers take {needed}: only {wired} of the \
             {share} of weights can stay wired, so all of them are read again for every token"
        );
        let fix = "give the device fewer layers (on GPU and CPU), or lower `context`";
        found.push(Finding::warning("working-set-exceeded", self.at(".gpu_layers"), what, fix));
    }

    fn memory(&self, found: &mut Vec<Finding>) {
        let MemoryBudget { available_memory, kv_cache, buffers, weight_cache, head_weights, .. } =
            self.budget;
        let (name, tokens) = (&self.planned_device.name, self.plan.context_length);
        if !self.budget.fits {
            let what = format!(
                "the KV cache of {tokens} tokens takes {kv_cache} and buffers take {buffers}: with the minimum \
                 memory for weights this exceeds the {available_memory} of memory of `{name}`"
            );
            let fix = "lower `context`, or give the device fewer layers";
            found.push(Finding::error("memory-exceeded", self.at(""), what, fix));
        } else if head_weights > weight_cache {
            let what = format!(
                "the output head takes {head_weights}, but only {weight_cache} of memory remain beside cache and buffers, so \
                 it is read again for every token"
            );
            let fix = "use a device with more memory as the head";
            found.push(Finding::warning("head-over-memory", self.at(""), what, fix));
        }
    }

    fn reading(&self, slow_disk: BytesPerSecond, found: &mut Vec<Finding>) {
        let MemoryBudget { weights: share, largest_window_weights: window, .. } = self.budget;
        let resident = self.budget.max_resident_weights();
        let (name, options) = (&self.planned_device.name, self.planned_device.residency);
        let managed = options.policy == Residency::Managed;
        let excess = share.saturating_sub(resident);
        let what = format!(
            "`{name}` uses {share} of weights for each token, {excess} more than its memory for weights"
        );
        let fix = if managed {
            "give the device fewer layers if this is too slow"
        } else {
            "give the device fewer layers, or use `managed` residency, which reads only the weights that do not fit"
        };
        found.push(Finding::note("share-exceeds-memory", self.at(""), what, fix));
        let disk = self.member.device.disk_read_rate();
        if disk < slow_disk {
            let what = format!(
                "`{name}` reads weights for every token from a disk of {disk}, below the threshold of {slow_disk}"
            );
            let fix = "give the device fewer layers, or lower `planner.slow_disk` if this is intended";
            found.push(Finding::warning("slow-disk-overloaded", self.at(".window"), what, fix));
        }
        if managed {
            let (available, buffer) = (self.budget.weight_cache, options.stream_buffer_bytes());
            let half = Bytes(available.0 / 2);
            if buffer > half {
                let what = format!(
                    "the stream buffer of {buffer} exceeds half the {available} for weights: it is reduced \
                     to {half}"
                );
                let fix = "use a smaller `stream_buffer`, which leaves more memory for kept weights";
                let location = self.at(".residency.stream_buffer");
                found.push(Finding::warning("stream-buffer-too-large", location, what, fix));
            }
        } else if !options.prefetches() {
            let what =
                format!("`{name}` reads weights from disk only when it needs them, while all devices wait");
            let fix = "enable prefetching, or use `managed` residency";
            found.push(Finding::warning("reads-without-prefetch", self.at(".residency"), what, fix));
        } else if self.plan.rounds > 1 {
            let ahead = options.prefetch_budget.map_or(window, |budget| budget.min(window));
            if window > resident {
                let what = format!(
                    "a window of `{name}` takes {window}, but only {resident} fit in memory, so none of it stays in memory"
                );
                let fix = "give the device smaller windows in more rounds, or `managed` residency";
                found.push(Finding::warning("window-exceeds-memory", self.at(".window"), what, fix));
            } else if window + ahead > resident {
                let what = format!(
                    "a window of {window} and {ahead} of the next one, which are read ahead, exceed the {resident} of \
                     memory for weights: reading ahead evicts weights in use"
                );
                let fix = "give the device smaller windows in more rounds, a `prefetch_budget`, or `managed` residency";
                found.push(Finding::warning("windows-evict-each-other", self.at(".window"), what, fix));
            }
        }
    }
}
