//! The gated delta net of a layer on the CPU. Its equations are in [`crate::hyperparameters`].

use hearth_kernels::delta_net::{convolve, delta_rule, gates, normalise_length};
use hearth_kernels::elementwise;
use hearth_profiles::model::DeltaNetShape;

use super::Matmul;
use super::layer_pass::{Buffers, LayerPass};
use crate::cache::DeltaNetState;

impl LayerPass<'_> {
    /// Computes the gated delta net of the block's input, up to the output matrix, and updates its state.
    pub(super) fn delta_net(&self, shape: &DeltaNetShape, state: &mut DeltaNetState, buffers: &mut Buffers) {
        if self.first == 0 {
            state.clear();
        }
        self.project(shape, state, buffers);
        self.convolve(shape, buffers);
        self.apply_delta_rule(shape, state, buffers);
        let Buffers { attended, value, .. } = buffers;
        let (heads, head) = (shape.value_heads as usize, shape.head_length as usize);
        let (tokens, run) = (self.tokens, self.cpu.instruction_set);
        self.cpu.for_each_row(attended.rows_mut(), heads * head, |token, row| {
            for (index, gate) in row.chunks_exact_mut(head).enumerate() {
                elementwise::swiglu(run, gate, &value[(index * tokens + token) * head..][..head]);
            }
        });
    }

    /// Computes the queries, keys and values after those of earlier tokens, `[earlier tokens + tokens, width]`, the
    /// gates of the output in `attended`, and beta and alpha, `[tokens, value heads]`.
    fn project(&self, shape: &DeltaNetShape, state: &mut DeltaNetState, buffers: &mut Buffers) {
        let (tensors, earlier) = (&self.tensors, shape.convolution_length as usize - 1);
        let net = tensors.delta_net.expect("the tensors of a delta net were checked");
        let widths = [shape.key_width(), shape.key_width(), shape.value_width()];
        buffers.resize_projections(self.tokens + earlier, widths);
        let Buffers { input, attended, query, key, value, beta, alpha, .. } = buffers;
        attended.resize(self.tokens, shape.value_width() as usize);
        let heads = self.tokens * shape.value_heads as usize;
        beta.resize(heads, 0.0);
        alpha.resize(heads, 0.0);
        let mut rows = [query, key, value];
        for (rows, history) in rows.iter_mut().zip(&state.history) {
            rows[..history.len()].copy_from_slice(history);
        }
        let projections = rows.iter_mut().zip(&state.history).zip(tensors.matrices);
        let mut matmuls: Vec<_> = projections
            .filter_map(|((rows, history), matrix)| {
                Some(Matmul { matrix: matrix?, out: &mut rows[history.len()..] })
            })
            .collect();
        matmuls.extend([
            Matmul { matrix: net.gate, out: attended.rows_mut() },
            Matmul { matrix: net.beta, out: beta },
            Matmul { matrix: net.alpha, out: alpha },
        ]);
        self.cpu.multiply(input, &mut matmuls);
        for (rows, history) in rows.iter().zip(&mut state.history) {
            let new = rows.len() - history.len();
            history.copy_from_slice(&rows[new..]);
        }
    }

    /// Convolves queries, keys and values into `convolved`, `[tokens, channels]`, and normalises each query and key.
    fn convolve(&self, shape: &DeltaNetShape, buffers: &mut Buffers) {
        let net = self.tensors.delta_net.expect("the tensors of a delta net were checked");
        let Buffers { query, key, value, convolved, .. } = buffers;
        let (length, head, run) =
            (shape.convolution_length as usize, shape.head_length as usize, self.cpu.instruction_set);
        let (keys, values) = (shape.key_width() as usize, shape.value_width() as usize);
        let channels = shape.channels() as usize;
        let epsilon = self.weights.hyperparameters().rms_norm_epsilon;
        convolved.resize(self.tokens * channels, 0.0);
        self.cpu.for_each_row(convolved, channels, |token, row| {
            let mut at = 0;
            for (rows, width) in [(&query, keys), (&key, keys), (&value, values)] {
                let window = &rows[token * width..][..length * width];
                let kernels = &net.convolution[at * length..][..width * length];
                convolve(run, window, kernels, &mut row[at..][..width]);
                at += width;
            }
            for head in row[..2 * keys].chunks_exact_mut(head) {
                normalise_length(run, head, epsilon);
            }
        });
    }

    /// Updates the state of each value head, and writes the normalised outputs to `value`, `[value heads, tokens, head
    /// length]`.
    fn apply_delta_rule(&self, shape: &DeltaNetShape, state: &mut DeltaNetState, buffers: &mut Buffers) {
        let net = self.tensors.delta_net.expect("the tensors of a delta net were checked");
        let Buffers { value, convolved, beta, alpha, .. } = buffers;
        let (heads, groups) = (shape.value_heads as usize, shape.key_heads as usize);
        let (head, keys) = (shape.head_length as usize, shape.key_width() as usize);
        let (channels, run) = (shape.channels() as usize, self.cpu.instruction_set);
        let epsilon = self.weights.hyperparameters().rms_norm_epsilon;
        value.resize(heads * self.tokens * head, 0.0);
        let matrices = state.matrices.chunks_exact_mut(head * head);
        let mut work: Vec<_> = matrices.zip(value.chunks_exact_mut(self.tokens * head)).collect();
        self.cpu.thread_pool.for_each_chunk_mut(&mut work, 1, |first, work| {
            for (index, (matrix, outputs)) in (first..).zip(work) {
                for (token, out) in outputs.chunks_exact_mut(head).enumerate() {
                    let row = &convolved[token * channels..][..channels];
                    let (group, at) = (index % groups * head, token * heads + index);
                    let (query, key) = (&row[group..][..head], &row[keys + group..][..head]);
                    let value = &row[2 * keys + index * head..][..head];
                    let step = alpha[at] + net.dt_bias[index];
                    let gates = gates(step, net.decay[index], beta[at]);
                    delta_rule(run, matrix, query, key, value, gates, out);
                    elementwise::rms_norm_in_place(run, out, net.norm, epsilon);
                }
            }
        });
    }
}
