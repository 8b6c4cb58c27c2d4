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
    let mut sum = 0.0f32;
    for (at, block) in blocks::<BlockQ8_0>(row).iter().enumerate() {
        let quants = &input.quants[32 * at..][..32];
        let total: i32 = (0..32).map(|j| i32::from(block.quants[j]) * i32::from(quants[j])).sum();
        sum = (block.scale() * input.scales[at]).mul_add(total as f32, sum);
    }
    sum
}

/// What the minima subtract is the second integer of a block.
pub(crate) fn dot_q4_k(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    let mut sum = 0.0f32;
    for (at, block) in blocks::<BlockQ4K>(row).iter().enumerate() {
        let quants = &input.quants[256 * at..][..256];
        let sums = &input.sums[16 * at..][..16];
        let (scales, minima) = block.scales_and_minima();
        let (scales, minima) = (scales.to_le_bytes(), minima.to_le_bytes());
        let (mut total, mut subtracted) = (0, 0);
        for j in 0..256 {
            total += i32::from(scales[j / 32]) * i32::from(block.quant(j)) * i32::from(quants[j]);
        }
        for j in 0..16 {
            subtracted += i32::from(minima[j / 2]) * i32::from(sums[j]);
        }
        sum = (block.scale() * input.scales[at]).mul_add(total as f32, sum);
        sum = (-(block.minimum() * input.scales[at])).mul_add(subtracted as f32, sum);
    }
    sum
}

/// The offset 32 is taken off each weight: it is part of the integer.
pub(crate) fn dot_q6_k(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    let mut sum = 0.0f32;
    for (at, block) in blocks::<BlockQ6K>(row).iter().enumerate() {
        let quants = &input.quants[256 * at..][..256];
        let mut total = 0;
        for j in 0..256 {
            let weight = i32::from(block.quant(j)) - 32;
            total += i32::from(block.scales[j / 16]) * weight * i32::from(quants[j]);
        }
        sum = (block.scale() * input.scales[at]).mul_add(total as f32, sum);
    }
    sum
}
