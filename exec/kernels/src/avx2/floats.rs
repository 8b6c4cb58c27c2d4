//! Dot products of F32, F16 and BF16 weights with f32 activations, and attention over an f16 cache, in AVX2.
//!
//! The 32 lanes of a sum (see [`super::super`]) are four registers of eight lanes.

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::x86_64::*;
// `attention_f16` uses these names.
use std::arch::x86_64::{_mm256_fmadd_ps as fma, _mm256_set1_ps as splat};

use bytemuck::must_cast;
use half::f16;

use super::{MultiplyAdd, per_token};
use crate::attention::attention_f16;
use crate::blocks::bf16_to_f32;
use crate::x86_64::Avx2;

/// Converts eight f16 values to f32.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn widen(halves: [u8; 16]) -> __m256 {
    _mm256_cvtph_ps(must_cast(halves))
}

/// Converts eight BF16 values to f32. A BF16 value is the upper half of the corresponding f32.
#[inline]
#[target_feature(enable = "avx2")]
fn upper(halves: [u8; 16]) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(must_cast(halves))))
}

/// Adds the products of the last elements of a row, `rest` (fewer than 32), to the 32 lanes and returns the sum of the
/// lanes, in the order of [`crate::sum_lanes`].
#[inline]
#[target_feature(enable = "avx2,fma")]
fn finish(lanes: [__m256; 4], rest: impl ExactSizeIterator<Item = (f32, f32)>) -> f32 {
    if rest.len() == 0 {
        let [a, b, c, d] = lanes;
        return tree_sum(_mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d)));
    }
    crate::sum_lanes_with_rest(must_cast(lanes), rest)
}

/// Returns the sum of eight lanes, in the order of [`crate::tree_sum`].
#[inline]
#[target_feature(enable = "avx2")]
fn tree_sum(lanes: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps::<1>(lanes));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}

/// Prefetches the cache lines [`MultiplyAdd::PREFETCH_BYTES`] after a chunk of a row, which may be outside the matrix.
#[inline]
#[target_feature(enable = "avx2")]
fn prefetch<I: MultiplyAdd, const N: usize>(chunk: &[u8; N]) {
    let there = chunk.as_ptr().cast::<i8>().wrapping_add(I::PREFETCH_BYTES);
    for line in (0..N).step_by(64) {
        // A prefetch of any address is harmless: it cannot fault.
        _mm_prefetch::<_MM_HINT_T1>(there.wrapping_add(line));
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn plain(bytes: [u8; 32]) -> __m256 {
    must_cast(bytes)
}

/// Defines dot products for float weights. Arguments of each format: the number of bytes of a weight, the function that
/// converts eight weights to f32, and the closure that converts a single weight to f32.
macro_rules! dots {
    ($($name:ident, $one_row:ident: $bytes:literal, $eight:ident, $one:expr;)+) => {$(
        #[inline]
        #[target_feature(enable = "avx2,fma,f16c")]
        pub(crate) fn $name<I: MultiplyAdd, const T: usize>(_: I, rows: &[&[u8]; 4], input: &[&[f32]; T]) -> [[f32; 4]; T] {
            let mut dots = [[0.0; 4]; T];
            for r in 0..4 {
                let sums = $one_row::<I, T>(rows[r], input);
                for t in 0..T {
                    dots[t][r] = sums[t];
                }
            }
            dots
        }

        #[inline]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn $one_row<I: MultiplyAdd, const T: usize>(row: &[u8], input: &[&[f32]; T]) -> [f32; T] {
            let (chunks, rest) = row.as_chunks::<{ 32 * $bytes }>();
            let values: [&[[f32; 32]]; T] = per_token(input, |input| &input.as_chunks().0[..chunks.len()]);
            let mut lanes = [[_mm256_setzero_ps(); 4]; T];
            for (at, chunk) in chunks.iter().enumerate() {
                prefetch::<I, _>(chunk);
                for (part, bytes) in chunk.as_chunks::<{ 8 * $bytes }>().0.iter().enumerate() {
                    let weights = $eight(*bytes);
                    for t in 0..T {
                        let values = must_cast(values[t][at].as_chunks::<8>().0[part]);
                        lanes[t][part] = _mm256_fmadd_ps(weights, values, lanes[t][part]);
                    }
                }
            }
            let mut sums = [0.0; T];
            for t in 0..T {
                let rest = rest.as_chunks::<$bytes>().0.iter().map($one);
                sums[t] = finish(lanes[t], rest.zip(input[t][32 * chunks.len()..].iter().copied()));
            }
            sums
        }
    )+};
}
dots! {
    dot_f16, one_row_f16: 2, widen, |bytes| f16::from_le_bytes(*bytes).to_f32();
    dot_bf16, one_row_bf16: 2, upper, |bytes| bf16_to_f32(*bytes);
    dot_f32, one_row_f32: 4, plain, |bytes| f32::from_le_bytes(*bytes);
}

/// Returns the dot product of a key and a query.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn row_f16(key: &[u8], query: &[&[f32]; 1]) -> [f32; 1] {
    one_row_f16::<Avx2, 1>(key, query)
}

attention_f16! { 8, 8, target_feature(enable = "avx2,fma,f16c") }
