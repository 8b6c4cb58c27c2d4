//! How do the parts between two matmuls compute, in one order everywhere?
//!
//! RMSNorm, softmax, rotary embedding, SwiGLU and the residual addition, written once without intrinsics:
//! the compiler may vectorise them, but neither reorders nor contracts, so that every instruction set has the
//! same bits.

use super::exponential::exponential;
use super::{fold, tree};

/// Sum of squares in the 32-lane order of an f32 dot product.
#[inline(always)]
fn sum_of_squares(row: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 32];
    let (chunks, rest) = row.as_chunks::<32>();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = value.mul_add(*value, *lane);
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane = value.mul_add(*value, *lane);
    }
    tree(fold(lanes))
}

#[inline(always)]
fn rms_norm_generic(row: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    let mean = sum_of_squares(row) / row.len() as f32;
    let scale = 1.0 / (mean + epsilon).sqrt();
    for ((out, value), weight) in out.iter_mut().zip(row).zip(weight) {
        *out = value * scale * weight;
    }
}

#[inline(always)]
fn softmax_generic(scores: &mut [f32]) {
    let mut largest = [f32::NEG_INFINITY; 8];
    let (chunks, rest) = scores.as_chunks::<8>();
    for chunk in chunks.iter().map(|chunk| &chunk[..]).chain([rest]) {
        for (lane, &score) in largest.iter_mut().zip(chunk) {
            *lane = if score > *lane { score } else { *lane };
        }
    }
    let largest = largest.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
    let mut lanes = [0.0f32; 8];
    let (chunks, rest) = scores.as_chunks_mut::<8>();
    for chunk in chunks {
        for (lane, score) in lanes.iter_mut().zip(chunk) {
            *score = exponential(*score - largest);
            *lane += *score;
        }
    }
    for (lane, score) in lanes.iter_mut().zip(rest) {
        *score = exponential(*score - largest);
        *lane += *score;
    }
    let inverse = 1.0 / tree(lanes);
    for score in scores {
        *score *= inverse;
    }
}

/// Turns each pair (2i, 2i + 1) of a head by the angle whose cosine and sine are `turns[i]`.
#[inline(always)]
fn rotate_generic(head: &mut [f32], turns: &[[f32; 2]]) {
    for ([even, odd], [cosine, sine]) in head.as_chunks_mut::<2>().0.iter_mut().zip(turns) {
        let (x, y) = (*even, *odd);
        *even = x.mul_add(*cosine, -(y * sine));
        *odd = x.mul_add(*sine, y * cosine);
    }
}

#[inline(always)]
fn swiglu_generic(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = gate / (1.0 + exponential(-gate)) * up;
    }
}

#[inline(always)]
fn add_generic(values: &mut [f32], more: &[f32]) {
    for (value, more) in values.iter_mut().zip(more) {
        *value += more;
    }
}

super::compiled_for_each! {
    /// `out = row / sqrt(mean(row^2) + epsilon) * weight`, all [length].
    pub(crate) fn rms_norm(row: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) = rms_norm_generic;
    /// Scores become probabilities.
    pub(crate) fn softmax(scores: &mut [f32]) = softmax_generic;
    /// Rotary embedding of one head, NORM style: neighbours are a pair.
    pub(crate) fn rotate(head: &mut [f32], turns: &[[f32; 2]]) = rotate_generic;
    /// `out = gate * sigmoid(gate) * up`.
    pub(crate) fn swiglu(gate: &[f32], up: &[f32], out: &mut [f32]) = swiglu_generic;
    /// `values += more`.
    pub(crate) fn add(values: &mut [f32], more: &[f32]) = add_generic;
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::Instructions;
    use super::*;

    #[test]
    fn a_row_of_equal_values_normalises_to_the_weights() {
        let mut out = [0.0; 3];
        rms_norm(Instructions::detect(), &[2.0; 3], &[1.0, 0.5, -1.0], 0.0, &mut out);
        assert_eq!(out, [1.0, 0.5, -1.0]);
    }

    #[test]
    fn a_quarter_turn() {
        let mut head = [1.0, 0.0, 3.0, 4.0];
        rotate(Instructions::detect(), &mut head, &[[0.0, 1.0], [1.0, 0.0]]);
        assert_eq!(head, [0.0, 1.0, 3.0, 4.0]);
    }

    proptest! {
        #[test]
        fn the_same_bits_for_every_instruction_set(row in prop::collection::vec(-30.0f32..30.0, 1..200)) {
            let bits = |instructions| {
                let mut norm = vec![0.0; row.len()];
                rms_norm(instructions, &row, &row, 1e-5, &mut norm);
                let mut probabilities = row.clone();
                softmax(instructions, &mut probabilities);
                let mut product = vec![0.0; row.len()];
                swiglu(instructions, &row, &norm, &mut product);
                norm.iter().chain(&probabilities).chain(&product).map(|v| v.to_bits()).collect::<Vec<_>>()
            };
            prop_assert_eq!(bits(Instructions::SCALAR), bits(Instructions::detect()));
        }

        #[test]
        fn probabilities_sum_to_one(scores in prop::collection::vec(-90.0f32..90.0, 1..100)) {
            let mut probabilities = scores;
            softmax(Instructions::detect(), &mut probabilities);
            let sum: f32 = probabilities.iter().sum();
            prop_assert!((sum - 1.0).abs() < 1e-5);
        }
    }
}
