//! The CPU backend: all threads of a device compute a layer together.
//!
//! A layer runs several jobs on the thread pool: norms (divided by tokens), matmuls (divided into chunks of weight
//! rows) and attention (divided by pairs of token and head). Threads take chunks of work from a shared counter, so that
//! an interrupted thread does not delay the other threads for long. The result of a chunk does not depend on the
//! thread.
//!
//! A chunk of weight rows has about 256 KiB, because memory is read fastest in long sequences. If dot products read a
//! chunk several times, for the many tokens of a batch, it has about 32 KiB and stays in the L2 cache, so that a batch reads
//! the weights from memory only once.

mod delta_net;
mod experts;
mod layer_pass;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use experts::{MAX_GROUP_ROUTES, MAX_SHARED_TOKENS};
use hearth_profiles::model::{GateActivation, ModelShape, TokenMixer};
use hearth_schema::pass::Pass;
use layer_pass::{Buffers, LayerPass, Piece};

use crate::cache::{KvCache, LayerCache, create_kv_caches};
use crate::experts::RouteOptions;
use crate::residency::ResidencyBarrier;
use crate::token_inputs::TokenInputs;
use crate::{Backend, CriticalPathCost, KvCacheOptions, ThreadPool, Weights};
use hearth_kernels::attention::{AttentionScratch, ScoreOptions};
use hearth_kernels::matmul::{DOT_ROWS, DOT_TOKENS, MatmulOutput, Matrix, matmul_rows};
use hearth_kernels::panel;
use hearth_kernels::{Activations, InstructionSet, attention, elementwise};

/// Target size of a chunk of weight rows that is read once, in bytes.
/// source: measured, see docs/studies/kernels/decode.md
const CHUNK_BYTES: usize = 256 << 10;
/// Target size of a chunk of weight rows that is read several times, in bytes.
const REREAD_CHUNK_BYTES: usize = 32 << 10;
/// Target number of chunks of the matmuls of a job for each thread, if there are enough rows: with fewer, the last
/// chunk of a small matrix keeps one thread busy while the others wait.
const TARGET_CHUNKS_PER_THREAD: usize = 8;
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
    /// What happens with the routes of a mixture's tokens, other than that the router determines them.
    pub route_options: Arc<RouteOptions>,
}

/// A matmul: its matrix and its output. The input is passed separately.
pub(crate) struct Matmul<'a> {
    pub(crate) matrix: Matrix<'a>,
    /// The output, `[tokens, rows]`.
    pub(crate) out: &'a mut [f32],
}

/// The queries of some tokens, and what they attend to.
pub(crate) struct Attention<'a> {
    /// For each token, the KV cache of its sequence and the positions to which it attends.
    pub(crate) attended: &'a [(&'a KvCache, Range<usize>)],
    /// The queries, `[tokens, heads, key_length]`.
    pub(crate) query: &'a [f32],
    pub(crate) heads: usize,
    /// Number of query heads that share one key and value head.
    pub(crate) group_size: usize,
    pub(crate) scoring: ScoreOptions,
    /// The sinks of the heads, if any, `[heads]`.
    pub(crate) sinks: Option<&'a [f32]>,
}

/// A matmul whose rows are computed by one or more jobs.
struct Strip<'a> {
    matrix: &'a Matrix<'a>,
    input: &'a Activations,
    /// The rows that the current job computes.
    rows: Range<usize>,
    /// The output of the rows after `rows`.
    rest: MatmulOutput<'a>,
}

/// The rows of a matmul that a thread computes at a time.
struct Chunk<'a> {
    matrix: &'a Matrix<'a>,
    input: &'a Activations,
    out: MatmulOutput<'a>,
}

impl<'a> Strip<'a> {
    /// Returns the number of rows in a chunk; a multiple of the number of rows that are multiplied together.
    fn chunk_rows(&self, bytes: usize) -> usize {
        let panels = panel::is_profitable(self.matrix.format, self.rest.tokens());
        let is_read_once = panels || self.rest.tokens() <= DOT_TOKENS;
        let bytes = if is_read_once { bytes } else { bytes.min(REREAD_CHUNK_BYTES) };
        let rows = bytes / self.matrix.row_bytes().max(1);
        let together = if panels { panel::PANEL_ROWS } else { DOT_ROWS.max(self.matrix.rows_together()) };
        rows.max(1).next_multiple_of(together)
    }

    fn bytes(&self) -> &'a [u8] {
        let row = self.matrix.row_bytes();
        &self.matrix.bytes[self.rows.start * row..self.rows.end * row]
    }

    /// Advances to the next rows, which end before the row `end`, and adds their chunks to `chunks`.
    fn advance(&mut self, end: usize, chunk_bytes: usize, chunks: &mut Vec<Chunk<'a>>) {
        self.rows = self.rows.end..end;
        let chunk_rows = self.chunk_rows(chunk_bytes);
        chunks.reserve(self.rows.len().div_ceil(chunk_rows));
        for first in self.rows.clone().step_by(chunk_rows) {
            let out = self.rest.split_off_first(chunk_rows.min(end - first));
            chunks.push(Chunk { matrix: self.matrix, input: self.input, out });
        }
    }
}

impl Cpu {
    /// Creates a `Cpu` with the fastest instruction set of this machine. Its threads do not wait for weights.
    pub fn new(thread_pool: Arc<ThreadPool>) -> Cpu {
        let barrier = ResidencyBarrier::always_open();
        Cpu { thread_pool, instruction_set: InstructionSet::detect(), barrier, route_options: Arc::default() }
    }

    /// Returns this CPU with threads that wait at `barrier` until the weights of a matmul are in memory.
    #[must_use]
    pub fn with_barrier(self, barrier: ResidencyBarrier) -> Cpu {
        Cpu { barrier, ..self }
    }

    /// Returns this CPU with options for the routes of a mixture.
    #[must_use]
    pub fn with_route_options(self, route_options: Arc<RouteOptions>) -> Cpu {
        Cpu { route_options, ..self }
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
        let matmuls_per_input = matmuls.len();
        self.multiply_each(std::slice::from_mut(input), matmuls, matmuls_per_input);
    }

    /// Multiplies the first of `inputs` by the matrices of the first `matmuls_per_input` matmuls, the second by those of
    /// the next ones, and so on, together: one wait of the threads for all of them.
    pub(crate) fn multiply_each(
        &self,
        inputs: &mut [Activations],
        matmuls: &mut [Matmul<'_>],
        matmuls_per_input: usize,
    ) {
        assert_eq!(matmuls.len(), inputs.len() * matmuls_per_input, "each input must have its matmuls");
        for (input, matmuls) in inputs.iter_mut().zip(matmuls.chunks(matmuls_per_input)) {
            for matmul in matmuls {
                input.quantise_for_format(matmul.matrix.format, self.instruction_set);
            }
        }
        let strips = inputs.iter().zip(matmuls.chunks_mut(matmuls_per_input)).flat_map(|(input, matmuls)| {
            matmuls.iter_mut().map(move |Matmul { matrix, out }| {
                let rest = MatmulOutput::new(out, input.tokens(), matrix.rows);
                Strip { matrix, input, rows: 0..0, rest }
            })
        });
        let mut strips: Vec<Strip> = strips.collect();
        let bytes: usize = strips.iter().map(|strip| strip.matrix.bytes.len()).sum();
        let chunk_bytes = (bytes / (TARGET_CHUNKS_PER_THREAD * self.thread_pool.threads())).min(CHUNK_BYTES);
        loop {
            let mut chunks = self.next_chunks(&mut strips, chunk_bytes);
            if chunks.is_empty() {
                break;
            }
            self.thread_pool.for_each_chunk_mut(&mut chunks, 1, |_, chunks| {
                for Chunk { matrix, input, out } in chunks {
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
    fn next_chunks<'a>(&self, strips: &mut [Strip<'a>], chunk_bytes: usize) -> Vec<Chunk<'a>> {
        let (mut chunks, mut earlier_wait) = (Vec::new(), false);
        for strip in strips {
            let (matrix, start) = (strip.matrix, strip.rows.end);
            let row = matrix.row_bytes().max(1);
            let together = matrix.rows_together();
            let rest = &matrix.bytes[start * row..];
            let mut end = start;
            if start < matrix.rows && !earlier_wait {
                // Weights arrive in the order of use, so later strips need not be checked.
                let ready = if chunks.is_empty() {
                    self.barrier.wait(rest, row * together)
                } else {
                    self.barrier.resident_prefix_bytes(rest)
                };
                end = matrix.rows.min(start + ready / row / together * together);
                earlier_wait = end < matrix.rows;
            }
            strip.advance(end, chunk_bytes, &mut chunks);
        }
        chunks
    }

    /// Computes the attention of all pairs of token and head. `out` is `[tokens, heads, value_length]`.
    pub(crate) fn attend(
        &self,
        Attention { attended, query, heads, group_size, scoring, sinks }: Attention<'_>,
        out: &mut [f32],
    ) {
        let Some((cache, _)) = attended.first() else { return };
        let (key_length, value_length) = (cache.keys.head_length, cache.values.head_length);
        assert_eq!(
            (query.len(), out.len()),
            (attended.len() * heads * key_length, attended.len() * heads * value_length),
            "each token must have a query and an output"
        );
        // The number of cached values that one head reads at most.
        let positions = attended.iter().map(|(_, positions)| positions.len()).max().unwrap_or(1);
        let values = positions * (key_length + value_length);
        let grain = (MIN_PARALLEL_ELEMENTS / values).max(1) * value_length;
        self.thread_pool.for_each_chunk_mut(out, grain, |first, out| {
            SCRATCH.with_borrow_mut(|scratch| {
                for (item, out) in (first / value_length..).zip(out.chunks_exact_mut(value_length)) {
                    let (cache, positions) = &attended[item / heads];
                    let head = item % heads / group_size;
                    let keys = cache.keys.rows(head, positions.clone());
                    let values = cache.values.rows(head, positions.clone());
                    let query = &query[item * key_length..][..key_length];
                    let scoring = ScoreOptions { sink: sinks.map(|sinks| sinks[item % heads]), ..scoring };
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
                GateActivation::ClampedSwiglu => elementwise::clamped_swiglu(self.instruction_set, gate, up),
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
    /// The layers of other devices whose keys and values layers of this backend use.
    copied_kv_layers: Vec<u32>,
    buffers: Buffers,
}

impl CpuBackend {
    pub fn new(
        weights: Arc<Weights>,
        layers: impl IntoIterator<Item = u32>,
        cache: KvCacheOptions,
        cpu: Cpu,
    ) -> CpuBackend {
        let (caches, copied_kv_layers) = create_kv_caches(layers, cache, weights.shape());
        CpuBackend { weights, cpu, caches, copied_kv_layers, buffers: Buffers::default() }
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> &'static str {
        self.cpu.instruction_set.name()
    }

    fn forward(&mut self, layers: Range<u32>, hidden: &mut [f32], passes: &[Pass]) -> CriticalPathCost {
        let CpuBackend { weights, cpu, caches, copied_kv_layers, buffers } = self;
        let shape = weights.shape();
        let embedding = shape.embedding_length as usize;
        let (hidden, mut shared) = TokenInputs::split(shape, hidden);
        // With a barrier, weights are evicted as soon as they have been used, so a second part would read them again.
        let part = if cpu.barrier.is_open() { MAX_PART_TOKENS } else { usize::MAX / embedding };
        let pieces = Piece::of_parts(passes, part);
        let ((), cost) = cpu.thread_pool.measure(|| {
            buffers.fill_angles(weights, passes);
            shared.copy_to_caches(shape, copied_kv_layers, &layers, caches, passes);
            for layer in layers {
                let tensors = weights.layer_weights(layer);
                let mut before = 0;
                for (hidden, pieces) in hidden.chunks_mut(part * embedding).zip(&pieces) {
                    let tokens = hidden.len() / embedding;
                    let pass = LayerPass { weights, cpu, layer, tensors, tokens, before, pieces };
                    pass.run(caches, buffers, hidden, &mut shared);
                    before += tokens;
                }
            }
        });
        cost
    }

    fn release(&mut self, sequence: u32, layers: Range<u32>) {
        for layer in layers {
            if let Some(cache) = self.caches.get_mut(&(sequence, layer)) {
                cache.release();
            }
        }
    }

    fn copy_positions(&mut self, from: u32, to: u32, positions: u32, mut layers: Range<u32>) -> bool {
        layers.all(|layer| {
            // The map has no two mutable references.
            let Some(mut copy) = self.caches.remove(&(to, layer)) else { return false };
            let is_copied = self
                .caches
                .get(&(from, layer))
                .is_some_and(|source| copy.copy_positions(source, positions as usize));
            self.caches.insert((to, layer), copy);
            is_copied
        })
    }

    fn kv_cache_bytes(&self) -> u64 {
        self.caches.values().map(LayerCache::bytes).sum()
    }
}

/// Returns the size in bytes of the buffers, the hidden states and one row of logits of a pass of `tokens` tokens. This
/// is an upper bound if the pass is computed in parts.
pub fn buffer_bytes(shape: &ModelShape, tokens: u32, threads: usize) -> u64 {
    let embedding = shape.activation_length();
    let feed_forward = u64::from(shape.largest_feed_forward_length());
    let attention = shape.largest_attention();
    let gate = if shape.architecture.spec().has_attention_gate { 2 * attention.query_width() } else { 0 };
    let of_attention = 2 * attention.query_width() + gate + attention.key_width() + attention.value_width();
    let of_delta_net = match shape.hybrid.map(|hybrid| hybrid.other) {
        Some(TokenMixer::DeltaNet(net)) => 2 * net.channels() + 2 * net.value_width(),
        _ => 0,
    };
    // The scores, and the input, gate, up projection and outputs of experts.
    let [of_experts, of_shared_experts] = shape.experts.map_or([0; 2], |experts| {
        let of_route = 2 * embedding + 3 * u64::from(experts.feed_forward_length);
        let slots = u64::from(experts.count).min(MAX_GROUP_ROUTES as u64);
        [u64::from(experts.count) + of_route, slots * MAX_SHARED_TOKENS as u64 * of_route]
    });
    let values = u64::from(tokens)
        * (3 * embedding + of_experts + of_attention + of_delta_net + 5 * feed_forward / 2)
        + threads as u64 * u64::from(shape.context_length.min(4096))
        + u64::from(shape.vocab_size)
        + of_shared_experts;
    4 * values
}
