//! Dot products of I-quants in blocks of 256, which have a codebook, with rounded activations, in AVX2.

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::x86_64::*;

use bytemuck::must_cast;

use super::k_quants::{
    Loaded, Loaded16, Scales16, dots256, four_scales, only_scale, spread, subtract_offset,
};
use super::{
    FourRows, MultiplyAdd, entries, load, load_half, nibbles, per_token, set_bits, signed, unsigned,
};
use crate::activations::QuantisedRow;
use crate::blocks::{
    BlockIq1M, BlockIq1S, BlockIq2S, BlockIq2Xs, BlockIq2Xxs, BlockIq3S, BlockIq3Xxs, BlockIq4Xs,
    HalfScaledBlock, IQ4_VALUES, IntegerBlock256, SignMagnitudeBlock,
};

dots256! {
    dot_iq4_xs: BlockIq4Xs, load_iq4_xs, group_iq4_xs, signed, only_scale;
    dot_iq1_s: BlockIq1S, load_iq1_s, group_iq1_s, unsigned, subtract_offset;
    dot_iq1_m: BlockIq1M, load_iq1_m, group_iq1_m, unsigned, subtract_offset;
    dot_iq2_xxs: BlockIq2Xxs, load_sign_magnitude, group_sign_magnitude, signed, only_scale;
    dot_iq2_xs: BlockIq2Xs, load_sign_magnitude, group_sign_magnitude, signed, only_scale;
    dot_iq2_s: BlockIq2S, load_sign_magnitude, group_sign_magnitude, signed, only_scale;
    dot_iq3_xxs: BlockIq3Xxs, load_sign_magnitude, group_sign_magnitude, signed, only_scale;
    dot_iq3_s: BlockIq3S, load_sign_magnitude, group_sign_magnitude, signed, only_scale;
}

/// The loaded parts of blocks from which nothing is subtracted.
type Scaled<Scales> = Loaded<Scales, ()>;

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_iq4_xs(blocks: [&BlockIq4Xs; 4]) -> Scaled<[u32; 8]> {
    let mut scales = [[0; 8]; 4];
    for r in 0..4 {
        let (low, high) = blocks[r].packed_scales();
        let low = _mm256_srlv_epi32(_mm256_set1_epi32(low), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
        let high = _mm256_srlv_epi32(_mm256_set1_epi32(high), _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
        let high = _mm256_slli_epi32::<4>(_mm256_and_si256(high, _mm256_set1_epi32(3)));
        let six_bits = _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi32(15)), high);
        // The lower i16 of each lane is the scale, the upper one is zero or -1.
        let signed = _mm256_sub_epi32(six_bits, _mm256_set1_epi32(32));
        scales[r] = must_cast(_mm256_blend_epi16::<0xaa>(signed, _mm256_slli_epi32::<16>(signed)));
    }
    Loaded { scale: four_scales(blocks), minimum: _mm_setzero_ps(), scales, subtracted: () }
}

#[inline]
#[target_feature(enable = "avx2")]
fn group_iq4_xs<const G: usize>(block: &BlockIq4Xs, scales: &[u32; 8]) -> (__m256i, __m256i) {
    let numbers = nibbles(&block.quants.as_chunks::<16>().0[G]);
    (entries(&IQ4_VALUES, numbers), _mm256_set1_epi32(scales[G] as i32))
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_iq1_s(blocks: [&BlockIq1S; 4]) -> Loaded<[i16; 8], [__m256i; 4]> {
    let (mut scales, mut subtracted) = ([[0; 8]; 4], [_mm256_setzero_si256(); 4]);
    for r in 0..4 {
        // For each sub-block, the scale is in bits 12 to 14 and the sign of the shift in bit 15.
        let bits = load_half(&blocks[r].high_bits);
        let scale = _mm_and_si128(_mm_srli_epi16::<11>(bits), _mm_set1_epi16(14));
        let scale = _mm_add_epi16(scale, _mm_set1_epi16(1));
        let offset = _mm_add_epi16(_mm_slli_epi16::<1>(_mm_srli_epi16::<15>(bits)), _mm_set1_epi16(7));
        let both = _mm_mullo_epi16(scale, offset);
        scales[r] = must_cast(scale);
        subtracted[r] = _mm256_set_m128i(_mm_unpackhi_epi16(both, both), _mm_unpacklo_epi16(both, both));
    }
    Loaded { scale: four_scales(blocks), minimum: _mm_setzero_ps(), scales, subtracted }
}

#[inline]
#[target_feature(enable = "avx2")]
fn group_iq1_s<const G: usize>(block: &BlockIq1S, scales: &[i16; 8]) -> (__m256i, __m256i) {
    let row = |at: usize| block.grid_row(4 * G + at) as i64;
    let weights = _mm256_set_epi64x(row(3), row(2), row(1), row(0));
    (weights, _mm256_set1_epi16(scales[G]))
}

/// The offset of all weights of `IQ1_M`: 8, which the rows of the codebook contain, plus 1 for the shift.
const IQ1_M_OFFSET: u8 = 9;

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_iq1_m(blocks: [&BlockIq1M; 4]) -> Loaded16 {
    let (mut scales, mut subtracted) = ([Scales16::default(); 4], [_mm256_setzero_si256(); 4]);
    for r in 0..4 {
        let wide = _mm256_cvtepi8_epi16(load_half(&blocks[r].scales()));
        scales[r] = must_cast(wide);
        // At most 15 * 9 = 135.
        subtracted[r] = _mm256_mullo_epi16(wide, _mm256_set1_epi16(i16::from(IQ1_M_OFFSET)));
    }
    Loaded { scale: four_scales(blocks), minimum: _mm_setzero_ps(), scales, subtracted }
}

#[inline]
#[target_feature(enable = "avx2")]
fn group_iq1_m<const G: usize>(block: &BlockIq1M, scales: &Scales16) -> (__m256i, __m256i) {
    let row = |at: usize| {
        let up = u64::from_le_bytes([IQ1_M_OFFSET - block.offset(4 * G + at); 8]);
        // A byte is at most 16 + 2, so the addition does not carry into the next byte.
        (block.grid_row(4 * G + at) + up) as i64
    };
    (_mm256_set_epi64x(row(3), row(2), row(1), row(0)), spread::<G>(scales))
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_sign_magnitude<B: HalfScaledBlock + IntegerBlock256>(blocks: [&B; 4]) -> Scaled<Scales16> {
    let mut scales = [Scales16::default(); 4];
    for r in 0..4 {
        scales[r] = must_cast(_mm256_cvtepi8_epi16(load_half(&blocks[r].scales())));
    }
    Loaded { scale: four_scales(blocks), minimum: _mm_setzero_ps(), scales, subtracted: () }
}

#[inline]
#[target_feature(enable = "avx2")]
fn group_sign_magnitude<const G: usize>(
    block: &impl SignMagnitudeBlock,
    scales: &Scales16,
) -> (__m256i, __m256i) {
    let eight = |at: usize| block.magnitudes(4 * G + at) as i64;
    let magnitudes = _mm256_set_epi64x(eight(3), eight(2), eight(1), eight(0));
    let signs = |at: usize| block.signs(4 * G + at);
    // The two's complement of a negative weight is the complement of its magnitude, plus one.
    let negative = set_bits([signs(0), signs(1), signs(2), signs(3)]);
    let weights = _mm256_sub_epi8(_mm256_xor_si256(magnitudes, negative), negative);
    (weights, spread::<G>(scales))
}
