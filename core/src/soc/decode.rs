//! Decoding on a SoC: the sync intervals of a layer, in which GPU and NPU work in parallel.
//!
//! On the GPU alone, weights are read at the bandwidth of one processor. If the rows are split between GPU and NPU,
//! weights are read at the bandwidth of both (HeteroLLM paper, sections 4.1.2 and 5.3). The GPU still reads the keys
//! and values, and each of the seven matmuls has two sync events. In closed form, with the bandwidths `B_g` of one
//! processor and `B_soc` of both, and the time `T_sync` of a sync event:
//!
//! ```text
//! GPU only         (weights + keys and values) / B_g
//! split by rows    weights / B_soc + keys and values / B_g + 14 T_sync
//! ```
//!
//! With a batch of n tokens (verified drafts) a weight of w bytes takes `a = max(2 n / F_g, w / B_g)` seconds on the
//! GPU, which computes `F_g` operations per second, and `b = ceil(n / tile) w / (B_soc - B_g)` on the NPU, which
//! processes up to a tile of rows at once. If both processors finish at the same time, a weight takes
//! `a b / (a + b)`; for one token this is the closed form.
//!
//! Deviation: as in the published closed form, the rows are split so that both processors finish at the same time, not
//! in steps of 256, all seven matmuls are split although the small ones gain nothing, and kernels other than the
//! matmuls and attention are not counted. The NPU reads weights of four bits, because the paper uses the NPU's integer
//! units for decoding (section 5, footnote 2), which do not follow the formula of prefill.

use hearth_profiles::device::Soc;
use hearth_profiles::model::ModelShape;

use super::gpu::GpuLatencyModel;
use super::interval::SyncInterval;
use super::matmul::{Matmul, matmul_groups};
use super::sync::SyncCost;

/// The latency model of decoding a batch of tokens on a SoC.
#[derive(Debug, Clone, Copy)]
pub struct DecodeLatencyModel<'a> {
    pub soc: &'a Soc,
    pub gpu: GpuLatencyModel,
    pub sync_cost: SyncCost,
    pub tokens: u64,
    /// Bytes of cached keys and values that one layer reads.
    pub kv_bytes_per_layer: f64,
}

impl DecodeLatencyModel<'_> {
    /// Returns the sync intervals of a layer that the GPU computes alone.
    pub fn gpu_intervals(&self, shape: &ModelShape) -> Vec<SyncInterval> {
        let time = |matmul: Matmul| self.gpu.decode_matmul_seconds(matmul, self.tokens);
        self.layer(shape, |matmul| SyncInterval::without_events(vec![time(matmul)]))
    }

    /// Returns the sync intervals of a layer whose matmuls are split between GPU and NPU.
    pub fn split_intervals(&self, shape: &ModelShape) -> Vec<SyncInterval> {
        self.layer(shape, |matmul| {
            let time = self.split_matmul_seconds(matmul);
            SyncInterval::with_events(vec![time], vec![time], self.sync_cost)
        })
    }

    /// Returns the sync intervals of a layer whose matmuls the NPU computes alone, with two sync events per matmul. The
    /// NPU alone has the same memory bandwidth as the GPU alone (HeteroLLM paper, section 3.3).
    pub fn npu_intervals(&self, shape: &ModelShape) -> Vec<SyncInterval> {
        let weight = self.gpu.read_seconds(self.gpu.bytes_per_weight) * self.npu_tiles();
        let graph = |matmul: Matmul| vec![weight * matmul.weight_count()];
        self.layer(shape, |matmul| SyncInterval::with_events(vec![], graph(matmul), self.sync_cost))
    }

    /// Returns the seconds for a matmul that is split between GPU and NPU, without the time of the sync events.
    pub fn split_matmul_seconds(&self, matmul: Matmul) -> f64 {
        let bandwidths = &self.soc.memory_bandwidths;
        let for_npu = bandwidths.both_processors.value.0 - bandwidths.single_processor.value.0;
        let on_gpu = self.gpu.seconds_per_weight(self.tokens);
        let on_npu = self.npu_tiles() * self.gpu.bytes_per_weight / for_npu;
        // If two processors together have no more bandwidth than one, the NPU has no share.
        let shares = on_npu.is_finite() && on_npu > 0.0;
        let weight = if shares { on_gpu * on_npu / (on_gpu + on_npu) } else { on_gpu };
        weight * matmul.weight_count()
    }

    fn npu_tiles(&self) -> f64 {
        let tile = self.soc.npu.as_ref().map_or(1, |npu| u64::from(npu.tile_size.value.max(1)));
        self.tokens.div_ceil(tile) as f64
    }

    fn layer(&self, shape: &ModelShape, interval: impl Fn(Matmul) -> SyncInterval) -> Vec<SyncInterval> {
        let [attention, output, gates, down] =
            matmul_groups(shape).map(|group| group.into_iter().map(&interval).collect::<Vec<_>>());
        let cached = SyncInterval::without_events(vec![self.gpu.read_seconds(self.kv_bytes_per_layer)]);
        [attention, vec![cached], output, gates, down].concat()
    }
}
