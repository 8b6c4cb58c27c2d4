//! How do weights in blocks of 32 meet rounded activations?

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::x86_64::*;

use super::{each, fetch_ahead, half_bits, load, tree};
use crate::kernels::activations::QuantisedRow;
use crate::kernels::blocks::{BlockQ8_0, blocks};

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn dot_q8_0<const T: usize>(row: &[u8], input: &[QuantisedRow<'_>; T]) -> [f32; T] {
    let row = blocks::<BlockQ8_0>(row);
    let quants: [&[[i8; 32]]; T] = each(input, |input| &input.quants.as_chunks().0[..row.len()]);
    let scales: [&[f32]; T] = each(input, |input| &input.scales[..row.len()]);
    let ones = _mm256_set1_epi16(1);
    let mut lanes = [_mm256_setzero_ps(); T];
    for (at, block) in row.iter().enumerate() {
        fetch_ahead(block);
        let weights = load(&block.quants);
        // maddubs wants one side unsigned: |w| * (sign(w) a) = w a. -128 becomes 128 as an unsigned byte.
        let magnitudes = _mm256_abs_epi8(weights);
        let scale = half_bits(block.scale_bits());
        for t in 0..T {
            let signed = _mm256_sign_epi8(load(&quants[t][at]), weights);
            let sum = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitudes, signed), ones);
            let scale = _mm256_set1_ps(scale * scales[t][at]);
            lanes[t] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(sum), lanes[t]);
        }
    }
    let mut sums = [0.0; T];
    for t in 0..T {
        sums[t] = tree(lanes[t]);
    }
    sums
}
