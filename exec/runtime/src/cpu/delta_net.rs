//! The gated delta net of a layer on the CPU. Its equations are in [`crate::hyperparameters`].

use hearth_kernels::delta_net::{convolve, delta_rule, gates, normalise_length};
use hearth_kernels::elementwise;
use hearth_profiles::model::DeltaNetShape;

use super::Matmul;
use super::layer_pass::{Buffers, Caches, LayerPass, OTHER_CACHE, Piece};
use crate::cache::{DeltaNetState, LayerCache};

impl LayerPass<'_> {
    /// Computes the gated delta net of the block's input, up to the output matrix, and updates the states of the
    /// sequences.
    pub(super) fn delta_net(&self, shape: &DeltaNetShape, caches: &mut Caches, buffers: &mut Buffers) {
        self.project(shape, buffers);
        for (index, piece) in self.pieces.iter().enumerate() {
            let state = self.state(caches, piece);
            if piece.first == 0 {
                state.clear();
            }
            self.insert_history(shape, index, state, buffers);
        }
        self.convolve(shape, buffers);
        let (heads, head) = (shape.value_heads as usize, shape.head_length as usize);
        buffers.value.resize(heads * self.tokens * head, 0.0);
        for piece in self.pieces {
            self.apply_delta_rule(shape, piece, self.state(caches, piece), buffers);
        }
        let (Buffers { attended, value, .. }, run) = (buffers, self.cpu.instruction_set);
        self.cpu.for_each_row(attended.rows_mut(), heads * head, |token, row| {
            let (_, piece) = self.piece_of(token);
            let outputs = &value[piece.before * heads * head..][..piece.tokens * heads * head];
            for (index, gate) in row.chunks_exact_mut(head).enumerate() {
                let at = index * piece.tokens + token - piece.before;
                elementwise::swiglu(run, gate, &outputs[at * head..][..head]);
            }
        });
    }

    fn state<'c>(&self, caches: &'c mut Caches, piece: &Piece) -> &'c mut DeltaNetState {
        match self.cache_mut(caches, piece) {
            LayerCache::DeltaNet(state) => state,
            LayerCache::Attention(_) => unreachable!("{OTHER_CACHE}"),
        }
    }

    /// Returns the piece of a token, and the index of the piece.
    fn piece_of(&self, token: usize) -> (usize, &Piece) {
        let is_in = |(_, piece): &(usize, &Piece)| piece.token_range().contains(&token);
        self.pieces.iter().enumerate().find(is_in).expect("the pieces have all tokens")
    }

    /// Computes the queries, keys and values, `[tokens, width]`, at the end of buffers that also have room for the
    /// earlier tokens of each piece, the gates of the output in `attended`, and beta and alpha, `[tokens, value heads]`.
    fn project(&self, shape: &DeltaNetShape, buffers: &mut Buffers) {
        let (tensors, earlier) = (&self.tensors, shape.convolution_length as usize - 1);
        let net = tensors.delta_net.expect("the tensors of a delta net were checked");
        let widths = [shape.key_width(), shape.key_width(), shape.value_width()];
        let earlier = earlier * self.pieces.len();
        buffers.resize_projections(self.tokens + earlier, widths);
        let Buffers { input, attended, query, key, value, beta, alpha, .. } = buffers;
        attended.resize(self.tokens, shape.value_width() as usize);
        let heads = self.tokens * shape.value_heads as usize;
        beta.resize(heads, 0.0);
        alpha.resize(heads, 0.0);
        let projections = [query, key, value].into_iter().zip(widths).zip(tensors.matrices);
        let mut matmuls: Vec<_> = projections
            .filter_map(|((rows, width), matrix)| {
                Some(Matmul { matrix: matrix?, out: &mut rows[earlier * width as usize..] })
            })
            .collect();
        matmuls.extend([
            Matmul { matrix: net.gate, out: attended.rows_mut() },
            Matmul { matrix: net.beta, out: beta },
            Matmul { matrix: net.alpha, out: alpha },
        ]);
        self.cpu.multiply(input, &mut matmuls);
    }

    /// Moves the queries, keys and values of the piece with this index behind those of the piece before it, with the
    /// earlier tokens of its sequence in between, and updates these. Pieces are moved in order, each at most to where
    /// it is, so that none is overwritten.
    fn insert_history(
        &self,
        shape: &DeltaNetShape,
        index: usize,
        state: &mut DeltaNetState,
        buffers: &mut Buffers,
    ) {
        let earlier = shape.convolution_length as usize - 1;
        let Piece { before, tokens, .. } = self.pieces[index];
        let (from, to) = (earlier * self.pieces.len() + before, earlier * (index + 1) + before);
        let Buffers { query, key, value, .. } = buffers;
        for (rows, history) in [query, key, value].into_iter().zip(&mut state.history) {
            let width = rows.len() / (earlier * self.pieces.len() + self.tokens);
            rows.copy_within(from * width..(from + tokens) * width, to * width);
            rows[(to - earlier) * width..to * width].copy_from_slice(history);
            history.copy_from_slice(&rows[(to + tokens - earlier) * width..(to + tokens) * width]);
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
            let (mut at, first) = (0, token + self.piece_of(token).0 * (length - 1));
            for (rows, width) in [(&query, keys), (&key, keys), (&value, values)] {
                let window = &rows[first * width..][..length * width];
                let kernels = &net.convolution[at * length..][..width * length];
                convolve(run, window, kernels, &mut row[at..][..width]);
                at += width;
            }
            for head in row[..2 * keys].chunks_exact_mut(head) {
                normalise_length(run, head, epsilon);
            }
        });
    }

    /// Updates the state of each value head, and writes the normalised outputs of a piece to `value`, `[value heads,
    /// tokens, head length]` for each piece.
    fn apply_delta_rule(
        &self,
        shape: &DeltaNetShape,
        piece: &Piece,
        state: &mut DeltaNetState,
        buffers: &mut Buffers,
    ) {
        let net = self.tensors.delta_net.expect("the tensors of a delta net were checked");
        let Buffers { value, convolved, beta, alpha, .. } = buffers;
        let (heads, groups) = (shape.value_heads as usize, shape.key_heads as usize);
        let (head, keys) = (shape.head_length as usize, shape.key_width() as usize);
        let (channels, run) = (shape.channels() as usize, self.cpu.instruction_set);
        let epsilon = self.weights.hyperparameters().rms_norm_epsilon;
        let outputs = &mut value[piece.before * heads * head..][..piece.tokens * heads * head];
        let matrices = state.matrices.chunks_exact_mut(head * head);
        let mut work: Vec<_> = matrices.zip(outputs.chunks_exact_mut(piece.tokens * head)).collect();
        self.cpu.thread_pool.for_each_chunk_mut(&mut work, 1, |first, work| {
            for (index, (matrix, outputs)) in (first..).zip(work) {
                for (token, out) in (piece.before..).zip(outputs.chunks_exact_mut(head)) {
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
