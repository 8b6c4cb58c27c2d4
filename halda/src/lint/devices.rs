//! Findings about one device's part of a plan.

use hearth_core::Member;
use hearth_core::memory::MemoryBudget;
use hearth_profiles::{Bytes, BytesPerSecond};
use hearth_schema::Plan;
use hearth_schema::plan::PlannedDevice;
use hearth_schema::residency::Residency;

use super::{Finding, Severity};

pub(super) struct PlannedPart<'p> {
    pub plan: &'p Plan,
    pub place: usize,
    pub planned: &'p PlannedDevice,
    pub member: &'p Member,
    pub budget: MemoryBudget,
}

impl PlannedPart<'_> {
    /// Returns the path of a key of this device in the plan.
    fn at(&self, key: &str) -> String {
        format!("plan devices[{}] `{}`{key}", self.place, self.planned.name)
    }

    pub fn findings(&self, slow_disk: BytesPerSecond) -> Vec<Finding> {
        let mut found = Vec::new();
        self.gpu(&mut found);
        let before = found.len();
        self.memory(&mut found);
        let fails = found[before..].iter().any(|finding| finding.severity == Severity::Error);
        if !fails && self.budget.is_exceeded() {
            self.reading(slow_disk, &mut found);
        }
        found
    }

    fn gpu(&self, found: &mut Vec<Finding>) {
        let (name, layers) = (&self.planned.name, self.planned.gpu_layers);
        if layers == 0 {
            return;
        }
        let usable = self.member.device.gpu.as_ref().filter(|gpu| !gpu.matvec.is_empty());
        let Some(gpu) = usable else {
            let what = format!("`{name}` has {layers} GPU layers a window and no GPU with a known speed");
            let fix = "set `gpu_layers: 0`, or complete the device's profile";
            found.push(Finding::error("no-gpu", self.at(".gpu_layers"), what, fix));
            return;
        };
        let (needed, available) = (self.budget.gpu_needed, gpu.memory_available.value);
        if self.budget.gpu_mapped > Bytes::ZERO {
            self.working_set(needed, available, found);
        } else if needed > available {
            found.push(Finding::error(
                "gpu-memory",
                self.at(".gpu_layers"),
                format!("weights, key-value cache and buffers take {needed} of the GPU of `{name}`, which has {available}"),
                "lower `gpu_layers` or `context`",
            ));
        }
    }

    /// Checks the share against what Metal keeps wired; the rest is read again.
    fn working_set(&self, needed: Bytes, available: Bytes, found: &mut Vec<Finding>) {
        let Some(wired) = self.budget.wired.filter(|&wired| self.budget.weights > wired) else { return };
        let (name, share) = (&self.planned.name, self.budget.weights);
        found.push(Finding::warning(
            "working-set-exceeded",
            self.at(".gpu_layers"),
            format!(
                "Metal's working set on `{name}` has {available}, of which the GPU's layers take {needed}: it keeps {wired} \
                 of weights wired, the share is {share}, and all of it is read again for every token"
            ),
            "give the device fewer layers, on its CPU too, or lower `context`",
        ));
    }

    fn memory(&self, found: &mut Vec<Finding>) {
        let MemoryBudget { available, kv_cache, buffers, left, head_weights, .. } = self.budget;
        let name = &self.planned.name;
        if !self.budget.fits {
            found.push(Finding::error(
                "memory-exceeded",
                self.at(""),
                format!(
                    "the key-value cache of {} tokens takes {kv_cache} and buffers take {buffers}: with room for weights \
                     to pass through that is more than the {available} of `{name}`",
                    self.plan.context
                ),
                "lower `context`, or give the device fewer layers",
            ));
        } else if head_weights > left {
            found.push(Finding::warning(
                "head-over-memory",
                self.at(""),
                format!(
                    "the head's output matrix takes {head_weights}, and {left} are left beside cache and buffers: it is read \
                     again for every token"
                ),
                "let a device with more memory be the head",
            ));
        }
    }

    /// Checks the settings of a device that reads from disk for every token.
    fn reading(&self, slow_disk: BytesPerSecond, found: &mut Vec<Finding>) {
        let MemoryBudget { weights: share, largest_window: window, .. } = self.budget;
        let room = self.budget.max_resident();
        let (name, options) = (&self.planned.name, self.planned.residency);
        let managed = options.policy == Residency::Managed;
        let excess = share.saturating_sub(room);
        found.push(Finding::note(
            "share-exceeds-memory",
            self.at(""),
            format!(
                "the weights that `{name}` uses for a token are {share}, {excess} more than there is room for"
            ),
            if managed {
                "give it fewer layers if that is too slow"
            } else {
                "give it fewer layers, or let `managed` residency read only what does not fit"
            },
        ));
        let disk = self.member.device.disk_read();
        if disk < slow_disk {
            found.push(Finding::warning(
                "slow-disk-overloaded",
                self.at(".window"),
                format!(
                    "`{name}` reads for every token from a disk of {disk}, under the threshold of {slow_disk}"
                ),
                "give it fewer layers, or lower `planner.slow_disk` if that is meant",
            ));
        }
        if managed {
            self.buffer(found);
        } else if !options.prefetches() {
            found.push(Finding::warning(
                "reads-without-prefetch",
                self.at(".residency"),
                format!("`{name}` reads what does not fit only when it needs it, and everybody waits"),
                "let it prefetch, or make it `managed`",
            ));
        } else if self.plan.rounds > 1 {
            let ahead = options.prefetch_budget.map_or(window, |budget| budget.min(window));
            if window > room {
                found.push(Finding::warning(
                    "window-exceeds-memory",
                    self.at(".window"),
                    format!("one window of `{name}` takes {window}, and there is room for {room}: none of it stays"),
                    "give it smaller windows in more rounds, or `managed` residency",
                ));
            } else if window + ahead > room {
                found.push(Finding::warning(
                    "windows-evict-each-other",
                    self.at(".window"),
                    format!(
                        "a window of {window} and {ahead} of the next, read ahead, exceed the room of {room}: what is \
                         read ahead evicts what is in use"
                    ),
                    "give it smaller windows in more rounds, a `prefetch_budget`, or `managed` residency",
                ));
            }
        }
    }

    fn buffer(&self, found: &mut Vec<Finding>) {
        let (room, buffer) = (self.budget.left, self.planned.residency.buffer());
        let half = Bytes(room.0 / 2);
        if buffer > half {
            found.push(Finding::warning(
                "stream-buffer-too-large",
                self.at(".residency.stream_buffer"),
                format!("the buffer is {buffer} and the room for weights {room}: it is cut to {half}"),
                "give it a smaller `stream_buffer`: what it takes cannot be kept",
            ));
        }
    }
}
