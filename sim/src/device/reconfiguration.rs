//! Reconfiguration of a device: applies background load, and adopts a new plan during a run.
//!
//! Background load changes the speed of computing and reading, and the memory for weights. A new plan ends the current
//! work; the page cache keeps its contents, because the old and the new weights are parts of the same file.
//!
//! Deviation: new weights of a GPU are first read from disk and then copied to GPU memory, not both at once.

use hearth_profiles::{Bytes, BytesPerSecond, Seconds};
use hearth_schema::plan::Processor;
use hearth_schema::trace::{Resource, StepKind, StepRecord};

use super::background_load::BackgroundLoad;
use super::context::{Event, SimContext};
use super::{DeviceSim, ThreadState};
use crate::page_cache::config::PageCacheConfig;
use crate::trace::new_record;

/// The pass index of records that belong to no pass, for example of loading weights for a new plan.
const NO_PASS: u32 = u32::MAX;

impl<'a> DeviceSim<'a> {
    pub fn bytes_read(&self) -> Bytes {
        self.earlier_bytes_read + self.storage.bytes_read()
    }

    pub fn has_gpu_output(&self) -> bool {
        self.schedule.device_index() == 0 && self.schedule.plan().output_processor == Processor::Gpu
    }

    pub fn gpu_layers(&self) -> Vec<u32> {
        let (plan, index) = (self.schedule.plan(), self.schedule.device_index());
        (0..plan.rounds).flat_map(|round| plan.gpu_window(index, round)).collect()
    }

    pub fn reads_weights_from_page_cache(&self) -> bool {
        self.layout.own_chunks().next().is_some()
    }

    /// Applies the background load. `memory_budget` is the memory that the load leaves for weights.
    pub fn apply_load(&mut self, load: &BackgroundLoad, memory_budget: Bytes, ctx: &mut SimContext) {
        let now = ctx.engine.now();
        self.cpu.set_co_runners(now, load.co_runners);
        self.cpu.set_clock_fraction(now, load.clock_rate_fraction);
        self.gpu_speed = load.clock_rate_fraction * load.available_gpu_fraction;
        if let Some(at) = self.cpu.next_completion_time() {
            ctx.engine.set_timer(self.cpu_timer, at, Event::Cpu(self.id));
        }
        self.storage.set_available_disk_fraction(now, load.available_disk_fraction);
        let cache_config = PageCacheConfig {
            device: self.device,
            device_id: self.id,
            seed: self.seed,
            memory_budget,
            file_chunks: self.layout.chunk_count,
            chunk_size: self.storage.chunk_size,
        };
        self.storage.set_cache_capacity(cache_config.initial_capacity_chunks());
        self.disk_timer_at = None;
        self.update_disk_timer(ctx);
    }

    /// Ends the work on the current plan, and records unfinished steps up to now. Reads from the disk continue.
    pub fn stop(&mut self, ctx: &mut SimContext) {
        let now = ctx.engine.now();
        self.residency.flush_records(now, ctx.records);
        self.after_computation = None;
        match std::mem::replace(&mut self.thread, ThreadState::Idle) {
            ThreadState::Computing(mut computation) => {
                if self.cpu.next_completion_time().is_some() {
                    computation.end_batch(now, self.cpu.slowdown_time(now, 0));
                }
                // The step produced no token.
                let kind = computation.record.kind;
                let kind = if kind == StepKind::Output { StepKind::Compute } else { kind };
                ctx.records.push(StepRecord { end_ns: now, kind, ..computation.record });
            }
            ThreadState::Fixed { output: Some(pass) } => {
                let own = |record: &&mut StepRecord| {
                    (record.kind, record.pass_index, record.device_index)
                        == (StepKind::Output, pass, self.id as u16)
                };
                // The step produced no token, even if it ends at this instant.
                if let Some(output) = ctx.records.iter_mut().rev().find(own) {
                    output.kind = StepKind::Compute;
                }
            }
            ThreadState::Fixed { output: None } | ThreadState::Idle => {}
        }
        self.cpu = super::idle_cpu(self.device);
        self.steps.clear();
        self.inbox.clear();
        self.idle_since = now;
        self.disk_timer_at = None;
        self.update_disk_timer(ctx);
    }

    /// Adopts the plan and the part of the model of `new`; call [`DeviceSim::stop`] first. The page cache keeps its
    /// contents if the chunk size stays the same, and otherwise starts empty.
    pub fn reconfigure(&mut self, new: DeviceSim<'a>) {
        (self.schedule, self.layout, self.residency) = (new.schedule, new.layout, new.residency);
        (self.drafter, self.uploads, self.reads_single_rows) =
            (new.drafter, new.uploads, new.reads_single_rows);
        if self.storage.chunk_size != new.storage.chunk_size {
            self.earlier_bytes_read += self.storage.bytes_read();
            self.storage = new.storage;
            self.rows.clear();
        }
    }

    /// Loads layers, and the output matrix if `output` is true, into GPU memory. The device is busy until then.
    pub fn load_gpu_weights(&mut self, layers: &[u32], output: bool, ctx: &mut SimContext) {
        let Some(gpu) = &self.device.gpu else { return };
        if self.device.gpu_maps_weights() {
            // The first computation with the weights reads them.
            return;
        }
        let span = layers.first().zip(layers.last()).map(|(&first, &last)| [first, last + 1]);
        if span.is_none() && !output {
            return;
        }
        let matrix = if output { self.model.output_head_bytes() } else { Bytes::ZERO };
        let bytes = matrix + layers.iter().map(|&layer| self.model.layer_bytes(layer)).sum::<Bytes>();
        let disk = &self.device.disk;
        let rate = disk.populate_bandwidth.as_ref().unwrap_or(&disk.sequential_bandwidth).value;
        let rate =
            disk.bandwidth_limit.as_ref().map_or(rate, |limit| BytesPerSecond(rate.0.min(limit.value.0)));
        let upload = if gpu.unified_memory { Seconds(0.0) } else { gpu.upload.transfer_time(bytes) };
        let (now, step) = (ctx.engine.now(), (NO_PASS, 0));
        let start = new_record(self.id, Resource::DiskPrefetch, StepKind::Prefetch, step, now);
        let record = StepRecord { layers: span, bytes: bytes.0, ..start };
        self.earlier_bytes_read += bytes;
        self.run_timed(vec![(record, bytes / rate + upload)], None, ctx);
    }
}
