//! Scalar dot products of K-quants, in blocks of 256, with rounded activations.
//!
//! An integer weight is the quant, less the offset of the format (4 in `Q3_K`, 32 in `Q6_K`), times the scale of its
//! sub-block. In formats with minima, a block has a second integer: the minimum of each sub-block times the sum of
//! its activations, added over the sub-blocks. It is subtracted: `sum = fma(-(minimum * activation_scale), integer,
//! sum)`.

use super::total;
use crate::activations::QuantisedRow;
use crate::blocks::{BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K, ScaledBlock, blocks};

/// Returns the dot product with `Q2_K` weights, which have minima and sub-blocks of 16.
pub(crate) fn dot_q2_k(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    let mut sum = 0.0f32;
    for (at, block) in blocks::<BlockQ2K>(row).iter().enumerate() {
        let (quants, sums) = of_block(input, at);
        let products = total(quants, |j| i32::from(block.packed[j / 16] & 15) * i32::from(block.quant(j)));
        let subtracted: i32 = (0..16).map(|j| i32::from(block.packed[j] >> 4) * i32::from(sums[j])).sum();
        sum = (block.scale() * input.scales[at]).mul_add(products as f32, sum);
        sum = (-(block.minimum() * input.scales[at])).mul_add(subtracted as f32, sum);
    }
    sum
}

/// Returns the dot product with `Q3_K` weights, which have the offset 4 and sub-blocks of 16.
pub(crate) fn dot_q3_k(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    let mut sum = 0.0f32;
    for (at, block) in blocks::<BlockQ3K>(row).iter().enumerate() {
        let scales = block.scales();
        let weight = |j| i32::from(scales[j / 16]) * (i32::from(block.quant(j)) - 4);
        let products = total(of_block(input, at).0, weight);
        sum = (block.scale() * input.scales[at]).mul_add(products as f32, sum);
    }
    sum
}

/// Defines dot products with formats that have minima and sub-blocks of 32.
macro_rules! minima_of_32 {
    ($($name:ident: $block:ty;)+) => {$(
        pub(crate) fn $name(row: &[u8], input: QuantisedRow<'_>) -> f32 {
            let mut sum = 0.0f32;
            for (at, block) in blocks::<$block>(row).iter().enumerate() {
                let (quants, sums) = of_block(input, at);
                let (scales, minima) = block.scales_and_minima();
                let (scales, minima) = (scales.to_le_bytes(), minima.to_le_bytes());
                let products = total(quants, |j| i32::from(scales[j / 32]) * i32::from(block.quant(j)));
                let subtracted: i32 = (0..16).map(|j| i32::from(minima[j / 2]) * i32::from(sums[j])).sum();
                sum = (block.scale() * input.scales[at]).mul_add(products as f32, sum);
                sum = (-(block.minimum() * input.scales[at])).mul_add(subtracted as f32, sum);
            }
            sum
        }
    )+};
}
minima_of_32! {
    dot_q4_k: BlockQ4K;
    dot_q5_k: BlockQ5K;
}

/// Returns the dot product with `Q6_K` weights, which have the offset 32 and sub-blocks of 16.
pub(crate) fn dot_q6_k(row: &[u8], input: QuantisedRow<'_>) -> f32 {
    let mut sum = 0.0f32;
    for (at, block) in blocks::<BlockQ6K>(row).iter().enumerate() {
        let weight = |j| i32::from(block.scales[j / 16]) * (i32::from(block.quant(j)) - 32);
        let products = total(of_block(input, at).0, weight);
        sum = (block.scale() * input.scales[at]).mul_add(products as f32, sum);
    }
    sum
}

/// Returns the activations for block `at`, and the sums of every 16 of them.
#[inline(always)]
fn of_block(input: QuantisedRow<'_>, at: usize) -> (&[i8], &[i16]) {
    (&input.quants[256 * at..][..256], &input.sums[16 * at..][..16])
}
