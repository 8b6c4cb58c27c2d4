//! Dot products of weights in blocks of 32 with rounded activations, in AVX2.
//!
//! A format defines how the 32 weights of a block are unpacked to bytes. The arithmetic after that is the same for all
//! formats with a minimum, and for all formats without one.

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::x86_64::*;

use bytemuck::must_cast;

use super::{
    entries, half_bits, load, lowest, nibbles, one_sum, per_token, prefetch, set_bits, signed, two_sums,
    unsigned,
};
use crate::activations::QuantisedRow;
use crate::blocks::{
    BlockIq4Nl, BlockMxfp4, BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0, HalfScaledBlock,
    IQ4_VALUES, MXFP4_VALUES, ScaledBlock, blocks,
};

/// Defines dot products for formats without a minimum. Arguments of each format: `$four_scales` and `$scale` return the
/// scales of four blocks and of one block, and an expression unpacks the weights of a block to signed bytes. Four
/// blocks are summed together.
macro_rules! signed_dots {
    ($($name:ident: $type:ty, $four_scales:ident, $scale:ident, |$block:ident| $weights:expr;)+) => {$(
        #[inline]
        #[target_feature(enable = "avx2,fma,f16c")]
        pub(crate) fn $name<const T: usize>(row: &[u8], input: &[QuantisedRow<'_>; T]) -> [f32; T] {
            #[inline]
            #[target_feature(enable = "avx2")]
            fn unpack($block: &$type) -> __m256i {
                $weights
            }
            let row = blocks::<$type>(row);
            let quants: [&[[i8; 32]]; T] = per_token(input, |input| &input.quants.as_chunks().0[..row.len()]);
            let scales: [&[f32]; T] = per_token(input, |input| &input.scales[..row.len()]);
            let (fours, rest) = row.as_chunks::<4>();
            let ones = _mm256_set1_epi16(1);
            let mut dots = [_mm_setzero_ps(); T];
            for (at, [a, b, c, d]) in fours.iter().enumerate() {
                prefetch(&fours[at]);
                let weights = [unpack(a), unpack(b), unpack(c), unpack(d)];
                let scale = $four_scales([a, b, c, d]);
                for t in 0..T {
                    let quants = &quants[t].as_chunks::<4>().0[at];
                    let mut sums = [_mm256_setzero_si256(); 4];
                    for n in 0..4 {
                        sums[n] = _mm256_madd_epi16(signed(weights[n], load(&quants[n])), ones);
                    }
                    let scale = _mm_mul_ps(scale, must_cast(scales[t].as_chunks::<4>().0[at]));
                    dots[t] = add_four(scale, four_sums(sums), dots[t]);
                }
            }
            for (at, block) in (4 * fours.len()..).zip(rest) {
                let weights = unpack(block);
                let scale = $scale(block);
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
    dot_q8_0: BlockQ8_0, four_half_scales, half_scale, |block| load(&block.quants);
    dot_q4_0: BlockQ4_0, four_half_scales, half_scale, |block| {
        _mm256_sub_epi8(nibbles(&block.quants), _mm256_set1_epi8(8))
    };
    dot_q5_0: BlockQ5_0, four_half_scales, half_scale, |block| {
        // Where the fifth bit is clear, setting the four bits above the nibble subtracts 16 from the nibble.
        let below = _mm256_andnot_si256(set_bits(block.high_bits), _mm256_set1_epi8(-16));
        _mm256_or_si256(nibbles(&block.quants), below)
    };
    dot_iq4_nl: BlockIq4Nl, four_half_scales, half_scale, |block| entries(&IQ4_VALUES, nibbles(&block.quants));
    dot_mxfp4: BlockMxfp4, four_power_scales, power_scale, |block| entries(&MXFP4_VALUES, nibbles(&block.quants));
}

/// Returns the f16 scales of four blocks as f32.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn four_half_scales<B: HalfScaledBlock>([a, b, c, d]: [&B; 4]) -> __m128 {
    four_halves([a.scale_bits(), b.scale_bits(), c.scale_bits(), d.scale_bits()])
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn half_scale(block: &impl HalfScaledBlock) -> f32 {
    half_bits(block.scale_bits())
}

/// Returns the scales of four blocks, which are powers of two: the results of [`BlockMxfp4::scale`].
#[inline]
#[target_feature(enable = "avx2")]
fn four_power_scales([a, b, c, d]: [&BlockMxfp4; 4]) -> __m128 {
    let exponents = i32::from_le_bytes([a.exponent, b.exponent, c.exponent, d.exponent]);
    let exponents = _mm_cvtepu8_epi32(_mm_cvtsi32_si128(exponents));
    let one = _mm_set1_epi32(1);
    let normal = _mm_slli_epi32::<23>(_mm_sub_epi32(exponents, one));
    let subnormal = _mm_sllv_epi32(_mm_set1_epi32(1 << 21), exponents);
    _mm_castsi128_ps(_mm_blendv_epi8(subnormal, normal, _mm_cmpgt_epi32(exponents, one)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn power_scale(block: &BlockMxfp4) -> f32 {
    block.scale()
}

/// Defines dot products for formats with a minimum, given expressions that unpack a block to unsigned bytes.
macro_rules! minimum_dots {
    ($($name:ident: $type:ty, |$block:ident| $weights:expr;)+) => {$(
        #[inline]
        #[target_feature(enable = "avx2,fma,f16c")]
        pub(crate) fn $name<const T: usize>(row: &[u8], input: &[QuantisedRow<'_>; T]) -> [f32; T] {
            #[inline]
            #[target_feature(enable = "avx2")]
            fn unpack($block: &$type) -> __m256i {
                $weights
            }
            let row = blocks::<$type>(row);
            let quants: [&[[i8; 32]]; T] = per_token(input, |input| &input.quants.as_chunks().0[..row.len()]);
            let scales: [&[f32]; T] = per_token(input, |input| &input.scales[..row.len()]);
            let (twos, rest) = row.as_chunks::<2>();
            let mut dots = [_mm_setzero_ps(); T];
            for (at, [a, b]) in twos.iter().enumerate() {
                prefetch(&twos[at]);
                let weights = [unpack(a), unpack(b)];
                // In the order of the sums: products and activations of the first block, then of the second.
                let scale = four_halves([a.scale_bits(), a.minimum_bits(), b.scale_bits(), b.minimum_bits()]);
                for t in 0..T {
                    let [first, second] = &quants[t].as_chunks::<2>().0[at];
                    let (first, second) = (load(first), load(second));
                    let ([c, d], [e, f]) = (integers(weights[0], first), integers(weights[1], second));
                    let [low, high] = scales[t].as_chunks::<2>().0[at];
                    let scale = _mm_mul_ps(scale, _mm_setr_ps(low, low, high, high));
                    dots[t] = add_four(scale, four_sums([c, d, e, f]), dots[t]);
                }
            }
            for (at, block) in (2 * twos.len()..).zip(rest) {
                let weights = unpack(block);
                let (scale, minimum) = (half_bits(block.scale_bits()), half_bits(block.minimum_bits()));
                for t in 0..T {
                    let [products, plain] = integers(weights, load(&quants[t][at]));
                    let both = two_sums(products, plain);
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
    dot_q4_1: BlockQ4_1, |block| nibbles(&block.quants);
    dot_q5_1: BlockQ5_1, |block| {
        let fifth = _mm256_and_si256(set_bits(block.high_bits), _mm256_set1_epi8(16));
        _mm256_or_si256(nibbles(&block.quants), fifth)
    };
}

/// Converts four f16 values, given by their bits, to f32.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn four_halves([a, b, c, d]: [u16; 4]) -> __m128 {
    let bits = u64::from(a) | u64::from(b) << 16 | u64::from(c) << 32 | u64::from(d) << 48;
    _mm_cvtph_ps(_mm_cvtsi64_si128(bits as i64))
}

#[inline]
#[target_feature(enable = "avx2")]
fn four_sums([a, b, c, d]: [__m256i; 4]) -> __m128 {
    let halves = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
    let sums = _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves));
    _mm_cvtepi32_ps(sums)
}

/// Adds the four products `scales[i] * sums[i]` to the lowest lane of `dot`, in ascending order of i.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn add_four(scales: __m128, sums: __m128, dot: __m128) -> __m128 {
    let dot = _mm_fmadd_ss(scales, sums, dot);
    let dot = _mm_fmadd_ss(_mm_movehdup_ps(scales), _mm_movehdup_ps(sums), dot);
    let (scales, sums) = (_mm_movehl_ps(scales, scales), _mm_movehl_ps(sums, sums));
    let dot = _mm_fmadd_ss(scales, sums, dot);
    _mm_fmadd_ss(_mm_movehdup_ps(scales), _mm_movehdup_ps(sums), dot)
}

/// Returns the integers by which the scale and the minimum of a block are multiplied, each as eight partial sums: of
/// the products of weights and activations, and of the activations.
#[inline]
#[target_feature(enable = "avx2")]
fn integers(weights: __m256i, activations: __m256i) -> [__m256i; 2] {
    let ones = _mm256_set1_epi16(1);
    let plain = unsigned(_mm256_set1_epi8(1), activations);
    [_mm256_madd_epi16(unsigned(weights, activations), ones), _mm256_madd_epi16(plain, ones)]
}
