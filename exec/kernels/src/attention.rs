//! Attention of one query head over its cached keys and values.
//!
//! `scores[t] = scale * dot(query, key[t])` in the 32 lanes of [`crate`], then the soft cap if the model has one,
//! `p = softmax(scores)`, with a sink as one more score if the head has one, and `out = sum over t of p[t] * value[t]`
//! with one fma for each t in ascending order. The result does not depend on the batches in which the tokens were
//! processed. In grouped-query attention several query heads share one key and value head.
//!
//! With keys and values in blocks (`Q8_0`, `Q4_0`), the query is rounded to eight bits and multiplied by the keys as
//! activations are by weights, and each block of values is multiplied by `p[t] * scale`.
//!
//! Not here: the cache, see `hearth_runtime::cache`.

use half::f16;

use hearth_profiles::Format;

use super::blocks::{BlockQ4_0, BlockQ8_0, ScaledBlock, blocks};
use super::elementwise::{softcap, softmax, softmax_with_sink};
use super::matmul::{Layout, MatmulOutput, Matrix, matmul_rows};
use super::{Activations, InstructionSet, dot};

/// The cached keys or the cached values of one head, [positions, head dimension].
#[derive(Debug, Clone, Copy)]
pub enum CachedRows<'a> {
    F16(&'a [f16]),
    F32(&'a [f32]),
    /// Blocks of the format `Q8_0` or `Q4_0`.
    Blocks(Format, &'a [u8]),
}

impl CachedRows<'_> {
    /// Returns the number of rows, which have `length` elements each.
    fn count(&self, length: usize) -> usize {
        match self {
            CachedRows::F16(rows) => rows.len() / length,
            CachedRows::F32(rows) => rows.len() / length,
            CachedRows::Blocks(format, rows) => {
                rows.len() / (length / format.block_len() as usize * format.block_bytes() as usize)
            }
        }
    }
}

/// Buffers that calls of [`attend`] reuse.
#[derive(Debug, Default)]
pub struct AttentionScratch {
    scores: Vec<f32>, // [positions]
    /// The query for keys in blocks.
    query: Activations,
}

/// What is applied to the attention scores of a head before and in the softmax.
#[derive(Clone, Copy)]
pub struct ScoreOptions {
    /// The factor of the dot products of queries and keys.
    pub scale: f32,
    /// The bound c of the soft cap `c tanh(score / c)`; `None` if the model has no soft cap.
    pub softcap: Option<f32>,
    /// The sink of the head: a score of the softmax that has no value; `None` if the model has no sinks.
    pub sink: Option<f32>,
}

/// Computes the attention output of one query head over all cached positions.
pub fn attend(
    instructions: InstructionSet,
    query: &[f32], // [key_length]
    scoring: ScoreOptions,
    keys: CachedRows<'_>,   // [positions, key_length]
    values: CachedRows<'_>, // [positions, value_length]
    scratch: &mut AttentionScratch,
    out: &mut [f32], // [value_length]
) {
    let AttentionScratch { scores, query: rounded } = scratch;
    scores.resize(keys.count(query.len()), 0.0);
    match keys {
        CachedRows::F32(keys) => scores_f32(instructions, query, scoring.scale, keys, scores),
        CachedRows::F16(keys) => scores_f16(instructions, query, scoring.scale, keys, scores),
        CachedRows::Blocks(format, keys) => {
            rounded.resize(1, query.len());
            rounded.rows_mut().copy_from_slice(query);
            rounded.quantise_for_format(format, instructions);
            let (row_length, rows) = (query.len(), scores.len());
            let matrix = Matrix { format, row_length, rows, layout: Layout::Rows, bytes: keys };
            matmul_rows(instructions, matrix, rounded, &mut MatmulOutput::new(scores, 1, rows));
            for score in scores.iter_mut() {
                *score *= scoring.scale;
            }
        }
    }
    if let Some(cap) = scoring.softcap {
        softcap(instructions, scores, cap);
    }
    match scoring.sink {
        Some(sink) => softmax_with_sink(instructions, scores, sink),
        None => softmax(instructions, scores),
    }
    match values {
        CachedRows::F32(values) => sum_values_f32(instructions, scores, values, out),
        CachedRows::F16(values) => sum_values_f16(instructions, scores, values, out),
        CachedRows::Blocks(Format::Q8_0, values) => {
            sum_values_q8_0(instructions, scores, blocks(values), out);
        }
        CachedRows::Blocks(Format::Q4_0, values) => {
            sum_values_q4_0(instructions, scores, blocks(values), out);
        }
        CachedRows::Blocks(other, _) => panic!("a KV cache in {other} is not supported"),
    }
}

super::multiversion! {
    fn scores_f32(query: &[f32], scale: f32, keys: &[f32], scores: &mut [f32]) {
        for (score, key) in scores.iter_mut().zip(keys.chunks_exact(query.len())) {
            *score = dot(key, query) * scale;
        }
    }

    fn sum_values_f32(probabilities: &[f32], values: &[f32], out: &mut [f32]) {
        out.fill(0.0);
        for (&probability, value) in probabilities.iter().zip(values.chunks_exact(out.len())) {
            for (out, value) in out.iter_mut().zip(value) {
                *out = probability.mul_add(*value, *out);
            }
        }
    }

    fn sum_values_q8_0(probabilities: &[f32], values: &[BlockQ8_0], out: &mut [f32]) {
        out.fill(0.0);
        for (&probability, row) in probabilities.iter().zip(values.chunks_exact(out.len() / 32)) {
            for (out, block) in out.as_chunks_mut::<32>().0.iter_mut().zip(row) {
                let factor = probability * block.scale();
                for (out, &quant) in out.iter_mut().zip(&block.quants) {
                    *out = factor.mul_add(f32::from(quant), *out);
                }
            }
        }
    }

    fn sum_values_q4_0(probabilities: &[f32], values: &[BlockQ4_0], out: &mut [f32]) {
        out.fill(0.0);
        for (&probability, row) in probabilities.iter().zip(values.chunks_exact(out.len() / 32)) {
            for (out, block) in out.as_chunks_mut::<32>().0.iter_mut().zip(row) {
                let factor = probability * block.scale();
                let (first, last) = out.split_at_mut(16);
                for ((low, high), &byte) in first.iter_mut().zip(last).zip(&block.quants) {
                    *low = factor.mul_add(f32::from((byte & 15) as i8 - 8), *low);
                    *high = factor.mul_add(f32::from((byte >> 4) as i8 - 8), *high);
                }
            }
        }
    }
}

fn scores_f16(instructions: InstructionSet, query: &[f32], scale: f32, keys: &[f16], scores: &mut [f32]) {
    match instructions.0 {
        None => {
            for (score, key) in scores.iter_mut().zip(keys.chunks_exact(query.len())) {
                *score = super::scalar::dot_f16(bytemuck::cast_slice(key), query) * scale;
            }
        }
        Some(native) => native.scores_f16(query, scale, keys, scores),
    }
}

fn sum_values_f16(instructions: InstructionSet, probabilities: &[f32], values: &[f16], out: &mut [f32]) {
    match instructions.0 {
        None => {
            out.fill(0.0);
            for (&probability, value) in probabilities.iter().zip(values.chunks_exact(out.len())) {
                for (out, value) in out.iter_mut().zip(value) {
                    *out = probability.mul_add(value.to_f32(), *out);
                }
            }
        }
        Some(native) => native.sum_values_f16(probabilities, values, out),
    }
}

/// Defines `scores_f16` and `sum_values_f16`, the two steps of attention over an f16 cache, with vector registers of
/// `$lanes` floats. `$run` is the number of registers that contain sums at the same time, and `$attribute` enables the
/// instructions if the target does not.
///
/// Uses the functions `row_f16`, `splat`, `widen` and `fma` of the invoking module.
#[allow(unused_macros)] // some targets have no native kernels
macro_rules! attention_f16 {
    ($lanes:literal, $run:literal $(, $attribute:meta)?) => {
        /// Computes `scores[t] = scale * dot(query, keys[t])` for f16 `keys` [positions, `key_length`].
        $(#[$attribute])?
        pub(crate) fn scores_f16(query: &[f32], scale: f32, keys: &[f16], scores: &mut [f32]) {
            for (score, key) in scores.iter_mut().zip(keys.chunks_exact(query.len())) {
                let [dot] = row_f16(bytemuck::cast_slice(key), &[query]);
                *score = dot * scale;
            }
        }

        /// Computes `out = sum over t of probabilities[t] * values[t]`, t ascending, for f16 values.
        $(#[$attribute])?
        pub(crate) fn sum_values_f16(probabilities: &[f32], values: &[f16], out: &mut [f32]) {
            let length = out.len();
            let mut done = 0;
            // The sums of a run of elements stay in registers over all positions.
            while done + $run * $lanes <= length {
                let run = &mut out[done..done + $run * $lanes];
                sum_run::<$run>(probabilities, &values[done..], length, run);
                done += $run * $lanes;
            }
            while done + $lanes <= length {
                sum_run::<1>(probabilities, &values[done..], length, &mut out[done..done + $lanes]);
                done += $lanes;
            }
            for (at, out) in out.iter_mut().enumerate().skip(done) {
                let values = values.iter().skip(at).step_by(length);
                *out = probabilities.iter().zip(values).fold(0.0, |sum, (p, v)| p.mul_add(v.to_f32(), sum));
            }
        }

        /// Computes the weighted sums over all positions for R registers of adjacent elements, starting with the first
        /// element of `values`. The rows of two adjacent positions start `length` elements apart.
        #[inline]
        $(#[$attribute])?
        fn sum_run<const R: usize>(probabilities: &[f32], values: &[f16], length: usize, out: &mut [f32]) {
            let mut sums = [splat(0.0); R];
            for (&probability, row) in probabilities.iter().zip(values.chunks(length)) {
                let factor = splat(probability);
                let row = &row.as_chunks::<$lanes>().0[..R];
                for (sum, value) in sums.iter_mut().zip(row) {
                    *sum = fma(factor, widen(bytemuck::must_cast(*value)), *sum);
                }
            }
            for (out, sum) in out.as_chunks_mut::<$lanes>().0.iter_mut().zip(sums) {
                *out = bytemuck::must_cast(sum);
            }
        }
    };
}
#[allow(unused_imports)]
pub(crate) use attention_f16;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::quantise_row;

    proptest! {
        #[test]
        fn the_same_bits_for_every_instruction_set(
            lengths in (1usize..140, 1usize..140),
            positions in 1usize..40,
            format in prop::sample::select(vec![Format::F16, Format::F32, Format::Q8_0, Format::Q4_0]),
            seed: u32,
        ) {
            let number = |at: usize| ((at as u32).wrapping_mul(2_654_435_761) ^ seed) as f32 / u32::MAX as f32 - 0.5;
            let numbers = |count: usize, from: usize| (from..from + count).map(number).collect::<Vec<f32>>();
            let whole = |length: usize| length.next_multiple_of(format.block_len() as usize);
            let (key_length, value_length) = (whole(lengths.0), whole(lengths.1));
            let (query, keys) = (numbers(key_length, 0), numbers(positions * key_length, 1000));
            let values = numbers(positions * value_length, 20_000);
            let half = |numbers: &[f32]| numbers.iter().map(|&n| f16::from_f32(n)).collect::<Vec<f16>>();
            let (half_keys, half_values) = (half(&keys), half(&values));
            let (key_blocks, value_blocks) = (in_blocks(format, &keys), in_blocks(format, &values));
            let bits = |instructions| {
                let (keys, values) = match format {
                    Format::F16 => (CachedRows::F16(&half_keys), CachedRows::F16(&half_values)),
                    Format::F32 => (CachedRows::F32(&keys), CachedRows::F32(&values)),
                    _ => (CachedRows::Blocks(format, &key_blocks), CachedRows::Blocks(format, &value_blocks)),
                };
                let (mut scratch, mut out) = (AttentionScratch::default(), vec![0.0; value_length]);
                let (softcap, sink) = ((seed % 2 == 0).then_some(5.0), (seed % 3 == 0).then_some(0.5));
                let scoring = ScoreOptions { scale: 0.3, softcap, sink };
                attend(instructions, &query, scoring, keys, values, &mut scratch, &mut out);
                out.iter().map(|number| number.to_bits()).collect::<Vec<u32>>()
            };
            let wanted = bits(InstructionSet::SCALAR);
            for instructions in InstructionSet::detect_all() {
                prop_assert_eq!(&wanted, &bits(instructions), "{}", instructions.name());
            }
        }
    }

    /// Returns rows in blocks of `format`; nothing if the format has no blocks.
    fn in_blocks(format: Format, rows: &[f32]) -> Vec<u8> {
        if format.block_len() == 1 {
            return Vec::new();
        }
        let mut bytes = vec![0; rows.len() / format.block_len() as usize * format.block_bytes() as usize];
        quantise_row(format, rows, &mut bytes);
        bytes
    }

    #[test]
    fn attention_over_blocks_is_close_to_attention_over_floats() {
        let (length, positions) = (64, 50);
        let number = |at: usize| ((at * 7919 % 257) as f32 / 128.0 - 1.0).powi(3);
        let query: Vec<f32> = (0..length).map(number).collect();
        let rows: Vec<f32> = (100..100 + positions * length).map(number).collect();
        let run = |keys: CachedRows, values: CachedRows| {
            let (mut scratch, mut out) = (AttentionScratch::default(), vec![0.0; length]);
            let scoring = ScoreOptions { scale: 0.125, softcap: None, sink: None };
            attend(InstructionSet::detect(), &query, scoring, keys, values, &mut scratch, &mut out);
            out
        };
        let plain = run(CachedRows::F32(&rows), CachedRows::F32(&rows));
        for (format, bound) in [(Format::Q8_0, 0.005), (Format::Q4_0, 0.05)] {
            let bytes = in_blocks(format, &rows);
            let blocks = CachedRows::Blocks(format, &bytes);
            // The elements of the rows are from -1 to 1.
            for (x, y) in plain.iter().zip(run(blocks, blocks)) {
                assert!((x - y).abs() < bound, "{format}: {x} {y}");
            }
        }
    }
}
