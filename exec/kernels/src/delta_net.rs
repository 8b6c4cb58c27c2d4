//! The gated delta rule of one value head, and the convolution before it (Yang et al. 2025, "Gated Delta Networks").
//!
//! The state S of a head is a matrix with a row for each element of the value. A token with the query q, key k, value
//! v, decay a and write strength b (beta) computes
//!
//! ```text
//! S = a S;  S += b (v - S k) k^T;  out = S q / sqrt(head length)
//! ```
//!
//! row by row, with the dot products of [`crate`]. Tokens are computed one after the other, so the result does not
//! depend on the batches in which the tokens were processed.
//!
//! Not here: the states, see `hearth_runtime::cache`.

use super::dot;
use super::exponential::exponential;

super::multiversion! {
    /// Computes one token of one head: updates `state`, `[values, keys]`, and writes `out`, `[values]`. `gates` are the
    /// decay and the write strength.
    pub fn delta_rule(
        state: &mut [f32],
        query: &[f32],
        key: &[f32],
        value: &[f32],
        gates: [f32; 2],
        out: &mut [f32],
    ) {
        let ([decay, beta], scale) = (gates, 1.0 / (key.len() as f32).sqrt());
        for ((row, value), out) in state.chunks_exact_mut(key.len()).zip(value).zip(out) {
            for element in &mut *row {
                *element *= decay;
            }
            let change = (value - dot(row, key)) * beta;
            for (element, key) in row.iter_mut().zip(key) {
                *element = change.mul_add(*key, *element);
            }
            *out = dot(row, query) * scale;
        }
    }

    /// Computes `out = silu(sum over i of kernels[.., i] * window[i, ..])`, `[channels]`: a convolution over the tokens
    /// of `window`, `[length, channels]`, with `kernels`, `[channels, length]`.
    pub fn convolve(window: &[f32], kernels: &[f32], out: &mut [f32]) {
        let (channels, length) = (out.len(), kernels.len() / out.len());
        out.fill(0.0);
        for (at, row) in window.chunks_exact(channels).enumerate() {
            for ((out, value), kernel) in out.iter_mut().zip(row).zip(kernels[at..].iter().step_by(length)) {
                *out = kernel.mul_add(*value, *out);
            }
        }
        for value in out {
            *value /= 1.0 + exponential(-*value);
        }
    }

    /// Divides a row by its length: `row /= sqrt(sum of squares + epsilon)`.
    pub fn normalise_length(row: &mut [f32], epsilon: f32) {
        let scale = 1.0 / (dot(row, row) + epsilon).sqrt();
        for value in row {
            *value *= scale;
        }
    }
}

/// The argument above which softplus is the identity in f32. source: ggml
const MAX_SOFTPLUS: f32 = 20.0;

/// Returns the decay `e^(factor * softplus(step))` and the write strength `sigmoid(beta)` of a token.
pub fn gates(step: f32, factor: f32, beta: f32) -> [f32; 2] {
    let softplus = if step > MAX_SOFTPLUS { step } else { libm::log1pf(exponential(step)) };
    [exponential(factor * softplus), 1.0 / (1.0 + exponential(-beta))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::InstructionSet;

    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|at| ((at * 37 + seed * 101) % 113) as f32 / 56.0 - 1.0).collect()
    }

    #[test]
    fn a_written_value_is_read_with_its_key() {
        let (mut state, mut out) = (vec![0.0; 4 * 4], [0.0; 4]);
        let (key, value) = ([0.0, 1.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]);
        let run = InstructionSet::detect();
        delta_rule(run, &mut state, &key, &key, &value, [0.5, 1.0], &mut out);
        assert_eq!(out, value.map(|value| value / 2.0));
        // The second write replaces the first, whatever the decay.
        delta_rule(run, &mut state, &key, &key, &[8.0; 4], [0.5, 1.0], &mut out);
        assert_eq!(out, [4.0; 4]);
    }

    #[test]
    fn the_same_bits_for_every_instruction_set() {
        for length in [8, 64, 128] {
            let [query, key, value] = [1, 2, 3].map(|seed| numbers(length, seed));
            let kernels = numbers(4 * length, 4);
            let bits = |run| {
                let (mut state, mut out) = (numbers(length * length, 5), vec![0.0; length]);
                delta_rule(run, &mut state, &query, &key, &value, [0.9, 0.3], &mut out);
                let [mut mixed, mut normal] = [vec![0.0; length], query.clone()];
                convolve(run, &kernels, &numbers(4 * length, 6), &mut mixed);
                normalise_length(run, &mut normal, 1e-6);
                [state, out, mixed, normal].concat().into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            for run in InstructionSet::detect_all() {
                assert_eq!(bits(run), bits(InstructionSet::SCALAR), "{}, {length}", run.name());
            }
        }
    }

    #[test]
    fn gates_are_near_their_definitions() {
        for step in [-30.0f32, -1.0, 0.0, 3.0, 19.0, 25.0] {
            let [decay, beta] = gates(step, -0.7, step);
            let x = f64::from(step);
            let exact = [(-0.7 * x.exp().ln_1p()).exp(), 1.0 / (1.0 + (-x).exp())];
            assert!((f64::from(decay) - exact[0]).abs() < 1e-6 && (f64::from(beta) - exact[1]).abs() < 1e-6);
        }
    }

    #[test]
    fn convolution_is_near_its_definition() {
        let (window, kernels, mut out) = (numbers(4 * 3, 1), numbers(3 * 4, 2), [0.0; 3]);
        convolve(InstructionSet::detect(), &window, &kernels, &mut out);
        for channel in 0..3 {
            let sum: f32 = (0..4).map(|at| window[at * 3 + channel] * kernels[channel * 4 + at]).sum();
            assert!((out[channel] - sum / (1.0 + (-sum).exp())).abs() < 1e-6);
        }
    }
}
