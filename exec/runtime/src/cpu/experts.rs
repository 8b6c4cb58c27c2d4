//! The experts of a mixture: each computes the tokens that are routed to it.
//!
//! Experts are computed in ascending order, and the results of a token are added in this order, so that a batch gives
//! the bits of single tokens.

use hearth_kernels::matmul::Matrix;
use hearth_kernels::{Activations, elementwise};
use hearth_profiles::model::Experts;

use super::Matmul;
use super::layer_pass::{Buffers, LayerPass};
use crate::experts::{Route, route};
use crate::weights::ExpertParameters;

/// The buffers of experts, which are reused as those of a pass.
#[derive(Debug, Default)]
pub(super) struct ExpertBuffers {
    scores: Vec<f32>, // [tokens, experts]
    routes: Vec<Route>,
    input: Activations, // [tokens of an expert, embedding]
    gated: Activations, // [tokens of an expert, width], first only the gate
    up: Vec<f32>,       // [tokens of an expert, width]
    out: Vec<f32>,      // [tokens of an expert, embedding]
}

impl LayerPass<'_> {
    /// Writes the sum of the experts' outputs for the block's input to `buffers.change`.
    pub(super) fn compute_experts(
        &self,
        weights: &ExpertParameters<Matrix<'_>>,
        shape: &Experts,
        buffers: &mut Buffers,
    ) {
        let Buffers { input, change, experts, .. } = buffers;
        let ExpertBuffers { scores, routes, input: own, gated, up, out } = experts;
        let (cpu, count) = (self.cpu, shape.count as usize);
        scores.resize(self.tokens * count, 0.0);
        cpu.multiply(input, &mut [Matmul { matrix: weights.router, out: scores }]);
        routes.clear();
        let is_normalised = self.weights.shape().architecture.spec().normalises_expert_weights;
        for (token, scores) in scores.chunks_exact_mut(count).enumerate() {
            route(scores, token, shape.used as usize, is_normalised, routes);
        }
        routes.sort_by_key(|route| (route.expert, route.token));
        change.fill(0.0);
        let (embedding, width) = (input.row_length(), shape.feed_forward_length as usize);
        for routes in routes.chunk_by(|one, other| one.expert == other.expert) {
            let (expert, tokens) = (routes[0].expert, routes.len());
            own.resize(tokens, embedding);
            for (row, route) in own.rows_mut().chunks_exact_mut(embedding).zip(routes) {
                row.copy_from_slice(&input.rows()[route.token * embedding..][..embedding]);
            }
            gated.resize(tokens, width);
            up.resize(tokens * width, 0.0);
            out.resize(tokens * embedding, 0.0);
            let mut matmuls = [
                Matmul { matrix: weights.gate.slice(expert * width, width), out: gated.rows_mut() },
                Matmul { matrix: weights.up.slice(expert * width, width), out: up },
            ];
            cpu.multiply(own, &mut matmuls);
            let activation = self.weights.hyperparameters().gate_activation;
            cpu.gated(activation, gated.rows_mut(), up, width);
            let down = weights.down.slice(expert * embedding, embedding);
            cpu.multiply(gated, &mut [Matmul { matrix: down, out }]);
            for (row, route) in out.chunks_exact_mut(embedding).zip(routes) {
                elementwise::scale(cpu.instruction_set, row, route.weight);
                let sum = &mut change[route.token * embedding..][..embedding];
                elementwise::add(cpu.instruction_set, sum, row);
            }
        }
    }
}
