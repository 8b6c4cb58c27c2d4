//! Kernels on the vectors between matmuls: norms, activation functions, rotary embedding, softmax.
//!
//! These kernels have no intrinsics. The compiler may vectorise them, but it neither reorders nor contracts float
//! operations, so the results have the same bits for every instruction set.

use super::exponential::{exponential, hyperbolic_tangent};
use super::{dot, tree_sum};

/// Returns the factor `1 / sqrt(mean(row^2) + epsilon)` by which RMSNorm multiplies a row. [`dot`] sums the squares.
#[inline(always)]
fn rms_scale(row: &[f32], epsilon: f32) -> f32 {
    let mean = dot(row, row) / row.len() as f32;
    1.0 / (mean + epsilon).sqrt()
}

/// Rotates the vector (`first`, `second`) by the angle with the given cosine and sine.
#[inline(always)]
fn rotate_pair(first: &mut f32, second: &mut f32, [cosine, sine]: &[f32; 2]) {
    let (x, y) = (*first, *second);
    *first = x.mul_add(*cosine, -(y * sine));
    *second = x.mul_add(*sine, y * cosine);
}

/// The factor sqrt(2 / pi) in the tanh approximation of GELU.
/// source: Hendrycks and Gimpel 2016, section 2
const GELU_SLOPE: f32 = 0.797_884_6;
/// The factor of x^3 in the tanh approximation of GELU.
/// source: Hendrycks and Gimpel 2016, section 2
const GELU_CUBE: f32 = 0.044_715;

/// The factor of the gate in the sigmoid of clamped SwiGLU.
/// source: OpenAI 2025, gpt-oss, published implementation (`swiglu` in `gpt_oss/torch/model.py`)
const CLAMPED_SWIGLU_SLOPE: f32 = 1.702;
/// The largest gate, and the largest magnitude of the other factor, in clamped SwiGLU.
/// source: OpenAI 2025, gpt-oss, published configuration (`swiglu_limit`)
const CLAMPED_SWIGLU_LIMIT: f32 = 7.0;

/// Returns the largest of scores; minus infinity if there are none.
#[inline(always)]
fn largest(scores: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 8];
    let mut take = |chunk: &[f32]| {
        for (lane, &score) in lanes.iter_mut().zip(chunk) {
            *lane = if score > *lane { score } else { *lane };
        }
    };
    let (chunks, rest) = scores.as_chunks::<8>();
    for chunk in chunks {
        take(chunk);
    }
    take(rest);
    lanes.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a })
}

/// Replaces scores by `e^(score - largest)`, and returns their sum.
#[inline(always)]
fn exponentiate(scores: &mut [f32], largest: f32) -> f32 {
    // The compiler vectorises a loop without sums.
    for score in scores.iter_mut() {
        *score = exponential(*score - largest);
    }
    sum(scores)
}

/// Returns the sum of values, added in eight lanes.
#[inline(always)]
fn sum(values: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 8];
    let (chunks, rest) = values.as_chunks::<8>();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += value;
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane += value;
    }
    tree_sum(lanes)
}

super::multiversion! {
    /// Computes RMSNorm: `out = row / sqrt(mean(row^2) + epsilon) * weight`. All vectors have the same length.
    pub fn rms_norm(row: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
        let scale = rms_scale(row, epsilon);
        for ((out, value), weight) in out.iter_mut().zip(row).zip(weight) {
            *out = value * scale * weight;
        }
    }

    /// Computes RMSNorm in place, as [`rms_norm`] does with a separate output.
    pub fn rms_norm_in_place(row: &mut [f32], weight: &[f32], epsilon: f32) {
        let scale = rms_scale(row, epsilon);
        for (value, weight) in row.iter_mut().zip(weight) {
            *value = *value * scale * weight;
        }
    }

    /// Computes RMSNorm in place with weights of one.
    pub fn rms_norm_without_weights(row: &mut [f32], epsilon: f32) {
        let scale = rms_scale(row, epsilon);
        for value in row {
            *value *= scale;
        }
    }

    /// Multiplies values by the sigmoid of gates in place: `values *= sigmoid(gates)`.
    pub fn apply_sigmoid_gate(values: &mut [f32], gates: &[f32]) {
        for (value, gate) in values.iter_mut().zip(gates) {
            *value /= 1.0 + exponential(-gate);
        }
    }

    /// Multiplies values by the sigmoid of a gate, `dot(input, weights)`.
    pub fn scale_by_sigmoid(values: &mut [f32], input: &[f32], weights: &[f32]) {
        let divisor = 1.0 + exponential(-dot(input, weights));
        for value in values {
            *value /= divisor;
        }
    }

    /// Replaces attention scores by their softmax.
    pub fn softmax(scores: &mut [f32]) {
        let inverse = 1.0 / exponentiate(scores, largest(scores));
        for score in scores {
            *score *= inverse;
        }
    }

    /// Replaces attention scores by their softmax with one more score, `sink`, whose own result is dropped.
    pub fn softmax_with_sink(scores: &mut [f32], sink: f32) {
        let largest = largest(scores).max(sink);
        let sum = exponentiate(scores, largest) + exponential(sink - largest);
        let inverse = 1.0 / sum;
        for score in scores {
            *score *= inverse;
        }
    }

    /// Computes the sums of `e^(x - largest)` and of `(x - largest) e^(x - largest)` over all x in `scores`. They give
    /// the entropy of the softmax of `scores`: with the sums Z and S it is `ln Z - S / Z`.
    pub fn exponential_sums(scores: &[f32], largest: f32, sums: &mut [f32; 2]) {
        *sums = [0.0; 2];
        let (mut powers, mut weighted) = ([0.0f32; 256], [0.0f32; 256]);
        for part in scores.chunks(powers.len()) {
            for ((power, weighted), score) in powers.iter_mut().zip(&mut weighted).zip(part) {
                let difference = score - largest;
                *power = exponential(difference);
                *weighted = difference * *power;
            }
            sums[0] += sum(&powers[..part.len()]);
            sums[1] += sum(&weighted[..part.len()]);
        }
    }

    /// Rotates each pair of dimensions (2i, 2i + 1) of a head by the angle whose cosine and sine are `angles[i]`.
    /// llama.cpp calls this order of the pairs "NORM".
    pub fn apply_rope_interleaved(head: &mut [f32], angles: &[[f32; 2]]) {
        for ([even, odd], angle) in head.as_chunks_mut::<2>().0.iter_mut().zip(angles) {
            rotate_pair(even, odd, angle);
        }
    }

    /// Rotates each pair of dimensions (i, i + d/2) of a head by the angle whose cosine and sine are `angles[i]`. The
    /// first d dimensions are rotated; d/2 is the length of `angles`. llama.cpp calls this order of the pairs "NEOX".
    pub fn apply_rope_neox(head: &mut [f32], angles: &[[f32; 2]]) {
        let (first, rest) = head.split_at_mut(angles.len());
        for ((first, second), angle) in first.iter_mut().zip(rest).zip(angles) {
            rotate_pair(first, second, angle);
        }
    }

    /// Computes GeGLU: `gate = gelu(gate) * up`, with the tanh approximation of GELU.
    pub fn geglu(gate: &mut [f32], up: &[f32]) {
        // `x/2 (1 + tanh z)` is computed as `x / (1 + e^(-2z))`, which has no cancellation where tanh is near -1.
        for (value, up) in gate.iter_mut().zip(up) {
            let gate = *value;
            let z = GELU_SLOPE * gate * (GELU_CUBE * gate * gate + 1.0);
            *value = gate / (1.0 + exponential(-2.0 * z)) * up;
        }
    }

    /// Soft-caps values in place: `values = cap * tanh(values / cap)`.
    pub fn softcap(values: &mut [f32], cap: f32) {
        for value in values {
            *value = cap * hyperbolic_tangent(*value / cap);
        }
    }

    /// Multiplies values in place: `values *= factor`.
    pub fn scale(values: &mut [f32], factor: f32) {
        for value in values {
            *value *= factor;
        }
    }

    /// Computes SwiGLU: `gate = gate * sigmoid(gate) * up`.
    pub fn swiglu(gate: &mut [f32], up: &[f32]) {
        for (value, up) in gate.iter_mut().zip(up) {
            let gate = *value;
            *value = gate / (1.0 + exponential(-gate)) * up;
        }
    }

    /// Computes clamped SwiGLU: `gate = gate * sigmoid(1.702 gate) * (up + 1)`, with gates of at most 7 and `up` from -7
    /// to 7.
    pub fn clamped_swiglu(gate: &mut [f32], up: &[f32]) {
        for (value, up) in gate.iter_mut().zip(up) {
            // Values that are not numbers stay what they are.
            let gate = if *value > CLAMPED_SWIGLU_LIMIT { CLAMPED_SWIGLU_LIMIT } else { *value };
            let up = up.clamp(-CLAMPED_SWIGLU_LIMIT, CLAMPED_SWIGLU_LIMIT);
            *value = gate / (1.0 + exponential(-CLAMPED_SWIGLU_SLOPE * gate)) * (up + 1.0);
        }
    }

    /// Adds two vectors in place: `values += other`.
    pub fn add(values: &mut [f32], other: &[f32]) {
        for (value, other) in values.iter_mut().zip(other) {
            *value += other;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::InstructionSet;
    use super::*;

    #[test]
    fn a_row_of_equal_values_normalises_to_the_weights() {
        let mut out = [0.0; 3];
        rms_norm(InstructionSet::detect(), &[2.0; 3], &[1.0, 0.5, -1.0], 0.0, &mut out);
        assert_eq!(out, [1.0, 0.5, -1.0]);
    }

    #[test]
    fn exponential_sums_are_near_their_definition() {
        for count in [1, 7, 255, 256, 257, 1000] {
            let scores: Vec<f32> = (0..count).map(|at| (at * 37 % 101) as f32 * 0.05).collect();
            let mut sums = [0.0; 2];
            exponential_sums(InstructionSet::detect(), &scores, 5.0, &mut sums);
            let mut exact = [0.0; 2];
            for score in &scores {
                let difference = f64::from(*score) - 5.0;
                exact[0] += difference.exp();
                exact[1] += difference * difference.exp();
            }
            for (sum, exact) in sums.into_iter().zip(exact) {
                assert!((f64::from(sum) - exact).abs() <= 1e-5 * exact.abs(), "{count}: {sum} and {exact}");
            }
            let mut scalar = [0.0; 2];
            exponential_sums(InstructionSet::SCALAR, &scores, 5.0, &mut scalar);
            assert_eq!(sums, scalar);
        }
    }

    #[test]
    fn rope_rotates_pairs_of_neighbours_or_of_halves() {
        // The first pair turns by a quarter turn, the second pair does not turn.
        let mut head = [1.0, 0.0, 3.0, 4.0];
        apply_rope_interleaved(InstructionSet::detect(), &mut head, &[[0.0, 1.0], [1.0, 0.0]]);
        assert_eq!(head, [0.0, 1.0, 3.0, 4.0]);
        let angles = [[0.6, 0.8], [0.0, 1.0]];
        let mut halves = [1.0, 2.0, 3.0, 4.0, 9.0];
        let mut neighbours = [1.0, 3.0, 2.0, 4.0, 9.0];
        apply_rope_neox(InstructionSet::detect(), &mut halves, &angles);
        apply_rope_interleaved(InstructionSet::detect(), &mut neighbours, &angles);
        assert_eq!(halves, [neighbours[0], neighbours[2], neighbours[1], neighbours[3], 9.0]);
    }

    #[test]
    fn gelu_and_soft_caps_are_near_their_definitions() {
        for step in -400..=400 {
            let x = step as f32 * 0.1;
            let (mut gated, mut capped) = ([x], [x]);
            geglu(InstructionSet::detect(), &mut gated, &[1.0]);
            softcap(InstructionSet::detect(), &mut capped, 30.0);
            let x = f64::from(x);
            let gelu = 0.5 * x * (1.0 + (0.797_884_560_802_865_4 * (x + 0.044_715 * x * x * x)).tanh());
            let cap = 30.0 * (x / 30.0).tanh();
            assert!((f64::from(gated[0]) - gelu).abs() <= 1e-6 * x.abs().max(1e-3), "gelu {x}: {}", gated[0]);
            assert!((f64::from(capped[0]) - cap).abs() <= 1e-6 * cap.abs(), "cap {x}: {}", capped[0]);
        }
    }

    #[test]
    fn clamped_swiglu_limits_both_factors() {
        let gated = |gate: f32, up: f32| {
            let mut value = [gate];
            clamped_swiglu(InstructionSet::detect(), &mut value, &[up]);
            value[0]
        };
        let expected = |gate: f64, up: f64| (gate / (1.0 + (-1.702 * gate).exp()) * (up + 1.0)) as f32;
        for (gate, up) in [(0.5, 0.25), (-20.0, 1.0), (7.0, -7.0), (-1.0, 7.0)] {
            let (own, exact) = (gated(gate, up), expected(gate.into(), up.into()));
            assert!((own - exact).abs() <= 1e-6 * exact.abs().max(1e-3), "{gate}, {up}: {own}");
        }
        assert_eq!(gated(100.0, 100.0), gated(7.0, 7.0));
        assert!(gated(f32::NAN, 1.0).is_nan() && gated(1.0, f32::NAN).is_nan());
    }

    proptest! {
        #[test]
        fn the_same_bits_for_every_instruction_set(row in prop::collection::vec(-30.0f32..30.0, 1..200)) {
            let bits = |instructions| {
                let mut norm = vec![0.0; row.len()];
                rms_norm(instructions, &row, &row, 1e-5, &mut norm);
                let [mut probabilities, mut sunk, mut product, mut clamped, mut gelu, mut capped, mut again] =
                    [(); 7].map(|()| row.clone());
                let mut gated = row.clone();
                scale_by_sigmoid(instructions, &mut gated, &norm, &norm);
                softmax(instructions, &mut probabilities);
                softmax_with_sink(instructions, &mut sunk, 3.0);
                clamped_swiglu(instructions, &mut clamped, &norm);
                swiglu(instructions, &mut product, &norm);
                geglu(instructions, &mut gelu, &norm);
                softcap(instructions, &mut capped, 5.0);
                rms_norm_in_place(instructions, &mut again, &row, 1e-5);
                assert_eq!(norm, again);
                let all = [norm, probabilities, sunk, product, clamped, gated, gelu, capped].concat();
                all.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            prop_assert_eq!(bits(InstructionSet::SCALAR), bits(InstructionSet::detect()));
        }

        #[test]
        fn sink_is_one_more_score(
            scores in prop::collection::vec(-90.0f32..90.0, 1..100),
            sink in -90.0f32..90.0,
        ) {
            let mut with_sink = scores.clone();
            softmax_with_sink(InstructionSet::detect(), &mut with_sink, sink);
            let mut all = [&scores[..], &[sink]].concat();
            softmax(InstructionSet::detect(), &mut all);
            for (one, other) in with_sink.iter().zip(&all) {
                prop_assert!((one - other).abs() < 1e-6, "{} and {}", one, other);
            }
        }

        #[test]
        fn probabilities_sum_to_one(scores in prop::collection::vec(-90.0f32..90.0, 1..100)) {
            let mut probabilities = scores;
            softmax(InstructionSet::detect(), &mut probabilities);
            let sum: f32 = probabilities.iter().sum();
            prop_assert!((sum - 1.0).abs() < 1e-5);
        }
    }
}
