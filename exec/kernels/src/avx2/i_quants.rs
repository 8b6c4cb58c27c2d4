//! Dot products of `IQ4_XS`, `IQ1_S` and `IQ1_M`, which have a codebook, with rounded activations, in AVX2.
//!
//! The codebook indices of a block are unpacked in registers and stored, because each look-up loads its index.

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::x86_64::*;

use bytemuck::must_cast;

use super::k_quants::{Loaded, Scales16, dots256, four_scales, only_scale, spread, subtract_offset};
use super::{
    FourRows, MultiplyAdd, bit_fields_to_bytes, entries, four_of_eight, load, load_half, nibbles, per_token,
    signed, u16_indices, unsigned,
};
use crate::activations::QuantisedRow;
use crate::blocks::{BlockIq1M, BlockIq1S, BlockIq4Xs, IQ1_GRID, IQ4_VALUES};

dots256! {
    dot_iq4_xs: BlockIq4Xs, load_iq4_xs, group_iq4_xs, signed, only_scale;
    dot_iq1_s: BlockIq1S, load_iq1_s, group_iq1_s, unsigned, subtract_offset;
    dot_iq1_m: BlockIq1M, load_iq1_m, group_iq1_m, unsigned, subtract_offset;
}

/// The loaded parts of blocks from which nothing is subtracted.
pub(super) type Scaled<Scales> = Loaded<Scales, ()>;

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

/// The codebook indices of a block, one for eight weights, and the scales of its sub-blocks.
#[derive(Clone, Copy)]
struct Iq1S {
    indices: [u16; 32],
    scales: [i16; 8],
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_iq1_s(blocks: [&BlockIq1S; 4]) -> Loaded<Iq1S, [__m256i; 4]> {
    let mut scales = [Iq1S { indices: [0; 32], scales: [0; 8] }; 4];
    let mut subtracted = [_mm256_setzero_si256(); 4];
    for r in 0..4 {
        // For each sub-block: four times three bits of an index, the scale in bits 12 to 14, the sign of the shift.
        let bits = load_half(&blocks[r].high_bits);
        let scale = _mm_and_si128(_mm_srli_epi16::<11>(bits), _mm_set1_epi16(14));
        let scale = _mm_add_epi16(scale, _mm_set1_epi16(1));
        let offset = _mm_add_epi16(_mm_slli_epi16::<1>(_mm_srli_epi16::<15>(bits)), _mm_set1_epi16(7));
        // At most 15 * 9 = 135.
        let both = _mm_mullo_epi16(scale, offset);
        let high = bit_fields_to_bytes::<3>(_mm256_cvtepu16_epi32(bits));
        scales[r] = Iq1S { indices: u16_indices(load(&blocks[r].low_bits), high), scales: must_cast(scale) };
        subtracted[r] = _mm256_set_m128i(_mm_unpackhi_epi16(both, both), _mm_unpacklo_epi16(both, both));
    }
    Loaded { scale: four_scales(blocks), minimum: _mm_setzero_ps(), scales, subtracted }
}

#[inline]
#[target_feature(enable = "avx2")]
fn group_iq1_s<const G: usize>(_: &BlockIq1S, loaded: &Iq1S) -> (__m256i, __m256i) {
    let rows = four_of_eight(&IQ1_GRID, &loaded.indices.as_chunks().0[G]);
    (rows, _mm256_set1_epi16(loaded.scales[G]))
}

/// The codebook indices of a block, one for eight weights, the numbers that are added to these weights, and the scales of
/// its sub-blocks.
#[derive(Clone, Copy)]
struct Iq1M {
    indices: [u16; 32],
    shifts: [u32; 8],
    scales: Scales16,
}

/// The offset of all weights of `IQ1_M`: 8, which the rows of the codebook contain, plus 1 for the shift.
const IQ1_M_OFFSET: i16 = 9;

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_iq1_m(blocks: [&BlockIq1M; 4]) -> Loaded<Iq1M, [__m256i; 4]> {
    let mut scales = [Iq1M { indices: [0; 32], shifts: [0; 8], scales: Scales16::default() }; 4];
    let mut subtracted = [_mm256_setzero_si256(); 4];
    for r in 0..4 {
        // Each of four 16-bit integers has four scales of three bits. A multiplication shifts each to bits 9 to 11.
        let each_four_times = _mm256_setr_epi64x(
            0x0100_0100_0100_0100,
            0x0302_0302_0302_0302,
            0x0504_0504_0504_0504,
            0x0706_0706_0706_0706,
        );
        let packed = _mm256_set1_epi64x(must_cast(blocks[r].packed));
        let packed = _mm256_shuffle_epi8(packed, each_four_times);
        let moved = _mm256_mullo_epi16(packed, _mm256_set1_epi64x(0x0001_0008_0040_0200));
        // Twice the scale, plus one.
        let twice = _mm256_and_si256(_mm256_srli_epi16::<8>(moved), _mm256_set1_epi16(14));
        let scale = _mm256_add_epi16(twice, _mm256_set1_epi16(1));
        // At most 15 * 9 = 135.
        subtracted[r] = _mm256_mullo_epi16(scale, _mm256_set1_epi16(IQ1_M_OFFSET));

        let high_bits = load_half(&blocks[r].high_bits);
        let low_nibbles = _mm_and_si128(high_bits, _mm_set1_epi8(15));
        let high_nibbles = _mm_and_si128(_mm_srli_epi16::<4>(high_bits), _mm_set1_epi8(15));
        let nibbles = _mm256_set_m128i(
            _mm_unpackhi_epi8(low_nibbles, high_nibbles),
            _mm_unpacklo_epi8(low_nibbles, high_nibbles),
        );
        let high = _mm256_and_si256(nibbles, _mm256_set1_epi8(7));
        // 0 if the shift is negative, 2 if it is positive.
        let negative = _mm256_and_si256(_mm256_srli_epi16::<2>(nibbles), _mm256_set1_epi8(2));
        scales[r] = Iq1M {
            indices: u16_indices(load(&blocks[r].low_bits), high),
            shifts: must_cast(_mm256_sub_epi8(_mm256_set1_epi8(2), negative)),
            scales: must_cast(scale),
        };
    }
    Loaded { scale: four_scales(blocks), minimum: _mm_setzero_ps(), scales, subtracted }
}

#[inline]
#[target_feature(enable = "avx2")]
fn group_iq1_m<const G: usize>(_: &BlockIq1M, loaded: &Iq1M) -> (__m256i, __m256i) {
    let rows = four_of_eight(&IQ1_GRID, &loaded.indices.as_chunks().0[G]);
    // A byte is at most 16 + 2, so the addition does not carry into the next byte.
    let shifts = each_eight_times(loaded.shifts[G]);
    (_mm256_add_epi8(rows, shifts), spread::<G>(&loaded.scales))
}

/// Repeats each of four bytes eight times.
#[inline]
#[target_feature(enable = "avx2")]
fn each_eight_times(bytes: u32) -> __m256i {
    let byte_of_eight = _mm256_setr_epi64x(
        0x0000_0000_0000_0000,
        0x0101_0101_0101_0101,
        0x0202_0202_0202_0202,
        0x0303_0303_0303_0303,
    );
    _mm256_shuffle_epi8(_mm256_set1_epi32(bytes as i32), byte_of_eight)
}
