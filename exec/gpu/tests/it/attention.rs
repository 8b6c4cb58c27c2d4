//! Tests of the attention kernel against plain attention in f64.
//!
//! The kernels and a plain loop in f64 compute attention for the queries, keys and values of several passes. The bound
//! of the difference is 1e-5 for a cache in f32, and 2e-3 for a cache in f16, which is the rounding error of f16.

use hearth_gpu::device::{GpuBuffer, KernelParams};
use hearth_gpu::kernels::attention::AttentionKernel;
use hearth_gpu::kernels::rope::{AttentionShape, RopeKernel};
use hearth_gpu::virtual_tensor::{Storage, WeightOrder};
use hearth_gpu::{CapabilityMask, Gpu};
use hearth_profiles::model::PairLayout;
use hearth_runtime::KvFormat;

use crate::gpu::{max_difference, open_and_lock, random_numbers};

/// The queries, keys and values of a sequence, [positions, heads * head dimension], and the attention options.
struct Sequence {
    heads: AttentionShape,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    cap: Option<f32>,
    window: Option<u32>,
}

const SCALE: f32 = 0.2;

impl Sequence {
    fn new(heads: AttentionShape, positions: usize, cap: Option<f32>, window: Option<u32>) -> Sequence {
        let of = |heads: u32, length: u32, seed| random_numbers(positions * (heads * length) as usize, seed);
        let query = of(heads.heads, heads.key_length, 1);
        let key = of(heads.kv_heads, heads.key_length, 2);
        let value = of(heads.kv_heads, heads.value_length, 3);
        Sequence { heads, query, key, value, cap, window }
    }

    /// Returns the attention output at `position`, computed in f64.
    fn reference(&self, position: usize) -> Vec<f32> {
        let AttentionShape { heads, kv_heads, key_length, value_length, .. } = self.heads;
        let (keys, values) = (key_length as usize, value_length as usize);
        let seen = self.window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
        let mut out = Vec::new();
        for head in 0..heads as usize {
            let kv = head / (heads / kv_heads) as usize;
            let query = &self.query[(position * heads as usize + head) * keys..][..keys];
            let score = |at: usize| {
                let key = &self.key[(at * kv_heads as usize + kv) * keys..][..keys];
                let dot: f64 = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                let score = dot * f64::from(SCALE);
                self.cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
            };
            let powers: Vec<f64> = (seen..=position).map(|at| score(at).exp()).collect();
            let sum: f64 = powers.iter().sum();
            for dimension in 0..values {
                let of =
                    |at: usize| f64::from(self.value[(at * kv_heads as usize + kv) * values + dimension]);
                let mixed: f64 = (seen..=position).zip(&powers).map(|(at, power)| power * of(at)).sum();
                out.push((mixed / sum) as f32);
            }
        }
        out
    }

    /// Returns the attention output of all positions, computed on the GPU. Pass i has `passes[i]` tokens.
    fn on_gpu(&self, gpu: &Gpu, passes: &[usize], storage: Storage) -> Vec<f32> {
        let heads = self.heads;
        let pair_count = heads.key_length / 2;
        let is_naive = storage == Storage::Linear;
        let rotate = RopeKernel {
            shape: heads,
            pair_layout: PairLayout::Halves,
            pair_count,
            input_storage: storage,
            norm_epsilon: None,
            capabilities: gpu.capabilities(),
        };
        let attention = AttentionKernel {
            shape: heads,
            scale: SCALE,
            soft_cap: self.cap,
            sliding_window: self.window,
            output_storage: storage,
        };
        let [key_bytes, value_bytes] = heads.kv_cache_bytes().unwrap();
        let [keys, values] = [gpu.allocate("k", key_bytes).unwrap(), gpu.allocate("v", value_bytes).unwrap()];
        let params = gpu.create_params_buffer().unwrap();
        let positions: usize = passes.iter().sum();
        let mixed = (heads.heads * heads.value_length) as usize;
        let (mut first, mut out) = (0, Vec::new());
        for &tokens in passes {
            gpu.write(&params, &[KernelParams::for_pass(tokens as u32, first as u32)]).unwrap();
            let part = |all: &Vec<f32>| {
                let width = all.len() / positions;
                let rows = &all[first * width..][..tokens * width];
                // In DSHWBC4, each slice of all tokens is contiguous.
                let rows = if is_naive { rows.to_vec() } else { transposed(rows, tokens) };
                gpu.upload("part", &rows).unwrap()
            };
            let [q, k, v] = [&self.query, &self.key, &self.value].map(part);
            // No rotation: the cosine is one, the sine zero.
            let angles = gpu.upload("angles", &vec![[1.0f32, 0.0]; tokens * pair_count as usize]).unwrap();
            let queries = gpu.allocate("q", q.size_bytes()).unwrap();
            let result = gpu.allocate("out", (tokens * mixed * 4) as u64).unwrap();
            let bound = |tensors: &[&GpuBuffer], text: &str, groups| {
                gpu.prepare_launch("attention", text, tensors, groups).unwrap()
            };
            let tensors = [&params, &q, &k, &v, &angles, &queries, &keys, &values];
            let one = bound(&tensors, &rotate.wgsl_source().unwrap(), rotate.workgroup_count(tokens as u32));
            let tensors = [&params, &queries, &keys, &values, &result];
            let two =
                bound(&tensors, &attention.wgsl_source().unwrap(), attention.workgroup_count(tokens as u32));
            gpu.submit([&one, &two]).unwrap();
            let found: Vec<f32> = gpu.read(&result, tokens * mixed).unwrap();
            out.extend(if is_naive { found } else { transposed(&found, mixed / 4) });
            first += tokens;
        }
        out
    }
}

/// Transposes a matrix of texels with four elements each, [rows, columns * 4].
fn transposed(texels: &[f32], rows: usize) -> Vec<f32> {
    let columns = texels.len() / rows / 4;
    let texel = |row: usize, column: usize| &texels[(row * columns + column) * 4..][..4];
    (0..columns).flat_map(|column| (0..rows).flat_map(move |row| texel(row, column))).copied().collect()
}

#[test]
fn attention_over_a_cache_of_weights_equals_plain_attention() {
    let Some((_lock, gpu)) = open_and_lock(CapabilityMask::default()) else { return };
    let mut worst = [0.0f32; 2];
    // More positions than a tile, and a cache that does not consist of whole slices.
    for (heads, kv_heads, key_length, value_length) in [(6, 3, 32, 64), (8, 1, 16, 72), (4, 4, 64, 16)] {
        for (cap, window) in [(None, None), (Some(1.5), Some(50))] {
            for (at, format, cache_order, bound) in [
                (0, KvFormat::F32, WeightOrder::Interleaved, 1e-5),
                (1, KvFormat::F16, WeightOrder::ByOutput, 2e-3),
            ] {
                let heads = AttentionShape {
                    heads,
                    kv_heads,
                    key_length,
                    value_length,
                    context_length: 147,
                    format,
                    cache_order,
                };
                let sequence = Sequence::new(heads, 147, cap, window);
                let expected: Vec<f32> = (0..147).flat_map(|position| sequence.reference(position)).collect();
                for storage in [Storage::Linear, Storage::Buffer] {
                    let own = sequence.on_gpu(&gpu, &[1, 2, 1, 70, 3, 70], storage);
                    let off = max_difference(&own, &expected);
                    worst[at] = worst[at].max(off);
                    assert!(off < bound, "{heads:?} {cap:?} {window:?} {storage:?}: {off}");
                }
            }
        }
    }
    println!("attention is off by at most {:.1e} with f32, {:.1e} with f16", worst[0], worst[1]);
}
