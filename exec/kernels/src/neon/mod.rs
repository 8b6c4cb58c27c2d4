//! The dot products of [`super::scalar`] for 64-bit ARM processors.
//!
//! NEON multiplies signed bytes, so the offset of weights is subtracted when they are unpacked. `sdot` adds four
//! products to each 32-bit lane. On processors without `sdot`, as many products are added in 16 bits as cannot
//! overflow, and the sums are then widened. A block is summed completely in integers before the conversion to f32.
//! Each function computes the dot products of a row with T tokens, so that weights are unpacked once for T tokens. The
//! arithmetic of a token does not depend on T.
//!
//! `sdot` and `smmla` are inline assembly, because their intrinsics are not stable. The assembly enables its
//! extension itself, so that the rest of a kernel is one generic function for all processors.
//!
//! Not here: loops over rows. That is [`super::matmul`].

mod blocks32;
mod floats;
mod i_quants;
mod k_quants;

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::aarch64::*;
use std::arch::asm;

pub(super) use blocks32::dot32;
pub(super) use floats::{dot_bf16, dot_f16, dot_f32, load_floats, scores_f16, store_floats, sum_values_f16};
pub(super) use k_quants::dot256;

use super::blocks::IQ4_VALUES;
use super::matmul::per_token;

/// Integer dot products of bytes with one instruction set.
///
/// An implementation may add a product to any lane, because the caller sums all lanes to one integer.
///
/// # Safety
/// The processor must have the instructions of the implementation.
pub(super) trait ByteDot {
    /// Returns four partial sums of the products of 16 weights from -128 to 127 and activations from -127 to 127.
    unsafe fn sum16(weights: int8x16_t, values: int8x16_t) -> int32x4_t;

    /// Returns four partial sums of the products of 32 weights and activations. If `small` is set, all weights are from
    /// -64 to 63.
    unsafe fn sum32(weights: [int8x16_t; 2], values: [int8x16_t; 2], small: bool) -> int32x4_t;
}

/// NEON without extensions, which every 64-bit ARM processor has.
pub(super) struct BaseNeon;

/// NEON with `sdot`, the dot product of four bytes.
pub(super) struct Dotprod;

impl ByteDot for BaseNeon {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sum16(weights: int8x16_t, values: int8x16_t) -> int32x4_t {
        // A lane is at most 2 * 128 * 127 = 32512.
        let low = vmull_s8(vget_low_s8(weights), vget_low_s8(values));
        vpaddlq_s16(vmlal_high_s8(low, weights, values))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sum32(weights: [int8x16_t; 2], values: [int8x16_t; 2], small: bool) -> int32x4_t {
        let first = vmull_s8(vget_low_s8(weights[0]), vget_low_s8(values[0]));
        let first = vmlal_high_s8(first, weights[0], values[0]);
        if small {
            // A lane is at most 4 * 64 * 127 = 32512.
            let both = vmlal_s8(first, vget_low_s8(weights[1]), vget_low_s8(values[1]));
            return vpaddlq_s16(vmlal_high_s8(both, weights[1], values[1]));
        }
        let second = vmull_s8(vget_low_s8(weights[1]), vget_low_s8(values[1]));
        vpadalq_s16(vpaddlq_s16(first), vmlal_high_s8(second, weights[1], values[1]))
    }
}

impl ByteDot for Dotprod {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sum16(weights: int8x16_t, values: int8x16_t) -> int32x4_t {
        // SAFETY: the caller's promise.
        unsafe { sdot(vdupq_n_s32(0), weights, values) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sum32(weights: [int8x16_t; 2], values: [int8x16_t; 2], _small: bool) -> int32x4_t {
        // SAFETY: the caller's promise.
        unsafe { sdot(sdot(vdupq_n_s32(0), weights[0], values[0]), weights[1], values[1]) }
    }
}

/// Adds to each 32-bit lane of `total` the dot product of the four bytes of this lane in `a` and in `b`.
///
/// # Safety
/// The processor has `dotprod`.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn sdot(mut total: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: the caller's promise; it touches registers only.
    unsafe {
        asm!(
            ".arch_extension dotprod",
            "sdot {total:v}.4s, {a:v}.16b, {b:v}.16b",
            total = inout(vreg) total, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    total
}

/// Adds to each 32-bit lane of `total` the dot product of the four bytes of this lane in `a` and the four bytes of lane
/// `LANE` in `b`.
///
/// # Safety
/// The processor has `dotprod`.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn sdot_lane<const LANE: usize>(
    mut total: int32x4_t,
    a: int8x16_t,
    b: int8x16_t,
) -> int32x4_t {
    // SAFETY: the caller's promise; it touches registers only.
    unsafe {
        asm!(
            ".arch_extension dotprod",
            "sdot {total:v}.4s, {a:v}.16b, {b:v}.4b[{lane}]",
            total = inout(vreg) total, a = in(vreg) a, b = in(vreg) b, lane = const LANE,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    total
}

/// Multiplies two matrices of two rows of eight bytes, `a` and `b`: adds the dot products of the rows
/// `[a0 b0, a0 b1, a1 b0, a1 b1]` to the four lanes of `total`.
///
/// # Safety
/// The processor has `i8mm`.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn smmla(mut total: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: the caller's promise; it touches registers only.
    unsafe {
        asm!(
            ".arch_extension i8mm",
            "smmla {total:v}.4s, {a:v}.16b, {b:v}.16b",
            total = inout(vreg) total, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    total
}

#[inline]
#[target_feature(enable = "neon")]
pub(super) fn load(bytes: &[i8; 16]) -> int8x16_t {
    // SAFETY: a load of the 16 bytes that the reference covers.
    unsafe { vld1q_s8(bytes.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
pub(super) fn load_unsigned(bytes: &[u8; 16]) -> uint8x16_t {
    // SAFETY: a load of the 16 bytes that the reference covers.
    unsafe { vld1q_u8(bytes.as_ptr()) }
}

/// Loads the lower (0) or upper (1) half of 32 bytes.
#[inline]
#[target_feature(enable = "neon")]
fn load_half(bytes: &[u8; 32], half: usize) -> uint8x16_t {
    load_unsigned(&bytes.as_chunks().0[half])
}

#[inline]
#[target_feature(enable = "neon")]
fn load_both(bytes: &[i8; 32]) -> [int8x16_t; 2] {
    let halves = bytes.as_chunks::<16>().0;
    [load(&halves[0]), load(&halves[1])]
}

/// Converts four f16 values, given by their bits, to f32.
#[inline]
#[target_feature(enable = "neon")]
fn four_halves([a, b, c, d]: [u16; 4]) -> float32x4_t {
    let bits = u64::from(a) | u64::from(b) << 16 | u64::from(c) << 32 | u64::from(d) << 48;
    vcvt_f32_f16(vreinterpret_f16_u16(vcreate_u16(bits)))
}

#[inline]
#[target_feature(enable = "neon")]
fn half_bits(bits: u16) -> f32 {
    vgetq_lane_f32::<0>(four_halves([bits, 0, 0, 0]))
}

/// Shifts every byte left by `places` bits, or right if `places` is negative.
#[inline]
#[target_feature(enable = "neon")]
fn shifted(bytes: uint8x16_t, places: i32) -> uint8x16_t {
    vshlq_u8(bytes, vdupq_n_s8(places as i8))
}

/// Returns the low four bits of each of 16 bytes, and the high four bits of each.
#[inline]
#[target_feature(enable = "neon")]
fn nibbles(bytes: &[u8; 16]) -> [uint8x16_t; 2] {
    let bytes = load_unsigned(bytes);
    [vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8::<4>(bytes)]
}

/// Returns the entries of the codebook of `IQ4_NL` and `IQ4_XS` for 16 indices.
#[inline]
#[target_feature(enable = "neon")]
fn iq4_values(indices: uint8x16_t) -> int8x16_t {
    vqtbl1q_s8(load(&IQ4_VALUES), indices)
}

/// Loads two groups of eight bytes into one register.
#[inline]
#[target_feature(enable = "neon")]
fn two_of_eight(first: &[u8; 8], second: &[u8; 8]) -> uint8x16_t {
    // SAFETY: loads of the eight bytes that each reference covers.
    unsafe { vcombine_u8(vld1_u8(first.as_ptr()), vld1_u8(second.as_ptr())) }
}
