//! Connects the runtime's kernels to the device measurements of `hearth_profiles`.
//!
//! [`CpuKernels`] runs the matmuls, attention and KV cache writes of [`crate::cpu`] on given weights, with the same
//! threads, chunks and instruction set as in a run.

use hearth_profiles::measure::{Kernels, memory};
use hearth_profiles::{Bytes, Flops, Format};

use crate::KvFormat;
use crate::cache::{HeadRows, KvCache};
use crate::cpu::{Attention, Cpu, Matmul};
use hearth_kernels::attention::ScoreOptions;
use hearth_kernels::interleaved::can_interleave;
use hearth_kernels::matmul::{Layout, Matrix};
use hearth_kernels::{Activations, elementwise};

// Widths, number and length of heads, as in an 8B model.
const EMBEDDING: usize = 4096;
const FEED_FORWARD: usize = 14336;
/// The gates of measured activation functions. They change little if they are computed from themselves, because the
/// sigmoid of a large number is near 1.
const GATE: f32 = 10.0;
const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const LENGTH: usize = 128;
/// Number of cached positions over which attention is measured, as in the middle of a conversation.
const POSITIONS: usize = 512;

/// Maximum number of KV caches. The measurements use them in turn, so that none stays in the CPU's cache.
const MAX_CACHES: u64 = 16;

/// Runs the CPU kernels of the runtime on the weights that a device measurement provides.
#[derive(Debug)]
pub struct CpuKernels {
    cpu: Cpu,
    /// The layout of matrices that can be packed.
    layout: Layout,
    input: Activations, // [tokens, columns]
    out: Vec<f32>,      // [repeats, tokens, rows]
    caches: Vec<KvCache>,
    current: usize,
    query: Vec<f32>,  // [HEADS, LENGTH]
    mixed: Vec<f32>,  // [HEADS, LENGTH]
    norm: Vec<f32>,   // [EMBEDDING]
    change: Vec<f32>, // [EMBEDDING]
    up: Vec<f32>,     // [FEED_FORWARD]
    hidden: Vec<f32>, // [tokens, EMBEDDING]
    gates: Vec<f32>,  // [tokens, FEED_FORWARD]
}

impl CpuKernels {
    pub fn new(cpu: Cpu) -> CpuKernels {
        CpuKernels {
            cpu,
            layout: Layout::Rows,
            input: Activations::default(),
            out: Vec::new(),
            caches: Vec::new(),
            current: 0,
            query: vec![0.1; HEADS * LENGTH],
            mixed: vec![0.0; HEADS * LENGTH],
            norm: vec![1.0; EMBEDDING],
            change: vec![0.0; EMBEDDING],
            // The product of the sigmoid of the gate and this number is 1, so that the gates keep their values.
            up: vec![1.0 + (-GATE).exp(); FEED_FORWARD],
            hidden: Vec::new(),
            gates: Vec::new(),
        }
    }

    /// Returns these kernels with packed weights, for matrices that can be packed.
    #[must_use]
    pub fn with_packed_weights(self, packed: bool) -> CpuKernels {
        CpuKernels { layout: if packed { Layout::Interleaved } else { Layout::Rows }, ..self }
    }

    /// Returns the index of the KV cache to use next. The first call creates and fills the KV caches: [`MAX_CACHES`],
    /// or fewer if memory is short.
    fn next_cache(&mut self) -> usize {
        if self.caches.is_empty() {
            let bytes = (2 * 2 * KV_HEADS * POSITIONS * LENGTH) as u64;
            let count = (memory::available_memory().0 / 8 / bytes).clamp(1, MAX_CACHES);
            self.caches = (0..count).map(|_| filled_cache()).collect();
        }
        self.current = (self.current + 1) % self.caches.len();
        self.current
    }
}

fn filled_cache() -> KvCache {
    let rows = HeadRows::new(KvFormat::F16, KV_HEADS, POSITIONS, LENGTH);
    let mut cache = KvCache { keys: rows.clone(), values: rows };
    let heads: Vec<f32> = (0..KV_HEADS * LENGTH).map(|at| 0.01 * (at % LENGTH) as f32).collect();
    for position in 0..POSITIONS {
        cache.write(position, &heads, &heads);
    }
    cache
}

impl Kernels for CpuKernels {
    fn description(&self) -> String {
        let threads = self.cpu.thread_pool.threads();
        let plural = if threads == 1 { "" } else { "s" };
        let packed = if self.layout == Layout::Interleaved { ", packed weights" } else { "" };
        format!("{} kernels on {threads} thread{plural}{packed}", self.cpu.instruction_set.name())
    }

    fn formats(&self) -> Vec<Format> {
        Format::ALL.to_vec()
    }

    fn multiply(&mut self, format: Format, columns: usize, weights: &[u8], tokens: usize, repeats: usize) {
        let rows =
            weights.len() / format.row_bytes(columns as u64).expect("rows are whole blocks").0 as usize;
        if (self.input.tokens(), self.input.row_length()) != (tokens, columns) || tokens > 1 {
            // A batch is rounded in every call, as in a run; rounding a single vector costs almost nothing.
            self.input.resize(tokens, columns);
            let values = self.input.rows_mut().iter_mut().enumerate();
            values.for_each(|(at, value)| *value = (at % 7) as f32 - 3.0);
        }
        self.out.resize(repeats * tokens * rows, 0.0);
        let layout = if can_interleave(format, rows) { self.layout } else { Layout::Rows };
        let matrix = Matrix { format, row_length: columns, rows, layout, bytes: weights };
        let outputs = self.out.chunks_exact_mut(tokens * rows);
        let mut matmuls: Vec<Matmul<'_>> = outputs.map(|out| Matmul { matrix, out }).collect();
        self.cpu.multiply(&mut self.input, &mut matmuls);
    }

    fn attend(&mut self) -> Flops {
        let index = self.next_cache();
        let attention = Attention {
            attended: &[(&self.caches[index], 0..POSITIONS)],
            query: &self.query,
            heads: HEADS,
            group_size: HEADS / KV_HEADS,
            scoring: ScoreOptions { scale: 0.1, softcap: None, sink: None },
            sinks: None,
        };
        self.cpu.attend(attention, &mut self.mixed);
        // As `TokenMixer::flops` counts it.
        Flops((HEADS * POSITIONS * (4 * LENGTH + 5)) as f64)
    }

    fn process_activations(&mut self, tokens: usize) -> Bytes {
        if self.gates.len() != tokens * FEED_FORWARD {
            self.hidden = (0..tokens * EMBEDDING).map(|at| (at % 7) as f32 - 3.0).collect();
            self.gates = vec![GATE; tokens * FEED_FORWARD];
        }
        let Self { cpu, hidden, gates, input, .. } = self;
        // The inputs of the mixer and of the feed-forward block, and what is added after each.
        for _ in 0..2 {
            cpu.rms_norm_rows(hidden, &self.norm, 1e-5, input);
            cpu.for_each_row(hidden, EMBEDDING, |_, row| {
                elementwise::add(cpu.instruction_set, row, &self.change);
            });
        }
        cpu.for_each_row(gates, FEED_FORWARD, |_, gate| {
            elementwise::swiglu(cpu.instruction_set, gate, &self.up);
        });
        Bytes((4 * tokens * (EMBEDDING + FEED_FORWARD)) as u64)
    }

    fn write_kv_cache(&mut self, tokens: usize) -> Bytes {
        let index = self.next_cache();
        let cache = &mut self.caches[index];
        let rows = &self.query[..KV_HEADS * LENGTH];
        for position in 0..tokens {
            cache.write(position % POSITIONS, rows, rows);
        }
        Bytes((2 * 2 * KV_HEADS * LENGTH * tokens) as u64)
    }
}
