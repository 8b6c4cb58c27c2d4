//! The sync intervals of a layer during prefill.
//!
//! Each strategy has its own rule for matmuls. The GPU computes the other kernels of the layer, in this order: norm,
//! Q K V, attention, O, residual and norm, gate and up, activation, down, residual. Matmuls that are not split share
//! a pair of events within their group ([`super::matmul::groups`]).
//!
//! Not here: the choice of the fastest strategy ([`super::Chip`]), and the output matrix.

use hearth_profiles::device::soc::Strategy;
use hearth_profiles::model::ModelShape;

use super::interval::SyncInterval;
use super::matmul::{Group, Matmul, groups};
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
pub fn on_gpu(gpu: &super::gpu::Gpu, shape: &ModelShape, chunk: PromptChunk) -> Vec<SyncInterval> {
    let kernels = |group: &Group| {
        let time = |matmul: &Matmul| gpu.matmul_time(*matmul, chunk.tokens);
        vec![SyncInterval::queued(group.matmuls.iter().map(time).collect())]
    };
    let matmuls = groups(shape).map(|group| kernels(&group));
    layer(&OtherKernels::new(gpu, shape, chunk.tokens, chunk.context), matmuls)
}

/// Returns the intervals of a layer for a chunk that is no longer than the largest graph. `chunked_size` is the graph
/// size of [`Strategy::Chunked`], in tokens.
pub fn intervals(
    solver: &Solver,
    strategy: Strategy,
    shape: &ModelShape,
    chunk: PromptChunk,
    chunked_size: u64,
) -> Vec<SyncInterval> {
    let groups = groups(shape);
    let tokens = chunk.tokens;
    let padded = vec![solver.sizes.padded(tokens)];
    let whole = |graphs: &[u64]| groups.clone().map(|group| vec![on_npu(solver, &group, graphs)]);
    let matmuls = match strategy {
        Strategy::GpuOnly | Strategy::Best => return on_gpu(&solver.gpu, shape, chunk),
        Strategy::HeteroTensor => groups
            .clone()
            .map(|group| group.matmuls.iter().map(|&matmul| solver.solve(matmul, tokens).interval).collect()),
        Strategy::NpuOnly => groups.clone().map(|group| {
            let alone = |&matmul: &Matmul| on_npu(solver, &Group { matmuls: vec![matmul] }, &padded);
            group.matmuls.iter().map(alone).collect()
        }),
        Strategy::HeteroLayer => groups.clone().map(|group| vec![faster(solver, &group, tokens, &padded)]),
        Strategy::Padding => whole(&padded),
        Strategy::Pipe => whole(&pipe(solver, shape, tokens)),
        Strategy::OnlinePrepare => whole(&[tokens]),
        Strategy::Chunked => whole(&[chunked_size]),
    };
    layer(&OtherKernels::new(&solver.gpu, shape, tokens, chunk.context), matmuls)
}

/// Returns the set of graphs that covers a prompt in the shortest time, the same for all matmuls.
pub fn pipe(solver: &Solver, shape: &ModelShape, tokens: u64) -> Vec<u64> {
    let groups = groups(shape);
    let cost = |graphs: &[u64]| -> f64 {
        groups.iter().flat_map(|group| &group.matmuls).map(|&matmul| solver.on_npu(matmul, graphs)).sum()
    };
    let covers = solver.sizes.covers(tokens);
    let fastest = covers.map(|graphs| (cost(graphs), graphs)).min_by(|one, other| one.0.total_cmp(&other.0));
    fastest.map_or_else(|| vec![solver.sizes.padded(tokens)], |(_, graphs)| graphs.to_vec())
}

/// Returns the interval in which the NPU computes a group, with one pair of events.
fn on_npu(solver: &Solver, group: &Group, graphs: &[u64]) -> SyncInterval {
    let times = |matmul: &Matmul| {
        graphs.iter().map(|&size| solver.npu.matmul_time(*matmul, size)).collect::<Vec<_>>()
    };
    SyncInterval {
        gpu: Vec::new(),
        npu: group.matmuls.iter().flat_map(times).collect(),
        events: EVENTS_PER_INTERVAL,
        waiting: solver.sync.pair(),
    }
}

/// Returns a group on the GPU or on the NPU, whichever is faster by the costs known when partitions are chosen.
fn faster(solver: &Solver, group: &Group, tokens: u64, graphs: &[u64]) -> SyncInterval {
    let npu = on_npu(solver, group, graphs);
    let times = group.matmuls.iter().map(|&matmul| solver.gpu.matmul_time(matmul, tokens));
    let gpu = SyncInterval::queued(times.collect());
    let planned = npu.npu_time() + f64::from(EVENTS_PER_INTERVAL) * solver.sync.planned;
    if gpu.gpu_time() <= planned { gpu } else { npu }
}

/// Joins the matmuls and the other kernels of a layer in the order of execution.
fn layer(other: &OtherKernels, matmuls: [Vec<SyncInterval>; 4]) -> Vec<SyncInterval> {
    let [qkv, output, gates, down] = matmuls;
    let queued = |kernels: &Vec<f64>| vec![SyncInterval::queued(kernels.clone())];
    [
        queued(&other.before),
        qkv,
        queued(&other.attention),
        output,
        queued(&other.between),
        gates,
        queued(&other.activation),
        down,
        queued(&other.after),
    ]
    .concat()
}
