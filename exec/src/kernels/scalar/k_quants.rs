//! What is the dot product of weights in blocks of 256 and rounded activations?

use crate::kernels::activations::QuantisedRow;
use crate::kernels::blocks::{BlockQ4K, BlockQ6K, blocks};
use crate::kernels::tree;

/// After the products, lane j takes what sub-block j subtracts: `fma(-(minimum * activation_scale),
/// minima[j] * sum of its activations, lane)`.
pub(crate) fn dot_q4_k(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    let mut lanes = [0.0f32; 8];
    for (at, block) in blocks::<BlockQ4K>(row).iter().enumerate() {
        let quants = &input.quants[256 * at..][..256];
        let sums = &input.sums[16 * at..][..16];
        let (scales, minima) = block.scales_and_minima();
        let (scales, minima) = (scales.to_le_bytes(), minima.to_le_bytes());
        let scale = block.scale() * input.scales[at];
        let minimum = -(block.minimum() * input.scales[at]);
        for (i, lane) in lanes.iter_mut().enumerate() {
            let mut sum = 0;
            for group in 0..8 {
                for j in 32 * group + 4 * i..32 * group + 4 * i + 4 {
                    sum += i32::from(scales[group]) * i32::from(block.quant(j)) * i32::from(quants[j]);
                }
            }
            *lane = scale.mul_add(sum as f32, *lane);
            let subtracted = i32::from(minima[i]) * (i32::from(sums[2 * i]) + i32::from(sums[2 * i + 1]));
            *lane = minimum.mul_add(subtracted as f32, *lane);
        }
    }
    tree(lanes)
}

/// Products are of q in 0..63; lane i's integer then loses 32 times the scaled activation sums of sub-blocks
/// 2i and 2i + 1, before it becomes an f32.
pub(crate) fn dot_q6_k(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    let mut lanes = [0.0f32; 8];
    for (at, block) in blocks::<BlockQ6K>(row).iter().enumerate() {
        let quants = &input.quants[256 * at..][..256];
        let sums = &input.sums[16 * at..][..16];
        let scale = block.scale() * input.scales[at];
        for (i, lane) in lanes.iter_mut().enumerate() {
            let mut sum = 0;
            for group in 0..8 {
                for j in 32 * group + 4 * i..32 * group + 4 * i + 4 {
                    sum += i32::from(block.scales[j / 16]) * i32::from(block.quant(j)) * i32::from(quants[j]);
                }
            }
            for j in 2 * i..2 * i + 2 {
                sum -= 32 * i32::from(block.scales[j]) * i32::from(sums[j]);
            }
            *lane = scale.mul_add(sum as f32, *lane);
        }
    }
    tree(lanes)
}
