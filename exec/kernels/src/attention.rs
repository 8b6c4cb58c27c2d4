//! Attention of one query head over its cache rows.
//!
//! `scores[t] = scale * dot(query, key[t])` in the 32-lane order, a soft cap where there is one, softmax, then
//! `out = sum of p[t] * value[t]`, t ascending, one fma each: nothing here depends on how the cache was filled or
//! how tokens were batched.
//! Grouped-query attention gives several query heads the same cache rows.
//!
//! Not here: the cache. That is `hearth_runtime::cache`.

use half::f16;

use super::elementwise::{soft_cap, softmax};
use super::{InstructionSet, Set, fold, tree};

/// Rows of one head, [positions, length].
#[derive(Debug, Clone, Copy)]
pub enum Rows<'a> {
    /// Half precision.
    F16(&'a [f16]),
    /// Single precision.
    F32(&'a [f32]),
}

/// What is done with a dot product before the softmax.
#[derive(Clone, Copy)]
pub struct Scoring {
    pub scale: f32,
    pub cap: Option<f32>,
}

/// One head's attention over some positions of its cache rows; `scores` has one place a position.
pub fn attend(
    instructions: InstructionSet,
    query: &[f32], // [key_length]
    scoring: Scoring,
    keys: Rows<'_>,     // [positions, key_length]
    values: Rows<'_>,   // [positions, value_length]
    scores: &mut [f32], // [positions]
    out: &mut [f32],    // [value_length]
) {
    match keys {
        Rows::F32(keys) => scores_f32(instructions, query, scoring.scale, keys, scores),
        Rows::F16(keys) => scores_f16(instructions, query, scoring.scale, keys, scores),
    }
    if let Some(cap) = scoring.cap {
        soft_cap(instructions, scores, cap);
    }
    softmax(instructions, scores);
    match values {
        Rows::F32(values) => mix_f32(instructions, scores, values, out),
        Rows::F16(values) => mix_f16(instructions, scores, values, out),
    }
}

#[inline(always)]
fn scores_f32_generic(query: &[f32], scale: f32, keys: &[f32], scores: &mut [f32]) {
    for (score, key) in scores.iter_mut().zip(keys.chunks_exact(query.len())) {
        let mut lanes = [0.0f32; 32];
        let (chunks, rest) = query.as_chunks::<32>();
        let (key_chunks, key_rest) = key.as_chunks::<32>();
        for (query, key) in chunks.iter().zip(key_chunks) {
            for ((lane, query), key) in lanes.iter_mut().zip(query).zip(key) {
                *lane = key.mul_add(*query, *lane);
            }
        }
        for ((lane, query), key) in lanes.iter_mut().zip(rest).zip(key_rest) {
            *lane = key.mul_add(*query, *lane);
        }
        *score = tree(fold(lanes)) * scale;
    }
}

#[inline(always)]
fn mix_f32_generic(probabilities: &[f32], values: &[f32], out: &mut [f32]) {
    out.fill(0.0);
    for (&probability, value) in probabilities.iter().zip(values.chunks_exact(out.len())) {
        for (out, value) in out.iter_mut().zip(value) {
            *out = probability.mul_add(*value, *out);
        }
    }
}

super::compiled_for_each! {
    fn scores_f32(query: &[f32], scale: f32, keys: &[f32], scores: &mut [f32]) = scores_f32_generic;
    fn mix_f32(probabilities: &[f32], values: &[f32], out: &mut [f32]) = mix_f32_generic;
}

fn scores_f16(instructions: InstructionSet, query: &[f32], scale: f32, keys: &[f16], scores: &mut [f32]) {
    match instructions.set() {
        Set::Scalar => {
            for (score, key) in scores.iter_mut().zip(keys.chunks_exact(query.len())) {
                *score = super::scalar::dot_f16(bytemuck::cast_slice(key), query) * scale;
            }
        }
        Set::Native(native) => native.scores_f16(query, scale, keys, scores),
    }
}

fn mix_f16(instructions: InstructionSet, probabilities: &[f32], values: &[f16], out: &mut [f32]) {
    match instructions.set() {
        Set::Scalar => {
            out.fill(0.0);
            for (&probability, value) in probabilities.iter().zip(values.chunks_exact(out.len())) {
                for (out, value) in out.iter_mut().zip(value) {
                    *out = probability.mul_add(value.to_f32(), *out);
                }
            }
        }
        Set::Native(native) => native.mix_f16(probabilities, values, out),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_same_bits_for_every_instruction_set(
            key_length in 1usize..140,
            value_length in 1usize..140,
            positions in 1usize..40,
            halves: bool,
            seed: u32,
        ) {
            let number = |at: usize| ((at as u32).wrapping_mul(2_654_435_761) ^ seed) as f32 / u32::MAX as f32 - 0.5;
            let numbers = |count: usize, from: usize| (from..from + count).map(number).collect::<Vec<f32>>();
            let (query, keys) = (numbers(key_length, 0), numbers(positions * key_length, 1000));
            let values = numbers(positions * value_length, 20_000);
            let half = |numbers: &[f32]| numbers.iter().map(|&n| f16::from_f32(n)).collect::<Vec<f16>>();
            let (half_keys, half_values) = (half(&keys), half(&values));
            let bits = |instructions| {
                let (keys, values) = if halves {
                    (Rows::F16(&half_keys), Rows::F16(&half_values))
                } else {
                    (Rows::F32(&keys), Rows::F32(&values))
                };
                let (mut scores, mut out) = (vec![0.0; positions], vec![0.0; value_length]);
                let scoring = Scoring { scale: 0.3, cap: (seed % 2 == 0).then_some(5.0) };
                attend(instructions, &query, scoring, keys, values, &mut scores, &mut out);
                out.iter().map(|number| number.to_bits()).collect::<Vec<u32>>()
            };
            let wanted = bits(InstructionSet::SCALAR);
            for instructions in InstructionSet::available() {
                prop_assert_eq!(&wanted, &bits(instructions), "{}", instructions.name());
            }
        }
    }
}
