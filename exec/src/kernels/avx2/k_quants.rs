//! How do weights in blocks of 256 meet rounded activations?

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::x86_64::*;

use super::{each, fetch_ahead, half_bits, load, load_unsigned, tree};
use crate::kernels::activations::QuantisedRow;
use crate::kernels::blocks::{BlockQ4K, BlockQ6K, blocks};

#[inline]
#[target_feature(enable = "avx2")]
fn load_sums(sums: &[i16; 16]) -> __m256i {
    // SAFETY: an unaligned load of the 32 bytes that the reference covers.
    unsafe { _mm256_loadu_si256(sums.as_ptr().cast()) }
}

/// One 8-bit number of each of eight sub-blocks, as an i16 pair in each 32-bit lane.
#[inline]
#[target_feature(enable = "avx2")]
fn pairs(bytes: u64) -> __m256i {
    let wide = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes as i64));
    _mm256_or_si256(wide, _mm256_slli_epi32::<16>(wide))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn dot_q4_k<const T: usize>(row: &[u8], input: &[QuantisedRow<'_>; T]) -> [f32; T] {
    let row = blocks::<BlockQ4K>(row);
    let quants: [&[[i8; 256]]; T] = each(input, |input| &input.quants.as_chunks().0[..row.len()]);
    let sums: [&[[i16; 16]]; T] = each(input, |input| &input.sums.as_chunks().0[..row.len()]);
    let scales: [&[f32]; T] = each(input, |input| &input.scales[..row.len()]);
    let low_bits = _mm256_set1_epi8(15);
    let mut lanes = [_mm256_setzero_ps(); T];
    for (at, block) in row.iter().enumerate() {
        fetch_ahead(block);
        let (block_scales, minima) = block.scales_and_minima();
        let minima = pairs(minima);
        let mut scale_pairs = [0u32; 8];
        // SAFETY: an unaligned store of 32 bytes into the array. Broadcasting from memory leaves the shuffle
        // port to the multiplications.
        unsafe { _mm256_storeu_si256(scale_pairs.as_mut_ptr().cast(), pairs(block_scales)) };
        let halves = _mm_cvtph_ps(_mm_cvtsi32_si128(block.scale_and_minimum_bits() as i32));
        let (scale, minimum) = (_mm_cvtss_f32(halves), _mm_cvtss_f32(_mm_movehdup_ps(halves)));
        let mut activations = [&quants[0][at]; T];
        for t in 1..T {
            activations[t] = &quants[t][at];
        }
        let mut totals = [_mm256_setzero_si256(); T];
        for (run, bytes) in block.quants.as_chunks::<32>().0.iter().enumerate() {
            let bytes = load_unsigned(bytes);
            let low = _mm256_and_si256(bytes, low_bits);
            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low_bits);
            let low_scale = _mm256_set1_epi32(scale_pairs[2 * run] as i32);
            let high_scale = _mm256_set1_epi32(scale_pairs[2 * run + 1] as i32);
            for t in 0..T {
                let groups = activations[t].as_chunks::<32>().0;
                let first = _mm256_maddubs_epi16(low, load(&groups[2 * run]));
                let second = _mm256_maddubs_epi16(high, load(&groups[2 * run + 1]));
                let first = _mm256_madd_epi16(first, low_scale);
                let second = _mm256_madd_epi16(second, high_scale);
                totals[t] = _mm256_add_epi32(totals[t], _mm256_add_epi32(first, second));
            }
        }
        for t in 0..T {
            let scale = _mm256_set1_ps(scale * scales[t][at]);
            let minimum = _mm256_set1_ps(minimum * scales[t][at]);
            let subtracted = _mm256_madd_epi16(load_sums(&sums[t][at]), minima);
            lanes[t] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(totals[t]), lanes[t]);
            lanes[t] = _mm256_fnmadd_ps(minimum, _mm256_cvtepi32_ps(subtracted), lanes[t]);
        }
    }
    let mut sums = [0.0; T];
    for t in 0..T {
        sums[t] = tree(lanes[t]);
    }
    sums
}

/// Byte shuffles that spread scales 2g and 2g + 1, of eight i16, over the halves of group g.
static SPREAD: [[i8; 32]; 4] = {
    let mut spread = [[0; 32]; 4];
    let mut at = 0;
    while at < 128 {
        let (group, byte) = (at / 32, at % 32);
        spread[group][byte] = (4 * group + 2 * (byte / 16) + byte % 2) as i8;
        at += 1;
    }
    spread
};

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn dot_q6_k<const T: usize>(row: &[u8], input: &[QuantisedRow<'_>; T]) -> [f32; T] {
    let row = blocks::<BlockQ6K>(row);
    let quants: [&[[i8; 256]]; T] = each(input, |input| &input.quants.as_chunks().0[..row.len()]);
    let sums: [&[[i16; 16]]; T] = each(input, |input| &input.sums.as_chunks().0[..row.len()]);
    let scales: [&[f32]; T] = each(input, |input| &input.scales[..row.len()]);
    let low_bits = _mm256_set1_epi8(15);
    let top_bits = _mm256_set1_epi8(0x30);
    let mut lanes = [_mm256_setzero_ps(); T];
    for (at, block) in row.iter().enumerate() {
        fetch_ahead(block);
        // SAFETY: an unaligned load of the 16 scales.
        let packed_scales = unsafe { _mm_loadu_si128(block.scales.as_ptr().cast()) };
        let wide_scales = _mm256_cvtepi8_epi16(packed_scales); // [16] i16
        let halves = [_mm256_castsi256_si128(wide_scales), _mm256_extracti128_si256::<1>(wide_scales)];
        let mut activations = [&quants[0][at]; T];
        for t in 1..T {
            activations[t] = &quants[t][at];
        }
        let mut totals = [_mm256_setzero_si256(); T];
        for (part, half_scales) in halves.into_iter().enumerate() {
            let half_scales = _mm256_broadcastsi128_si256(half_scales); // eight i16 twice
            let low = block.low.as_chunks::<32>().0;
            let (low0, low1) = (load_unsigned(&low[2 * part]), load_unsigned(&low[2 * part + 1]));
            let high = load_unsigned(&block.high.as_chunks::<32>().0[part]);
            let group = [
                _mm256_or_si256(
                    _mm256_and_si256(low0, low_bits),
                    _mm256_and_si256(_mm256_slli_epi16::<4>(high), top_bits),
                ),
                _mm256_or_si256(
                    _mm256_and_si256(low1, low_bits),
                    _mm256_and_si256(_mm256_slli_epi16::<2>(high), top_bits),
                ),
                _mm256_or_si256(
                    _mm256_and_si256(_mm256_srli_epi16::<4>(low0), low_bits),
                    _mm256_and_si256(high, top_bits),
                ),
                _mm256_or_si256(
                    _mm256_and_si256(_mm256_srli_epi16::<4>(low1), low_bits),
                    _mm256_and_si256(_mm256_srli_epi16::<2>(high), top_bits),
                ),
            ];
            for g in 0..4 {
                let scale = _mm256_shuffle_epi8(half_scales, load(&SPREAD[g]));
                for t in 0..T {
                    let group_of_token = load(&activations[t].as_chunks::<32>().0[4 * part + g]);
                    let sum = _mm256_madd_epi16(_mm256_maddubs_epi16(group[g], group_of_token), scale);
                    totals[t] = _mm256_add_epi32(totals[t], sum);
                }
            }
        }
        let scale = half_bits(block.scale_bits());
        for t in 0..T {
            let offset = _mm256_madd_epi16(load_sums(&sums[t][at]), wide_scales);
            let total = _mm256_sub_epi32(totals[t], _mm256_slli_epi32::<5>(offset));
            let scale = _mm256_set1_ps(scale * scales[t][at]);
            lanes[t] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(total), lanes[t]);
        }
    }
    let mut sums = [0.0; T];
    for t in 0..T {
        sums[t] = tree(lanes[t]);
    }
    sums
}
