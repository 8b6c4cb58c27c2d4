//! What is the dot product of weights from a code book, in blocks of 256, and rounded activations?

use super::lane_sum;
use crate::kernels::activations::QuantisedRow;
use crate::kernels::blocks::{BlockIq1S, BlockIq4Xs, blocks};
use crate::kernels::tree;

/// Weights are entries of the book, times the sub-block's scale.
pub(crate) fn dot_iq4_xs(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    let mut lanes = [0.0f32; 8];
    for (at, block) in blocks::<BlockIq4Xs>(row).iter().enumerate() {
        let quants = &input.quants[256 * at..][..256];
        let scale = block.scale() * input.scales[at];
        for (i, lane) in lanes.iter_mut().enumerate() {
            let weight = |j| i32::from(block.sub_scale(j / 32)) * i32::from(block.quant(j));
            *lane = scale.mul_add(lane_sum(i, quants, weight) as f32, *lane);
        }
    }
    tree(lanes)
}

/// In eighths, so that the shift of a sub-block is an integer: products are of 0, 8 and 16; lane i's integer then
/// loses 7 or 9 times the scaled sum of the activations of sub-block i. An eighth of the block's scale is exact.
pub(crate) fn dot_iq1_s(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    let mut lanes = [0.0f32; 8];
    for (at, block) in blocks::<BlockIq1S>(row).iter().enumerate() {
        let quants = &input.quants[256 * at..][..256];
        let sums = &input.sums[16 * at..][..16];
        let scale = 0.125 * block.scale() * input.scales[at];
        for (i, lane) in lanes.iter_mut().enumerate() {
            let weight = |j| i32::from(block.sub_scale(j / 32)) * i32::from(block.quant(j));
            let offset = i32::from(block.sub_scale(i)) * i32::from(block.offset(i));
            let sum = i32::from(sums[2 * i]) + i32::from(sums[2 * i + 1]);
            *lane = scale.mul_add((lane_sum(i, quants, weight) - offset * sum) as f32, *lane);
        }
    }
    tree(lanes)
}
