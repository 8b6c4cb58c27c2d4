//! The stages of a layer while a prompt is read.
//!
//! Each strategy has its own rule for products; the GPU computes the rest of the layer between them: norm, q k v,
//! attention, o, residual and norm, gate and up, activation, down, residual. Products that are not cut share a pair
//! of events by groups ([`super::matmul::groups`]).
//!
//! Not here: choosing the best of the strategies ([`super::Chip`]), and the head.

use hearth_profiles::device::soc::Strategy;
use hearth_profiles::model::ModelShape;

use super::matmul::{Group, Matmul, groups};
use super::rest::Rest;
use super::solver::Solver;
use super::stage::Stage;
use super::sync::EVENTS;

/// A chunk of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptChunk {
    /// Its tokens.
    pub tokens: u64,
    /// The number of positions that they attend to.
    pub context: u64,
}

/// A layer of a model without an NPU: one stretch of the GPU's queue.
pub fn on_gpu(gpu: &super::gpu::Gpu, shape: &ModelShape, piece: PromptChunk) -> Vec<Stage> {
    let kernels = |group: &Group| {
        let product = |matmul: &Matmul| gpu.product(*matmul, piece.tokens);
        vec![Stage::queued(group.matmuls.iter().map(product).collect())]
    };
    let products = groups(shape).map(|group| kernels(&group));
    layer(&Rest::new(gpu, shape, piece.tokens, piece.context), products)
}

/// A layer under a strategy that uses the NPU; one of the largest graph's tokens or less.
pub fn stages(
    solver: &Solver,
    strategy: Strategy,
    shape: &ModelShape,
    piece: PromptChunk,
    chunk: u64,
) -> Vec<Stage> {
    let groups = groups(shape);
    let tokens = piece.tokens;
    let padded = vec![solver.sizes.padded(tokens)];
    let whole = |graphs: &[u64]| groups.clone().map(|group| vec![on_npu(solver, &group, graphs)]);
    let products = match strategy {
        Strategy::GpuOnly | Strategy::Best => return on_gpu(&solver.gpu, shape, piece),
        Strategy::HeteroTensor => groups
            .clone()
            .map(|group| group.matmuls.iter().map(|&matmul| solver.solve(matmul, tokens).stage).collect()),
        Strategy::NpuOnly => groups.clone().map(|group| {
            let alone = |&matmul: &Matmul| on_npu(solver, &Group { matmuls: vec![matmul] }, &padded);
            group.matmuls.iter().map(alone).collect()
        }),
        Strategy::HeteroLayer => groups.clone().map(|group| vec![faster(solver, &group, tokens, &padded)]),
        Strategy::Padding => whole(&padded),
        Strategy::Pipe => whole(&pipe(solver, shape, tokens)),
        Strategy::OnlinePrepare => whole(&[tokens]),
        Strategy::Chunked => whole(&[chunk]),
    };
    layer(&Rest::new(&solver.gpu, shape, tokens, piece.context), products)
}

/// The cheapest cover of a prompt by graphs, the same for all products.
pub fn pipe(solver: &Solver, shape: &ModelShape, tokens: u64) -> Vec<u64> {
    let groups = groups(shape);
    let cost = |graphs: &[u64]| -> f64 {
        groups.iter().flat_map(|group| &group.matmuls).map(|&matmul| solver.on_npu(matmul, graphs)).sum()
    };
    let covers = solver.sizes.covers(tokens);
    let cheapest = covers.map(|graphs| (cost(graphs), graphs)).min_by(|one, other| one.0.total_cmp(&other.0));
    cheapest.map_or_else(|| vec![solver.sizes.padded(tokens)], |(_, graphs)| graphs.to_vec())
}

/// The products of a group on the NPU, with one pair of events.
fn on_npu(solver: &Solver, group: &Group, graphs: &[u64]) -> Stage {
    let product =
        |matmul: &Matmul| graphs.iter().map(|&size| solver.npu.product(*matmul, size)).collect::<Vec<_>>();
    Stage {
        gpu: Vec::new(),
        npu: group.matmuls.iter().flat_map(product).collect(),
        events: EVENTS,
        waiting: solver.sync.pair(),
    }
}

/// A group wholly on the one or the other, as it looks when it is planned.
fn faster(solver: &Solver, group: &Group, tokens: u64, graphs: &[u64]) -> Stage {
    let npu = on_npu(solver, group, graphs);
    let gpu = Stage::queued(group.matmuls.iter().map(|&matmul| solver.gpu.product(matmul, tokens)).collect());
    let planned = npu.npu_time() + f64::from(EVENTS) * solver.sync.planned;
    if gpu.gpu_time() <= planned { gpu } else { npu }
}

/// Puts the products where they belong in a layer.
fn layer(rest: &Rest, products: [Vec<Stage>; 4]) -> Vec<Stage> {
    let [attention, output, gates, down] = products;
    let mut stages = vec![Stage::queued(rest.before.clone())];
    stages.extend(attention);
    stages.push(Stage::queued(rest.attention.clone()));
    stages.extend(output);
    stages.push(Stage::queued(rest.between.clone()));
    stages.extend(gates);
    stages.push(Stage::queued(rest.activation.clone()));
    stages.extend(down);
    stages.push(Stage::queued(rest.after.clone()));
    stages
}
