//! Dot products of I-quants in blocks of 256, which have a codebook, with rounded activations, in AVX2.

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::x86_64::*;

use super::k_quants::{Loaded, Loaded16, dots256, pairs, spread, subtract_offset, twice};
use super::{
    entries, half_bits, load, load_half, lowest, nibbles, per_token, prefetch, set_bits, signed, unsigned,
};
use crate::activations::QuantisedRow;
use crate::blocks::{
    BlockIq1M, BlockIq1S, BlockIq2S, BlockIq2Xs, BlockIq2Xxs, BlockIq3S, BlockIq3Xxs, BlockIq4Xs,
    HalfScaledBlock, IQ4_VALUES, IntegerBlock256, SignMagnitudeBlock, blocks,
};

dots256! {
    dot_iq4_xs: BlockIq4Xs, load_iq4_xs, group_iq4_xs, signed, subtract_offset;
    dot_iq1_s: BlockIq1S, load_iq1_s, group_iq1_s, unsigned, subtract_offset;
    dot_iq1_m: BlockIq1M, load_iq1_m, group_iq1_m, unsigned, subtract_offset;
    dot_iq2_xxs: BlockIq2Xxs, load_sign_magnitude, group_sign_magnitude, signed, subtract_offset;
    dot_iq2_xs: BlockIq2Xs, load_sign_magnitude, group_sign_magnitude, signed, subtract_offset;
    dot_iq2_s: BlockIq2S, load_sign_magnitude, group_sign_magnitude, signed, subtract_offset;
    dot_iq3_xxs: BlockIq3Xxs, load_sign_magnitude, group_sign_magnitude, signed, subtract_offset;
    dot_iq3_s: BlockIq3S, load_sign_magnitude, group_sign_magnitude, signed, subtract_offset;
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_iq4_xs(block: &BlockIq4Xs) -> Loaded<[i16; 8]> {
    let mut scales = [0; 8];
    for (sub_block, scale) in scales.iter_mut().enumerate() {
        *scale = i16::from(block.sub_scale(sub_block));
    }
    let zero = _mm256_setzero_si256();
    Loaded { scale: half_bits(block.scale_bits()), minimum: 0.0, scales, subtracted: zero, high_bits: zero }
}

#[inline]
#[target_feature(enable = "avx2")]
fn group_iq4_xs<const G: usize>(block: &BlockIq4Xs, loaded: &Loaded<[i16; 8]>) -> (__m256i, __m256i) {
    let numbers = nibbles(&block.quants.as_chunks::<16>().0[G]);
    (entries(&IQ4_VALUES, numbers), _mm256_set1_epi16(loaded.scales[G]))
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_iq1_s(block: &BlockIq1S) -> Loaded<[u8; 8]> {
    let (mut scales, mut offsets) = ([0; 8], [0; 8]);
    for (sub_block, (scale, offset)) in scales.iter_mut().zip(&mut offsets).enumerate() {
        *scale = block.sub_scale(sub_block);
        // At most 15 * 9 = 135.
        *offset = *scale * block.offset(sub_block);
    }
    let subtracted = pairs(u64::from_le_bytes(offsets));
    let scale = 0.125 * half_bits(block.scale_bits());
    Loaded { scale, minimum: 0.0, scales, subtracted, high_bits: _mm256_setzero_si256() }
}

#[inline]
#[target_feature(enable = "avx2")]
fn group_iq1_s<const G: usize>(block: &BlockIq1S, loaded: &Loaded<[u8; 8]>) -> (__m256i, __m256i) {
    let row = |at: usize| block.grid_row(4 * G + at) as i64;
    let weights = _mm256_set_epi64x(row(3), row(2), row(1), row(0));
    (weights, _mm256_set1_epi16(i16::from(loaded.scales[G])))
}

/// The offset of all weights of `IQ1_M`: 8, which the rows of the codebook contain, plus 1 for the shift.
const IQ1_M_OFFSET: u8 = 9;

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_iq1_m(block: &BlockIq1M) -> Loaded16 {
    let scales = _mm256_cvtepi8_epi16(load_half(&block.scales()));
    // At most 15 * 9 = 135.
    let subtracted = _mm256_mullo_epi16(scales, _mm256_set1_epi16(i16::from(IQ1_M_OFFSET)));
    let scale = 0.125 * half_bits(block.scale_bits());
    Loaded { scale, minimum: 0.0, scales: twice(scales), subtracted, high_bits: _mm256_setzero_si256() }
}

#[inline]
#[target_feature(enable = "avx2")]
fn group_iq1_m<const G: usize>(block: &BlockIq1M, loaded: &Loaded16) -> (__m256i, __m256i) {
    let row = |at: usize| {
        let up = u64::from_le_bytes([IQ1_M_OFFSET - block.offset(4 * G + at); 8]);
        // A byte is at most 16 + 2, so the addition does not carry into the next byte.
        (block.grid_row(4 * G + at) + up) as i64
    };
    (_mm256_set_epi64x(row(3), row(2), row(1), row(0)), spread::<G>(loaded))
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_sign_magnitude<B: HalfScaledBlock + IntegerBlock256>(block: &B) -> Loaded16 {
    let scales = twice(_mm256_cvtepi8_epi16(load_half(&block.scales())));
    let scale = B::SCALE_FACTOR * half_bits(block.scale_bits());
    let zero = _mm256_setzero_si256();
    Loaded { scale, minimum: 0.0, scales, subtracted: zero, high_bits: zero }
}

#[inline]
#[target_feature(enable = "avx2")]
fn group_sign_magnitude<const G: usize>(
    block: &impl SignMagnitudeBlock,
    loaded: &Loaded16,
) -> (__m256i, __m256i) {
    let eight = |at: usize| block.magnitudes(4 * G + at) as i64;
    let magnitudes = _mm256_set_epi64x(eight(3), eight(2), eight(1), eight(0));
    let signs = |at: usize| block.signs(4 * G + at);
    // The two's complement of a negative weight is the complement of its magnitude, plus one.
    let negative = set_bits([signs(0), signs(1), signs(2), signs(3)]);
    let weights = _mm256_sub_epi8(_mm256_xor_si256(magnitudes, negative), negative);
    (weights, spread::<G>(loaded))
}
