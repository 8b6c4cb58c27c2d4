//! How long does a token take once reading ahead has settled, and what does each device wait for?
//!
//! The paper's objective adds computing and reading. But a device reads while the others compute, and how much of
//! that is hidden depends on the rounds, on its memory and on who decides what stays there. For a device with
//! `stage = T_comp + T_mem` and `k` windows, `share` bytes of CPU weights, `room` for page cache beside what cannot
//! be reclaimed, and a disk of `s` bytes a second:
//!
//! ```text
//! share <= room            own = stage                                     busy = 0
//! else, no prefetch        own = stage + read/s                            busy = 0
//! os, windowed             own = stage + conflict share/s                  busy = stage + (1 + conflict) read/s
//! managed                  own = max(stage, (read - k q)/s)                busy = read/s
//!
//! T = max( sum of own + sum of hops + token overhead of the head ,  largest busy )
//! ```
//!
//! `own` is what a device adds to a token whose reading is as far ahead as it can be; `busy` is how long its disk
//! needs for one token, and no token can be faster than the slowest disk. `read` is `share` where the system evicts
//! what was used longest ago, and `share - room` in the paper's page cache. A window of `w = share / k` is in
//! conflict with the one before it as far as both do not fit: `conflict = (w + ahead - room) / w`, within 0 and 1,
//! with `ahead` = w or the prefetch budget, and 0 if windows are given up behind the computation. A device that
//! manages its residency reads `share - kept` ([`hearth_schema::residency::kept_bytes`]), through a buffer of q
//! bytes that is filled before each window and streams on while it computes.
//!
//! Not here: the search ([`crate::overlap`]).

use hearth_profiles::Bytes;
use hearth_schema::residency::{Residency, ResidencyOptions, kept_bytes, stream_bytes};

use crate::assignment::{Assignment, Share};
use crate::constraints::{Violation, shape_violations};
use crate::latency::{Breakdown, DeviceTerms, LatencyModel};
use crate::practice::Rereads;

/// What a device adds to a token, and how fast tokens can follow each other there.
#[derive(Debug, Clone, PartialEq)]
pub struct Pace {
    /// Its terms; `disk` is what it waits for although reading is as far ahead as it can be.
    pub terms: DeviceTerms,
    /// Seconds for which a token keeps its disk, and in a conflict its processor too: no token is faster.
    pub busy: f64,
}

/// Bytes of one share.
struct Memory {
    /// Weights that the CPU reads for a token.
    share: i64,
    /// Page cache that they can have.
    room: i64,
}

impl LatencyModel<'_> {
    /// The time of a token and its terms in the steady state, for a residency of each device. What is waited for
    /// beside the devices' own times, because a disk is too slow, is a disk term of that device. An assignment that
    /// breaks a memory rule has no time.
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
        for (device, share) in assignment.shares(self.model_layers()).into_iter().enumerate() {
            let residency = residencies.get(device).copied().unwrap_or_default();
            let pace = self
                .pace(device, device == assignment.head, share, &residency)
                .ok_or_else(|| self.no_room(device, device == assignment.head, share))?;
            if pace.busy > slowest.0 {
                slowest = (pace.busy, device);
            }
            devices.push(pace.terms);
        }
        let own: f64 = devices.iter().map(DeviceTerms::seconds).sum();
        devices[slowest.1].disk += (slowest.0 - own).max(0.0);
        Ok(Breakdown { seconds: own.max(slowest.0), devices })
    }

    /// The pace of a device, `None` if its memory cannot hold what must be held, or if a slow disk would be read.
    pub fn pace(
        &self,
        device: usize,
        head: bool,
        share: Share,
        residency: &ResidencyOptions,
    ) -> Option<Pace> {
        let mut terms = self.terms(device, head, share);
        terms.disk = 0.0;
        if share.layers == 0 {
            return Some(Pace { terms, busy: 0.0 });
        }
        let costs = &self.devices[device];
        let practice = &self.instance().devices[device].practice;
        if head {
            terms.compute += practice.token_overhead;
        }
        let memory = self.memory(device, head, share);
        terms.need = (costs.steady_capacity - memory.room + memory.share) as f64;
        terms.capacity = costs.steady_capacity as u64;
        terms.over = memory.share > memory.room;
        let within_metal = !costs.metal || share.gpu_layers == 0 || {
            let paper = self.terms(device, head, share);
            !paper.over
        };
        if memory.room < 0 || (memory.share > 0 && memory.room < LEAST_CACHE) {
            return None;
        }
        if !terms.over && within_metal {
            return Some(Pace { terms, busy: 0.0 });
        }
        if costs.slow_disk {
            return None;
        }
        terms.over = true;
        let stage = terms.compute + terms.memory;
        let (disk, windows, weights) = (costs.disk_read, f64::from(share.windows), memory.share as f64);
        let busy = if !within_metal {
            // Past its working set Metal gives everything up, whoever keeps what.
            terms.disk = 0.0;
            stage + weights / disk
        } else if residency.policy == Residency::Managed {
            let (room, share) = (memory.room as u64, memory.share as u64);
            let read = (share - kept_bytes(room, share, practice.processors, residency)) as f64;
            let buffer = stream_bytes(room, share, practice.processors, residency) as f64;
            terms.disk = ((read - windows * buffer) / disk - stage).max(0.0);
            read / disk
        } else {
            let excess = practice.rereads == Rereads::Excess;
            let read = if excess { weights - memory.room as f64 } else { weights };
            let window = weights / windows;
            let ahead = read_ahead(residency).min(window);
            if ahead <= 0.0 {
                terms.disk = read / disk;
                return Some(Pace { terms, busy: 0.0 });
            }
            let conflict = if excess {
                0.0
            } else {
                let held = if residency.releases() { 0.0 } else { window };
                ((held + ahead - memory.room as f64) / window).clamp(0.0, 1.0)
            };
            // What no budget covers is read when it is touched.
            let uncovered = read * (1.0 - ahead / window);
            terms.disk = conflict * read / disk + uncovered / disk;
            stage + (1.0 + conflict) * read / disk
        };
        Some(Pace { terms, busy })
    }

    fn memory(&self, device: usize, head: bool, share: Share) -> Memory {
        let (costs, model) = (&self.devices[device], &self.model);
        let cpu = i64::from(share.layers - share.gpu_layers);
        let weight = self.instance().model.layer_weight_bytes as i64;
        let head_bytes = if head { model.output_head_bytes + model.row_bytes_up } else { 0 };
        // On Metal the GPU's layers lie in the same memory and stay there.
        let pinned = if costs.metal { i64::from(share.gpu_layers) * model.layer_resident_bytes } else { 0 };
        let held = cpu * (model.layer_resident_bytes - weight) + pinned + costs.buffer_bytes;
        Memory { share: cpu * weight + head_bytes, room: costs.steady_capacity - held }
    }

    fn no_room(&self, device: usize, head: bool, share: Share) -> Violation {
        let (costs, described) = (&self.devices[device], &self.instance().devices[device]);
        let memory = self.memory(device, head, share);
        let (need, capacity) =
            ((costs.steady_capacity - memory.room + memory.share) as f64, costs.steady_capacity as u64);
        let device = described.name.clone();
        if memory.room >= LEAST_CACHE && costs.slow_disk {
            let threshold = self.instance().slow_disk_threshold;
            return Violation::SlowDiskOverloaded {
                device,
                need,
                capacity,
                disk_read: costs.disk_read,
                threshold,
            };
        }
        Violation::NoRoom { device, held: need - memory.share as f64, capacity }
    }
}

/// With less than this even weights that only pass through find no room, as in the simulator.
/// source: assumed, two read-ahead windows of 8 MiB
const LEAST_CACHE: i64 = 16 << 20;

/// Bytes of a window that are read ahead of its turn at most.
fn read_ahead(residency: &ResidencyOptions) -> f64 {
    if !residency.prefetches() || residency.one_call {
        return 0.0;
    }
    residency.prefetch_budget.map_or(f64::INFINITY, Bytes::as_f64)
}
