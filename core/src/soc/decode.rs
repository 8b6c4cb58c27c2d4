//! The sync intervals of a layer during decoding.
//!
//! Decoding reads every weight and the cached keys and values, and computes little. On the GPU alone, weights are
//! read at the bandwidth of one processor. If the rows are split between GPU and NPU, weights are read at the
//! bandwidth of both (HeteroLLM paper, sections 4.1.2 and 5.3). The GPU still reads the keys and values, and each of
//! the seven matmuls has two events. In closed form:
//!
//! ```text
//! GPU only         (weights + keys and values) / B_g
//! split by rows    weights / B_soc + keys and values / B_g + 14 T_sync
//! ```
//!
//! With a batch of n tokens (verified drafts) a weight of w bytes takes `a = max(2 n / F_g, w / B_g)` seconds on the
//! GPU and `b = ceil(n / tile) w / (B_soc - B_g)` on the NPU, which processes up to a tile of rows at once. If both
//! processors finish at the same time, a weight takes `a b / (a + b)`; for one token this is the closed form.
//!
//! Deviation: the rows are split so that both processors finish at the same time, not in steps of 256, and all seven
//! matmuls are split although the small ones gain nothing; the published closed form does both. The NPU reads weights
//! of four bits here, because the paper uses its integer path for decoding (section 5, footnote 2), which does not
//! follow the formula of prefill. Kernels other than the matmuls and attention are not counted there either.

use hearth_profiles::device::Soc;
use hearth_profiles::model::ModelShape;

use super::gpu::Gpu;
use super::interval::SyncInterval;
use super::matmul::{Matmul, groups};
use super::sync::{EVENTS_PER_INTERVAL, SyncCost};

/// Decoding of a batch of tokens.
#[derive(Debug, Clone, Copy)]
pub struct Decode<'a> {
    pub soc: &'a Soc,
    pub gpu: Gpu,
    pub sync: SyncCost,
    /// The number of tokens in the batch.
    pub tokens: u64,
    /// Bytes of cached keys and values that a layer reads.
    pub cached: f64,
}

impl Decode<'_> {
    /// Returns the intervals of a layer that the GPU computes alone.
    pub fn on_gpu(&self, shape: &ModelShape) -> Vec<SyncInterval> {
        self.layer(shape, |matmul| SyncInterval::queued(vec![self.gpu.streamed(matmul, self.tokens)]))
    }

    /// Returns the intervals of a layer whose matmuls are split between GPU and NPU.
    pub fn split(&self, shape: &ModelShape) -> Vec<SyncInterval> {
        self.layer(shape, |matmul| {
            let time = self.split_matmul_time(matmul);
            SyncInterval {
                gpu: vec![time],
                npu: vec![time],
                events: EVENTS_PER_INTERVAL,
                waiting: self.sync.pair(),
            }
        })
    }

    /// Returns the intervals of a layer whose matmuls the NPU computes alone, with a pair of events each. The
    /// bandwidth of one processor alone is the same for GPU and NPU (section 3.3).
    pub fn on_npu(&self, shape: &ModelShape) -> Vec<SyncInterval> {
        let weight = self.gpu.read(self.gpu.weight) * self.npu_tiles();
        self.layer(shape, |matmul| SyncInterval {
            gpu: Vec::new(),
            npu: vec![weight * matmul.weights()],
            events: EVENTS_PER_INTERVAL,
            waiting: self.sync.pair(),
        })
    }

    /// Returns the seconds for a matmul that is split between GPU and NPU, without its events.
    pub fn split_matmul_time(&self, matmul: Matmul) -> f64 {
        let (one, both) = (self.soc.bus.one.value.0, self.soc.bus.together.value.0);
        let on_gpu = self.gpu.seconds_per_weight(self.tokens);
        let on_npu = self.npu_tiles() * self.gpu.weight / (both - one);
        // If two processors together have no more bandwidth than one, the NPU has no share.
        let shares = on_npu.is_finite() && on_npu > 0.0;
        let weight = if shares { on_gpu * on_npu / (on_gpu + on_npu) } else { on_gpu };
        weight * matmul.weights()
    }

    /// The number of NPU tiles that the tokens fill.
    fn npu_tiles(&self) -> f64 {
        let tile = self.soc.npu.as_ref().map_or(1, |npu| u64::from(npu.tile.value.max(1)));
        self.tokens.div_ceil(tile) as f64
    }

    fn layer(&self, shape: &ModelShape, interval: impl Fn(Matmul) -> SyncInterval) -> Vec<SyncInterval> {
        let [attention, output, gates, down] =
            groups(shape).map(|group| group.matmuls.into_iter().map(&interval).collect::<Vec<_>>());
        let cached = SyncInterval::queued(vec![self.gpu.read(self.cached)]);
        [attention, vec![cached], output, gates, down].concat()
    }
}
