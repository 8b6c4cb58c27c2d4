//! Rank: simulates the computation of one device's slice of a block.
//!
//! On the CPU a rank waits for the weights of a block and then computes its slice. If the pinned weights exceed the
//! memory, the page-cache policy of the device determines which weights are swapped in again for every token: all
//! weights with least-recently-used eviction, only the excess with [`PageCachePolicy::PaperLinear`]. The
//! [`BlockLoader`] reads the weights of a sliding window. On a GPU with its own memory a rank uploads the activations,
//! computes the slice, and downloads the partial result.

use hearth_core::compute_cost::ComputeCost;
use hearth_core::memory::{PinnedMemory, streamed_block_sizes};
use hearth_core::tensor::SlicedModel;
use hearth_profiles::device::{DeviceProfile, PageCachePolicy};
use hearth_profiles::{Bytes, Format, Seconds};
use hearth_schema::pass::Pass;
use hearth_schema::plan::tensor_parallel::TensorParallelPlan;
use hearth_schema::residency::Residency;
use hearth_schema::trace::{Resource, StepCost, StepKind, StepRecord};

use crate::device::cost_or_zero;
use crate::engine::Nanos;
use crate::input::Input;
use crate::trace::{gpu_step_with_copies, new_record, record_steps};

use super::loader::BlockLoader;

#[derive(Debug, Clone)]
pub struct Rank<'a> {
    index: usize,
    device: &'a DeviceProfile,
    sliced: SlicedModel,
    kv_format: Format,
    on_gpu: bool,
    pub pinned_memory: PinnedMemory,
    loader: Option<BlockLoader>,
    /// Sizes of the blocks of the output matrix, which a sliding window loads one after another.
    output: Vec<Bytes>,
    /// Bytes that are swapped in for each byte of weights that the rank uses.
    swap_ratio: f64,
    swapped_in: Bytes,
}

impl<'a> Rank<'a> {
    pub fn new(
        input: &Input<'a>,
        tensor: &TensorParallelPlan,
        index: usize,
        device: &'a DeviceProfile,
        memory: PinnedMemory,
    ) -> Self {
        let (plan, model) = (input.plan, &input.cluster.model);
        let planned = &plan.devices[index];
        let sliced = SlicedModel::new(plan, tensor, index, model);
        let blocks = streamed_block_sizes(&sliced, index == 0);
        let window = planned.residency.resident_blocks.unwrap_or(0) as usize;
        // A window that includes all blocks reads nothing again.
        let slides = planned.residency.policy == Residency::Sliding && window < blocks.len();
        let loader = slides.then(|| BlockLoader::new(window, device.disk_read_rate()));
        let output = blocks[2 * model.layers.len()..].to_vec();
        let excess = if input.options.ignore_memory_shortages { Bytes::ZERO } else { memory.excess_memory() };
        let swap_ratio = if excess == Bytes::ZERO || memory.cpu_weights == Bytes::ZERO {
            0.0
        } else if device.memory.page_cache == PageCachePolicy::PaperLinear {
            (excess.as_f64() / memory.cpu_weights.as_f64()).min(1.0)
        } else {
            1.0
        };
        Self {
            index,
            device,
            sliced,
            kv_format: plan.kv_cache_format.format(),
            on_gpu: planned.gpu_layers > 0,
            pinned_memory: memory,
            loader,
            output,
            swap_ratio,
            swapped_in: Bytes::ZERO,
        }
    }

    pub fn embed_time(&self, pass: Pass) -> Seconds {
        self.cpu_cost().embedding_time(pass.tokens)
    }

    /// Simulates the rank's slice of a block from `now` on. Adds the records to `out` and returns the end time.
    pub fn simulate_block(
        &mut self,
        now: Nanos,
        block: usize,
        pass: Pass,
        out: &mut Vec<StepRecord>,
    ) -> Nanos {
        let layer = (block / 2) as u32;
        let start = self.new_record(StepKind::Compute, pass, block as u32, now);
        let mut record = StepRecord { layers: Some([layer, layer + 1]), ..start };
        if self.on_gpu {
            return self.block_on_gpu(block, pass, &record, out);
        }
        let mut time = slice_time(&self.cpu_cost(), &self.sliced, block, pass);
        if block == 0 {
            time += cost_or_zero(self.device.cpu.window_overhead.as_ref());
        }
        let bytes = self.sliced.block_bytes(block);
        record.bytes = bytes.0;
        self.compute_parts(&[(bytes, time)], &record, out)
    }

    /// Simulates the output of a pass on the head device. Adds the records to `out` and returns the end time.
    pub fn simulate_output(
        &mut self,
        now: Nanos,
        round: u32,
        pass: Pass,
        out: &mut Vec<StepRecord>,
    ) -> Nanos {
        let whole: Bytes = self.output.iter().copied().sum();
        let time = self.cpu_cost().output_time(1);
        let part = |&bytes: &Bytes| (bytes, time * (bytes.as_f64() / whole.as_f64().max(1.0)));
        let mut parts: Vec<(Bytes, Seconds)> = self.output.iter().map(part).collect();
        parts.push((Bytes::ZERO, cost_or_zero(self.device.cpu.token_overhead.as_ref())));
        let record = StepRecord { bytes: whole.0, ..self.new_record(StepKind::Output, pass, round, now) };
        self.compute_parts(&parts, &record, out)
    }

    pub fn bytes_read(&self) -> Bytes {
        self.swapped_in + self.loader.as_ref().map_or(Bytes::ZERO, |loader| loader.bytes_read)
    }

    /// Simulates computing with parts of the weights in order, each as soon as it is in memory. Returns the end time.
    fn compute_parts(
        &mut self,
        parts: &[(Bytes, Seconds)],
        record: &StepRecord,
        out: &mut Vec<StepRecord>,
    ) -> Nanos {
        let (mut at, mut computed) = (record.start_ns, 0);
        for &(bytes, time) in parts {
            if let Some(loader) = self.loader.as_mut().filter(|_| bytes > Bytes::ZERO) {
                let loading = loader.load_block(bytes);
                at = at.max(loading.end);
                out.push(StepRecord {
                    resource: Resource::DiskPrefetch,
                    kind: StepKind::Prefetch,
                    start_ns: loading.start,
                    end_ns: loading.end,
                    bytes: bytes.0,
                    ..record.clone()
                });
            }
            let swapped = Bytes((bytes.as_f64() * self.swap_ratio) as u64);
            self.swapped_in += swapped;
            let swapping = (swapped / self.device.disk_read_rate()).to_nanos();
            at = at.saturating_add(swapping).saturating_add(time.to_nanos());
            computed += time.to_nanos();
            if let Some(loader) = self.loader.as_mut().filter(|_| bytes > Bytes::ZERO) {
                loader.release_block(at);
            }
        }
        let cost = Some(StepCost { cpu_ns: computed, ..StepCost::default() });
        out.push(StepRecord { end_ns: at, cost, ..record.clone() });
        at
    }

    fn block_on_gpu(
        &self,
        block: usize,
        pass: Pass,
        record: &StepRecord,
        out: &mut Vec<StepRecord>,
    ) -> Nanos {
        let Some(gpu) = &self.device.gpu else { return record.start_ns };
        let work = ComputeCost::for_gpu(gpu, &self.sliced.attention, self.kv_format);
        let mut time = slice_time(&work, &self.sliced, block, pass);
        if block == 0 {
            time += cost_or_zero(gpu.window_overhead.as_ref());
        }
        let record = StepRecord { resource: Resource::Gpu, ..record.clone() };
        let bytes = self.sliced.attention.shape.hidden_state_bytes() * u64::from(pass.tokens);
        let steps = gpu_step_with_copies(gpu, (record.clone(), time), &record, bytes, bytes);
        record_steps(out, record.start_ns, steps)
    }

    fn cpu_cost(&self) -> ComputeCost<'_> {
        ComputeCost::for_cpu(&self.device.cpu, &self.sliced.attention, self.kv_format)
    }

    pub fn new_record(&self, kind: StepKind, pass: Pass, round: u32, now: Nanos) -> StepRecord {
        new_record(self.index, Resource::Cpu, kind, (pass.index, round), now)
    }
}

/// Returns the time to compute a slice of a block; zero if the slice is empty.
fn slice_time(work: &ComputeCost, sliced: &SlicedModel, block: usize, pass: Pass) -> Seconds {
    let layer = block / 2;
    let feed_forward = &sliced.feed_forward[layer];
    match block % 2 {
        0 if sliced.attention.shape.kv_heads > 0 => work.layer_time(layer as u32, &[pass]),
        1 if feed_forward.flops().0 != 0.0 => work.matmul_time(feed_forward, pass.tokens),
        _ => Seconds(0.0),
    }
}
