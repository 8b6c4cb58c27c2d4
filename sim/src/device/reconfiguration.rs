//! How a device reacts to background load, and to a new plan in the middle of a run.
//!
//! Background load changes how fast the device computes and reads and how much memory its weights have. A new plan ends
//! the current work; the page cache keeps its content, because both shares lie in one file.
//!
//! Deviation: a new part in GPU memory is read from disk and then copied, not both at once.

use hearth_core::schedule::Schedule;
use hearth_profiles::{Bytes, BytesPerSecond, Seconds};
use hearth_schema::plan::Processor;
use hearth_schema::trace::{Kind, Record, Resource};

use super::background_load::BackgroundLoad;
use super::context::{Event, SimContext};
use super::walk::Walk;
use super::{DeviceConfig, DeviceSim, ThreadState};
use crate::page_cache::for_device::CacheConfig;
use crate::trace::start_record;

/// The pass of records that belong to no pass: loading weights for a new plan.
const NO_PASS: u32 = u32::MAX;

impl<'a> DeviceSim<'a> {
    /// Bytes read from disk.
    pub fn read(&self) -> Bytes {
        self.read_before + self.storage.delivered()
    }

    pub fn schedule(&mut self) -> &mut Schedule {
        &mut self.schedule
    }

    /// Whether its GPU holds the output matrix.
    pub fn gpu_output(&self) -> bool {
        self.schedule.device() == 0 && self.schedule.plan().output == Processor::Gpu
    }

    pub fn gpu_layers(&self) -> Vec<u32> {
        let (plan, place) = (self.schedule.plan(), self.schedule.device());
        (0..plan.rounds).flat_map(|round| plan.gpu_window(place, round)).collect()
    }

    /// Whether weights pass through its page cache.
    pub fn has_weights(&self) -> bool {
        self.layout.own().next().is_some()
    }

    /// Applies the background load and the memory that it leaves for weights.
    pub fn apply_load(&mut self, background_load: &BackgroundLoad, room: Bytes, ctx: &mut SimContext) {
        let now = ctx.engine.now();
        self.cpu.set_co_runners(now, background_load.co_runners);
        self.cpu.set_clock(now, background_load.clock);
        self.gpu_speed = background_load.clock * background_load.gpu;
        if let Some(at) = self.cpu.next_end() {
            ctx.engine.set(self.cpu_timer, at, Event::Processor(self.place));
        }
        self.storage.set_disk_left(now, background_load.disk);
        let (device, place, seed) = (self.device, self.place, self.seed);
        let (share, chunk) = (self.layout.chunks(), self.storage.chunk());
        self.storage.set_room(CacheConfig { device, place, seed, room, share, chunk }.initial_capacity());
        self.disk_set = None;
        self.watch_disk(ctx);
    }

    /// Ends the current plan and records unfinished work up to now. Page cache and disk continue.
    pub fn stop(&mut self, ctx: &mut SimContext) {
        let now = ctx.engine.now();
        self.residency.flush(now, ctx.records);
        self.after_walk = None;
        match std::mem::replace(&mut self.thread, ThreadState::Idle) {
            ThreadState::Walking(walk) => self.cancel_walk(*walk, ctx),
            ThreadState::Fixed { output: Some(pass) } => {
                let own = |record: &&mut Record| {
                    (record.kind, record.pass, record.device) == (Kind::Output, pass, self.place as u16)
                };
                // It gave no token, even if it ends at this instant.
                if let Some(output) = ctx.records.iter_mut().rev().find(own) {
                    output.kind = Kind::Compute;
                }
            }
            ThreadState::Fixed { output: None } | ThreadState::Idle => {}
        }
        self.cpu = super::idle_cpu(self.device);
        self.steps.clear();
        self.inbox.clear();
        self.idle_since = now;
        self.disk_set = None;
        self.watch_disk(ctx);
    }

    fn cancel_walk(&mut self, mut walk: Walk, ctx: &mut SimContext) {
        let now = ctx.engine.now();
        if self.cpu.next_end().is_some() {
            let slowdown = self.cpu.slowdown(now, 0);
            walk.computed(now, slowdown);
        }
        // It gave no token.
        let kind = if walk.record.kind == Kind::Output { Kind::Compute } else { walk.record.kind };
        ctx.records.push(Record { end: now, kind, ..walk.record });
    }

    /// Adopts its part of another plan, after [`DeviceSim::stop`]. The page cache keeps its content, unless the new
    /// part has chunks of another size; then it starts empty.
    pub fn reconfigure(&mut self, config: DeviceConfig<'a>) {
        (self.schedule, self.layout, self.residency) = (config.schedule, config.layout, config.residency);
        (self.drafter, self.uploads, self.reads_single_rows) =
            (config.drafter, config.uploads, config.reads_single_rows);
        if self.storage.chunk() != config.storage.chunk() {
            self.read_before += self.storage.delivered();
            self.storage = config.storage;
            self.rows.clear();
        }
    }

    /// Loads layers, and perhaps the output matrix, into GPU memory, which keeps the thread of control busy.
    pub fn load(&mut self, layers: &[u32], output: bool, ctx: &mut SimContext) {
        let Some(gpu) = &self.device.gpu else { return };
        if self.device.gpu_maps_weights() {
            // They are brought in by the first token.
            return;
        }
        let span = layers.first().zip(layers.last()).map(|(&first, &last)| [first, last + 1]);
        if span.is_none() && !output {
            return;
        }
        let matrix = if output { self.model.output_bytes() } else { Bytes::ZERO };
        let bytes = matrix + layers.iter().map(|&layer| self.model.layer_bytes(layer)).sum::<Bytes>();
        let disk = &self.device.disk;
        let rate = disk.populate.as_ref().unwrap_or(&disk.sequential).value;
        let rate = disk.limit.as_ref().map_or(rate, |limit| BytesPerSecond(rate.0.min(limit.value.0)));
        let upload = if gpu.unified_memory { Seconds(0.0) } else { gpu.upload.time(bytes) };
        let line =
            start_record(self.place, Resource::DiskPrefetch, Kind::Prefetch, (NO_PASS, 0), ctx.engine.now());
        let record = Record { layers: span, bytes: bytes.0, ..line };
        self.read_before += bytes;
        self.run_timed(vec![(record, bytes / rate + upload)].into(), ctx);
    }
}
