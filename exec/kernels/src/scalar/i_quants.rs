//! Scalar dot products of codebook weights in blocks of 256 with rounded activations.

use super::total;
use crate::activations::QuantisedRow;
use crate::blocks::{BlockIq1S, BlockIq4Xs, ScaledBlock, blocks};

/// Returns the dot product with `IQ4_XS` weights: codebook entries times the scale of their sub-block.
pub(crate) fn dot_iq4_xs(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    let mut sum = 0.0f32;
    for (at, block) in blocks::<BlockIq4Xs>(row).iter().enumerate() {
        let quants = &input.quants[256 * at..][..256];
        let weight = |j| i32::from(block.sub_scale(j / 32)) * i32::from(block.quant(j));
        sum = (block.scale() * input.scales[at]).mul_add(total(quants, weight) as f32, sum);
    }
    sum
}

/// Returns the dot product with `IQ1_S` weights. They are computed in units of an eighth, so that they stay integers
/// with the shift of their sub-block: 8 g + 1 or 8 g - 1, times the scale of the sub-block. One eighth of the block's
/// scale is exact.
pub(crate) fn dot_iq1_s(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    let mut sum = 0.0f32;
    for (at, block) in blocks::<BlockIq1S>(row).iter().enumerate() {
        let quants = &input.quants[256 * at..][..256];
        let eighths = |j| i32::from(block.quant(j)) - i32::from(block.offset(j / 32));
        let weight = |j| i32::from(block.sub_scale(j / 32)) * eighths(j);
        let scale = 0.125 * block.scale() * input.scales[at];
        sum = scale.mul_add(total(quants, weight) as f32, sum);
    }
    sum
}
