//! The dot products of [`super::scalar`] for x86-64 processors with AVX2, FMA and F16C.
//!
//! `maddubs` multiplies unsigned weights by signed activations and adds adjacent products (at most 2 * 128 * 127,
//! below 2^15); `madd` multiplies by the integer scales and adds adjacent products again. A block is summed
//! completely in integers before the conversion to f32. Each function computes the dot products of four rows with T
//! tokens: the activations are loaded once for four rows, the weights are unpacked once for T tokens, and the four rows
//! are the lanes of the conversions and of the float arithmetic. The arithmetic of a row and a token does not depend on
//! the other rows and tokens.
//!
//! The functions are compiled with the instructions of their caller, and use its [`MultiplyAdd`].
//!
//! Not here: loops over rows. That is [`super::matmul`].

mod blocks32;
mod floats;
mod i_quants;
mod k_quants;
mod multiply_add;
mod sign_magnitude;

use std::arch::asm;
#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::x86_64::*;
use std::ops::Range;
use std::sync::atomic::{Ordering, compiler_fence};

pub(super) use blocks32::{dot_iq4_nl, dot_mxfp4, dot_q4_0, dot_q4_1, dot_q5_0, dot_q5_1, dot_q8_0};
pub(super) use floats::{dot_bf16, dot_f16, dot_f32, scores_f16, sum_values_f16};
pub(super) use i_quants::{dot_iq1_m, dot_iq1_s, dot_iq4_xs};
pub(super) use k_quants::{
    FOUR_BITS, Q3_K_WORDS, SIX_BITS, TOP_BITS, dot_q2_k, dot_q3_k, dot_q4_k, dot_q5_k, dot_q6_k,
};
pub(super) use multiply_add::MultiplyAdd;
pub(super) use sign_magnitude::{dot_iq2_s, dot_iq2_xs, dot_iq2_xxs, dot_iq3_s, dot_iq3_xxs};

use bytemuck::{Pod, must_cast};

use super::blocks::blocks;
use super::matmul::per_token;

/// Loads the 32 bytes of `values`.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn load<T: Pod>(values: &T) -> __m256i {
    must_cast(*values)
}

/// Loads the 16 bytes of `values`.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn load_half<T: Pod>(values: &T) -> __m128i {
    must_cast(*values)
}

/// Returns a register with `half` in both halves.
#[inline]
#[target_feature(enable = "avx2")]
fn two_of(half: __m128i) -> __m256i {
    _mm256_broadcastsi128_si256(half)
}

/// Converts four f16 values, given by their bits, to f32.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn four_halves(bits: [u16; 4]) -> __m128 {
    let [a, b, c, d] = bits.map(u16::cast_signed);
    _mm_cvtph_ps(_mm_setr_epi16(a, b, c, d, 0, 0, 0, 0))
}

/// The blocks of four adjacent weight rows of a matrix, which are multiplied together.
pub(super) struct FourRows<'a, B> {
    pub(super) rows: [&'a [B]; 4],
}

impl<'a, B: Pod> FourRows<'a, B> {
    #[inline(always)]
    pub(super) fn new(rows: &[&'a [u8]; 4]) -> FourRows<'a, B> {
        let first: &[B] = blocks(rows[0]);
        let length = first.len();
        FourRows {
            rows: [first, &blocks(rows[1])[..length], &blocks(rows[2])[..length], &blocks(rows[3])[..length]],
        }
    }

    /// Returns the number of blocks in a row.
    #[inline(always)]
    fn length(&self) -> usize {
        self.rows[0].len()
    }

    /// Returns the block with index `at` of each row.
    #[inline(always)]
    fn blocks(&self, at: usize) -> [&'a B; 4] {
        [&self.rows[0][at], &self.rows[1][at], &self.rows[2][at], &self.rows[3][at]]
    }

    /// Returns the pairs of adjacent blocks of each row. If the number of blocks is odd, the last one is not in a pair.
    #[inline(always)]
    fn pairs(&self) -> [&'a [[B; 2]]; 4] {
        self.rows.map(|row| row.as_chunks().0)
    }

    /// Prefetches a part of the next rows, as long as the blocks with the indices `blocks` of all four rows, and
    /// [`MultiplyAdd::PREFETCH_BYTES`] after the beginning of the next four rows. The parts follow each other in memory:
    /// hardware prefetching, which needs a sequence of addresses, does not follow four rows at the same time. The
    /// addresses may be outside the matrix.
    ///
    /// Only every `step`-th cache line is prefetched, starting with line `first`, because a burst of prefetches delays
    /// the loads after it.
    #[inline(always)]
    fn prefetch<I: MultiplyAdd>(&self, blocks: Range<usize>, first: usize, step: usize) {
        let next = self.rows[0].as_ptr().wrapping_add(4 * (self.length() + blocks.start)).cast::<i8>();
        let next = next.wrapping_add(I::PREFETCH_BYTES);
        for line in (64 * first..4 * blocks.len() * size_of::<B>()).step_by(64 * step) {
            // SAFETY: a prefetch of any address is harmless: it cannot fault.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(line)) };
        }
        compiler_fence(Ordering::SeqCst);
    }
}

/// Makes the compiler compute four registers before the code that follows, instead of moving the arithmetic behind all
/// later loads, whose values it then stores on the stack.
#[inline]
#[target_feature(enable = "avx2")]
fn compute_here(registers: &mut [__m256i; 4]) {
    for register in registers {
        // SAFETY: there is no instruction.
        unsafe { asm!("/* {0} */", inout(ymm_reg) * register, options(nomem, nostack, preserves_flags)) };
    }
}

/// Returns the sum of the i32 lanes of each of four registers.
#[inline]
#[target_feature(enable = "avx2")]
fn four_sums(registers: [__m256i; 4]) -> __m128i {
    let sums = sums_of_halves(registers);
    _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums))
}

/// Returns the sums of the four lower i32 lanes of each of four registers, then the sums of the four upper lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn sums_of_halves([a, b, c, d]: [__m256i; 4]) -> __m256i {
    let (first, last) = (interleaved_sums(a, b), interleaved_sums(c, d));
    _mm256_add_epi32(_mm256_unpacklo_epi64(first, last), _mm256_unpackhi_epi64(first, last))
}

/// Adds lanes 0 and 2, and lanes 1 and 3, of the halves of two registers; the sums of the two registers alternate.
#[inline]
#[target_feature(enable = "avx2")]
fn interleaved_sums(a: __m256i, b: __m256i) -> __m256i {
    _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b))
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
    _mm256_shuffle_epi8(two_of(load_half(codebook)), indices)
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
    bits_to_bytes(_mm256_set1_epi32(i32::from_le_bytes(bits)), byte_of_eight)
}

/// Expands bits to bytes: 0xff if the bit is set, otherwise 0. Byte j of the result is for bit j modulo 8 of the byte of
/// `bits` that byte j of `bytes` selects, as in [`_mm256_shuffle_epi8`].
#[inline]
#[target_feature(enable = "avx2")]
fn bits_to_bytes(bits: __m256i, bytes: __m256i) -> __m256i {
    let one_bit_each = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    let selected = _mm256_shuffle_epi8(bits, bytes);
    _mm256_cmpeq_epi8(_mm256_and_si256(selected, one_bit_each), one_bit_each)
}

/// Splits each of eight 32-bit integers into four fields of W bits, the lowest first, and writes each to a byte. Ignores
/// the bits above.
#[inline]
#[target_feature(enable = "avx2")]
fn bit_fields_to_bytes<const W: i32>(packed: __m256i) -> __m256i {
    let mask = (1 << W) - 1;
    let field = |at: i32| {
        let moved = _mm256_sll_epi32(packed, _mm_cvtsi32_si128((8 - W) * at));
        _mm256_and_si256(moved, _mm256_set1_epi32(mask << (8 * at)))
    };
    _mm256_or_si256(_mm256_or_si256(field(0), field(1)), _mm256_or_si256(field(2), field(3)))
}

/// Returns 32 indices, given their low and their high bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn u16_indices(low: __m256i, high: __m256i) -> [u16; 32] {
    let (a, b) = (_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high));
    must_cast([_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b)])
}

/// Looks up four rows of eight weights in a codebook, whose number of rows must be a power of two.
#[inline]
#[target_feature(enable = "avx2")]
fn four_of_eight<I: Into<usize> + Copy, const ROWS: usize>(
    grid: &[[u8; 8]; ROWS],
    indices: &[I; 4],
) -> __m256i {
    let [a, b, c, d] = indices.map(|index| i64::from_le_bytes(grid[index.into() % ROWS]));
    _mm256_setr_epi64x(a, b, c, d)
}

/// Looks up eight rows of four weights in a codebook, whose number of rows must be a power of two.
#[inline]
#[target_feature(enable = "avx2")]
fn eight_of_four<I: Into<usize> + Copy, const ROWS: usize>(
    grid: &[[u8; 4]; ROWS],
    indices: &[I; 8],
) -> __m256i {
    let [a, b, c, d, e, f, g, h] = indices.map(|index| i32::from_le_bytes(grid[index.into() % ROWS]));
    _mm256_setr_epi32(a, b, c, d, e, f, g, h)
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
