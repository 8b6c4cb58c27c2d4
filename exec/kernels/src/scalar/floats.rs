//! Scalar dot products of F32, F16 and BF16 weights with f32 activations.

use half::f16;

use crate::blocks::bf16;
use crate::sum_lanes;

#[inline(always)]
pub(crate) fn dot_f32(row: &[u8], input: &[f32]) -> f32 {
    dot(row.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)), input)
}

/// Returns the dot product with F16 weights, stored in little-endian order and widened exactly to f32.
#[inline(always)]
pub(crate) fn dot_f16(row: &[u8], input: &[f32]) -> f32 {
    dot(row.as_chunks::<2>().0.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f32()), input)
}

/// Returns the dot product with BF16 weights, stored in little-endian order and widened exactly to f32. Activations
/// stay f32, whereas llama.cpp rounds them to BF16.
#[inline(always)]
pub(crate) fn dot_bf16(row: &[u8], input: &[f32]) -> f32 {
    dot(row.as_chunks::<2>().0.iter().map(|bytes| bf16(*bytes)), input)
}

#[inline(always)]
fn dot(weights: impl Iterator<Item = f32>, input: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 32];
    for (index, (weight, &value)) in weights.zip(input).enumerate() {
        lanes[index % 32] = weight.mul_add(value, lanes[index % 32]);
    }
    sum_lanes(lanes)
}
