//! What exactly is the dot product of a stored row and an activation row?
//!
//! The oracle: one function a format, written for reading. The SIMD kernels must give the same bits. The
//! order of summation is that of [`super`]; each function states what is special to its format.

// Indices are the definition here: lane i, element j.
#![allow(clippy::needless_range_loop)]

use half::f16;

use super::activations::QuantisedRow;
use super::blocks::{BlockQ4K, BlockQ6K, BlockQ8_0, blocks};
use super::{fold, tree};

/// F32 weights in little-endian bytes.
#[inline(always)]
pub(crate) fn dot_f32(row: &[u8], input: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 32];
    for (index, (weight, &value)) in row.as_chunks::<4>().0.iter().zip(input).enumerate() {
        lanes[index % 32] = f32::from_le_bytes(*weight).mul_add(value, lanes[index % 32]);
    }
    tree(fold(lanes))
}

/// F16 weights in little-endian bytes, widened exactly.
#[inline(always)]
pub(crate) fn dot_f16(row: &[u8], input: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 32];
    for (index, (weight, &value)) in row.as_chunks::<2>().0.iter().zip(input).enumerate() {
        let weight = f16::from_le_bytes(*weight).to_f32();
        lanes[index % 32] = weight.mul_add(value, lanes[index % 32]);
    }
    tree(fold(lanes))
}

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
