//! Multiplications of integers whose sums are added to 32-bit lanes: with AVX2, or with the instructions of VNNI.

use std::arch::asm;
#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::x86_64::*;

use super::{signed, unsigned};
use crate::x86_64::{Avx2, Avx512, AvxVnni};

/// Integer multiplications of one instruction set. A value of an implementation exists only where the processor has the
/// instructions.
pub(crate) trait MultiplyAdd: Copy {
    /// The number that [`Self::signed_fours`] adds to each weight.
    const SIGNED_OFFSET: i32;

    /// Whether blocks of 32 weights are added to the dot products while the next blocks are multiplied. Processors with
    /// few vector registers execute fewer instructions ahead, so that the multiplications of the next blocks would wait.
    const OVERLAPS_BLOCKS: bool;

    /// How far ahead software prefetches, in bytes. It is several KiB for cores that read faster than lines come from
    /// memory one page ahead.
    ///
    /// source: measured on Zen 3 and Zen 4, see `docs/studies/kernels/decode.md`
    const PREFETCH_BYTES: usize;

    /// Multiplies 16 pairs of i16 and adds the two products of each 32-bit lane to the lane of `total`.
    fn add_pairs(self, total: __m256i, a: __m256i, b: __m256i) -> __m256i;

    /// Multiplies two registers of 32 weights from 0 to 31 by activations, and returns in each 32-bit lane the sum of its
    /// four products of both registers.
    fn unsigned_fours(self, weights: [__m256i; 2], activations: [__m256i; 2]) -> __m256i;

    /// Does what [`Self::unsigned_fours`] does for signed weights, plus [`Self::SIGNED_OFFSET`].
    fn signed_fours(self, weights: [__m256i; 2], activations: [__m256i; 2]) -> __m256i;
}

impl MultiplyAdd for Avx2 {
    const SIGNED_OFFSET: i32 = 0;
    const OVERLAPS_BLOCKS: bool = true;
    const PREFETCH_BYTES: usize = 512;

    #[inline(always)]
    fn add_pairs(self, total: __m256i, a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: `self` proves that the processor has the instructions.
        unsafe { _mm256_add_epi32(total, _mm256_madd_epi16(a, b)) }
    }

    #[inline(always)]
    fn unsigned_fours(self, weights: [__m256i; 2], activations: [__m256i; 2]) -> __m256i {
        // A 16-bit lane is at most 4 * 31 * 127 = 15748.
        // SAFETY: `self` proves that the processor has the instructions.
        unsafe {
            let first = unsigned(weights[0], activations[0]);
            let both = _mm256_add_epi16(first, unsigned(weights[1], activations[1]));
            _mm256_madd_epi16(both, _mm256_set1_epi16(1))
        }
    }

    #[inline(always)]
    fn signed_fours(self, weights: [__m256i; 2], activations: [__m256i; 2]) -> __m256i {
        // SAFETY: `self` proves that the processor has the instructions.
        unsafe {
            let ones = _mm256_set1_epi16(1);
            let first = _mm256_madd_epi16(signed(weights[0], activations[0]), ones);
            self.add_pairs(first, signed(weights[1], activations[1]), ones)
        }
    }
}

/// Defines a function for one instruction of VNNI, given the prefix that selects its encoding and its mnemonic. The
/// function is unsafe: the processor must have the instruction, which no attribute enables.
///
/// It is inline assembly, because LLVM replaces the intrinsics by pairs of a multiplication and an addition.
macro_rules! instruction {
    ($name:ident, $prefix:literal, $mnemonic:literal) => {
        #[inline]
        #[target_feature(enable = "avx2")]
        unsafe fn $name(mut total: __m256i, a: __m256i, b: __m256i) -> __m256i {
            // SAFETY: the caller guarantees that the processor has the instruction, which changes only the register
            // `total`.
            unsafe {
                asm!(
                    concat!($prefix, $mnemonic, " {total}, {a}, {b}"),
                    total = inout(ymm_reg) total, a = in(ymm_reg) a, b = in(ymm_reg) b,
                    options(pure, nomem, nostack, preserves_flags)
                );
            }
            total
        }
    };
}

/// Implements [`MultiplyAdd`] for an instruction set with `vpdpwssd` and `vpdpbusd`, given the prefix that selects their
/// encoding, and `PREFETCH_BYTES`.
macro_rules! vnni {
    ($instructions:ty, $prefix:literal, $prefetch_bytes:literal) => {
        impl MultiplyAdd for $instructions {
            const SIGNED_OFFSET: i32 = 128;
            const OVERLAPS_BLOCKS: bool = false;
            const PREFETCH_BYTES: usize = $prefetch_bytes;

            #[inline(always)]
            fn add_pairs(self, total: __m256i, a: __m256i, b: __m256i) -> __m256i {
                instruction! { dpwssd, $prefix, "vpdpwssd" }
                // SAFETY: `self` proves that the processor has the instructions.
                unsafe { dpwssd(total, a, b) }
            }

            #[inline(always)]
            fn unsigned_fours(self, weights: [__m256i; 2], activations: [__m256i; 2]) -> __m256i {
                instruction! { dpbusd, $prefix, "vpdpbusd" }
                // SAFETY: `self` proves that the processor has the instructions.
                unsafe {
                    let first = dpbusd(_mm256_setzero_si256(), weights[0], activations[0]);
                    dpbusd(first, weights[1], activations[1])
                }
            }

            #[inline(always)]
            fn signed_fours(self, weights: [__m256i; 2], activations: [__m256i; 2]) -> __m256i {
                // Inverting the sign bit adds 128.
                // SAFETY: `self` proves that the processor has the instructions.
                let weights = unsafe {
                    let sign = _mm256_set1_epi8(-128);
                    [_mm256_xor_si256(weights[0], sign), _mm256_xor_si256(weights[1], sign)]
                };
                self.unsigned_fours(weights, activations)
            }
        }
    };
}
vnni! { AvxVnni, "{{vex}} ", 512 }
vnni! { Avx512, "", 6144 }
