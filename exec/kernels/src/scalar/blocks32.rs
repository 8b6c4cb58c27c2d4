//! Scalar dot products of weights in blocks of 32 with rounded activations.
//!
//! Minima are added, not taken off: their integer is the sum of the block's activations.

use bytemuck::Pod;

use super::total;
use crate::activations::QuantisedRow;
use crate::blocks::{BlockIq4Nl, BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0, blocks};

/// Weights are bytes with a sign.
pub(crate) fn dot_q8_0(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    signed(row, input, BlockQ8_0::scale, |block, j| block.quants[j])
}

/// Weights are -8 to 7.
pub(crate) fn dot_q4_0(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    signed(row, input, BlockQ4_0::scale, BlockQ4_0::quant)
}

/// Weights are -16 to 15.
pub(crate) fn dot_q5_0(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    signed(row, input, BlockQ5_0::scale, BlockQ5_0::quant)
}

/// Weights are entries of the book, -127 to 113.
pub(crate) fn dot_iq4_nl(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    signed(row, input, BlockIq4Nl::scale, BlockIq4Nl::quant)
}

/// Weights are 0 to 15, and a minimum.
pub(crate) fn dot_q4_1(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    with_minimum(row, input, BlockQ4_1::scale, BlockQ4_1::minimum, BlockQ4_1::quant)
}

/// Weights are 0 to 31, and a minimum.
pub(crate) fn dot_q5_1(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    with_minimum(row, input, BlockQ5_1::scale, BlockQ5_1::minimum, BlockQ5_1::quant)
}

fn signed<B: Pod>(
    row: &[u8],
    input: QuantisedRow<'_>,
    scale: fn(&B) -> f32,
    quant: fn(&B, usize) -> i8,
) -> f32 {
    let mut sum = 0.0f32;
    for (at, block) in blocks::<B>(row).iter().enumerate() {
        let quants = &input.quants[32 * at..][..32];
        let products = total(quants, |j| i32::from(quant(block, j)));
        sum = (scale(block) * input.scales[at]).mul_add(products as f32, sum);
    }
    sum
}

fn with_minimum<B: Pod>(
    row: &[u8],
    input: QuantisedRow<'_>,
    scale: fn(&B) -> f32,
    minimum: fn(&B) -> f32,
    quant: fn(&B, usize) -> u8,
) -> f32 {
    let mut sum = 0.0f32;
    for (at, block) in blocks::<B>(row).iter().enumerate() {
        let quants = &input.quants[32 * at..][..32];
        let products = total(quants, |j| i32::from(quant(block, j)));
        sum = (scale(block) * input.scales[at]).mul_add(products as f32, sum);
        sum = (minimum(block) * input.scales[at]).mul_add(total(quants, |_| 1) as f32, sum);
    }
    sum
}
