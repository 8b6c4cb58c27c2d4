//! The sync intervals of a layer during prefill.
//!
//! Each strategy has its own rule for matmuls. The GPU computes the other kernels of the layer, in this order: norm,
//! Q K V, attention, O, residual and norm, gate and up, activation, down, residual. Matmuls that are not split share
//! a pair of events within their group ([`super::matmul::matmul_groups`]).
//!
//! Not here: the choice of the fastest strategy ([`super::SocLatencyModel`]), and the output matrix.

use hearth_profiles::device::soc::Strategy;
use hearth_profiles::model::ModelShape;

use super::interval::SyncInterval;
use super::matmul::{Matmul, MatmulGroup, matmul_groups};
use super::other_kernels::OtherKernels;
use super::solver::Solver;
use super::sync::EVENTS_PER_INTERVAL;

/// A chunk of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptChunk {
    /// The number of tokens in the chunk.
    pub tokens: u64,
    /// The number of positions that its tokens attend to.
    pub context: u64,
}

/// Returns the intervals of a layer that the GPU computes alone, without events.
pub fn gpu_intervals(gpu: &super::gpu::Gpu, shape: &ModelShape, chunk: PromptChunk) -> Vec<SyncInterval> {
    let kernels = |group: &MatmulGroup| {
        let time = |matmul: &Matmul| gpu.matmul_time(*matmul, chunk.tokens);
        vec![SyncInterval::without_events(group.matmuls.iter().map(time).collect())]
    };
    let matmuls = matmul_groups(shape).map(|group| kernels(&group));
    layer(&OtherKernels::new(gpu, shape, chunk.tokens, chunk.context), matmuls)
}

/// Returns the intervals of a layer for a chunk that is no longer than the largest graph. `chunked_size` is the graph
/// size of [`Strategy::Chunked`], in tokens.
pub fn layer_intervals(
    solver: &Solver,
    strategy: Strategy,
    shape: &ModelShape,
    chunk: PromptChunk,
    chunked_size: u64,
) -> Vec<SyncInterval> {
    let groups = matmul_groups(shape);
    let tokens = chunk.tokens;
    let padded = vec![solver.sizes.padded_size(tokens)];
    let whole = |graphs: &[u64]| groups.clone().map(|group| vec![npu_interval(solver, &group, graphs)]);
    let matmuls = match strategy {
        Strategy::GpuOnly | Strategy::Best => return gpu_intervals(&solver.gpu, shape, chunk),
        Strategy::HeteroTensor => groups
            .clone()
            .map(|group| group.matmuls.iter().map(|&matmul| solver.solve(matmul, tokens).interval).collect()),
        Strategy::NpuOnly => groups.clone().map(|group| {
            let alone =
                |&matmul: &Matmul| npu_interval(solver, &MatmulGroup { matmuls: vec![matmul] }, &padded);
            group.matmuls.iter().map(alone).collect()
        }),
        Strategy::HeteroLayer => {
            groups.clone().map(|group| vec![faster_interval(solver, &group, tokens, &padded)])
        }
        Strategy::Padding => whole(&padded),
        Strategy::Pipe => whole(&fastest_cover(solver, shape, tokens)),
        Strategy::OnlinePrepare => whole(&[tokens]),
        Strategy::Chunked => whole(&[chunked_size]),
    };
    layer(&OtherKernels::new(&solver.gpu, shape, tokens, chunk.context), matmuls)
}

/// Returns the set of graphs that covers a prompt in the shortest time, the same for all matmuls.
pub fn fastest_cover(solver: &Solver, shape: &ModelShape, tokens: u64) -> Vec<u64> {
    let groups = matmul_groups(shape);
    let cost = |graphs: &[u64]| -> f64 {
        groups.iter().flat_map(|group| &group.matmuls).map(|&matmul| solver.npu_time(matmul, graphs)).sum()
    };
    let covers = solver.sizes.covering_sets(tokens);
    let fastest = covers.map(|graphs| (cost(graphs), graphs)).min_by(|one, other| one.0.total_cmp(&other.0));
    fastest.map_or_else(|| vec![solver.sizes.padded_size(tokens)], |(_, graphs)| graphs.to_vec())
}

/// Returns the interval in which the NPU computes a group, with one pair of events.
fn npu_interval(solver: &Solver, group: &MatmulGroup, graphs: &[u64]) -> SyncInterval {
    let times = |matmul: &Matmul| {
        graphs.iter().map(|&size| solver.npu.matmul_time(*matmul, size)).collect::<Vec<_>>()
    };
    SyncInterval {
        gpu_times: Vec::new(),
        npu_times: group.matmuls.iter().flat_map(times).collect(),
        event_count: EVENTS_PER_INTERVAL,
        event_time: solver.sync.pair_cost(),
    }
}

/// Returns a group on the GPU or on the NPU, whichever is faster by the costs known when partitions are chosen.
fn faster_interval(solver: &Solver, group: &MatmulGroup, tokens: u64, graphs: &[u64]) -> SyncInterval {
    let npu = npu_interval(solver, group, graphs);
    let times = group.matmuls.iter().map(|&matmul| solver.gpu.matmul_time(matmul, tokens));
    let gpu = SyncInterval::without_events(times.collect());
    let planned = npu.npu_time() + f64::from(EVENTS_PER_INTERVAL) * solver.sync.planned_cost;
    if gpu.gpu_time() <= planned { gpu } else { npu }
}

/// Joins the matmuls and the other kernels of a layer in the order of execution.
fn layer(other: &OtherKernels, matmuls: [Vec<SyncInterval>; 4]) -> Vec<SyncInterval> {
    let [qkv, output, gates, down] = matmuls;
    let queued = |kernels: &Vec<f64>| vec![SyncInterval::without_events(kernels.clone())];
    [
        queued(&other.attention_norm),
        qkv,
        queued(&other.attention),
        output,
        queued(&other.residual_and_norm),
        gates,
        queued(&other.activation),
        down,
        queued(&other.last_residual),
    ]
    .concat()
}
