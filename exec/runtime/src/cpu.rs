//! The CPU backend: all threads of a device compute a layer together.
//!
//! A layer runs several jobs on the thread pool: norms (divided by tokens), matmuls (divided into chunks of weight
//! rows) and attention (divided by pairs of token and head). Threads take chunks of work from a shared counter, so that
//! an interrupted thread does not delay the other threads for long. The result of a chunk does not depend on the
//! thread.
//!
//! A chunk of weight rows has about 32 KiB. It stays in the L2 cache while it is multiplied by all tiles of a batch, so
//! that a batch reads the weights from memory only once.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use hearth_profiles::model::{GateActivation, ModelShape, PairLayout};

use crate::cache::{LayerCache, create_kv_caches};
use crate::residency::ResidencyBarrier;
use crate::weights::LayerWeights;
use crate::{Backend, CriticalPathCost, KvCacheOptions, ThreadPool, Weights};
use hearth_kernels::attention::{AttentionScratch, ScoreOptions};
use hearth_kernels::matmul::{MatmulOutput, Matrix, matmul_rows};
use hearth_kernels::panel;
use hearth_kernels::{Activations, InstructionSet, attention, elementwise};

/// Target size of a chunk of weight rows, in bytes; a chunk has at least one row.
const CHUNK_BYTES: usize = 32 << 10;
/// Minimum number of elements for which a job on all threads is faster than a loop on the calling thread.
const MIN_PARALLEL_ELEMENTS: usize = 16 << 10;

/// Maximum number of tokens of a batch that are computed together in a layer. More tokens give little speedup,
/// because the batch is already compute-bound, and need larger buffers (measured: `docs/studies/kernels/batches.md`).
const MAX_PART_TOKENS: usize = 96;

thread_local! {
    /// The buffers of attention. All calls on a thread reuse them, so that a call rarely allocates memory.
    static SCRATCH: RefCell<AttentionScratch> = RefCell::default();
}

/// The compute threads of a process, with the SIMD instruction set and the residency barrier that they use.
#[derive(Debug, Clone)]
pub struct Cpu {
    /// The thread pool, shared by all computations of the process.
    pub thread_pool: Arc<ThreadPool>,
    pub instruction_set: InstructionSet,
    /// The barrier that blocks threads until the weights of a matmul are in memory.
    pub barrier: ResidencyBarrier,
}

/// A matmul: its matrix and its output. The input is passed separately.
pub(crate) struct Matmul<'a> {
    pub(crate) matrix: Matrix<'a>,
    /// The output, `[tokens, rows]`.
    pub(crate) out: &'a mut [f32],
}

/// The queries of some tokens, and the KV cache to which they attend.
pub(crate) struct Attention<'a> {
    pub(crate) cache: &'a LayerCache,
    /// The queries, `[tokens, heads, key_length]`.
    pub(crate) query: &'a [f32],
    pub(crate) heads: usize,
    /// Number of query heads that share one key and value head.
    pub(crate) group_size: usize,
    pub(crate) scoring: ScoreOptions,
}

/// A matmul whose rows are computed by one or more jobs.
struct Strip<'a> {
    matrix: &'a Matrix<'a>,
    /// The rows that the current job computes.
    rows: Range<usize>,
    /// The output of the rows after `rows`.
    rest: MatmulOutput<'a>,
}

/// The rows of a matmul that a thread computes at a time.
struct Chunk<'a> {
    matrix: &'a Matrix<'a>,
    out: MatmulOutput<'a>,
}

impl<'a> Strip<'a> {
    /// Returns the number of rows in a chunk; a multiple of the panel size if panels are used.
    fn chunk_rows(&self) -> usize {
        let rows = (CHUNK_BYTES / self.matrix.row_bytes().max(1)).max(1);
        if panel::is_profitable(self.matrix.format, self.rest.tokens()) {
            rows.next_multiple_of(panel::PANEL_ROWS)
        } else {
            rows
        }
    }

    fn bytes(&self) -> &'a [u8] {
        let row = self.matrix.row_bytes();
        &self.matrix.bytes[self.rows.start * row..self.rows.end * row]
    }

    /// Advances to the next rows, which end before the row `end`, and adds their chunks to `chunks`.
    fn advance(&mut self, end: usize, chunks: &mut Vec<Chunk<'a>>) {
        self.rows = self.rows.end..end;
        let chunk_rows = self.chunk_rows();
        chunks.reserve(self.rows.len().div_ceil(chunk_rows));
        for first in self.rows.clone().step_by(chunk_rows) {
            let out = self.rest.split_off_first(chunk_rows.min(end - first));
            chunks.push(Chunk { matrix: self.matrix, out });
        }
    }
}

impl Cpu {
    /// Creates a `Cpu` with the fastest instruction set of this machine. Its threads do not wait for weights.
    pub fn new(thread_pool: Arc<ThreadPool>) -> Cpu {
        let barrier = ResidencyBarrier::always_open();
        Cpu { thread_pool, instruction_set: InstructionSet::detect(), barrier }
    }

    /// Returns this CPU with threads that wait at `barrier` until the weights of a matmul are in memory.
    #[must_use]
    pub fn with_barrier(self, barrier: ResidencyBarrier) -> Cpu {
        Cpu { barrier, ..self }
    }

    /// Calls `body` with the index of each token and its row of `rows`, `[tokens, width]`. Uses all threads if there
    /// are enough elements.
    pub(crate) fn for_each_row(
        &self,
        rows: &mut [f32],
        width: usize,
        body: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        assert!(rows.len().is_multiple_of(width), "a buffer must be whole rows");
        let grain = (MIN_PARALLEL_ELEMENTS / width).max(1) * width;
        self.thread_pool.for_each_chunk_mut(rows, grain, |first, rows| {
            for (token, row) in (first / width..).zip(rows.chunks_exact_mut(width)) {
                body(token, row);
            }
        });
    }

    /// Computes `into = RMSNorm(rows)`, both `[tokens, length of weight]`.
    pub(crate) fn rms_norm_rows(&self, rows: &[f32], weight: &[f32], epsilon: f32, into: &mut Activations) {
        let width = weight.len();
        let tokens = rows.len() / width;
        into.resize(tokens, width);
        self.for_each_row(into.rows_mut(), width, |token, out| {
            let row = &rows[token * width..][..width];
            elementwise::rms_norm(self.instruction_set, row, weight, epsilon, out);
        });
    }

    /// Multiplies `input` by the matrices of all matmuls, in several jobs if weights are still being read.
    pub(crate) fn multiply(&self, input: &mut Activations, matmuls: &mut [Matmul<'_>]) {
        let tokens = input.tokens();
        for matmul in &*matmuls {
            input.quantise_for_format(matmul.matrix.format, self.instruction_set);
        }
        let mut strips: Vec<Strip> = matmuls
            .iter_mut()
            .map(|Matmul { matrix, out }| Strip {
                matrix,
                rows: 0..0,
                rest: MatmulOutput::new(out, tokens, matrix.rows),
            })
            .collect();
        loop {
            let mut chunks = self.next_chunks(&mut strips);
            if chunks.is_empty() {
                break;
            }
            self.thread_pool.for_each_chunk_mut(&mut chunks, 1, |_, chunks| {
                for Chunk { matrix, out } in chunks {
                    matmul_rows(self.instruction_set, **matrix, input, out);
                }
            });
            for strip in &strips {
                self.barrier.mark_used(strip.bytes());
            }
        }
    }

    /// Advances each strip to its next rows whose weights are in memory, and returns the chunks of these rows; waits if
    /// there are no such rows. Returns no chunks if all rows have been computed.
    fn next_chunks<'a>(&self, strips: &mut [Strip<'a>]) -> Vec<Chunk<'a>> {
        let (mut chunks, mut earlier_wait) = (Vec::new(), false);
        for strip in strips {
            let (matrix, start) = (strip.matrix, strip.rows.end);
            let row = matrix.row_bytes().max(1);
            let rest = &matrix.bytes[start * row..];
            let mut end = start;
            if start < matrix.rows && !earlier_wait {
                // Weights arrive in the order of use, so later strips need not be checked.
                let ready = if chunks.is_empty() {
                    self.barrier.wait(rest, row)
                } else {
                    self.barrier.resident_prefix_bytes(rest)
                };
                end = matrix.rows.min(start + ready / row);
                earlier_wait = end < matrix.rows;
            }
            strip.advance(end, &mut chunks);
        }
        chunks
    }

    /// Computes the attention of all pairs of token and head. `positions` returns the positions to which a token
    /// attends; `out` is `[tokens, heads, value_length]`.
    pub(crate) fn attend(
        &self,
        Attention { cache, query, heads, group_size, scoring }: Attention<'_>,
        positions: impl Fn(usize) -> Range<usize> + Sync,
        out: &mut [f32],
    ) {
        let (key_length, value_length) = (cache.keys.head_length, cache.values.head_length);
        let tokens = query.len() / (heads * key_length);
        assert_eq!(out.len(), tokens * heads * value_length, "the output must have a row for each query");
        // The number of cached values that one head of the last token reads.
        let values = positions(tokens - 1).end * (key_length + value_length);
        let grain = (MIN_PARALLEL_ELEMENTS / values).max(1) * value_length;
        self.thread_pool.for_each_chunk_mut(out, grain, |first, out| {
            SCRATCH.with_borrow_mut(|scratch| {
                for (item, out) in (first / value_length..).zip(out.chunks_exact_mut(value_length)) {
                    let (seen, head) = (positions(item / heads), item % heads / group_size);
                    let (keys, values) =
                        (cache.keys.rows(head, seen.clone()), cache.values.rows(head, seen.clone()));
                    let query = &query[item * key_length..][..key_length];
                    attention::attend(self.instruction_set, query, scoring, keys, values, scratch, out);
                }
            });
        });
    }

    /// Computes `gate = activation(gate) * up`, both `[tokens, width]`.
    fn gated(&self, gating: GateActivation, gate: &mut [f32], up: &[f32], width: usize) {
        self.for_each_row(gate, width, |token, gate| {
            let up = &up[token * width..][..width];
            match gating {
                GateActivation::Silu => elementwise::swiglu(self.instruction_set, gate, up),
                GateActivation::Gelu => elementwise::geglu(self.instruction_set, gate, up),
            }
        });
    }

    /// Computes `hidden += change`, both `[tokens, width]`.
    fn add(&self, hidden: &mut [f32], change: &[f32], width: usize) {
        self.for_each_row(hidden, width, |token, row| {
            elementwise::add(self.instruction_set, row, &change[token * width..][..width]);
        });
    }
}

#[derive(Debug)]
pub struct CpuBackend {
    weights: Arc<Weights>,
    cpu: Cpu,
    /// The KV caches, keyed by sequence and layer.
    caches: BTreeMap<(u32, u32), LayerCache>,
    buffers: Buffers,
}

/// The buffers of a pass, which are reused so that computing a token allocates no memory.
#[derive(Debug, Default)]
struct Buffers {
    input: Activations,    // [tokens, embedding]
    attended: Activations, // [tokens, heads * value_length]
    gated: Activations,    // [tokens, feed_forward], first only the gate
    query: Vec<f32>,       // [tokens, heads * key_length]
    key: Vec<f32>,         // [tokens, kv_heads * key_length]
    value: Vec<f32>,       // [tokens, kv_heads * value_length]
    up: Vec<f32>,          // [tokens, feed_forward]
    change: Vec<f32>,      // [tokens, embedding]
    /// Cosine and sine for each rotary embedding of the model, [tokens of the batch, pairs].
    angles: Vec<Vec<[f32; 2]>>,
}

impl CpuBackend {
    pub fn new(
        weights: Arc<Weights>,
        layers: impl IntoIterator<Item = u32>,
        cache: KvCacheOptions,
        cpu: Cpu,
    ) -> CpuBackend {
        let caches = create_kv_caches(layers, cache, weights.shape());
        CpuBackend { weights, cpu, caches, buffers: Buffers::default() }
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> &'static str {
        self.cpu.instruction_set.name()
    }

    fn forward(
        &mut self,
        sequence: u32,
        layers: Range<u32>,
        hidden: &mut [f32],
        first: u32,
    ) -> CriticalPathCost {
        let CpuBackend { weights, cpu, caches, buffers } = self;
        let embedding = weights.shape().embedding_length as usize;
        // With a barrier, weights are evicted as soon as they have been used, so a second part would read them again.
        let part = if cpu.barrier.is_open() { MAX_PART_TOKENS } else { usize::MAX / embedding };
        let ((), cost) = cpu.thread_pool.measure(|| {
            buffers.fill_angles(weights, hidden.len() / embedding, first);
            for layer in layers {
                let cache =
                    caches.get_mut(&(sequence, layer)).expect("a stage sends a backend its own layers");
                let tensors = weights.layer_weights(layer);
                for (index, hidden) in hidden.chunks_mut(part * embedding).enumerate() {
                    let (tokens, before) = (hidden.len() / embedding, index * part);
                    buffers.resize(weights.shape(), tokens);
                    let first = first as usize + before;
                    let pass = LayerPass { weights, cpu, layer, tensors, tokens, before, first };
                    pass.attention_block(cache, buffers, hidden);
                    pass.feed_forward_block(buffers, hidden);
                }
            }
        });
        cost
    }

    fn kv_cache_bytes(&self) -> u64 {
        self.caches.values().map(LayerCache::bytes).sum()
    }
}

/// Returns the size in bytes of the buffers, the hidden states and one row of logits of a pass of `tokens` tokens. This
/// is an upper bound if the pass is computed in parts.
pub fn buffer_bytes(shape: &ModelShape, tokens: u32, threads: usize) -> u64 {
    let (embedding, feed_forward) = (u64::from(shape.embedding_length), u64::from(shape.feed_forward_length));
    let (heads, keys) = (shape.query_width() * 2, shape.key_width() + shape.value_width());
    let values = u64::from(tokens) * (3 * embedding + heads + keys + 5 * feed_forward / 2)
        + threads as u64 * u64::from(shape.context_length.min(4096))
        + u64::from(shape.vocab_size);
    4 * values
}

impl Buffers {
    fn resize(&mut self, shape: &ModelShape, tokens: usize) {
        let feed_forward = shape.feed_forward_length as usize;
        self.query.resize(tokens * shape.query_width() as usize, 0.0);
        self.key.resize(tokens * shape.key_width() as usize, 0.0);
        self.value.resize(tokens * shape.value_width() as usize, 0.0);
        self.gated.resize(tokens, feed_forward);
        self.up.resize(tokens * feed_forward, 0.0);
        self.change.resize(tokens * shape.embedding_length as usize, 0.0);
    }

    /// Computes the cosine and sine of the rotation angles of `tokens` tokens from the position `first` on.
    fn fill_angles(&mut self, weights: &Weights, tokens: usize, first: u32) {
        let ropes = &weights.hyperparameters().ropes;
        self.angles.resize(ropes.len(), Vec::new());
        for (rope, angles) in ropes.iter().zip(&mut self.angles) {
            let pairs = rope.frequencies.len();
            angles.resize(tokens * pairs, [0.0; 2]);
            for (position, angles) in (first..).zip(angles.chunks_exact_mut(pairs)) {
                rope.write_cosines_and_sines(position, angles);
            }
        }
    }
}

/// The computation of one layer for one part of a batch.
struct LayerPass<'a> {
    weights: &'a Weights,
    cpu: &'a Cpu,
    layer: u32,
    tensors: LayerWeights<'a>,
    tokens: usize,
    /// Number of tokens of the batch that precede this part.
    before: usize,
    /// Position in the sequence of the first token of this part.
    first: usize,
}

impl LayerPass<'_> {
    fn attention_block(&self, cache: &mut LayerCache, buffers: &mut Buffers, hidden: &mut [f32]) {
        let (cpu, tensors) = (self.cpu, &self.tensors);
        let Buffers { input, query, key, value, .. } = &mut *buffers;
        self.write_block_input(hidden, tensors.attention_norm, input);
        let [query_matrix, key_matrix, value_matrix, matrix, ..] = tensors.matrices;
        let [query_bias, key_bias, value_bias, bias, ..] = tensors.biases;
        let mut matmuls = [
            Matmul { matrix: query_matrix, out: query },
            Matmul { matrix: key_matrix, out: key },
            Matmul { matrix: value_matrix, out: value },
        ];
        cpu.multiply(input, &mut matmuls);
        self.add_bias_and_norm(query, query_bias, tensors.query_norm);
        self.add_bias_and_norm(key, key_bias, tensors.key_norm);
        self.add_bias_and_norm(value, value_bias, None);
        self.rotate_and_store(cache, buffers);
        self.attend(cache, buffers);
        let Buffers { attended, change, .. } = buffers;
        cpu.multiply(attended, &mut [Matmul { matrix, out: change }]);
        self.add_bias_and_norm(change, bias, tensors.post_attention_norm);
        self.add_to_hidden(hidden, change);
    }

    fn feed_forward_block(&self, buffers: &mut Buffers, hidden: &mut [f32]) {
        let (parameters, cpu, tensors) = (self.weights.hyperparameters(), self.cpu, &self.tensors);
        let Buffers { input, gated, up, change, .. } = buffers;
        self.write_block_input(hidden, tensors.feed_forward_norm, input);
        let [.., gate_matrix, up_matrix, matrix] = tensors.matrices;
        let [.., gate_bias, up_bias, bias] = tensors.biases;
        let mut matmuls =
            [Matmul { matrix: gate_matrix, out: gated.rows_mut() }, Matmul { matrix: up_matrix, out: up }];
        cpu.multiply(input, &mut matmuls);
        self.add_bias_and_norm(gated.rows_mut(), gate_bias, None);
        self.add_bias_and_norm(up, up_bias, None);
        cpu.gated(parameters.gate_activation, gated.rows_mut(), up, matrix.row_length);
        cpu.multiply(gated, &mut [Matmul { matrix, out: change }]);
        self.add_bias_and_norm(change, bias, tensors.post_feed_forward_norm);
        self.add_to_hidden(hidden, change);
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
        let width = hidden.len() / self.tokens;
        if let Some(factor) = self.weights.hyperparameters().residual_scale {
            self.cpu.for_each_row(change, width, |_, row| {
                elementwise::scale(self.cpu.instruction_set, row, factor);
            });
        }
        self.cpu.add(hidden, change, width);
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

    /// Applies the rotary embedding to queries and keys, and writes keys and values to the KV cache.
    fn rotate_and_store(&self, cache: &mut LayerCache, buffers: &mut Buffers) {
        let Buffers { query, key, value, angles, .. } = buffers;
        let shape = self.weights.shape();
        let key_length = shape.key_length as usize;
        let (query_width, key_width) = (shape.query_width() as usize, shape.key_width() as usize);
        let parameters = self.weights.hyperparameters();
        let rope_index = parameters.rope_index(self.layer, cache.keys.capacity() as u32);
        let rope = &parameters.ropes[rope_index];
        let rotate = match rope.pair_layout {
            PairLayout::Interleaved => elementwise::apply_rope_interleaved,
            PairLayout::Halves => elementwise::apply_rope_neox,
        };
        let pairs = rope.frequencies.len();
        let angles = &angles[rope_index][self.before * pairs..][..self.tokens * pairs];
        for (rows, width) in [(query, query_width), (&mut *key, key_width)] {
            self.cpu.for_each_row(rows, width, |token, row| {
                for head in row.chunks_exact_mut(key_length) {
                    rotate(self.cpu.instruction_set, head, &angles[token * pairs..][..pairs]);
                }
            });
        }
        for (token, (keys, values)) in
            key.chunks_exact(key_width).zip(value.chunks_exact(shape.value_width() as usize)).enumerate()
        {
            cache.write(self.first + token, keys, values);
        }
    }

    fn attend(&self, cache: &LayerCache, buffers: &mut Buffers) {
        let Buffers { query, attended, .. } = buffers;
        let (shape, parameters) = (self.weights.shape(), self.weights.hyperparameters());
        let (tokens, heads) = (self.tokens, shape.heads as usize);
        let group_size = heads / shape.kv_heads as usize;
        let scoring =
            ScoreOptions { scale: parameters.attention_scale, softcap: parameters.attention_softcap };
        attended.resize(tokens, heads * shape.value_length as usize);
        let positions = |token: usize| {
            let position = self.first + token;
            parameters.first_attended_position(self.layer, position)..position + 1
        };
        let attention = Attention { cache, query, heads, group_size, scoring };
        self.cpu.attend(attention, positions, attended.rows_mut());
    }
}
