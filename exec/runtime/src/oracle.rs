//! The scalar oracle: a simple forward pass with which other backends are compared.
//!
//! The oracle computes the equations of [`crate::hyperparameters`] in their order, with scalar kernels on one thread,
//! one token and one row at a time. The fast CPU backend must give the same bits.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::cache::{DeltaNetState, KvCache, LayerCache, create_kv_caches};
use crate::experts::{Route, route};
use crate::token_inputs::{TokenInputs, for_each_pass};
use crate::weights::LayerWeights;
use crate::{Backend, CriticalPathCost, KvCacheOptions, ThreadPool, ThreadPoolOptions, Weights};
use hearth_kernels::attention::{AttentionScratch, ScoreOptions};
use hearth_kernels::delta_net::{convolve, delta_rule, gates, normalise_length};
use hearth_kernels::matmul::{Matrix, scalar_dot};
use hearth_kernels::{Activations, InstructionSet, attention, elementwise};
use hearth_profiles::model::{AttentionShape, DeltaNetShape, GateActivation, PairLayout, TokenMixer};
use hearth_schema::pass::Pass;

const SCALAR: InstructionSet = InstructionSet::SCALAR;

/// The scalar reference backend, with which other backends are compared.
#[derive(Debug)]
pub struct Oracle {
    weights: Arc<Weights>,
    /// The KV caches, keyed by sequence and layer.
    caches: BTreeMap<(u32, u32), LayerCache>,
    /// The layers of other devices whose keys and values layers of this backend use.
    copied_kv_layers: Vec<u32>,
    /// A pool of one thread, used only to measure the cost of a pass.
    pool: ThreadPool,
}

impl Oracle {
    pub fn new(
        weights: Arc<Weights>,
        layers: impl IntoIterator<Item = u32>,
        cache: KvCacheOptions,
    ) -> std::io::Result<Oracle> {
        let (caches, copied_kv_layers) = create_kv_caches(layers, cache, weights.shape());
        let pool = ThreadPool::new(ThreadPoolOptions { threads: 1, pin_workers: false, spin_ns: 0 })?;
        Ok(Oracle { weights, caches, copied_kv_layers, pool })
    }
}

impl Backend for Oracle {
    fn name(&self) -> &'static str {
        "oracle"
    }

    fn forward(&mut self, layers: Range<u32>, hidden: &mut [f32], passes: &[Pass]) -> CriticalPathCost {
        let mut cost = CriticalPathCost::default();
        let weights = Arc::clone(&self.weights);
        for_each_pass(weights.shape(), hidden, passes, |pass, hidden| {
            cost += self.forward_pass(layers.clone(), hidden, pass);
        });
        cost
    }

    fn kv_cache_bytes(&self) -> u64 {
        self.caches.values().map(LayerCache::bytes).sum()
    }
}

impl Oracle {
    fn forward_pass(&mut self, layers: Range<u32>, hidden: &mut [f32], pass: Pass) -> CriticalPathCost {
        let Oracle { weights, caches, copied_kv_layers, pool } = self;
        let (shape, sequence, first) = (weights.shape(), pass.sequence_index, pass.first_position);
        let (hidden, mut inputs) = TokenInputs::split(shape, hidden);
        let ((), cost) = pool.measure(|| {
            inputs.copy_to_caches(shape, copied_kv_layers, &layers, caches, &[pass]);
            for layer in layers {
                let cache = caches
                    .get_mut(&(sequence, shape.kv_layer(layer)))
                    .expect("a stage sends a backend its own layers");
                for (token, row) in hidden.chunks_exact_mut(shape.embedding_length as usize).enumerate() {
                    let at = LayerToken { layer, token, position: first + token as u32 };
                    mixer_block(weights, at, cache, row, &mut inputs);
                    feed_forward_block(weights, layer, row);
                    add_per_layer_input(weights, at, row, &inputs);
                    if let Some(&[scale]) = weights.layer_weights(layer).output_scale {
                        elementwise::scale(SCALAR, row, scale);
                    }
                }
            }
        });
        cost
    }
}

/// Returns the matrix-vector product `[rows]` of `matrix` and `input`, `[row length]`. The input is rounded as the
/// format of the matrix requires. Tests compare the kernels with this function.
pub fn matvec(matrix: Matrix<'_>, input: &[f32]) -> Vec<f32> {
    let mut activations = Activations::default();
    activations.resize(1, input.len());
    activations.rows_mut().copy_from_slice(input);
    activations.quantise_for_format(matrix.format, SCALAR);
    (0..matrix.rows).map(|row| scalar_dot(matrix.format, matrix.row(row), &activations, 0)).collect()
}

/// Returns the input of a block: the hidden state, normalised if the architecture has a norm there.
fn normalised(row: &[f32], weight: Option<&[f32]>, epsilon: f32) -> Vec<f32> {
    let Some(weight) = weight else { return row.to_vec() };
    let mut out = vec![0.0; row.len()];
    elementwise::rms_norm(SCALAR, row, weight, epsilon, &mut out);
    out
}

/// Returns the product of the matrix `index` of a layer and `input`, plus the bias of the matrix, if any.
fn linear(tensors: &LayerWeights<'_>, index: usize, input: &[f32]) -> Vec<f32> {
    let matrix = tensors.matrices[index].expect("the tensors of a layer were checked");
    let mut out = matvec(matrix, input);
    if let Some(bias) = tensors.biases[index] {
        elementwise::add(SCALAR, &mut out, bias);
    }
    out
}

fn normalise_each(rows: &mut [f32], weight: Option<&[f32]>, epsilon: f32) {
    if let Some(weight) = weight {
        for row in rows.chunks_exact_mut(weight.len()) {
            elementwise::rms_norm_in_place(SCALAR, row, weight, epsilon);
        }
    }
}

/// The layer and the token that are computed. `token` is the index in the pass.
#[derive(Clone, Copy)]
struct LayerToken {
    layer: u32,
    token: usize,
    position: u32,
}

fn mixer_block(
    weights: &Weights,
    at: LayerToken,
    cache: &mut LayerCache,
    row: &mut [f32],
    inputs: &mut TokenInputs<'_>,
) {
    let LayerToken { layer, position, .. } = at;
    let (tensors, epsilon) = (&weights.layer_weights(layer), weights.hyperparameters().rms_norm_epsilon);
    let input = normalised(row, tensors.attention_norm, epsilon);
    let mixed = match (cache, weights.shape().mixer(layer)) {
        (LayerCache::Attention(cache), TokenMixer::Attention(shape)) => {
            attention(weights, at, &shape, cache, &input, inputs)
        }
        (LayerCache::DeltaNet(state), TokenMixer::DeltaNet(shape)) => {
            if position == 0 {
                state.clear();
            }
            delta_net(tensors, &shape, state, &input, epsilon)
        }
        _ => unreachable!("a cache is created for the token mixer of its layer"),
    };
    let mut change = linear(tensors, 3, &mixed);
    normalise_each(&mut change, tensors.post_attention_norm, epsilon);
    add_to_hidden(weights, row, change);
}

/// Returns the attention output, `[heads * value_length]`.
fn attention(
    weights: &Weights,
    at: LayerToken,
    shape: &AttentionShape,
    cache: &mut KvCache,
    input: &[f32],
    inputs: &mut TokenInputs<'_>,
) -> Vec<f32> {
    let LayerToken { layer, token, position } = at;
    let (parameters, spec) = (weights.hyperparameters(), weights.shape().architecture.spec());
    let (tensors, epsilon) = (&weights.layer_weights(layer), parameters.rms_norm_epsilon);
    let (key_length, value_length) = (shape.key_length as usize, shape.value_length as usize);
    let mut query = linear(tensors, 0, input);
    let mut gate = Vec::new();
    if spec.has_attention_gate {
        let (queries, gates): (Vec<_>, Vec<_>) =
            query.chunks_exact(2 * key_length).map(|pair| pair.split_at(key_length)).unzip();
        gate = gates.concat();
        query = queries.concat();
    }
    normalise_each(&mut query, tensors.query_norm, epsilon);
    let rope = &parameters.ropes[parameters.rope_index(layer, cache.keys.capacity() as u32)];
    let mut angles = vec![[0.0; 2]; rope.frequencies.len()];
    rope.write_cosines_and_sines(position, &mut angles);
    let rotate = |row: &mut [f32]| {
        for head in row.chunks_exact_mut(key_length) {
            match rope.pair_layout {
                PairLayout::Interleaved => elementwise::apply_rope_interleaved(SCALAR, head, &angles),
                PairLayout::Halves => elementwise::apply_rope_neox(SCALAR, head, &angles),
            }
        }
    };
    rotate(&mut query);
    // A layer without matrices of keys and values uses those of an earlier layer.
    if tensors.matrices[1].is_some() {
        let mut key = linear(tensors, 1, input);
        let mut value = if tensors.matrices[2].is_some() { linear(tensors, 2, input) } else { key.clone() };
        normalise_each(&mut key, tensors.key_norm, epsilon);
        if spec.has_value_norm {
            for head in value.chunks_exact_mut(value_length) {
                elementwise::rms_norm_without_weights(SCALAR, head, epsilon);
            }
        }
        rotate(&mut key);
        cache.write(position as usize, &key, &value);
        inputs.store_keys_and_values(layer, token, &key, &value);
    }

    let seen = parameters.first_attended_position(layer, position as usize)..position as usize + 1;
    let group = (shape.heads / shape.kv_heads) as usize;
    let mut mixed = vec![0.0; shape.heads as usize * value_length];
    let mut scratch = AttentionScratch::default();
    for (head, (query, out)) in
        query.chunks_exact(key_length).zip(mixed.chunks_exact_mut(value_length)).enumerate()
    {
        let sink = tensors.attention_sinks.map(|sinks| sinks[head]);
        let scoring = ScoreOptions { sink, ..parameters.score_options() };
        let keys = cache.keys.rows(head / group, seen.clone());
        let values = cache.values.rows(head / group, seen.clone());
        attention::attend(SCALAR, query, scoring, keys, values, &mut scratch, out);
    }
    elementwise::apply_sigmoid_gate(SCALAR, &mut mixed, &gate);
    mixed
}

/// Returns the output of a gated delta net, `[value heads * head length]`, and updates its state.
fn delta_net(
    tensors: &LayerWeights<'_>,
    shape: &DeltaNetShape,
    state: &mut DeltaNetState,
    input: &[f32],
    epsilon: f32,
) -> Vec<f32> {
    let net = tensors.delta_net.expect("the tensors of a delta net were checked");
    let head = shape.head_length as usize;
    let mut kernels = net.convolution;
    let [mut query, mut key, value] = [0, 1, 2].map(|index| {
        let row = linear(tensors, index, input);
        let history = &mut state.history[index];
        let window = [&history[..], &row].concat();
        history.copy_from_slice(&window[row.len()..]);
        let (own, rest) = kernels.split_at(row.len() * shape.convolution_length as usize);
        kernels = rest;
        let mut out = vec![0.0; row.len()];
        convolve(SCALAR, &window, own, &mut out);
        out
    });
    for row in query.chunks_exact_mut(head).chain(key.chunks_exact_mut(head)) {
        normalise_length(SCALAR, row, epsilon);
    }
    let mut gate = matvec(net.gate, input);
    let (steps, betas) = (matvec(net.alpha, input), matvec(net.beta, input));
    let matrices = state.matrices.chunks_exact_mut(head * head);
    for (index, (matrix, gate)) in matrices.zip(gate.chunks_exact_mut(head)).enumerate() {
        let group = index % shape.key_heads as usize * head;
        let step = steps[index] + net.dt_bias[index];
        let factors = gates(step, net.decay[index], betas[index]);
        let mut out = vec![0.0; head];
        let (query, key, value) =
            (&query[group..][..head], &key[group..][..head], &value[index * head..][..head]);
        delta_rule(SCALAR, matrix, query, key, value, factors, &mut out);
        elementwise::rms_norm_in_place(SCALAR, &mut out, net.norm, epsilon);
        elementwise::swiglu(SCALAR, gate, &out);
    }
    gate
}

/// Adds the input of the layer to the hidden state, if the token has such an input.
fn add_per_layer_input(weights: &Weights, at: LayerToken, row: &mut [f32], inputs: &TokenInputs<'_>) {
    let Some(own) = weights.layer_weights(at.layer).per_layer_input else { return };
    let mut gated = matvec(own.gate, row);
    elementwise::geglu(SCALAR, &mut gated, inputs.per_layer_input(at.layer, at.token..at.token + 1));
    let mut change = matvec(own.projection, &gated);
    normalise_each(&mut change, Some(own.norm), weights.hyperparameters().rms_norm_epsilon);
    add_to_hidden(weights, row, change);
}

fn feed_forward_block(weights: &Weights, layer: u32, row: &mut [f32]) {
    let (tensors, parameters) = (&weights.layer_weights(layer), weights.hyperparameters());
    let input = normalised(row, tensors.feed_forward_norm, parameters.rms_norm_epsilon);
    let gated = |mut gate: Vec<f32>, up: &[f32]| {
        match parameters.gate_activation {
            GateActivation::Silu => elementwise::swiglu(SCALAR, &mut gate, up),
            GateActivation::Gelu => elementwise::geglu(SCALAR, &mut gate, up),
            GateActivation::ClampedSwiglu => elementwise::clamped_swiglu(SCALAR, &mut gate, up),
        }
        gate
    };
    let dense = || {
        let (gate, up) = (linear(tensors, 4, &input), linear(tensors, 5, &input));
        linear(tensors, 6, &gated(gate, &up))
    };
    let mut change = match (tensors.experts, weights.shape().layer_experts(layer)) {
        (Some(experts), Some(shape)) => {
            let (width, embedding) = (shape.feed_forward_length as usize, row.len());
            let is_normalised = weights.shape().architecture.spec().normalises_expert_weights;
            // The result of some rows of the matrix `index`, from `first` on, with their biases.
            let part = |index: usize, matrix: Matrix<'_>, (first, rows): (usize, usize), input: &[f32]| {
                let mut out = matvec(matrix.slice(first, rows), input);
                if let Some(biases) = experts.biases {
                    elementwise::add(SCALAR, &mut out, &biases[index][first..first + rows]);
                }
                out
            };
            let mut scores = part(0, experts.router, (0, shape.count as usize), &input);
            let mut routes = Vec::new();
            route(&mut scores, 0, (shape.used as usize, None), is_normalised, &mut routes);
            let mut sum = if tensors.matrices[4].is_some() { dense() } else { vec![0.0; embedding] };
            if let Some(gate) = experts.shared_gate {
                elementwise::scale_by_sigmoid(SCALAR, &mut sum, &input, gate);
            }
            for Route { expert, weight, .. } in routes {
                let [(gate, gate_row), (up, up_row)] = experts.gate_and_up(expert, width);
                let gate = part(1, gate, (gate_row, width), &input);
                let up = part(2, up, (up_row, width), &input);
                let mut own = part(3, experts.down, (expert * embedding, embedding), &gated(gate, &up));
                elementwise::scale(SCALAR, &mut own, weight);
                elementwise::add(SCALAR, &mut sum, &own);
            }
            sum
        }
        _ => dense(),
    };
    normalise_each(&mut change, tensors.post_feed_forward_norm, parameters.rms_norm_epsilon);
    add_to_hidden(weights, row, change);
}

fn add_to_hidden(weights: &Weights, row: &mut [f32], mut change: Vec<f32>) {
    if let Some(factor) = weights.hyperparameters().residual_scale {
        elementwise::scale(SCALAR, &mut change, factor);
    }
    elementwise::add(SCALAR, row, &change);
}
