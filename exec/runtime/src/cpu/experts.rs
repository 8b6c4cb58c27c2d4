//! The experts of a mixture: each computes the tokens that are routed to it.
//!
//! The experts of a batch are computed in groups. Within a group, those in memory come first, while the others are read;
//! the next group is read while a group is computed. The results of a token are added in ascending order of its experts,
//! so that a batch gives the bits of single tokens.

use std::ops::Range;

use hearth_kernels::{Activations, elementwise};
use hearth_profiles::model::Experts;
use hearth_schema::route_trace::RouteUse;

use super::Matmul;
use super::layer_pass::{Buffers, LayerPass};
use crate::experts::{ReplayedRoutes, Route, RouteOptions, route};
use crate::residency::ExpertGroup;
use crate::weights::ExpertWeights;

/// The maximum number of routes of a group, unless there are more tokens: it limits the outputs that wait for their sum.
/// source: assumed, those of eight tokens of usual mixtures
pub(super) const MAX_GROUP_ROUTES: usize = 64;
/// The maximum number of tokens of a pass whose experts are computed together: with more, an expert has enough work for
/// all threads, and the inputs of all experts would need much memory. source: assumed
pub(super) const MAX_SHARED_TOKENS: usize = 8;

/// The buffers of experts, which are reused as those of a pass.
#[derive(Debug, Default)]
pub(super) struct ExpertBuffers {
    scores: Vec<f32>, // [tokens, experts]
    routes: Vec<Route>,
    inputs: Vec<Activations>, // [experts that are computed together], each [tokens of the expert, embedding]
    gated: Vec<Activations>,  // the same, each [tokens of the expert, width], first only the gate
    up: Vec<f32>,             // [tokens of these experts, width]
    out: Vec<f32>,            // [routes of a group, embedding]
}

/// The computation of an expert.
struct ExpertTask<'a> {
    /// The routes to the expert.
    routes: &'a [Route],
    /// The output, `[routes, embedding]`.
    out: &'a mut [f32],
}

/// Divides routes, which are sorted by expert, into groups of at most `max_experts` experts and `max_routes` routes. An
/// expert with more routes is a group of its own.
fn groups(routes: &[Route], max_experts: usize, max_routes: usize) -> Vec<Range<usize>> {
    let mut groups: Vec<Range<usize>> = Vec::new();
    let (mut end, mut count) = (0, 0);
    for own in routes.chunk_by(|one, other| one.expert == other.expert) {
        match groups.last_mut() {
            Some(last) if count < max_experts && last.len() + own.len() <= max_routes => {
                last.end += own.len();
                count += 1;
            }
            _ => {
                groups.push(end..end + own.len());
                count = 1;
            }
        }
        end += own.len();
    }
    groups
}

impl LayerPass<'_> {
    /// Writes the sum of the experts' outputs for the block's input to `buffers.change`.
    pub(super) fn compute_experts(
        &self,
        weights: &ExpertWeights<'_>,
        shape: &Experts,
        buffers: &mut Buffers,
    ) {
        let Buffers { input, experts: own, .. } = &mut *buffers;
        let (cpu, count) = (self.cpu, shape.count as usize);
        own.scores.resize(self.tokens * count, 0.0);
        cpu.multiply(input, &mut [Matmul { matrix: weights.router, out: &mut own.scores }]);
        self.add_bias(&mut own.scores, weights.biases.map(|[router, ..]| router));
        own.routes.clear();
        let is_normalised = self.weights.shape().architecture.spec().normalises_expert_weights;
        let RouteOptions { recorder, replayed } = &*cpu.route_options;
        for (token, scores) in own.scores.chunks_exact_mut(count).enumerate() {
            let replayed = replayed.as_ref().map(|ReplayedRoutes { recorded, prompt_tokens }| {
                recorded.token_experts(self.layer, self.position(token), *prompt_tokens)
            });
            route(scores, token, (shape.used as usize, replayed), is_normalised, &mut own.routes);
        }
        if let Some(recorder) = recorder {
            recorder.record(own.routes.iter().map(|route| {
                let Route { expert, token, weight } = *route;
                RouteUse { position: self.position(token), layer: self.layer, expert: expert as u32, weight }
            }));
        }
        own.routes.sort_by_key(|route| (route.expert, route.token));
        let routes = std::mem::take(&mut own.routes);
        let max_routes = self.tokens.max(MAX_GROUP_ROUTES);
        let groups = groups(&routes, cpu.barrier.experts_per_group(), max_routes);
        let mut groups = groups.into_iter().map(|range| &routes[range]).peekable();
        let mut requested = groups.peek().map(|routes| self.request(routes, true));
        // Experts are read while the shared block is computed.
        self.shared_block(weights, buffers);
        let Buffers { input, change, experts: own, .. } = buffers;
        while let (Some(routes), Some(mut group)) = (groups.next(), requested.take()) {
            requested = groups.peek().map(|next| self.request(next, false));
            self.compute_group(weights, routes, &mut group, (&*input, &mut *own, &mut *change));
            cpu.barrier.release_experts(group);
        }
        own.routes = routes;
    }

    /// Returns the position of a token of this part in its sequence.
    fn position(&self, token: usize) -> u32 {
        let piece = self.pieces.iter().find(|piece| piece.token_range().contains(&token));
        piece.map_or(0, |piece| (piece.first + token - piece.before) as u32)
    }

    /// Writes the output of the block that all tokens share, or zeros without such a block, to `buffers.change`.
    fn shared_block(&self, weights: &ExpertWeights<'_>, buffers: &mut Buffers) {
        if self.tensors.matrices[4].is_none() {
            buffers.change.fill(0.0);
            return;
        }
        self.dense_block(buffers);
        let Buffers { input, change, .. } = buffers;
        let (Some(gate), width) = (weights.shared_gate, input.row_length()) else { return };
        self.cpu.for_each_row(change, width, |token, row| {
            let input = &input.rows()[token * width..][..width];
            elementwise::scale_by_sigmoid(self.cpu.instruction_set, row, input, gate);
        });
    }

    /// Requests the experts of routes, and starts to read those that are not in memory.
    fn request(&self, routes: &[Route], is_first: bool) -> ExpertGroup {
        let mut experts: Vec<u32> = routes.iter().map(|route| route.expert as u32).collect();
        experts.dedup();
        let mut group = ExpertGroup::new(self.layer, experts, is_first);
        self.cpu.barrier.request_experts(&mut group);
        group
    }

    /// Adds the outputs of a group of experts to `change`.
    fn compute_group(
        &self,
        weights: &ExpertWeights<'_>,
        routes: &[Route],
        group: &mut ExpertGroup,
        (input, buffers, change): (&Activations, &mut ExpertBuffers, &mut [f32]),
    ) {
        let embedding = input.row_length();
        let mut out = std::mem::take(&mut buffers.out);
        out.resize(routes.len() * embedding, 0.0);
        let (mut present, mut missing, mut rest) = (Vec::new(), Vec::new(), &mut out[..]);
        for routes in routes.chunk_by(|one, other| one.expert == other.expert) {
            let (out, after) = rest.split_at_mut(routes.len() * embedding);
            rest = after;
            let is_missing = group.is_missing(routes[0].expert as u32);
            (if is_missing { &mut missing } else { &mut present }).push(ExpertTask { routes, out });
        }
        let together = if self.tokens <= MAX_SHARED_TOKENS { present.len().max(1) } else { 1 };
        for tasks in present.chunks_mut(together) {
            self.compute_together(weights, tasks, group, (input, buffers));
        }
        // Each of the others is computed as soon as it is in memory.
        for task in missing.chunks_mut(1) {
            let expert = task[0].routes[0].expert as u32;
            self.cpu.barrier.wait_for_expert(group, expert);
            self.compute_together(weights, task, group, (input, buffers));
        }
        for (route, row) in routes.iter().zip(out.chunks_exact_mut(embedding)) {
            elementwise::scale(self.cpu.instruction_set, row, route.weight);
            elementwise::add(
                self.cpu.instruction_set,
                &mut change[route.token * embedding..][..embedding],
                row,
            );
        }
        buffers.out = out;
    }

    /// Computes the outputs of experts for their tokens. The threads wait for each other twice for all of them, because
    /// an expert has little work for a token.
    fn compute_together(
        &self,
        weights: &ExpertWeights<'_>,
        experts: &mut [ExpertTask<'_>],
        group: &ExpertGroup,
        (input, buffers): (&Activations, &mut ExpertBuffers),
    ) {
        let (embedding, width) = (input.row_length(), weights.down.row_length);
        let matrices = |expert: usize| weights.of_expert(expert, width, group.matrices(expert as u32));
        let ExpertBuffers { inputs, gated, up, .. } = buffers;
        let count = experts.len();
        inputs.resize_with(inputs.len().max(count), Activations::default);
        gated.resize_with(gated.len().max(count), Activations::default);
        let (inputs, gated) = (&mut inputs[..count], &mut gated[..count]);
        up.resize(experts.iter().map(|task| task.routes.len() * width).sum(), 0.0);
        let (mut matmuls, mut rest) = (Vec::with_capacity(2 * count), &mut up[..]);
        for ((task, own), gated) in experts.iter().zip(&mut *inputs).zip(&mut *gated) {
            let (expert, tokens) = (task.routes[0].expert, task.routes.len());
            own.resize(tokens, embedding);
            for (row, route) in own.rows_mut().chunks_exact_mut(embedding).zip(task.routes) {
                row.copy_from_slice(&input.rows()[route.token * embedding..][..embedding]);
            }
            gated.resize(tokens, width);
            let (up, after) = rest.split_at_mut(tokens * width);
            rest = after;
            let [gate, up_matrix, _] = matrices(expert);
            matmuls.push(Matmul { matrix: gate, out: gated.rows_mut() });
            matmuls.push(Matmul { matrix: up_matrix, out: up });
        }
        self.cpu.multiply_each(inputs, &mut matmuls, 2);
        drop(matmuls);
        let bias = |index: usize, expert: usize, rows: usize| {
            weights.biases.map(|all| &all[index][expert * rows..][..rows])
        };
        let (activation, mut rest) = (self.weights.hyperparameters().gate_activation, &mut up[..]);
        for (task, gated) in experts.iter().zip(&mut *gated) {
            let expert = task.routes[0].expert;
            let (up, after) = rest.split_at_mut(task.routes.len() * width);
            rest = after;
            self.add_bias(gated.rows_mut(), bias(1, expert, width));
            self.add_bias(up, bias(2, expert, width));
            self.cpu.gated(activation, gated.rows_mut(), up, width);
        }
        let mut matmuls: Vec<Matmul> = experts
            .iter_mut()
            .map(|task| {
                let [_, _, down] = matrices(task.routes[0].expert);
                Matmul { matrix: down, out: task.out }
            })
            .collect();
        self.cpu.multiply_each(gated, &mut matmuls, 1);
        for ExpertTask { routes, out } in experts {
            self.add_bias(out, bias(3, routes[0].expert, embedding));
        }
    }

    /// Adds a bias, if any, to each row.
    fn add_bias(&self, rows: &mut [f32], bias: Option<&[f32]>) {
        let Some(bias) = bias else { return };
        let instructions = self.cpu.instruction_set;
        self.cpu.for_each_row(rows, bias.len(), |_, row| elementwise::add(instructions, row, bias));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_limited_by_experts_and_routes() {
        let route = |expert| Route { expert, token: 0, weight: 1.0 };
        let routes = [0, 0, 1, 2, 2, 2, 2, 3, 4].map(route);
        assert_eq!(groups(&routes, 9, 9).len(), 1);
        assert_eq!(groups(&routes, 2, 9), [0..3, 3..8, 8..9]);
        assert_eq!(groups(&routes, 9, 3), [0..3, 3..7, 7..9]);
        assert!(groups(&[], 2, 3).is_empty());
    }
}
