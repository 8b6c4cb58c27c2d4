//! The scalar oracle: a simple forward pass with which other backends are compared.
//!
//! The oracle computes the equations of [`crate::hyperparameters`] in their order, with scalar kernels on one thread,
//! one token and one row at a time. The fast CPU backend must give the same bits.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::cache::{LayerCache, create_kv_caches};
use crate::weights::LayerWeights;
use crate::{Backend, CriticalPathCost, KvCacheOptions, ThreadPool, ThreadPoolOptions, Weights};
use hearth_kernels::attention::ScoreOptions;
use hearth_kernels::matmul::{Matrix, scalar_dot};
use hearth_kernels::{Activations, InstructionSet, attention, elementwise};
use hearth_profiles::model::{GateActivation, PairLayout};

const SCALAR: InstructionSet = InstructionSet::SCALAR;

/// The scalar reference backend, with which other backends are compared.
#[derive(Debug)]
pub struct Oracle {
    weights: Arc<Weights>,
    /// The KV caches, keyed by sequence and layer.
    caches: BTreeMap<(u32, u32), LayerCache>,
    /// A pool of one thread, used only to measure the cost of a pass.
    pool: ThreadPool,
}

impl Oracle {
    pub fn new(
        weights: Arc<Weights>,
        layers: impl IntoIterator<Item = u32>,
        cache: KvCacheOptions,
    ) -> std::io::Result<Oracle> {
        let caches = create_kv_caches(layers, cache, weights.shape());
        let pool = ThreadPool::new(ThreadPoolOptions { threads: 1, pin_workers: false, spin_ns: 0 })?;
        Ok(Oracle { weights, caches, pool })
    }
}

impl Backend for Oracle {
    fn name(&self) -> &'static str {
        "oracle"
    }

    fn forward(
        &mut self,
        sequence: u32,
        layers: Range<u32>,
        hidden: &mut [f32],
        first: u32,
    ) -> CriticalPathCost {
        let Oracle { weights, caches, pool } = self;
        let width = weights.shape().embedding_length as usize;
        let ((), cost) = pool.measure(|| {
            for layer in layers {
                let cache =
                    caches.get_mut(&(sequence, layer)).expect("a stage sends a backend its own layers");
                for (position, row) in (first..).zip(hidden.chunks_exact_mut(width)) {
                    attention_block(weights, layer, cache, row, position);
                    feed_forward_block(weights, layer, row);
                }
            }
        });
        cost
    }

    fn kv_cache_bytes(&self) -> u64 {
        self.caches.values().map(LayerCache::bytes).sum()
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
    let mut out = matvec(tensors.matrices[index], input);
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

fn attention_block(weights: &Weights, layer: u32, cache: &mut LayerCache, row: &mut [f32], position: u32) {
    let (shape, parameters) = (weights.shape(), weights.hyperparameters());
    let (tensors, epsilon) = (&weights.layer_weights(layer), parameters.rms_norm_epsilon);
    let (key_length, value_length) = (shape.key_length as usize, shape.value_length as usize);
    let input = normalised(row, tensors.attention_norm, epsilon);
    let [mut query, mut key, value] = [0, 1, 2].map(|index| linear(tensors, index, &input));
    normalise_each(&mut query, tensors.query_norm, epsilon);
    normalise_each(&mut key, tensors.key_norm, epsilon);

    let rope = &parameters.ropes[parameters.rope_index(layer, cache.keys.capacity() as u32)];
    let mut angles = vec![[0.0; 2]; rope.frequencies.len()];
    rope.write_cosines_and_sines(position, &mut angles);
    for head in query.chunks_exact_mut(key_length).chain(key.chunks_exact_mut(key_length)) {
        match rope.pair_layout {
            PairLayout::Interleaved => elementwise::apply_rope_interleaved(SCALAR, head, &angles),
            PairLayout::Halves => elementwise::apply_rope_neox(SCALAR, head, &angles),
        }
    }
    cache.write(position as usize, &key, &value);

    let seen = parameters.first_attended_position(layer, position as usize)..position as usize + 1;
    let group = (shape.heads / shape.kv_heads) as usize;
    let scoring = ScoreOptions { scale: parameters.attention_scale, softcap: parameters.attention_softcap };
    let mut mixed = vec![0.0; shape.heads as usize * value_length];
    let mut scores = vec![0.0; seen.len()];
    for (head, (query, out)) in
        query.chunks_exact(key_length).zip(mixed.chunks_exact_mut(value_length)).enumerate()
    {
        let keys = cache.keys.rows(head / group, seen.clone());
        let values = cache.values.rows(head / group, seen.clone());
        attention::attend(SCALAR, query, scoring, keys, values, &mut scores, out);
    }
    let mut change = linear(tensors, 3, &mixed);
    normalise_each(&mut change, tensors.post_attention_norm, epsilon);
    add_to_hidden(weights, row, change);
}

fn feed_forward_block(weights: &Weights, layer: u32, row: &mut [f32]) {
    let (tensors, parameters) = (&weights.layer_weights(layer), weights.hyperparameters());
    let input = normalised(row, tensors.feed_forward_norm, parameters.rms_norm_epsilon);
    let [mut gate, up] = [4, 5].map(|index| linear(tensors, index, &input));
    match parameters.gate_activation {
        GateActivation::Silu => elementwise::swiglu(SCALAR, &mut gate, &up),
        GateActivation::Gelu => elementwise::geglu(SCALAR, &mut gate, &up),
    }
    let mut change = linear(tensors, 6, &gate);
    normalise_each(&mut change, tensors.post_feed_forward_norm, parameters.rms_norm_epsilon);
    add_to_hidden(weights, row, change);
}

fn add_to_hidden(weights: &Weights, row: &mut [f32], mut change: Vec<f32>) {
    if let Some(factor) = weights.hyperparameters().residual_scale {
        elementwise::scale(SCALAR, &mut change, factor);
    }
    elementwise::add(SCALAR, row, &change);
}
