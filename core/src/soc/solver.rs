//! The solver: splits a matrix multiplication between GPU and NPU.
//!
//! HeteroLLM paper, section 4.3: the least of
//!
//! ```text
//! max(T_gpu(part 1), T_npu(part 2)) + T_sync,    T_gpu(all),    T_npu(all) + T_sync
//! ```
//!
//! over all parts that add up to the whole. Rows of the weights (columns of the result) go to the GPU in multiples of
//! 256, tokens to the NPU in multiples of 32.
//!
//! A prompt as long as a graph was solved ahead, so the NPU has a graph for whatever part of it is best. Any other
//! prompt uses the graphs of standard sizes: a margin of tokens goes to the GPU, or the NPU pads, or both, and
//! perhaps some rows go to the GPU as well (hybrid).
//!
//! Not here: covers of a prompt without the GPU, which several products share ([`super::prefill`]).

use super::gpu::Gpu;
use super::graphs::Sizes;
use super::matmul::Matmul;
use super::npu::Npu;
use super::stage::Stage;
use super::sync::{EVENTS, Sync};

/// The GPU's share of the rows is a multiple of this. source: HeteroLLM paper, section 4.3
pub const ROW_STEP: u64 = 256;
/// Tokens that the NPU gets, where graphs were made ahead. source: HeteroLLM paper, section 4.3
pub const TOKEN_STEP: u64 = 32;

/// Which way a product is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// All on the GPU.
    Gpu,
    /// All on the NPU.
    Npu,
    /// Split by rows of the weights.
    Row,
    /// Split by tokens, with one graph.
    Sequence,
    /// Split by tokens, with several graphs.
    MultiSequence,
    /// Split by tokens and rows, or by rows of a padded prompt.
    Hybrid,
}

/// A product and who computes which part of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Partition {
    /// Which way.
    pub cut: Cut,
    /// Tokens of the graphs on the NPU, one after another.
    pub graphs: Vec<u64>,
    /// Tokens that the GPU computes in whole.
    pub margin: u64,
    /// Rows of the other tokens that the GPU computes.
    pub rows: u64,
    /// The kernels and graphs, in seconds.
    pub stage: Stage,
}

/// Times of the two parts of a split product, on the GPU and on the NPU.
#[derive(Debug, Clone, Copy)]
pub struct Solver<'a> {
    /// One processor.
    pub gpu: Gpu,
    /// The other.
    pub npu: &'a Npu<'a>,
    /// The sizes for which the NPU has graphs.
    pub sizes: &'a Sizes,
    /// What waiting costs.
    pub sync: Sync,
}

/// A candidate: its time, margin, rows, and graphs.
#[derive(Debug, Clone)]
struct Best {
    time: f64,
    margin: u64,
    rows: u64,
    graphs: Vec<u64>,
}

impl Solver<'_> {
    /// The best partition of a product with `tokens`, at most those of the largest graph.
    pub fn solve(&self, matmul: Matmul, tokens: u64) -> Partition {
        let all = Best { time: self.gpu.product(matmul, tokens), margin: tokens, rows: 0, graphs: vec![] };
        let best = if self.sizes.has(tokens) {
            self.ahead(matmul, tokens, all)
        } else {
            self.ready(matmul, tokens, all)
        };
        self.partition(matmul, tokens, best)
    }

    /// A product on the NPU alone, by these graphs.
    pub fn on_npu(&self, matmul: Matmul, graphs: &[u64]) -> f64 {
        graphs.iter().map(|&size| self.npu.product(matmul, size)).sum()
    }

    /// With a graph for any part.
    fn ahead(&self, matmul: Matmul, tokens: u64, mut best: Best) -> Best {
        let pair = f64::from(EVENTS) * self.sync.planned;
        for rows in cuts(matmul.outputs) {
            let on_gpu = self.gpu.product(matmul.with_outputs(rows), tokens);
            let on_npu = self.npu.product(matmul.with_outputs(matmul.outputs - rows), tokens);
            best.improve(on_gpu.max(on_npu) + pair, 0, rows, &[tokens]);
        }
        let mut part = TOKEN_STEP;
        while part < tokens {
            let (on_gpu, on_npu) = (self.gpu.product(matmul, tokens - part), self.npu.product(matmul, part));
            best.improve(on_gpu.max(on_npu) + pair, tokens - part, 0, &[part]);
            part += TOKEN_STEP;
        }
        best
    }

    /// With the graphs that are ready.
    fn ready(&self, matmul: Matmul, tokens: u64, mut best: Best) -> Best {
        let pair = f64::from(EVENTS) * self.sync.planned;
        let sets: Vec<&[u64]> = self.sizes.covers(tokens).chain(self.sizes.smaller_sets(tokens)).collect();
        for rows in cuts(matmul.outputs) {
            let rest = matmul.with_outputs(matmul.outputs - rows);
            let times: Vec<f64> = self.sizes.all().iter().map(|&size| self.npu.product(rest, size)).collect();
            let of = |size: &u64| self.sizes.all().binary_search(size).map_or(f64::INFINITY, |at| times[at]);
            for set in &sets {
                let held = set.iter().sum::<u64>().min(tokens);
                let on_npu: f64 = set.iter().map(of).sum();
                if on_npu + pair >= best.time {
                    continue;
                }
                let on_gpu = self.gpu.product(matmul, tokens - held)
                    + self.gpu.product(matmul.with_outputs(rows), held);
                best.improve(on_gpu.max(on_npu) + pair, tokens - held, rows, set);
            }
        }
        best
    }

    fn partition(&self, matmul: Matmul, tokens: u64, best: Best) -> Partition {
        let Best { margin, rows, graphs, .. } = best;
        if graphs.is_empty() {
            let stage = Stage::queued(vec![self.gpu.product(matmul, tokens)]);
            return Partition { cut: Cut::Gpu, graphs, margin, rows, stage };
        }
        let rest = matmul.with_outputs(matmul.outputs - rows);
        let kernels =
            [self.gpu.product(matmul, margin), self.gpu.product(matmul.with_outputs(rows), tokens - margin)];
        let pads = graphs.iter().sum::<u64>() > tokens - margin;
        let cut = match (margin > 0, rows > 0) {
            (false, false) => Cut::Npu,
            (true, true) => Cut::Hybrid,
            (false, true) if pads => Cut::Hybrid,
            (false, true) => Cut::Row,
            (true, false) if graphs.len() > 1 => Cut::MultiSequence,
            (true, false) => Cut::Sequence,
        };
        let stage = Stage {
            gpu: kernels.into_iter().filter(|&time| time > 0.0).collect(),
            npu: graphs.iter().map(|&size| self.npu.product(rest, size)).collect(),
            events: EVENTS,
            waiting: self.sync.pair(),
        };
        Partition { cut, graphs, margin, rows, stage }
    }
}

impl Best {
    fn improve(&mut self, time: f64, margin: u64, rows: u64, graphs: &[u64]) {
        if time < self.time {
            *self = Self { time, margin, rows, graphs: graphs.to_vec() };
        }
    }
}

/// Rows that the GPU can get, none first.
fn cuts(outputs: u64) -> impl Iterator<Item = u64> {
    (0..outputs.div_ceil(ROW_STEP)).map(|step| step * ROW_STEP)
}
