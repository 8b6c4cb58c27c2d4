//! The dot products of [`super::scalar`] for 64-bit ARM processors.
//!
//! NEON multiplies signed bytes, so that weights lose their offset when they are unpacked. `sdot` adds up four
//! products in each 32-bit lane; where it is missing, products are added in 16 bits as often as that cannot overflow,
//! and then widened. All of a block is added up as integers before it meets an f32. Each function takes T tokens, so
//! that weights are unpacked once for all of them; per token the arithmetic is the same.
//!
//! `sdot` and `smmla` are written as assembly: their intrinsics are not stable. An instruction names its extension,
//! so that the rest of a kernel is one generic function for all processors.
//!
//! Here: what all formats load and add up. The formats are in files by family.
//!
//! Not here: loops over rows. That is [`super::product`].

mod blocks32;
mod floats;
mod i_quants;
mod k_quants;

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::aarch64::*;
use std::arch::asm;

pub(super) use blocks32::{dot_iq4_nl, dot_q4_0, dot_q4_1, dot_q5_0, dot_q5_1, dot_q8_0};
pub(super) use floats::{dot_bf16, dot_f16, dot_f32, load_floats, mix_f16, scores_f16, store_floats};
pub(super) use i_quants::{dot_iq1_s, dot_iq4_xs};
pub(super) use k_quants::{dot_q2_k, dot_q3_k, dot_q4_k, dot_q5_k, dot_q6_k};

use super::blocks::IQ4_VALUES;
use super::product::per_token;

/// How bytes are multiplied and added up. Which lane a product is added to is free: all lanes make one integer.
///
/// # Safety
/// Each function needs a processor that has the instructions.
pub(super) trait Products {
    /// Sixteen weights from -128 to 127, times activations from -127 to 127.
    unsafe fn sum16(weights: int8x16_t, values: int8x16_t) -> int32x4_t;

    /// Thirty-two; `small` weights are from -64 to 63.
    unsafe fn sum32(weights: [int8x16_t; 2], values: [int8x16_t; 2], small: bool) -> int32x4_t;
}

/// The instructions that every processor has.
pub(super) struct Plain;

/// Dot products of four bytes.
pub(super) struct Dotprod;

impl Products for Plain {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sum16(weights: int8x16_t, values: int8x16_t) -> int32x4_t {
        // At most 2 * 128 * 127 = 32512.
        let low = vmull_s8(vget_low_s8(weights), vget_low_s8(values));
        vpaddlq_s16(vmlal_high_s8(low, weights, values))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sum32(weights: [int8x16_t; 2], values: [int8x16_t; 2], small: bool) -> int32x4_t {
        let first = vmull_s8(vget_low_s8(weights[0]), vget_low_s8(values[0]));
        let first = vmlal_high_s8(first, weights[0], values[0]);
        if small {
            // At most 4 * 64 * 127 = 32512.
            let both = vmlal_s8(first, vget_low_s8(weights[1]), vget_low_s8(values[1]));
            return vpaddlq_s16(vmlal_high_s8(both, weights[1], values[1]));
        }
        let second = vmull_s8(vget_low_s8(weights[1]), vget_low_s8(values[1]));
        vpadalq_s16(vpaddlq_s16(first), vmlal_high_s8(second, weights[1], values[1]))
    }
}

impl Products for Dotprod {
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

/// Adds to each lane the products of its four bytes.
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

/// The same; each lane of `a` meets the four bytes at `LANE` of `b`.
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

/// Two rows of eight bytes in `a`, two in `b`: adds `[a0 b0, a0 b1, a1 b0, a1 b1]`.
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

/// Half `half` of 32 bytes.
#[inline]
#[target_feature(enable = "neon")]
fn load_half(bytes: &[u8; 32], half: usize) -> uint8x16_t {
    load_unsigned(&bytes.as_chunks().0[half])
}

/// 32 activations.
#[inline]
#[target_feature(enable = "neon")]
fn load_both(bytes: &[i8; 32]) -> [int8x16_t; 2] {
    let halves = bytes.as_chunks::<16>().0;
    [load(&halves[0]), load(&halves[1])]
}

/// Numbers stored as f16.
#[inline]
#[target_feature(enable = "neon")]
fn four_halves([a, b, c, d]: [u16; 4]) -> float32x4_t {
    let bits = u64::from(a) | u64::from(b) << 16 | u64::from(c) << 32 | u64::from(d) << 48;
    vcvt_f32_f16(vreinterpret_f16_u16(vcreate_u16(bits)))
}

/// One of them.
#[inline]
#[target_feature(enable = "neon")]
fn half_bits(bits: u16) -> f32 {
    vgetq_lane_f32::<0>(four_halves([bits, 0, 0, 0]))
}

/// Moves the bits of every byte up by `places`, or down where that is negative.
#[inline]
#[target_feature(enable = "neon")]
fn shifted(bytes: uint8x16_t, places: i32) -> uint8x16_t {
    vshlq_u8(bytes, vdupq_n_s8(places as i8))
}

/// The low four bits of 16 bytes, and the high four.
#[inline]
#[target_feature(enable = "neon")]
fn nibbles(bytes: &[u8; 16]) -> [uint8x16_t; 2] {
    let bytes = load_unsigned(bytes);
    [vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8::<4>(bytes)]
}

/// Entries of the codebook of `IQ4_NL` and `IQ4_XS`.
#[inline]
#[target_feature(enable = "neon")]
fn iq4_values(numbers: uint8x16_t) -> int8x16_t {
    vqtbl1q_s8(load(&IQ4_VALUES), numbers)
}

/// Eight bytes twice.
#[inline]
#[target_feature(enable = "neon")]
fn two_of_eight(first: &[u8; 8], second: &[u8; 8]) -> uint8x16_t {
    // SAFETY: loads of the eight bytes that each reference covers.
    unsafe { vcombine_u8(vld1_u8(first.as_ptr()), vld1_u8(second.as_ptr())) }
}
