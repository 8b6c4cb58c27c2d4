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
use crate::experts::{Route, route};
use crate::residency::ExpertGroup;
use crate::weights::ExpertWeights;

/// The maximum number of routes of a group, unless there are more tokens: it limits the outputs that wait for their sum.
/// source: assumed, those of eight tokens of usual mixtures
pub(super) const MAX_GROUP_ROUTES: usize = 64;

/// The buffers of experts, which are reused as those of a pass.
#[derive(Debug, Default)]
pub(super) struct ExpertBuffers {
    scores: Vec<f32>, // [tokens, experts]
    routes: Vec<Route>,
    input: Activations, // [tokens of an expert, embedding]
    gated: Activations, // [tokens of an expert, width], first only the gate
    up: Vec<f32>,       // [tokens of an expert, width]
    out: Vec<f32>,      // [routes of a group, embedding]
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
        for (token, scores) in own.scores.chunks_exact_mut(count).enumerate() {
            route(scores, token, shape.used as usize, is_normalised, &mut own.routes);
        }
        if let Some(recorder) = &cpu.route_recorder {
            recorder.record(own.routes.iter().filter_map(|route| {
                let piece = self.pieces.iter().find(|piece| piece.token_range().contains(&route.token))?;
                let position = (piece.first + route.token - piece.before) as u32;
                let Route { expert, weight, .. } = *route;
                Some(RouteUse { position, layer: self.layer, expert: expert as u32, weight })
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
        while let (Some(routes), Some(group)) = (groups.next(), requested.take()) {
            requested = groups.peek().map(|next| self.request(next, false));
            self.compute_group(weights, routes, &group, (&*input, &mut *own, &mut *change));
            cpu.barrier.release_experts(&group);
        }
        own.routes = routes;
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
        self.cpu.barrier.request_experts(&mut group, &self.cpu.thread_pool);
        group
    }

    /// Adds the outputs of a group of experts to `change`.
    fn compute_group(
        &self,
        weights: &ExpertWeights<'_>,
        routes: &[Route],
        group: &ExpertGroup,
        (input, buffers, change): (&Activations, &mut ExpertBuffers, &mut [f32]),
    ) {
        let embedding = input.row_length();
        buffers.out.resize(routes.len() * embedding, 0.0);
        for is_missing in [false, true] {
            let mut first = 0;
            for own in routes.chunk_by(|one, other| one.expert == other.expert) {
                let rows = first * embedding..(first + own.len()) * embedding;
                first += own.len();
                if group.is_missing(own[0].expert as u32) == is_missing {
                    let expert = own[0].expert as u32;
                    self.cpu.barrier.wait_for_expert(group, expert, &self.cpu.thread_pool);
                    self.compute_expert(weights, own, input, buffers, rows);
                }
            }
        }
        for (route, row) in routes.iter().zip(buffers.out.chunks_exact_mut(embedding)) {
            elementwise::scale(self.cpu.instruction_set, row, route.weight);
            elementwise::add(
                self.cpu.instruction_set,
                &mut change[route.token * embedding..][..embedding],
                row,
            );
        }
    }

    /// Writes the outputs of an expert for its tokens to `rows` of `buffers.out`.
    fn compute_expert(
        &self,
        weights: &ExpertWeights<'_>,
        routes: &[Route],
        input: &Activations,
        ExpertBuffers { input: own, gated, up, out, .. }: &mut ExpertBuffers,
        rows: Range<usize>,
    ) {
        let (expert, tokens) = (routes[0].expert, routes.len());
        let (embedding, width) = (input.row_length(), weights.down.row_length);
        own.resize(tokens, embedding);
        for (row, route) in own.rows_mut().chunks_exact_mut(embedding).zip(routes) {
            row.copy_from_slice(&input.rows()[route.token * embedding..][..embedding]);
        }
        gated.resize(tokens, width);
        up.resize(tokens * width, 0.0);
        let mut matmuls = [
            Matmul { matrix: weights.gate.slice(expert * width, width), out: gated.rows_mut() },
            Matmul { matrix: weights.up.slice(expert * width, width), out: up },
        ];
        self.cpu.multiply(own, &mut matmuls);
        let bias = |index: usize, rows: usize| weights.biases.map(|all| &all[index][expert * rows..][..rows]);
        self.add_bias(gated.rows_mut(), bias(1, width));
        self.add_bias(up, bias(2, width));
        let activation = self.weights.hyperparameters().gate_activation;
        self.cpu.gated(activation, gated.rows_mut(), up, width);
        let down = weights.down.slice(expert * embedding, embedding);
        let out = &mut out[rows];
        self.cpu.multiply(gated, &mut [Matmul { matrix: down, out: &mut *out }]);
        self.add_bias(out, bias(3, embedding));
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
