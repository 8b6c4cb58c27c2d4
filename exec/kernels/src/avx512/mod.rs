//! Dot products for x86-64 processors with AVX-512 and VNNI that read one row after the other.
//!
//! The kernels of [`super::avx2`] read four rows at the same time. On processors whose cores read memory fast, hardware
//! and software prefetching follow four sequences of addresses less well than one. So the blocks that are multiplied
//! together are those of one row here, and loads are in the order of their addresses. Registers have 512 bits. The order
//! of summation is the same.
//!
//! Not here: other formats, and batches. They use the kernels of [`super::avx2`].

mod k_quants;

use std::arch::asm;
#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::x86_64::*;

use bytemuck::{Pod, must_cast};

use super::avx2::MultiplyAdd;
pub(super) use super::avx2::{
    dot_bf16, dot_f16, dot_f32, dot_iq1_m, dot_iq1_s, dot_iq2_s, dot_iq2_xs, dot_iq2_xxs, dot_iq3_s,
    dot_iq3_xxs, dot_iq4_nl, dot_iq4_xs, dot_mxfp4, dot_q4_0, dot_q4_1, dot_q5_0, dot_q5_1, dot_q8_0,
};
use super::x86_64::Avx512;
pub(super) use k_quants::{dot_q2_k, dot_q3_k, dot_q4_k, dot_q5_k, dot_q6_k};

/// Repeats a block of code for each value of a constant, because loops over registers are not always unrolled.
macro_rules! for_each {
    ($at:ident in $($value:literal)+ => $body:block) => {$(
        {
            #[allow(non_upper_case_globals)]
            const $at: usize = $value;
            $body
        }
    )+};
}
pub(crate) use for_each;

/// Prefetches one of N parts of the bytes that are [`MultiplyAdd::PREFETCH_BYTES`] after N blocks; they may be outside
/// the matrix.
#[inline(always)]
fn prefetch<B, const N: usize>(blocks: &[B; N], part: usize) {
    let there = blocks.as_ptr().cast::<i8>().wrapping_add(Avx512::PREFETCH_BYTES);
    let lines = size_of_val(blocks).div_ceil(64);
    for line in part * lines / N..(part + 1) * lines / N {
        // SAFETY: a prefetch of any address is harmless: it cannot fault.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(there.wrapping_add(64 * line)) };
    }
}

/// Loads the 64 bytes of `values`.
#[inline]
#[target_feature(enable = "avx512f")]
fn load<T: Pod>(values: &T) -> __m512i {
    must_cast(*values)
}

/// Returns a register with the 32 bytes of `values` in both halves.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_twice<T: Pod>(values: &T) -> __m512i {
    _mm512_broadcast_i64x4(must_cast(*values))
}

/// Returns a register with `quarter` in all four quarters.
#[inline]
#[target_feature(enable = "avx512f")]
fn four_of(quarter: __m128i) -> __m512i {
    _mm512_broadcast_i32x4(quarter)
}

/// Multiplies 64 unsigned weights by activations and adds four adjacent products.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn sums_of_fours(weights: __m512i, activations: __m512i) -> __m512i {
    _mm512_dpbusd_epi32(_mm512_setzero_si512(), weights, activations)
}

/// Multiplies pairs of i16 and adds the two products of each 32-bit lane to the lane of `total`. It is inline assembly,
/// because LLVM replaces the intrinsic by two instructions.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
pub(crate) fn add_pairs(mut total: __m512i, a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: the function requires the instruction, which changes only the register `total`.
    unsafe {
        asm!(
            "vpdpwssd {total}, {a}, {b}",
            total = inout(zmm_reg) total, a = in(zmm_reg) a, b = in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    total
}

/// Makes the compiler compute N registers before the code that follows, and load what they need before what that code
/// needs.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn compute_here<const N: usize>(registers: &mut [__m512i; N]) {
    if let [a, b] = registers.as_mut_slice() {
        // SAFETY: there is no instruction.
        unsafe {
            asm!("/* {0} {1} */", inout(zmm_reg) * a, inout(zmm_reg) * b, options(nostack, preserves_flags));
        }
        return;
    }
    for register in registers {
        // SAFETY: there is no instruction.
        unsafe {
            asm!("/* {0} */", inout(zmm_reg) * register, options(nostack, preserves_flags));
        }
    }
}

/// Adds the i32 lanes of each of four registers up to four partial sums. Each quarter of the result has one of them of
/// each register.
#[inline]
#[target_feature(enable = "avx512f")]
fn partial_sums([a, b, c, d]: [__m512i; 4]) -> __m512i {
    let first = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let last = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    _mm512_add_epi32(_mm512_unpacklo_epi64(first, last), _mm512_unpackhi_epi64(first, last))
}

/// Adds the quarters of each of two registers.
#[inline]
#[target_feature(enable = "avx2,avx512f")]
fn sums_of_quarters(a: __m512i, b: __m512i) -> __m256i {
    let a = _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64::<1>(a));
    let b = _mm256_add_epi32(_mm512_castsi512_si256(b), _mm512_extracti64x4_epi64::<1>(b));
    _mm256_add_epi32(_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b))
}
