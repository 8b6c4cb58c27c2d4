//! Prefill on a SoC: the sync intervals of a layer, in which GPU and NPU work in parallel.
//!
//! Each strategy distributes the matmuls in its own way. Matmuls that are not split share a pair of sync events within
//! their group ([`super::matmul::matmul_groups`]). The GPU computes the other nine kernels of the layer in FP16, each
//! bound by its arithmetic or its memory traffic. Attention is not masked: each token of a prompt computes all scores.
//!
//! Not here: the choice of the fastest strategy ([`super::SocLatencyModel`]), and the output matrix.

use hearth_profiles::device::soc::SocStrategy;
use hearth_profiles::model::ModelShape;

use super::gpu::GpuLatencyModel;
use super::interval::SyncInterval;
use super::matmul::{Matmul, matmul_groups};
use super::solver::PartitionSolver;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptChunk {
    pub tokens: u64,
    /// The number of positions that each token of the chunk attends to.
    pub context_length: u64,
}

/// Returns the sync intervals of a layer that the GPU computes alone, without sync events.
pub fn gpu_intervals(gpu: &GpuLatencyModel, shape: &ModelShape, chunk: PromptChunk) -> Vec<SyncInterval> {
    let matmuls = matmul_groups(shape).map(|group| vec![gpu_interval(gpu, &group, chunk.tokens)]);
    layer(gpu, shape, chunk, matmuls)
}

fn gpu_interval(gpu: &GpuLatencyModel, group: &[Matmul], tokens: u64) -> SyncInterval {
    SyncInterval::without_events(group.iter().map(|&matmul| gpu.matmul_seconds(matmul, tokens)).collect())
}

/// Returns the sync intervals of a layer for a prompt chunk that is no longer than the largest graph. `chunked_size` is
/// the graph size of [`SocStrategy::Chunked`], in tokens.
pub fn layer_intervals(
    solver: &PartitionSolver,
    strategy: SocStrategy,
    shape: &ModelShape,
    chunk: PromptChunk,
    chunked_size: u64,
) -> Vec<SyncInterval> {
    let groups = matmul_groups(shape);
    let tokens = chunk.tokens;
    let padded = vec![solver.graph_sizes.padded_size(tokens)];
    let each = |interval: &dyn Fn(Matmul) -> SyncInterval| {
        groups.clone().map(|group| group.into_iter().map(interval).collect())
    };
    let whole = |graphs: &[u64]| groups.clone().map(|group| vec![npu_interval(solver, &group, graphs)]);
    let matmuls = match strategy {
        SocStrategy::GpuOnly | SocStrategy::Best => return gpu_intervals(&solver.gpu, shape, chunk),
        SocStrategy::HeteroTensor => each(&|matmul| solver.solve(matmul, tokens).interval),
        SocStrategy::NpuOnly => each(&|matmul| npu_interval(solver, &[matmul], &padded)),
        SocStrategy::HeteroLayer => {
            groups.clone().map(|it| vec![faster_interval(solver, &it, tokens, &padded)])
        }
        SocStrategy::Padding => whole(&padded),
        SocStrategy::Pipe => whole(&fastest_graph_sizes(solver, shape, tokens)),
        SocStrategy::OnlinePrepare => whole(&[tokens]),
        SocStrategy::Chunked => whole(&[chunked_size]),
    };
    layer(&solver.gpu, shape, chunk, matmuls)
}

/// Returns the NPU graph sizes that cover a prompt of `tokens` tokens in the shortest time of all matmuls of a layer.
pub fn fastest_graph_sizes(solver: &PartitionSolver, shape: &ModelShape, tokens: u64) -> Vec<u64> {
    let groups = matmul_groups(shape);
    let cost = |graphs: &[u64]| -> f64 {
        groups.iter().flatten().map(|&matmul| solver.npu_seconds(matmul, graphs)).sum()
    };
    let covers = solver.graph_sizes.size_sets_covering(tokens);
    let fastest = covers.map(|graphs| (cost(graphs), graphs)).min_by(|one, other| one.0.total_cmp(&other.0));
    fastest.map_or_else(|| vec![solver.graph_sizes.padded_size(tokens)], |(_, graphs)| graphs.to_vec())
}

/// Returns the sync interval in which the NPU computes a matmul group, with one pair of sync events.
fn npu_interval(solver: &PartitionSolver, group: &[Matmul], graphs: &[u64]) -> SyncInterval {
    let times = |&matmul: &Matmul| graphs.iter().map(move |&size| solver.npu.matmul_seconds(matmul, size));
    SyncInterval::with_events(vec![], group.iter().flat_map(times).collect(), solver.sync_cost)
}

/// Returns the sync interval of a matmul group on the GPU or the NPU, whichever is faster at the planned sync cost.
fn faster_interval(solver: &PartitionSolver, group: &[Matmul], tokens: u64, graphs: &[u64]) -> SyncInterval {
    let npu = npu_interval(solver, group, graphs);
    let gpu = gpu_interval(&solver.gpu, group, tokens);
    let sync_seconds = solver.sync_cost.planned_event_pair_seconds;
    if gpu.gpu_seconds() <= npu.npu_seconds() + sync_seconds { gpu } else { npu }
}

/// Joins the matmuls and the other kernels of a layer in the order of execution.
fn layer(
    gpu: &GpuLatencyModel,
    shape: &ModelShape,
    chunk: PromptChunk,
    matmuls: [Vec<SyncInterval>; 4],
) -> Vec<SyncInterval> {
    let (tokens, context, width) =
        (chunk.tokens as f64, chunk.context_length as f64, f64::from(shape.embedding_length));
    let [heads, kv_heads, key, value] =
        [shape.heads, shape.kv_heads, shape.key_length, shape.value_length].map(f64::from);
    let moved = |bytes: f64| gpu.kernel_seconds(0.0, bytes);
    let weighted = |length: f64| {
        gpu.kernel_seconds(2.0 * heads * length * tokens * context, 2.0 * heads * tokens * context)
    };
    let rotation = moved(4.0 * tokens * (heads + kv_heads) * key);
    let softmax = moved(4.0 * heads * tokens * context);
    let activation = moved(6.0 * tokens * f64::from(shape.feed_forward_length));
    let (norm, residual) = (moved(4.0 * tokens * width), moved(6.0 * tokens * width));
    let kernels = |times: &[f64]| vec![SyncInterval::without_events(times.to_vec())];
    let [qkv, output, gates, down] = matmuls;
    [
        kernels(&[norm]),
        qkv,
        kernels(&[rotation, weighted(key), softmax, weighted(value)]),
        output,
        kernels(&[residual, norm]),
        gates,
        kernels(&[activation]),
        down,
        kernels(&[residual]),
    ]
    .concat()
}
