//! What is the dot product of K-quants, in blocks of 256 weights, and rounded activations?
//!
//! After the products of a format with minima, lane i takes what they subtract: `fma(-(minimum *
//! activation_scale), integer, lane)`, where the integer is of sub-block i where sub-blocks have 32 weights, and
//! of 2i and 2i + 1 where they have 16: their minima times the sums of their activations.
//!
//! A format with an offset instead multiplies q as stored, not below zero; lane i's integer then loses the
//! offset times the scaled activation sums of sub-blocks 2i and 2i + 1, before it becomes an f32.

// Indices are the definition here: lane i, element j.
#![allow(clippy::needless_range_loop)]

use super::lane_sum;
use crate::kernels::activations::QuantisedRow;
use crate::kernels::blocks::{BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K, blocks};
use crate::kernels::tree;

/// Minima, sub-blocks of 16.
pub(crate) fn dot_q2_k(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    let mut lanes = [0.0f32; 8];
    for (at, block) in blocks::<BlockQ2K>(row).iter().enumerate() {
        let (quants, sums) = of_block(input, at);
        let scale = block.scale() * input.scales[at];
        let minimum = -(block.minimum() * input.scales[at]);
        for (i, lane) in lanes.iter_mut().enumerate() {
            let weight = |j| i32::from(block.packed[j / 16] & 15) * i32::from(block.quant(j));
            *lane = scale.mul_add(lane_sum(i, quants, weight) as f32, *lane);
            let minimum_of = |j: usize| i32::from(block.packed[j] >> 4);
            let subtracted: i32 = (2 * i..2 * i + 2).map(|j| minimum_of(j) * i32::from(sums[j])).sum();
            *lane = minimum.mul_add(subtracted as f32, *lane);
        }
    }
    tree(lanes)
}

/// Offset 4.
pub(crate) fn dot_q3_k(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    let mut lanes = [0.0f32; 8];
    for (at, block) in blocks::<BlockQ3K>(row).iter().enumerate() {
        let (quants, sums) = of_block(input, at);
        let scales = block.scales();
        let scale = block.scale() * input.scales[at];
        for (i, lane) in lanes.iter_mut().enumerate() {
            let weight = |j| i32::from(scales[j / 16]) * i32::from(block.quant(j));
            let mut sum = lane_sum(i, quants, weight);
            for j in 2 * i..2 * i + 2 {
                sum -= 4 * i32::from(scales[j]) * i32::from(sums[j]);
            }
            *lane = scale.mul_add(sum as f32, *lane);
        }
    }
    tree(lanes)
}

/// Minima, sub-blocks of 32.
pub(crate) fn dot_q4_k(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    let mut lanes = [0.0f32; 8];
    for (at, block) in blocks::<BlockQ4K>(row).iter().enumerate() {
        let (quants, sums) = of_block(input, at);
        let (scales, minima) = block.scales_and_minima();
        let (scales, minima) = (scales.to_le_bytes(), minima.to_le_bytes());
        let scale = block.scale() * input.scales[at];
        let minimum = -(block.minimum() * input.scales[at]);
        for (i, lane) in lanes.iter_mut().enumerate() {
            let weight = |j| i32::from(scales[j / 32]) * i32::from(block.quant(j));
            *lane = scale.mul_add(lane_sum(i, quants, weight) as f32, *lane);
            let subtracted = i32::from(minima[i]) * (i32::from(sums[2 * i]) + i32::from(sums[2 * i + 1]));
            *lane = minimum.mul_add(subtracted as f32, *lane);
        }
    }
    tree(lanes)
}

/// Minima, sub-blocks of 32.
pub(crate) fn dot_q5_k(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    let mut lanes = [0.0f32; 8];
    for (at, block) in blocks::<BlockQ5K>(row).iter().enumerate() {
        let (quants, sums) = of_block(input, at);
        let (scales, minima) = block.scales_and_minima();
        let (scales, minima) = (scales.to_le_bytes(), minima.to_le_bytes());
        let scale = block.scale() * input.scales[at];
        let minimum = -(block.minimum() * input.scales[at]);
        for (i, lane) in lanes.iter_mut().enumerate() {
            let weight = |j| i32::from(scales[j / 32]) * i32::from(block.quant(j));
            *lane = scale.mul_add(lane_sum(i, quants, weight) as f32, *lane);
            let subtracted = i32::from(minima[i]) * (i32::from(sums[2 * i]) + i32::from(sums[2 * i + 1]));
            *lane = minimum.mul_add(subtracted as f32, *lane);
        }
    }
    tree(lanes)
}

/// Offset 32.
pub(crate) fn dot_q6_k(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    let mut lanes = [0.0f32; 8];
    for (at, block) in blocks::<BlockQ6K>(row).iter().enumerate() {
        let (quants, sums) = of_block(input, at);
        let scale = block.scale() * input.scales[at];
        for (i, lane) in lanes.iter_mut().enumerate() {
            let weight = |j| i32::from(block.scales[j / 16]) * i32::from(block.quant(j));
            let mut sum = lane_sum(i, quants, weight);
            for j in 2 * i..2 * i + 2 {
                sum -= 32 * i32::from(block.scales[j]) * i32::from(sums[j]);
            }
            *lane = scale.mul_add(sum as f32, *lane);
        }
    }
    tree(lanes)
}

/// The activations that a block meets, and their sums of 16.
#[inline(always)]
fn of_block(input: QuantisedRow<'_>, at: usize) -> (&[i8], &[i16]) {
    (&input.quants[256 * at..][..256], &input.sums[16 * at..][..16])
}
