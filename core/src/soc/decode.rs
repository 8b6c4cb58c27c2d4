//! The stages of a layer while tokens are generated.
//!
//! Decoding reads every weight and the cached keys and values, and computes little. On the GPU alone the bus gives
//! the rate of one processor. Cut by rows between GPU and NPU, the weights come at the rate of both (HeteroLLM paper,
//! sections 4.1.2 and 5.3); keys and values still come to the GPU, and each of the seven products has two events. In
//! closed form,
//!
//! ```text
//! GPU only         (weights + keys and values) / B_g
//! cut by rows      weights / B_soc + keys and values / B_g + 14 T_sync
//! ```
//!
//! With n tokens at once (drafts that are verified) a weight takes `a = max(2 n / F_g, w / B_g)` on the GPU, and `b =
//! ceil(n / tile) w / (B_soc - B_g)` on the NPU, whose graph for up to a tile of rows is one stage of its array. The
//! cut that ends both together takes `a b / (a + b)`, which for one token is the closed form.
//!
//! Deviation: the rows are cut where both end together, not in steps of 256, and all seven products are cut, though
//! the small ones do not gain; the published closed form does both. The NPU reads weights of four bits here, because
//! the paper uses its integer path for decoding (section 5, footnote 2), which does not follow the formula of
//! prefill. The kernels beside products and cached keys are not counted there either.

use hearth_profiles::device::Soc;
use hearth_profiles::model::ModelShape;

use super::gpu::Gpu;
use super::matmul::{Matmul, groups};
use super::stage::Stage;
use super::sync::{EVENTS, Sync};

/// Decoding some tokens at once, with the bytes of keys and values that they see.
#[derive(Debug, Clone, Copy)]
pub struct Decode<'a> {
    /// The processors.
    pub soc: &'a Soc,
    /// One of them.
    pub gpu: Gpu,
    /// What waiting costs.
    pub sync: Sync,
    /// Tokens at once.
    pub tokens: u64,
    /// Bytes of keys and values that a layer reads.
    pub cached: f64,
}

impl Decode<'_> {
    /// The stages of a layer that only the GPU computes.
    pub fn on_gpu(&self, shape: &ModelShape) -> Vec<Stage> {
        self.layer(shape, |matmul| Stage::queued(vec![self.gpu.streamed(matmul, self.tokens)]))
    }

    /// A layer whose products are cut between both.
    pub fn cut(&self, shape: &ModelShape) -> Vec<Stage> {
        self.layer(shape, |matmul| {
            let time = self.cut_product(matmul);
            Stage { gpu: vec![time], npu: vec![time], events: EVENTS, waiting: self.sync.pair() }
        })
    }

    /// A layer whose products are the NPU's alone, a pair of events each. One processor gets the same of the bus,
    /// whichever it is (section 3.3).
    pub fn on_npu(&self, shape: &ModelShape) -> Vec<Stage> {
        let weight = self.gpu.read(self.gpu.weight) * self.stages();
        self.layer(shape, |matmul| Stage {
            gpu: Vec::new(),
            npu: vec![weight * matmul.weights()],
            events: EVENTS,
            waiting: self.sync.pair(),
        })
    }

    /// Seconds for a product that is cut between both, without its events.
    pub fn cut_product(&self, matmul: Matmul) -> f64 {
        let (one, both) = (self.soc.bus.one.value.0, self.soc.bus.together.value.0);
        let on_gpu = self.gpu.seconds_per_weight(self.tokens);
        let on_npu = self.stages() * self.gpu.weight / (both - one);
        // A bus that gives two no more than one leaves the NPU nothing.
        let shares = on_npu.is_finite() && on_npu > 0.0;
        let weight = if shares { on_gpu * on_npu / (on_gpu + on_npu) } else { on_gpu };
        weight * matmul.weights()
    }

    /// Times that the array of the NPU is filled.
    fn stages(&self) -> f64 {
        let tile = self.soc.npu.as_ref().map_or(1, |npu| u64::from(npu.tile.value.max(1)));
        self.tokens.div_ceil(tile) as f64
    }

    fn layer(&self, shape: &ModelShape, product: impl Fn(Matmul) -> Stage) -> Vec<Stage> {
        let [attention, output, gates, down] =
            groups(shape).map(|group| group.matmuls.into_iter().map(&product).collect::<Vec<_>>());
        let cached = Stage::queued(vec![self.gpu.read(self.cached)]);
        [attention, vec![cached], output, gates, down].concat()
    }
}
