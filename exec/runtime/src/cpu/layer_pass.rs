//! The pass of some tokens, of one or more sequences, through one layer on the CPU.

use std::collections::BTreeMap;
use std::ops::Range;

use hearth_kernels::matmul::Matrix;
use hearth_kernels::{Activations, elementwise};
use hearth_profiles::model::{AttentionShape, GateActivation, PairLayout, TokenMixer};
use hearth_schema::pass::Pass;

use super::experts::ExpertBuffers;
use super::{Attention, Cpu, Matmul};
use crate::Weights;
use crate::cache::{KvCache, LayerCache};
use crate::token_inputs::TokenInputs;
use crate::weights::LayerWeights;

/// The buffers of a pass, which are reused so that computing a token allocates no memory.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    pub(super) input: Activations,       // [tokens, embedding]
    pub(super) attended: Activations,    // [tokens, heads * value_length]
    pub(super) gated: Activations,       // [tokens, feed_forward], first only the gate
    pub(super) query: Vec<f32>,          // [tokens, heads * key_length]
    pub(super) key: Vec<f32>,            // [tokens, kv_heads * key_length]
    pub(super) value: Vec<f32>,          // [tokens, kv_heads * value_length]
    pub(super) query_and_gate: Vec<f32>, // [tokens, heads, 2, key_length], as they are projected
    /// The convolved queries, keys and values of a delta net, `[tokens, channels]`.
    pub(super) convolved: Vec<f32>,
    pub(super) up: Vec<f32>, // [tokens, feed_forward]
    pub(super) experts: ExpertBuffers,
    pub(super) change: Vec<f32>, // [tokens, embedding]
    pub(super) beta: Vec<f32>,   // [tokens, value heads of a delta net]
    pub(super) alpha: Vec<f32>,  // [tokens, value heads of a delta net]
    /// Cosine and sine for each rotary embedding of the model, [tokens of the batch, pairs].
    pub(super) angles: Vec<Vec<[f32; 2]>>,
}

impl Buffers {
    /// Resizes the queries, keys and values to `tokens` rows with these widths.
    pub(super) fn resize_projections(&mut self, tokens: usize, [query, key, value]: [u64; 3]) {
        self.query.resize(tokens * query as usize, 0.0);
        self.key.resize(tokens * key as usize, 0.0);
        self.value.resize(tokens * value as usize, 0.0);
    }

    /// Computes the cosine and sine of the rotation angles of the tokens of `passes`.
    pub(super) fn fill_angles(&mut self, weights: &Weights, passes: &[Pass]) {
        let ropes = &weights.hyperparameters().ropes;
        let tokens: usize = passes.iter().map(|pass| pass.tokens as usize).sum();
        self.angles.resize(ropes.len(), Vec::new());
        for (rope, angles) in ropes.iter().zip(&mut self.angles) {
            let pairs = rope.frequencies.len();
            angles.resize(tokens * pairs, [0.0; 2]);
            let positions = passes.iter().flat_map(|pass| (pass.first_position..).take(pass.tokens as usize));
            for (position, angles) in positions.zip(angles.chunks_exact_mut(pairs)) {
                rope.write_cosines_and_sines(position, angles);
            }
        }
    }
}

/// Consecutive tokens of one sequence in a part of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) sequence: u32,
    /// Number of tokens of the part that precede this piece.
    pub(super) before: usize,
    pub(super) tokens: usize,
    /// Position in the sequence of the first token.
    pub(super) first: usize,
}

impl Piece {
    /// Divides a batch into parts of `part` tokens, and returns the pieces of each part.
    pub(super) fn of_parts(passes: &[Pass], part: usize) -> Vec<Vec<Piece>> {
        let mut parts: Vec<Vec<Piece>> = vec![Vec::new()];
        let mut free = part;
        for pass in passes {
            let (mut first, end) =
                (pass.first_position as usize, (pass.first_position + pass.tokens) as usize);
            while first < end {
                if free == 0 {
                    parts.push(Vec::new());
                    free = part;
                }
                let tokens = free.min(end - first);
                let piece = Piece { sequence: pass.sequence_index, before: part - free, tokens, first };
                parts.last_mut().expect("at least one part").push(piece);
                (first, free) = (first + tokens, free - tokens);
            }
        }
        parts
    }

    pub(super) fn token_range(&self) -> Range<usize> {
        self.before..self.before + self.tokens
    }
}

/// The computation of one layer for one part of a batch.
pub(super) struct LayerPass<'a> {
    pub(super) weights: &'a Weights,
    pub(super) cpu: &'a Cpu,
    pub(super) layer: u32,
    pub(super) tensors: LayerWeights<'a>,
    pub(super) tokens: usize,
    /// Number of tokens of the batch that precede this part.
    pub(super) before: usize,
    /// The tokens of this part by sequence.
    pub(super) pieces: &'a [Piece],
}

/// The caches of a device, keyed by sequence and layer.
pub(super) type Caches = BTreeMap<(u32, u32), LayerCache>;

const OWN_LAYERS: &str = "a stage sends a backend its own layers";
pub(super) const OTHER_CACHE: &str = "a cache is created for the token mixer of its layer";

impl LayerPass<'_> {
    /// Computes the layer for the hidden states `[tokens, embedding]`, in place.
    /// `inputs` has what the tokens take along besides the hidden states.
    pub(super) fn run(
        &self,
        caches: &mut Caches,
        buffers: &mut Buffers,
        hidden: &mut [f32],
        inputs: &mut TokenInputs<'_>,
    ) {
        buffers.change.resize(hidden.len(), 0.0);
        self.mixer_block(caches, buffers, hidden, inputs);
        self.feed_forward_block(buffers, hidden);
        self.add_per_layer_input(buffers, hidden, inputs);
        if let Some(&[scale]) = self.tensors.output_scale {
            self.scale(hidden, scale);
        }
    }

    fn mixer_block(
        &self,
        caches: &mut Caches,
        buffers: &mut Buffers,
        hidden: &mut [f32],
        inputs: &mut TokenInputs<'_>,
    ) {
        self.write_block_input(hidden, self.tensors.attention_norm, &mut buffers.input);
        match self.weights.shape().mixer(self.layer) {
            TokenMixer::Attention(shape) => self.attention(&shape, caches, buffers, inputs),
            TokenMixer::DeltaNet(shape) => self.delta_net(&shape, caches, buffers),
        }
        let Buffers { attended, change, .. } = buffers;
        let (matrix, bias) = (self.matrix(3), self.tensors.biases[3]);
        self.cpu.multiply(attended, &mut [Matmul { matrix, out: change }]);
        self.add_bias_and_norm(change, bias, self.tensors.post_attention_norm);
        self.add_to_hidden(hidden, change);
    }

    /// Computes the attention of the block's input, up to the output matrix.
    fn attention(
        &self,
        shape: &AttentionShape,
        caches: &mut Caches,
        buffers: &mut Buffers,
        inputs: &mut TokenInputs<'_>,
    ) {
        let (cpu, tensors) = (self.cpu, &self.tensors);
        let has_gate = self.weights.shape().architecture.spec().has_attention_gate;
        buffers
            .resize_projections(self.tokens, [shape.query_width(), shape.key_width(), shape.value_width()]);
        let Buffers { input, query, key, value, query_and_gate, .. } = &mut *buffers;
        let [_, key_matrix, value_matrix, ..] = tensors.matrices;
        let [query_bias, key_bias, value_bias, ..] = tensors.biases;
        query_and_gate.resize(if has_gate { 2 * query.len() } else { 0 }, 0.0);
        let projected = if has_gate { &mut *query_and_gate } else { &mut *query };
        let mut matmuls = vec![Matmul { matrix: self.matrix(0), out: projected }];
        matmuls.extend(key_matrix.map(|matrix| Matmul { matrix, out: key }));
        matmuls.extend(value_matrix.map(|matrix| Matmul { matrix, out: value }));
        cpu.multiply(input, &mut matmuls);
        drop(matmuls);
        if has_gate {
            let head = shape.key_length as usize;
            for (query, pair) in query.chunks_exact_mut(head).zip(query_and_gate.chunks_exact(2 * head)) {
                query.copy_from_slice(&pair[..head]);
            }
        }
        self.add_bias_and_norm(query, query_bias, tensors.query_norm);
        if key_matrix.is_none() {
            // The layer uses the keys and values of an earlier layer.
            self.rotate(shape.key_length, caches, buffers, false);
            self.attend(shape, caches, buffers);
            return;
        }
        if value_matrix.is_none() {
            value.copy_from_slice(key);
        }
        self.add_bias_and_norm(key, key_bias, tensors.key_norm);
        self.add_bias_and_norm(value, value_bias, None);
        if self.weights.shape().architecture.spec().has_value_norm {
            let (run, epsilon) = (cpu.instruction_set, self.weights.hyperparameters().rms_norm_epsilon);
            cpu.for_each_row(value, shape.value_length as usize, |_, head| {
                elementwise::rms_norm_without_weights(run, head, epsilon);
            });
        }
        self.rotate(shape.key_length, caches, buffers, true);
        self.store(shape, caches, buffers, inputs);
        self.attend(shape, caches, buffers);
        if has_gate {
            let (Buffers { attended, query_and_gate, .. }, head) = (buffers, shape.key_length as usize);
            cpu.for_each_row(attended.rows_mut(), head, |index, out| {
                let gate = &query_and_gate[(2 * index + 1) * head..][..head];
                elementwise::apply_sigmoid_gate(cpu.instruction_set, out, gate);
            });
        }
    }

    fn feed_forward_block(&self, buffers: &mut Buffers, hidden: &mut [f32]) {
        self.write_block_input(hidden, self.tensors.feed_forward_norm, &mut buffers.input);
        match (self.tensors.experts, self.weights.shape().layer_experts(self.layer)) {
            (Some(weights), Some(shape)) => self.compute_experts(&weights, &shape, buffers),
            _ => self.dense_block(buffers),
        }
        self.add_bias_and_norm(&mut buffers.change, None, self.tensors.post_feed_forward_norm);
        self.add_to_hidden(hidden, &mut buffers.change);
    }

    /// Writes the output of the block that all tokens use for the block's input to `buffers.change`.
    pub(super) fn dense_block(&self, buffers: &mut Buffers) {
        let (parameters, cpu) = (self.weights.hyperparameters(), self.cpu);
        let Buffers { input, gated, up, change, .. } = buffers;
        let [gate_matrix, up_matrix, matrix] = [4, 5, 6].map(|index| self.matrix(index));
        let [.., gate_bias, up_bias, bias] = self.tensors.biases;
        gated.resize(self.tokens, matrix.row_length);
        up.resize(self.tokens * matrix.row_length, 0.0);
        let mut matmuls =
            [Matmul { matrix: gate_matrix, out: gated.rows_mut() }, Matmul { matrix: up_matrix, out: up }];
        cpu.multiply(input, &mut matmuls);
        self.add_bias_and_norm(gated.rows_mut(), gate_bias, None);
        self.add_bias_and_norm(up, up_bias, None);
        cpu.gated(parameters.gate_activation, gated.rows_mut(), up, matrix.row_length);
        cpu.multiply(gated, &mut [Matmul { matrix, out: change }]);
        self.add_bias_and_norm(change, bias, None);
    }

    /// Adds the input of the layer to the hidden states, if the tokens have such an input.
    fn add_per_layer_input(&self, buffers: &mut Buffers, hidden: &mut [f32], inputs: &TokenInputs<'_>) {
        let Some(weights) = self.tensors.per_layer_input else { return };
        let (cpu, Buffers { input, gated, change, .. }) = (self.cpu, buffers);
        let own = inputs.per_layer_input(self.layer, self.before..self.before + self.tokens);
        self.write_block_input(hidden, None, input);
        gated.resize(self.tokens, weights.gate.rows);
        cpu.multiply(input, &mut [Matmul { matrix: weights.gate, out: gated.rows_mut() }]);
        cpu.gated(GateActivation::Gelu, gated.rows_mut(), own, weights.gate.rows);
        cpu.multiply(gated, &mut [Matmul { matrix: weights.projection, out: change }]);
        self.add_bias_and_norm(change, None, Some(weights.norm));
        self.add_to_hidden(hidden, change);
    }

    /// Returns one of the matrices that every layer has.
    fn matrix(&self, index: usize) -> Matrix<'_> {
        self.tensors.matrices[index].expect("the tensors of a layer were checked")
    }

    /// Writes the input of a block: the hidden states, normalised if the architecture has a norm there.
    fn write_block_input(&self, hidden: &[f32], norm: Option<&[f32]>, input: &mut Activations) {
        if let Some(weight) = norm {
            let epsilon = self.weights.hyperparameters().rms_norm_epsilon;
            self.cpu.rms_norm_rows(hidden, weight, epsilon, input);
        } else {
            input.resize(self.tokens, hidden.len() / self.tokens);
            input.rows_mut().copy_from_slice(hidden);
        }
    }

    /// Adds the output of a block to the hidden states: the residual connection.
    fn add_to_hidden(&self, hidden: &mut [f32], change: &mut [f32]) {
        if let Some(factor) = self.weights.hyperparameters().residual_scale {
            self.scale(change, factor);
        }
        self.cpu.add(hidden, change, hidden.len() / self.tokens);
    }

    /// Multiplies rows by a factor.
    fn scale(&self, rows: &mut [f32], factor: f32) {
        self.cpu.for_each_row(rows, rows.len() / self.tokens, |_, row| {
            elementwise::scale(self.cpu.instruction_set, row, factor);
        });
    }

    /// Adds `bias` to each of the `rows`, and then applies RMSNorm with the weights `norm` to every part of a row that
    /// has the length of these weights (a head, or the whole row).
    fn add_bias_and_norm(&self, rows: &mut [f32], bias: Option<&[f32]>, norm: Option<&[f32]>) {
        if bias.is_none() && norm.is_none() {
            return;
        }
        let (instructions, epsilon) =
            (self.cpu.instruction_set, self.weights.hyperparameters().rms_norm_epsilon);
        self.cpu.for_each_row(rows, rows.len() / self.tokens, |_, row| {
            if let Some(bias) = bias {
                elementwise::add(instructions, row, bias);
            }
            let Some(weight) = norm else { return };
            for part in row.chunks_exact_mut(weight.len()) {
                elementwise::rms_norm_in_place(instructions, part, weight, epsilon);
            }
        });
    }

    /// Applies the rotary embedding to queries and, if `has_keys`, to keys.
    fn rotate(&self, key_length: u32, caches: &Caches, buffers: &mut Buffers, has_keys: bool) {
        let Buffers { query, key, angles, .. } = buffers;
        let parameters = self.weights.hyperparameters();
        // All sequences have the same capacity.
        let capacity = self.cache(caches, &self.pieces[0]).keys.capacity();
        let rope_index = parameters.rope_index(self.layer, capacity as u32);
        let rope = &parameters.ropes[rope_index];
        let rotate = match rope.pair_layout {
            PairLayout::Interleaved => elementwise::apply_rope_interleaved,
            PairLayout::Halves => elementwise::apply_rope_neox,
        };
        let pairs = rope.frequencies.len();
        let angles = &angles[rope_index][self.before * pairs..][..self.tokens * pairs];
        for rows in [Some(query), has_keys.then_some(key)].into_iter().flatten() {
            let width = rows.len() / self.tokens;
            self.cpu.for_each_row(rows, width, |token, row| {
                for head in row.chunks_exact_mut(key_length as usize) {
                    rotate(self.cpu.instruction_set, head, &angles[token * pairs..][..pairs]);
                }
            });
        }
    }

    /// Writes keys and values to the KV cache and, if layers on other devices may use them, to `inputs`.
    fn store(
        &self,
        shape: &AttentionShape,
        caches: &mut Caches,
        buffers: &Buffers,
        inputs: &mut TokenInputs<'_>,
    ) {
        let Buffers { key, value, .. } = buffers;
        let mut rows = key
            .chunks_exact(shape.key_width() as usize)
            .zip(value.chunks_exact(shape.value_width() as usize));
        for piece in self.pieces {
            let LayerCache::Attention(cache) = self.cache_mut(caches, piece) else {
                unreachable!("{OTHER_CACHE}")
            };
            for (position, (keys, values)) in (piece.first..).zip(rows.by_ref().take(piece.tokens)) {
                cache.write(position, keys, values);
            }
        }
        inputs.store_keys_and_values(self.layer, self.before, key, value);
    }

    fn attend(&self, shape: &AttentionShape, caches: &Caches, buffers: &mut Buffers) {
        let Buffers { query, attended, .. } = buffers;
        let parameters = self.weights.hyperparameters();
        let heads = shape.heads as usize;
        let group_size = heads / shape.kv_heads as usize;
        let scoring = parameters.score_options();
        attended.resize(self.tokens, shape.output_width() as usize);
        let seen = self.pieces.iter().flat_map(|piece| {
            let cache = self.cache(caches, piece);
            (piece.first..piece.first + piece.tokens).map(move |position| {
                (cache, parameters.first_attended_position(self.layer, position)..position + 1)
            })
        });
        let seen: Vec<_> = seen.collect();
        let sinks = self.tensors.attention_sinks;
        let attention = Attention { attended: &seen, query, heads, group_size, scoring, sinks };
        self.cpu.attend(attention, attended.rows_mut());
    }

    /// Returns the KV cache that a piece uses: the cache of its sequence for this layer or, if the layer has no keys and
    /// values of its own, for an earlier layer.
    fn cache<'c>(&self, caches: &'c Caches, piece: &Piece) -> &'c KvCache {
        let layer = self.weights.shape().kv_layer(self.layer);
        match caches.get(&(piece.sequence, layer)).expect(OWN_LAYERS) {
            LayerCache::Attention(cache) => cache,
            LayerCache::DeltaNet(_) => unreachable!("{OTHER_CACHE}"),
        }
    }

    pub(super) fn cache_mut<'c>(&self, caches: &'c mut Caches, piece: &Piece) -> &'c mut LayerCache {
        let layer = self.weights.shape().kv_layer(self.layer);
        caches.get_mut(&(piece.sequence, layer)).expect(OWN_LAYERS)
    }
}
