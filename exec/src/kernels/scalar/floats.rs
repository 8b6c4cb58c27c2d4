//! What is the dot product of F32 or F16 weights and plain activations?

use half::f16;

use crate::kernels::{fold, tree};

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
