//! Dot products of weights in blocks of 32 with rounded activations, in AVX2.
//!
//! Two adjacent blocks are multiplied together, one in each half of a register: first their first 16 weights, then their
//! last 16 weights. A format defines how these weights are unpacked to bytes. The arithmetic after that is the same for
//! all formats.

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::x86_64::*;

use bytemuck::{bytes_of, must_cast};

use super::{
    FourRows, MultiplyAdd, bits_to_bytes, compute_here, entries, load, load_half, per_token, sums_of_halves,
    two_of,
};
use crate::activations::QuantisedRow;
use crate::blocks::{
    BlockIq4Nl, BlockMxfp4, BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0, HalfScaledBlock,
    IQ4_VALUES, IntegerBlock32, MXFP4_VALUES, ScaledBlock,
};
use crate::scalar::add_block32;

/// Defines dot products of four rows for formats with blocks of 32 weights. Arguments of each format: the offset of the
/// bytes, the method of [`MultiplyAdd`] that multiplies them, the functions that return the scales and the minima of
/// eight blocks, and an expression for the bytes of two blocks.
macro_rules! dots32 {
    ($(
        $name:ident: $type:ty, $offset:expr, $multiply:ident, $scales:ident $minima:ident,
        |$first:ident, $second:ident| $bytes:expr;
    )+) => {$(
        #[inline]
        #[target_feature(enable = "avx2,fma,f16c")]
        pub(crate) fn $name<I: MultiplyAdd, const T: usize>(
            instructions: I,
            rows: &[&[u8]; 4],
            input: &[QuantisedRow<'_>; T],
        ) -> [[f32; 4]; T] {
            #[inline]
            #[target_feature(enable = "avx2")]
            fn unpack($first: &$type, $second: &$type) -> [__m256i; 2] {
                $bytes
            }
            let rows = FourRows::<$type>::new(rows);
            let (length, offset) = (rows.length() / 2, $offset);
            let [a, b, c, d] = rows.pairs();
            // Slices of the same length need no check of the index.
            let (a, b, c, d) = (&a[..length], &b[..length], &c[..length], &d[..length]);
            let quants: [&[[[i8; 32]; 2]]; T] =
                per_token(input, |input| &input.quants.as_chunks().0.as_chunks().0[..length]);
            let scales: [&[[f32; 2]]; T] = per_token(input, |input| &input.scales.as_chunks().0[..length]);
            let sums: [&[[i16; 2]]; T] = per_token(input, |input| &input.sums.as_chunks().0[..length]);
            let mut dots = [_mm_setzero_ps(); T];
            let mut last = [Products::zero(); T];
            for at in 0..length {
                let four = [&a[at], &b[at], &c[at], &d[at]];
                let mut bytes = [[_mm256_setzero_si256(); 2]; 4];
                for r in 0..4 {
                    rows.prefetch::<I>(2 * at..2 * at + 2, r, 4);
                    bytes[r] = unpack(&four[r][0], &four[r][1]);
                }
                let (block_scales, block_minima) = ($scales(four), $minima(four));
                for t in 0..T {
                    let [a, b] = &quants[t][at];
                    let (a, b) = (load(a), load(b));
                    let values =
                        [_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b)];
                    let mut totals = [_mm256_setzero_si256(); 4];
                    for r in 0..4 {
                        totals[r] = instructions.$multiply(bytes[r], values);
                    }
                    let factors = four_floats(scales[t][at]);
                    let mut products = Products {
                        totals,
                        sums: _mm256_set1_epi32(must_cast(sums[t][at])),
                        scale: _mm256_mul_ps(block_scales, factors),
                        minimum: _mm256_mul_ps(block_minima, factors),
                    };
                    let ready = if I::OVERLAPS_BLOCKS {
                        compute_here(&mut products.totals);
                        std::mem::replace(&mut last[t], products)
                    } else {
                        products
                    };
                    dots[t] = add::<I, $type>(instructions, dots[t], ready, offset);
                }
            }
            if I::OVERLAPS_BLOCKS {
                for t in 0..T {
                    dots[t] = add::<I, $type>(instructions, dots[t], last[t], offset);
                }
            }
            let mut sums = [[0.0; 4]; T];
            for t in 0..T {
                sums[t] = must_cast(dots[t]);
            }
            if 2 * length < rows.length() {
                add_last_blocks(&rows, input, &mut sums);
            }
            sums
        }
    )+};
}
dots32! {
    dot_q8_0: BlockQ8_0, I::SIGNED_OFFSET, signed_fours, eight_scales eight_minima, |first, second| {
        let [[a, b], [c, d]] = [first, second].map(|block| {
            let halves = block.quants.as_chunks::<16>().0;
            [halves[0], halves[1]]
        });
        [halves(&a, &c), halves(&b, &d)]
    };
    dot_q4_0: BlockQ4_0, 8, unsigned_fours, eight_scales eight_minima, |first, second| nibbles_of_two(&first.quants, &second.quants);
    dot_q4_1: BlockQ4_1, 0, unsigned_fours, eight_scales eight_minima, |first, second| nibbles_of_two(&first.quants, &second.quants);
    dot_q5_0: BlockQ5_0, 16, unsigned_fours, eight_scales eight_minima, |first, second| {
        with_fifth(nibbles_of_two(&first.quants, &second.quants), [first.high_bits, second.high_bits])
    };
    dot_q5_1: BlockQ5_1, 0, unsigned_fours, eight_scales eight_minima, |first, second| {
        with_fifth(nibbles_of_two(&first.quants, &second.quants), [first.high_bits, second.high_bits])
    };
    dot_iq4_nl: BlockIq4Nl, I::SIGNED_OFFSET, signed_fours, eight_scales eight_minima, |first, second| {
        let [low, high] = nibbles_of_two(&first.quants, &second.quants);
        [entries(&IQ4_VALUES, low), entries(&IQ4_VALUES, high)]
    };
    dot_mxfp4: BlockMxfp4, MXFP4_OFFSET, unsigned_fours, eight_powers eight_zeros, |first, second| {
        let [low, high] = nibbles_of_two(&first.quants, &second.quants);
        [entries(&MXFP4_BYTES, low), entries(&MXFP4_BYTES, high)]
    };
}

/// The products of two blocks of four rows with the activations of a token.
#[derive(Clone, Copy)]
struct Products {
    /// For each row four partial sums of its first block, then of its second block.
    totals: [__m256i; 4],
    /// The sums of the halves of the activations of both blocks, as pairs of i16.
    sums: __m256i,
    /// The scales of the first blocks times that of the activations, then of the second blocks.
    scale: __m256,
    /// The minima, as the scales.
    minimum: __m256,
}

impl Products {
    /// Returns products that add nothing.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn zero() -> Products {
        let (zero, float_zero) = (_mm256_setzero_si256(), _mm256_setzero_ps());
        Products { totals: [zero; 4], sums: zero, scale: float_zero, minimum: float_zero }
    }
}

/// Adds products of weights that are larger by `offset` to the dot products of four rows.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn add<I: MultiplyAdd, B: ScaledBlock>(
    instructions: I,
    mut dots: __m128,
    products: Products,
    offset: i32,
) -> __m128 {
    let Products { totals, sums, scale, minimum } = products;
    let mut totals = sums_of_halves(totals);
    if offset != 0 {
        totals = instructions.add_pairs(totals, sums, fours(-offset));
    }
    let totals = _mm256_cvtepi32_ps(totals);
    let plain = instructions.add_pairs(_mm256_setzero_si256(), sums, fours(1));
    let plain = _mm256_cvtepi32_ps(plain);
    for half in [low, high] {
        dots = _mm_fmadd_ps(half(scale), half(totals), dots);
        if B::HAS_MINIMUM {
            dots = _mm_fmadd_ps(half(minimum), half(plain), dots);
        }
    }
    dots
}

/// The offset of the entries of `MXFP4_BYTES`.
const MXFP4_OFFSET: i32 = 12;

/// The codebook of `MXFP4`, plus its offset.
const MXFP4_BYTES: [i8; 16] = {
    let mut bytes = MXFP4_VALUES;
    let mut at = 0;
    while at < 16 {
        bytes[at] += MXFP4_OFFSET as i8;
        at += 1;
    }
    bytes
};

/// Adds the products of the last block of each row to the dot products of T tokens. This is for rows with an odd number
/// of blocks, which are rare.
#[cold]
fn add_last_blocks<B: IntegerBlock32, const T: usize>(
    rows: &FourRows<'_, B>,
    input: &[QuantisedRow<'_>; T],
    dots: &mut [[f32; 4]; T],
) {
    let last = rows.length() - 1;
    for (input, dots) in input.iter().zip(dots) {
        for (block, dot) in rows.blocks(last).into_iter().zip(dots) {
            *dot = add_block32(block, *input, last, *dot);
        }
    }
}

/// Returns a register with `low` in its lower half and `high` in its upper half.
#[inline]
#[target_feature(enable = "avx2")]
fn halves(low: &[i8; 16], high: &[i8; 16]) -> __m256i {
    _mm256_set_m128i(load_half(high), load_half(low))
}

/// Returns the low four bits of the bytes of two blocks, which are their first 16 weights, and the high four bits.
#[inline]
#[target_feature(enable = "avx2")]
fn nibbles_of_two(first: &[u8; 16], second: &[u8; 16]) -> [__m256i; 2] {
    let bytes = _mm256_set_m128i(load_half(second), load_half(first));
    let low_bits = _mm256_set1_epi8(15);
    [_mm256_and_si256(bytes, low_bits), _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low_bits)]
}

/// Adds the fifth bits of the weights of two blocks to their nibbles: bit j of the bits of a block belongs to weight j.
#[inline]
#[target_feature(enable = "avx2")]
fn with_fifth(nibbles: [__m256i; 2], [first, second]: [[u8; 4]; 2]) -> [__m256i; 2] {
    let bits = |block: [u8; 4]| _mm256_set1_epi32(i32::from_le_bytes(block));
    let bits = _mm256_blend_epi32::<0b1111_0000>(bits(first), bits(second));
    let with = |nibbles, bytes: [i64; 2]| {
        let [low, high] = bytes.map(|byte| 0x0101_0101_0101_0101 * byte);
        let set = bits_to_bytes(bits, two_of(_mm_set_epi64x(high, low)));
        _mm256_add_epi8(nibbles, _mm256_and_si256(set, _mm256_set1_epi8(16)))
    };
    [with(nibbles[0], [0, 1]), with(nibbles[1], [2, 3])]
}

/// Returns the first 16 bits of a block of each of four rows, which are its scale, then the next 16 bits of each, which
/// are its minimum if the format has one.
#[inline]
#[target_feature(enable = "avx2")]
fn four_headers<B: HalfScaledBlock>([a, b, c, d]: [&B; 4]) -> __m128i {
    // A load of 32 bits needs no shuffle, unlike one of 16 bits.
    let load = |block: &B| {
        let bytes = bytes_of(block).first_chunk().expect("a block is longer than its header");
        _mm_cvtsi32_si128(i32::from_ne_bytes(*bytes))
    };
    _mm_unpacklo_epi16(_mm_unpacklo_epi16(load(a), load(c)), _mm_unpacklo_epi16(load(b), load(d)))
}

/// Returns the scales of the first block of each of four rows, then those of the second blocks.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn eight_scales<B: HalfScaledBlock>(rows: [&[B; 2]; 4]) -> __m256 {
    _mm256_cvtph_ps(_mm_unpacklo_epi64(
        four_headers(rows.map(|row| &row[0])),
        four_headers(rows.map(|row| &row[1])),
    ))
}

/// Returns the minima of the first block of each of four rows, then those of the second blocks.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn eight_minima<B: HalfScaledBlock>(rows: [&[B; 2]; 4]) -> __m256 {
    _mm256_cvtph_ps(_mm_unpackhi_epi64(
        four_headers(rows.map(|row| &row[0])),
        four_headers(rows.map(|row| &row[1])),
    ))
}

/// Returns the scales of eight blocks, which are powers of two: the results of [`BlockMxfp4::scale`].
#[inline]
#[target_feature(enable = "avx2")]
fn eight_powers([a, b, c, d]: [&[BlockMxfp4; 2]; 4]) -> __m256 {
    let bytes = [&a[0], &b[0], &c[0], &d[0], &a[1], &b[1], &c[1], &d[1]].map(|block| block.exponent);
    let exponents = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(i64::from_le_bytes(bytes)));
    let one = _mm256_set1_epi32(1);
    let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(exponents, one));
    let subnormal = _mm256_sllv_epi32(_mm256_set1_epi32(1 << 21), exponents);
    _mm256_castsi256_ps(_mm256_blendv_epi8(subnormal, normal, _mm256_cmpgt_epi32(exponents, one)))
}

/// Returns the minima of eight blocks in a format without minima.
#[inline]
#[target_feature(enable = "avx2")]
fn eight_zeros<B>(_: [&[B; 2]; 4]) -> __m256 {
    _mm256_setzero_ps()
}

/// Returns the factors of pairs of i16: `factor` and 0 in the lower half, 0 and `factor` in the upper half. With them,
/// [`MultiplyAdd::add_pairs`] adds the first value of a pair to the lower half, and the second to the upper half.
#[inline]
#[target_feature(enable = "avx2")]
fn fours(factor: i32) -> __m256i {
    _mm256_set_m128i(_mm_set1_epi32(factor << 16), _mm_set1_epi32(factor & 0xffff))
}

/// Returns four times the first value, then four times the second.
#[inline]
#[target_feature(enable = "avx2")]
fn four_floats(pair: [f32; 2]) -> __m256 {
    let pair = _mm256_castpd_ps(_mm256_castpd128_pd256(_mm_set_sd(must_cast(pair))));
    _mm256_permutevar8x32_ps(pair, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1))
}

#[inline]
#[target_feature(enable = "avx2")]
fn low(eight: __m256) -> __m128 {
    _mm256_castps256_ps128(eight)
}

#[inline]
#[target_feature(enable = "avx2")]
fn high(eight: __m256) -> __m128 {
    _mm256_extractf128_ps::<1>(eight)
}
