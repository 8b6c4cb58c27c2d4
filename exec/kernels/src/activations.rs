//! Activations as matmul inputs: in f32, or rounded to eight bits in blocks.
//!
//! The input rows are rounded once for all weight rows. F32, F16 and BF16 weights are multiplied by f32 activations.
//! Weights in blocks of 32 need eight-bit activations in blocks of 32. Weights in blocks of 256 need eight-bit
//! activations in blocks of 256, and the sum of every 16 rounded activations, by which minima and offsets are
//! multiplied. A block of activations x has `scale = max |x| / 127` and `q = round_ties_even(x * (127 / max |x|))`.
//! Unlike in `Q8_0` files, the scale is f32.

use bytemuck::{Pod, Zeroable, must_cast};
use hearth_profiles::Format;

use super::InstructionSet;

/// The input rows of a matmul in f32, and quantised to eight bits in the blocks that the weight format requires.
#[derive(Debug, Default)]
pub struct Activations {
    tokens: usize,
    length: usize,
    plain: Vec<f32>, // [tokens, length]
    blocks32: Quantised,
    blocks256: Quantised,
}

/// A cache line of rounded activations: kernels load 64 activations at once.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([i8; 64]);

#[derive(Debug, Default)]
struct Quantised {
    ready: bool,
    quants: Vec<Line>, // [tokens, length] i8
    scales: Vec<f32>,  // [tokens, length / block]
    sums: Vec<i16>,    // [tokens, length / 16] for blocks of 256, [tokens, length / 32] for blocks of 32
    /// For one token in blocks of 256, otherwise empty: see [`SingleToken`].
    sums_of_32: Vec<i16>,
    by_nibble: Vec<Line>,
}

/// The input row of one token, rounded to eight bits.
#[derive(Clone, Copy)]
pub(crate) struct QuantisedRow<'a> {
    pub(crate) quants: &'a [i8],  // [length]
    pub(crate) scales: &'a [f32], // [length / block]
    pub(crate) sums: &'a [i16],   // [length / 16], or [length / 32] for blocks of 32
    /// More of the token, in blocks of 256, if it is the only one.
    #[allow(dead_code)] // for AVX-512
    pub(crate) single: Option<SingleToken<'a>>,
}

/// What kernels for one token also use.
#[derive(Clone, Copy)]
#[allow(dead_code)] // for AVX-512
pub(crate) struct SingleToken<'a> {
    pub(crate) sums_of_32: &'a [i16], // [length / 32]
    /// The quants, with the second and the third of four groups of 32 exchanged. In `Q4_K` and `Q5_K`, the low bits of
    /// 64 bytes are the first and the third of four groups of weights, and the high bits are the other two.
    pub(crate) by_nibble: &'a [i8], // [length]
}

/// A function that rounds f32 values in blocks: writes the quants, the scales and the sums of quants.
type Round = fn(InstructionSet, &[f32], &mut [i8], &mut [f32], &mut [i16]);

impl Activations {
    /// Resizes the input to `tokens` rows of `length` values each. [`Self::rows_mut`] gives access to the values.
    pub fn resize(&mut self, tokens: usize, length: usize) {
        (self.tokens, self.length) = (tokens, length);
        self.plain.resize(tokens * length, 0.0);
        self.blocks32.ready = false;
        self.blocks256.ready = false;
    }

    /// Returns the f32 rows [tokens, length] for writing, and marks the rounded rows as outdated.
    pub fn rows_mut(&mut self) -> &mut [f32] {
        self.blocks32.ready = false;
        self.blocks256.ready = false;
        &mut self.plain
    }

    /// Returns the f32 rows [tokens, length].
    pub fn rows(&self) -> &[f32] {
        &self.plain
    }

    pub fn tokens(&self) -> usize {
        self.tokens
    }

    pub fn row_length(&self) -> usize {
        self.length
    }

    /// Rounds the rows as a matmul with weights in `format` requires, unless they are already rounded like that.
    ///
    /// # Panics
    /// If the row length is not a multiple of the block length of `format`.
    pub fn quantise_for_format(&mut self, format: Format, instructions: InstructionSet) {
        let block = format.block_len() as usize;
        let (into, round): (_, Round) = match block {
            1 => return,
            32 => (&mut self.blocks32, round32),
            _ => (&mut self.blocks256, round256),
        };
        if into.ready {
            return;
        }
        let length = self.length;
        assert!(length.is_multiple_of(block), "a row of {length} values must be whole blocks of {block}");
        into.quants.resize(self.plain.len().div_ceil(64), Line::zeroed());
        into.scales.resize(self.plain.len() / block, 0.0);
        into.sums.resize(self.plain.len() / sum_length(block), 0);
        let quants = &mut bytemuck::cast_slice_mut(&mut into.quants)[..self.plain.len()];
        round(instructions, &self.plain, quants, &mut into.scales, &mut into.sums);
        into.sums_of_32.clear();
        into.by_nibble.clear();
        if block == 256 && self.tokens == 1 {
            into.arrange_for_single_token();
        }
        into.ready = true;
    }

    pub(crate) fn plain_row(&self, token: usize) -> &[f32] {
        &self.plain[token * self.length..][..self.length]
    }

    pub(crate) fn row32(&self, token: usize) -> QuantisedRow<'_> {
        self.blocks32.row(token, self.length, 32)
    }

    pub(crate) fn row256(&self, token: usize) -> QuantisedRow<'_> {
        self.blocks256.row(token, self.length, 256)
    }
}

impl Quantised {
    fn row(&self, token: usize, length: usize, block: usize) -> QuantisedRow<'_> {
        assert!(self.ready, "the input was not rounded to blocks of {block}");
        let sums = &self.sums[token * (length / sum_length(block))..][..length / sum_length(block)];
        QuantisedRow {
            quants: &bytemuck::cast_slice(&self.quants)[token * length..][..length],
            scales: &self.scales[token * (length / block)..][..length / block],
            sums,
            single: (!self.by_nibble.is_empty()).then(|| SingleToken {
                sums_of_32: &self.sums_of_32,
                by_nibble: bytemuck::cast_slice(&self.by_nibble),
            }),
        }
    }

    /// Computes what [`SingleToken`] has.
    fn arrange_for_single_token(&mut self) {
        self.sums_of_32.extend(self.sums.as_chunks().0.iter().map(|[a, b]| a + b));
        self.by_nibble.extend(self.quants.as_chunks().0.iter().flat_map(|[Line(first), Line(second)]| {
            let ([a, b], [c, d]): ([[i8; 32]; 2], [[i8; 32]; 2]) = (must_cast(*first), must_cast(*second));
            [Line(must_cast([a, c])), Line(must_cast([b, d]))]
        }));
    }
}

/// Returns the number of quants in each stored sum, for blocks of `block` values.
fn sum_length(block: usize) -> usize {
    if block == 256 { 16 } else { 32 }
}

/// The number whose addition rounds a small f32 to the nearest integer, ties to even, and moves it to the low bits.
const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23

/// Rounds a block of N values to eight bits and returns the scale of the block.
#[inline(always)]
fn round_block<const N: usize>(values: &[f32; N], quants: &mut [i8; N]) -> f32 {
    // The bits of positive floats are in the order of the floats; infinity and NaN are above all finite values.
    let largest = f32::from_bits(values.iter().fold(0, |largest, value| largest.max(value.abs().to_bits())));
    if !largest.is_finite() {
        // Eight-bit integers have no NaN, so the scale carries it: the logits become NaN too.
        quants.fill(1);
        return f32::NAN;
    }
    let inverse = 127.0 / largest;
    if !inverse.is_finite() {
        // All values are zero, or so small that they round to zero.
        quants.fill(0);
        return 0.0;
    }
    for (quant, value) in quants.iter_mut().zip(values) {
        // The low eight bits of the sum are the integer in two's complement.
        *quant = (value * inverse + ROUND).to_bits() as i8;
    }
    largest / 127.0
}

super::multiversion! {
    fn round32(values: &[f32], quants: &mut [i8], scales: &mut [f32], sums: &mut [i16]) {
        let blocks = values.as_chunks::<32>().0.iter().zip(quants.as_chunks_mut::<32>().0);
        for ((values, quants), (scale, sum)) in blocks.zip(scales.iter_mut().zip(sums)) {
            *scale = round_block(values, quants);
            *sum = quants.iter().map(|&quant| i16::from(quant)).sum();
        }
    }

    fn round256(values: &[f32], quants: &mut [i8], scales: &mut [f32], sums: &mut [i16]) {
        let blocks = values.as_chunks::<256>().0.iter().zip(quants.as_chunks_mut::<256>().0);
        for ((values, quants), (scale, sums)) in blocks.zip(scales.iter_mut().zip(sums.as_chunks_mut::<16>().0)) {
            *scale = round_block(values, quants);
            for (sum, quants) in sums.iter_mut().zip(quants.as_chunks::<16>().0) {
                *sum = quants.iter().map(|&quant| i16::from(quant)).sum();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_rounded_to_the_nearest_eight_bits() {
        // The largest magnitude is 2.0, so the scale is 2/127. 1.0 becomes 63.5, a tie, which rounds to the even 64;
        // -0.01 becomes -0.635, which rounds to -1.
        let mut values = [0.0f32; 32];
        values[..4].copy_from_slice(&[2.0, 1.0, -0.01, -2.0]);
        let mut quants = [0i8; 32];
        let mut scales = [0.0f32];
        round32(InstructionSet::SCALAR, &values, &mut quants, &mut scales, &mut [0]);
        assert_eq!(quants[..5], [127, 64, -1, -127, 0]);
        assert_eq!(scales[0], 2.0 / 127.0);
    }

    #[test]
    fn scale_of_a_block_with_a_value_that_is_not_finite_is_nan() {
        for value in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 17, 31] {
                let mut values = [f32::MAX; 32];
                values[at] = value;
                let (mut quants, mut scales) = ([0i8; 32], [0.0f32]);
                round32(InstructionSet::detect(), &values, &mut quants, &mut scales, &mut [0]);
                assert!(scales[0].is_nan() && quants == [1; 32], "{value} at {at}");
            }
        }
    }

    #[test]
    fn zeros_have_scale_zero() {
        let mut quants = [1i8; 32];
        let mut scales = [1.0f32];
        round32(InstructionSet::detect(), &[0.0; 32], &mut quants, &mut scales, &mut [0]);
        assert_eq!((quants, scales), ([0; 32], [0.0]));
    }
}
