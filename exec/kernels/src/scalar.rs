//! Scalar dot products, the reference whose results all SIMD kernels reproduce bit for bit.
//!
//! The order of summation is that of [`super`].

use half::f16;

use crate::activations::QuantisedRow;
use crate::blocks::{IntegerBlock32, IntegerBlock256, bf16_to_f32, blocks};
use crate::sum_lanes;

/// Returns the integer dot product of a block: the sum over j of `weight(j)` times the rounded activation `quants[j]`.
#[inline(always)]
fn total(quants: &[i8], weight: impl Fn(usize) -> i32) -> i32 {
    quants.iter().enumerate().map(|(j, &activation)| weight(j) * i32::from(activation)).sum()
}

/// Returns the dot product of a row of weights in blocks of 32 with rounded activations.
///
/// In formats with minima, the minimum of a block times the sum of the block's activations is added.
pub(crate) fn dot32<B: IntegerBlock32>(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    blocks::<B>(row).iter().enumerate().fold(0.0, |sum, (at, block)| add_block32(block, input, at, sum))
}

/// Adds the products of a block of 32 weights and the rounded activations with the same index `at` to `sum`.
#[inline(always)]
pub(crate) fn add_block32<B: IntegerBlock32>(block: &B, input: QuantisedRow<'_>, at: usize, sum: f32) -> f32 {
    let quants = &input.quants[32 * at..][..32];
    let products = total(quants, |j| block.quant(j));
    let sum = (block.scale() * input.scales[at]).mul_add(products as f32, sum);
    if !B::HAS_MINIMUM {
        return sum;
    }
    (block.minimum() * input.scales[at]).mul_add(total(quants, |_| 1) as f32, sum)
}

/// Returns the dot product of a row of weights in blocks of 256 with rounded activations.
///
/// An integer weight is the quant times the scale of its sub-block. In formats with minima, a block has a second
/// integer: the sum, over all sub-blocks, of the minimum times the sum of the activations. This integer is subtracted:
/// `sum = fma(-(minimum * activation_scale), integer, sum)`.
pub(crate) fn dot256<B: IntegerBlock256>(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    let mut sum = 0.0f32;
    for (at, block) in blocks::<B>(row).iter().enumerate() {
        let (quants, sums) = (&input.quants[256 * at..][..256], &input.sums[16 * at..][..16]);
        let scales = block.scales();
        let products = total(quants, |j| i32::from(scales[j / 16]) * block.quant(j));
        sum = (B::SCALE_FACTOR * block.scale() * input.scales[at]).mul_add(products as f32, sum);
        if B::HAS_MINIMUM {
            let minima = block.minima();
            let subtracted: i32 = (0..16).map(|j| i32::from(minima[j]) * i32::from(sums[j])).sum();
            sum = (-(block.minimum() * input.scales[at])).mul_add(subtracted as f32, sum);
        }
    }
    sum
}

#[inline(always)]
pub(crate) fn dot_f32(row: &[u8], input: &[f32]) -> f32 {
    dot(row.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)), input)
}

/// Returns the dot product of little-endian F16 weights, widened exactly to f32, and f32 activations.
#[inline(always)]
pub(crate) fn dot_f16(row: &[u8], input: &[f32]) -> f32 {
    dot(row.as_chunks::<2>().0.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f32()), input)
}

/// Returns the dot product of BF16 weights, stored in little-endian order and widened exactly to f32, and f32
/// activations. llama.cpp rounds these activations to BF16.
#[inline(always)]
pub(crate) fn dot_bf16(row: &[u8], input: &[f32]) -> f32 {
    dot(row.as_chunks::<2>().0.iter().map(|bytes| bf16_to_f32(*bytes)), input)
}

#[inline(always)]
fn dot(weights: impl Iterator<Item = f32>, input: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 32];
    for (index, (weight, &value)) in weights.zip(input).enumerate() {
        lanes[index % 32] = weight.mul_add(value, lanes[index % 32]);
    }
    sum_lanes(lanes)
}
