//! How do weights in blocks of 32 meet rounded activations?
//!
//! A format says how its 32 weights become bytes; what follows is the same for all.

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::x86_64::*;

use super::{
    each, fetch_ahead, half_bits, iq4_values, load, lowest, nibbles, one_sum, signed, two_sums, unsigned,
};
use crate::kernels::activations::QuantisedRow;
use crate::kernels::blocks::{BlockIq4Nl, BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0, blocks};

/// Dots of blocks whose weights are bytes with a sign.
macro_rules! signed_dots {
    ($($name:ident: $block:ty, $weights:ident;)+) => {$(
        #[inline]
        #[target_feature(enable = "avx2,fma,f16c")]
        pub(crate) fn $name<const T: usize>(row: &[u8], input: &[QuantisedRow<'_>; T]) -> [f32; T] {
            let row = blocks::<$block>(row);
            let quants: [&[[i8; 32]]; T] = each(input, |input| &input.quants.as_chunks().0[..row.len()]);
            let scales: [&[f32]; T] = each(input, |input| &input.scales[..row.len()]);
            let ones = _mm256_set1_epi16(1);
            let mut dots = [_mm_setzero_ps(); T];
            for (at, block) in row.iter().enumerate() {
                fetch_ahead(block);
                let weights = $weights(block);
                let scale = half_bits(block.scale_bits());
                for t in 0..T {
                    let sum = _mm256_madd_epi16(signed(weights, load(&quants[t][at])), ones);
                    dots[t] = _mm_fmadd_ss(_mm_set_ss(scale * scales[t][at]), one_sum(sum), dots[t]);
                }
            }
            lowest(dots)
        }
    )+};
}
signed_dots! {
    dot_q8_0: BlockQ8_0, q8_0;
    dot_q4_0: BlockQ4_0, q4_0;
    dot_q5_0: BlockQ5_0, q5_0;
    dot_iq4_nl: BlockIq4Nl, iq4_nl;
}

/// Dots of blocks whose weights are bytes without a sign, and a minimum.
macro_rules! minimum_dots {
    ($($name:ident: $block:ty, $weights:ident;)+) => {$(
        #[inline]
        #[target_feature(enable = "avx2,fma,f16c")]
        pub(crate) fn $name<const T: usize>(row: &[u8], input: &[QuantisedRow<'_>; T]) -> [f32; T] {
            let row = blocks::<$block>(row);
            let quants: [&[[i8; 32]]; T] = each(input, |input| &input.quants.as_chunks().0[..row.len()]);
            let scales: [&[f32]; T] = each(input, |input| &input.scales[..row.len()]);
            let (ones, byte_ones) = (_mm256_set1_epi16(1), _mm256_set1_epi8(1));
            let mut dots = [_mm_setzero_ps(); T];
            for (at, block) in row.iter().enumerate() {
                fetch_ahead(block);
                let weights = $weights(block);
                let (scale, minimum) = (half_bits(block.scale_bits()), half_bits(block.minimum_bits()));
                for t in 0..T {
                    let activations = load(&quants[t][at]);
                    let sum = _mm256_madd_epi16(unsigned(weights, activations), ones);
                    let plain = _mm256_madd_epi16(unsigned(byte_ones, activations), ones);
                    let both = two_sums(sum, plain);
                    let (scale, minimum) = (scale * scales[t][at], minimum * scales[t][at]);
                    dots[t] = _mm_fmadd_ss(_mm_set_ss(scale), both, dots[t]);
                    dots[t] = _mm_fmadd_ss(_mm_set_ss(minimum), _mm_movehdup_ps(both), dots[t]);
                }
            }
            lowest(dots)
        }
    )+};
}
minimum_dots! {
    dot_q4_1: BlockQ4_1, q4_1;
    dot_q5_1: BlockQ5_1, q5_1;
}

#[inline]
#[target_feature(enable = "avx2")]
fn q8_0(block: &BlockQ8_0) -> __m256i {
    load(&block.quants)
}

#[inline]
#[target_feature(enable = "avx2")]
fn q4_0(block: &BlockQ4_0) -> __m256i {
    _mm256_sub_epi8(nibbles(&block.quants), _mm256_set1_epi8(8))
}

#[inline]
#[target_feature(enable = "avx2")]
fn q4_1(block: &BlockQ4_1) -> __m256i {
    nibbles(&block.quants)
}

/// Where the fifth bit is clear, four bits set above the four there are give q - 16.
#[inline]
#[target_feature(enable = "avx2")]
fn q5_0(block: &BlockQ5_0) -> __m256i {
    let below = _mm256_andnot_si256(set_bits(block.high), _mm256_set1_epi8(-16));
    _mm256_or_si256(nibbles(&block.quants), below)
}

#[inline]
#[target_feature(enable = "avx2")]
fn q5_1(block: &BlockQ5_1) -> __m256i {
    let fifth = _mm256_and_si256(set_bits(block.high), _mm256_set1_epi8(16));
    _mm256_or_si256(nibbles(&block.quants), fifth)
}

#[inline]
#[target_feature(enable = "avx2")]
fn iq4_nl(block: &BlockIq4Nl) -> __m256i {
    iq4_values(nibbles(&block.quants))
}

/// 32 bits as 32 bytes: all ones where the bit is set.
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
