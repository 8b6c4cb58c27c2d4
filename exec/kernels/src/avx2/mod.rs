//! The dot products of [`super::scalar`] for x86-64 processors with AVX2, FMA and F16C.
//!
//! `maddubs` multiplies unsigned weights by signed activations and adds adjacent products (at most 2 * 128 * 127,
//! below 2^15); `madd` multiplies by the integer scales and adds adjacent products again. A block is summed
//! completely in integers before the conversion to f32. Each function computes the dot products of a row with T
//! tokens, so that weights are unpacked once for T tokens. The arithmetic of a token does not depend on T.
//!
//! Not here: loops over rows. That is [`super::matmul`].

mod blocks32;
mod floats;
mod i_quants;
mod k_quants;

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::x86_64::*;

pub(super) use blocks32::{dot_iq4_nl, dot_mxfp4, dot_q4_0, dot_q4_1, dot_q5_0, dot_q5_1, dot_q8_0};
pub(super) use floats::{dot_bf16, dot_f16, dot_f32, scores_f16, sum_values_f16};
pub(super) use i_quants::{
    dot_iq1_m, dot_iq1_s, dot_iq2_s, dot_iq2_xs, dot_iq2_xxs, dot_iq3_s, dot_iq3_xxs, dot_iq4_xs,
};
pub(super) use k_quants::{dot_q2_k, dot_q3_k, dot_q4_k, dot_q5_k, dot_q6_k};

use bytemuck::Pod;

use super::matmul::per_token;

/// Loads the 32 bytes of `values`.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn load<T: Pod>(values: &T) -> __m256i {
    bytemuck::must_cast(*values)
}

/// Loads the 16 bytes of `values`.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn load_half<T: Pod>(values: &T) -> __m128i {
    bytemuck::must_cast(*values)
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn half_bits(bits: u16) -> f32 {
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))))
}

/// The distance between a loaded block and the software prefetch, in bytes. Hardware prefetching stops at the end of a
/// 4 KiB page; without software prefetching one core reaches only 60 % of its read bandwidth.
const PREFETCH_BYTES: usize = 4096;

/// Prefetches the cache lines `PREFETCH_BYTES` after a block, which may be outside the row or the matrix.
#[inline]
#[target_feature(enable = "avx2")]
fn prefetch<B>(block: &B) {
    let there = std::ptr::from_ref(block).cast::<i8>().wrapping_add(PREFETCH_BYTES);
    for line in (0..size_of::<B>()).step_by(64) {
        // A prefetch of any address is harmless: it cannot fault.
        _mm_prefetch::<_MM_HINT_T0>(there.wrapping_add(line));
    }
}

/// Returns the sum of the i32 lanes of `first` and that of `second`, as floats in the two lowest lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn two_sums(first: __m256i, second: __m256i) -> __m128 {
    let pairs = _mm256_hadd_epi32(first, second);
    let four = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256::<1>(pairs));
    _mm_cvtepi32_ps(_mm_hadd_epi32(four, four))
}

/// Returns the sum of the i32 lanes of `values`, as a float in the lowest lane.
#[inline]
#[target_feature(enable = "avx2")]
fn one_sum(values: __m256i) -> __m128 {
    let four = _mm_add_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256::<1>(values));
    let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b1110>(four));
    _mm_cvtepi32_ps(_mm_add_epi32(two, _mm_shuffle_epi32::<1>(two)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn lowest<const T: usize>(dots: [__m128; T]) -> [f32; T] {
    let mut lowest = [0.0; T];
    for t in 0..T {
        lowest[t] = _mm_cvtss_f32(dots[t]);
    }
    lowest
}

/// Returns the low four bits of each of 16 bytes, followed by the high four bits of each, as 32 bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn nibbles(bytes: &[u8; 16]) -> __m256i {
    let low = load_half(bytes);
    let both = _mm256_set_m128i(_mm_srli_epi16::<4>(low), low);
    _mm256_and_si256(both, _mm256_set1_epi8(15))
}

/// Returns the entries of a codebook for 32 indices.
#[inline]
#[target_feature(enable = "avx2")]
fn entries(codebook: &[i8; 16], indices: __m256i) -> __m256i {
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_half(codebook)), indices)
}

/// Expands each of 32 bits to a byte: 0xff if the bit is set, otherwise 0.
#[inline]
#[target_feature(enable = "avx2")]
fn set_bits(bits: [u8; 4]) -> __m256i {
    let byte_of_eight = _mm256_set_epi64x(
        0x0303_0303_0303_0303,
        0x0202_0202_0202_0202,
        0x0101_0101_0101_0101,
        0x0000_0000_0000_0000,
    );
    let one_bit_each = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(i32::from_le_bytes(bits)), byte_of_eight);
    _mm256_cmpeq_epi8(_mm256_and_si256(bytes, one_bit_each), one_bit_each)
}

/// Multiplies 32 weights from 0 to 127 by 32 activations and adds adjacent products.
#[inline]
#[target_feature(enable = "avx2")]
fn unsigned(weights: __m256i, activations: __m256i) -> __m256i {
    _mm256_maddubs_epi16(weights, activations)
}

/// Multiplies 32 signed weights by 32 activations and adds adjacent products. `maddubs` needs one unsigned operand, so
/// w a is computed as |w| * (sign(w) a); the magnitude of -128 is 128 as an unsigned byte.
#[inline]
#[target_feature(enable = "avx2")]
fn signed(weights: __m256i, activations: __m256i) -> __m256i {
    _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(activations, weights))
}
