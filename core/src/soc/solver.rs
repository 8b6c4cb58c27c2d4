//! The solver: splits a matrix multiplication between GPU and NPU.
//!
//! As in the HeteroLLM paper, section 4.3, the solver minimises the time
//!
//! ```text
//! max(T_gpu(part 1), T_npu(part 2)) + T_sync,    T_gpu(all),    T_npu(all) + T_sync
//! ```
//!
//! over all pairs of parts that sum to the whole matmul. `T_gpu` and `T_npu` are the times of the processors for a
//! part, `T_sync` is the time of a pair of sync events. Rows are rows of the weights, which are columns of the result.
//!
//! For prompt lengths that equal a graph size the partition is solved ahead of time, so the NPU has a graph for the
//! best part. Any other prompt uses the standard graph sizes: the GPU computes the tokens beyond them (the margin),
//! or the NPU pads, or both, and some rows may go to the GPU as well (hybrid).
//!
//! Not here: sets of NPU graphs that compute a prompt without the GPU and that several matmuls share
//! ([`super::prefill`]).

use super::gpu::GpuLatencyModel;
use super::graphs::GraphSizes;
use super::interval::SyncInterval;
use super::matmul::Matmul;
use super::npu::NpuLatencyModel;
use super::sync::SyncCost;

/// Step of the number of weight rows on the GPU: the number is a multiple of this constant.
/// source: HeteroLLM paper, section 4.3
const ROW_STEP: u64 = 256;
/// Step of the number of tokens on the NPU, if the partition is solved ahead of time.
/// source: HeteroLLM paper, section 4.3
const TOKEN_STEP: u64 = 32;

/// The partition of a matmul between GPU and NPU.
#[derive(Debug, Clone, PartialEq)]
pub struct Partition {
    /// Sizes in tokens of the NPU graphs, which run one after another; empty if the GPU computes the whole matmul.
    pub graph_sizes: Vec<u64>,
    /// Number of tokens for which the GPU computes all rows of the weights.
    pub margin_tokens: u64,
    /// Number of rows of the weights that the GPU computes for all tokens except `margin_tokens`.
    pub gpu_rows: u64,
    /// The times of the GPU kernels and NPU graphs of this partition.
    pub interval: SyncInterval,
}

/// Splits matmuls between the GPU and the NPU of a SoC, given their latency models, graph sizes and sync costs.
#[derive(Debug, Clone, Copy)]
pub struct PartitionSolver<'a> {
    pub gpu: GpuLatencyModel,
    pub npu: &'a NpuLatencyModel<'a>,
    pub graph_sizes: &'a GraphSizes,
    pub sync_cost: SyncCost,
}

#[derive(Debug, Clone)]
struct Best {
    time: f64,
    margin: u64,
    rows: u64,
    graphs: Vec<u64>,
}

impl PartitionSolver<'_> {
    /// Returns the fastest partition of a matmul. `tokens` must be at most the size of the largest NPU graph.
    pub fn solve(&self, matmul: Matmul, tokens: u64) -> Partition {
        let time = self.gpu.matmul_seconds(matmul, tokens);
        let all = Best { time, margin: tokens, rows: 0, graphs: vec![] };
        let Best { margin, rows, graphs, .. } = if self.graph_sizes.sizes.contains(&tokens) {
            self.solve_with_any_graph(matmul, tokens, all)
        } else {
            self.solve_with_standard_graphs(matmul, tokens, all)
        };
        let kernels = [
            self.gpu.matmul_seconds(matmul, margin),
            self.gpu.matmul_seconds(matmul.with_outputs(rows), tokens - margin),
        ];
        let kernel_seconds: Vec<f64> = kernels.into_iter().filter(|&time| time > 0.0).collect();
        let rest = matmul.with_outputs(matmul.outputs - rows);
        let graph_seconds: Vec<f64> =
            graphs.iter().map(|&size| self.npu.matmul_seconds(rest, size)).collect();
        let interval = if graphs.is_empty() {
            SyncInterval::without_events(kernel_seconds)
        } else {
            SyncInterval::with_events(kernel_seconds, graph_seconds, self.sync_cost)
        };
        Partition { graph_sizes: graphs, margin_tokens: margin, gpu_rows: rows, interval }
    }

    /// Returns the seconds for a matmul that the NPU computes alone with graphs of these sizes (in tokens).
    pub fn npu_seconds(&self, matmul: Matmul, graphs: &[u64]) -> f64 {
        graphs.iter().map(|&size| self.npu.matmul_seconds(matmul, size)).sum()
    }

    /// Returns `best`, or a faster partition for which the NPU may have a graph of any size.
    fn solve_with_any_graph(&self, matmul: Matmul, tokens: u64, mut best: Best) -> Best {
        let pair = self.sync_cost.planned_event_pair_seconds;
        for rows in gpu_row_counts(matmul.outputs) {
            let on_gpu = self.gpu.matmul_seconds(matmul.with_outputs(rows), tokens);
            let on_npu = self.npu.matmul_seconds(matmul.with_outputs(matmul.outputs - rows), tokens);
            best.improve(on_gpu.max(on_npu) + pair, 0, rows, &[tokens]);
        }
        for part in (TOKEN_STEP..tokens).step_by(TOKEN_STEP as usize) {
            let on_gpu = self.gpu.matmul_seconds(matmul, tokens - part);
            let on_npu = self.npu.matmul_seconds(matmul, part);
            best.improve(on_gpu.max(on_npu) + pair, tokens - part, 0, &[part]);
        }
        best
    }

    /// Returns `best`, or a faster partition that uses NPU graphs of the standard sizes.
    fn solve_with_standard_graphs(&self, matmul: Matmul, tokens: u64, mut best: Best) -> Best {
        let (pair, graphs) = (self.sync_cost.planned_event_pair_seconds, self.graph_sizes);
        let sizes = &graphs.sizes;
        let sets: Vec<&[u64]> =
            graphs.size_sets_covering(tokens).chain(graphs.size_sets_below(tokens)).collect();
        for rows in gpu_row_counts(matmul.outputs) {
            let rest = matmul.with_outputs(matmul.outputs - rows);
            let times: Vec<f64> = sizes.iter().map(|&size| self.npu.matmul_seconds(rest, size)).collect();
            let time_of = |size: &u64| times[sizes.partition_point(|other| other < size)];
            for set in &sets {
                let covered = set.iter().sum::<u64>().min(tokens);
                let on_npu: f64 = set.iter().map(time_of).sum();
                if on_npu + pair >= best.time {
                    continue;
                }
                let on_gpu = self.gpu.matmul_seconds(matmul, tokens - covered)
                    + self.gpu.matmul_seconds(matmul.with_outputs(rows), covered);
                best.improve(on_gpu.max(on_npu) + pair, tokens - covered, rows, set);
            }
        }
        best
    }
}

impl Best {
    fn improve(&mut self, time: f64, margin: u64, rows: u64, graphs: &[u64]) {
        if time < self.time {
            *self = Self { time, margin, rows, graphs: graphs.to_vec() };
        }
    }
}

/// Returns the numbers of rows that the GPU can compute, in ascending order from 0.
fn gpu_row_counts(outputs: u64) -> impl Iterator<Item = u64> {
    (0..outputs.div_ceil(ROW_STEP)).map(|step| step * ROW_STEP)
}
