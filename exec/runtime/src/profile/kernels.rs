//! The runtime's kernels as the measuring code of `hearth_profiles` calls them.
//!
//! [`CpuKernels`] runs the products, attention and cache writes of [`crate::cpu`] on weights that it is given:
//! the same pool, chunks and instructions as a run has.

use hearth_profiles::measure::{Kernels, memory};
use hearth_profiles::{Bytes, Flops, Format};

use crate::cache::{CacheFormat, CacheShape, LayerCache};
use crate::cpu::{Cpu, Product};
use crate::rows::SharedRows;
use hearth_kernels::product::Matrix;
use hearth_kernels::{Activations, KernelFormat, attention};

/// Query heads, key and value heads, numbers of each, positions in use: a model of 8B in mid-conversation.
const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const LENGTH: usize = 128;
const POSITIONS: usize = 512;

/// Layers whose caches take turns, so that none is in a near cache when its turn comes.
const LAYERS: u64 = 16;

/// The executor's kernels over weights from anywhere.
#[derive(Debug)]
pub struct CpuKernels {
    cpu: Cpu,
    input: Activations, // [tokens, columns]
    out: Vec<f32>,      // [repeats, tokens, rows]
    caches: Vec<LayerCache>,
    turn: usize,
    query: Vec<f32>,  // [HEADS, LENGTH]
    scores: Vec<f32>, // [threads, POSITIONS]
    mixed: Vec<f32>,  // [HEADS, LENGTH]
}

impl CpuKernels {
    pub fn new(cpu: Cpu) -> CpuKernels {
        let scores = vec![0.0; cpu.pool.threads() * POSITIONS];
        CpuKernels {
            cpu,
            input: Activations::default(),
            out: Vec::new(),
            caches: Vec::new(),
            turn: 0,
            query: vec![0.1; HEADS * LENGTH],
            scores,
            mixed: vec![0.0; HEADS * LENGTH],
        }
    }

    /// Caches full of ordinary numbers, made when they are first needed; few where memory is short.
    fn next_cache(&mut self) -> usize {
        if self.caches.is_empty() {
            let shape = CacheShape {
                kv_heads: KV_HEADS,
                context: POSITIONS,
                key_length: LENGTH,
                value_length: LENGTH,
                format: CacheFormat::F16,
            };
            let bytes = (2 * 2 * KV_HEADS * POSITIONS * LENGTH) as u64;
            let count = (memory::available().0 / 8 / bytes).clamp(1, LAYERS);
            self.caches = (0..count).map(|_| filled(shape)).collect();
        }
        self.turn = (self.turn + 1) % self.caches.len();
        self.turn
    }
}

fn filled(shape: CacheShape) -> LayerCache {
    let mut cache = LayerCache::new(shape);
    let row: Vec<f32> = (0..LENGTH).map(|at| 0.01 * at as f32).collect();
    for head in 0..KV_HEADS {
        for position in 0..POSITIONS {
            cache.keys.set(head, position, &row);
            cache.values.set(head, position, &row);
        }
    }
    cache
}

impl Kernels for CpuKernels {
    fn name(&self) -> String {
        let threads = self.cpu.pool.threads();
        let plural = if threads == 1 { "" } else { "s" };
        format!("{} kernels on {threads} thread{plural}", self.cpu.instructions.name())
    }

    fn formats(&self) -> Vec<Format> {
        KernelFormat::ALL.map(KernelFormat::format).to_vec()
    }

    fn multiply(&mut self, format: Format, columns: usize, weights: &[u8], tokens: usize, repeats: usize) {
        let format = KernelFormat::of(format).expect("only formats that were offered are asked for");
        let rows = weights.len() / format.row_bytes(columns).expect("rows are whole blocks");
        if (self.input.tokens(), self.input.length()) != (tokens, columns) || tokens > 1 {
            // A batch is rounded again each time, as in a run; a single vector costs almost nothing.
            self.input.resize(tokens, columns);
            let values = self.input.rows_mut().iter_mut().enumerate();
            values.for_each(|(at, value)| *value = (at % 7) as f32 - 3.0);
        }
        self.out.resize(repeats * tokens * rows, 0.0);
        let matrix = Matrix { format, length: columns, rows, bytes: weights };
        let outputs = self.out.chunks_exact_mut(tokens * rows);
        let mut products: Vec<Product<'_>> = outputs.map(|out| Product { matrix, out }).collect();
        self.cpu.multiply(&mut self.input, &mut products);
    }

    fn attend(&mut self) -> Flops {
        let turn = self.next_cache();
        let cache = &self.caches[turn];
        let out = SharedRows::new(&mut self.mixed, LENGTH);
        let scores = SharedRows::new(&mut self.scores, POSITIONS);
        let (query, instructions) = (&self.query, self.cpu.instructions);
        self.cpu.pool.for_each(HEADS, 1, |participant, heads| {
            // SAFETY: each participant has a row of its own.
            let scores = unsafe { scores.row(participant) };
            for head in heads {
                let group = head / (HEADS / KV_HEADS);
                let (keys, values) =
                    (cache.keys.rows(group, 0..POSITIONS), cache.values.rows(group, 0..POSITIONS));
                // SAFETY: each head is in one chunk.
                let out = unsafe { out.row(head) };
                attention::attend(
                    instructions,
                    &query[head * LENGTH..][..LENGTH],
                    attention::Scoring { scale: 0.1, cap: None },
                    keys,
                    values,
                    scores,
                    out,
                );
            }
        });
        // As `ModelShape::attention_flops_per_layer` counts it.
        Flops((HEADS * POSITIONS * (4 * LENGTH + 5)) as f64)
    }

    fn write_cache(&mut self, tokens: usize) -> Bytes {
        let turn = self.next_cache();
        let cache = &mut self.caches[turn];
        for position in 0..tokens {
            for head in 0..KV_HEADS {
                let row = &self.query[head * LENGTH..][..LENGTH];
                cache.keys.set(head, position % POSITIONS, row);
                cache.values.set(head, position % POSITIONS, row);
            }
        }
        Bytes((2 * 2 * KV_HEADS * LENGTH * tokens) as u64)
    }
}
