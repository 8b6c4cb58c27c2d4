//! What is the dot product of weights in blocks of 32 and rounded activations?
//!
//! A block is one group of 32: lane i takes the integer sum of elements 4i..4i+3.

use crate::kernels::activations::QuantisedRow;
use crate::kernels::blocks::{BlockQ8_0, blocks};
use crate::kernels::tree;

/// One block is one group of 32.
pub(crate) fn dot_q8_0(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    let mut lanes = [0.0f32; 8];
    for (at, block) in blocks::<BlockQ8_0>(row).iter().enumerate() {
        let scale = block.scale() * input.scales[at];
        for (i, lane) in lanes.iter_mut().enumerate() {
            let sum: i32 = (4 * i..4 * i + 4)
                .map(|j| i32::from(block.quants[j]) * i32::from(input.quants[32 * at + j]))
                .sum();
            *lane = scale.mul_add(sum as f32, *lane);
        }
    }
    tree(lanes)
}
