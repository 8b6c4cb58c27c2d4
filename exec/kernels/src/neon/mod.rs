//! The dot products of [`super::scalar`] for 64-bit ARM processors.
//!
//! NEON multiplies signed bytes, so the offset of weights is subtracted when they are unpacked. `sdot` adds four
//! products to each 32-bit lane. On processors without `sdot`, as many products are added in 16 bits as cannot
//! overflow, and the sums are then widened. A block is summed completely in integers before the conversion to f32.
//! Each function computes the dot products of four rows with T tokens: the activations are loaded once for four rows,
//! the weights are unpacked once for T tokens, and the four rows are the lanes of the conversions and of the float
//! arithmetic. The arithmetic of a row and a token does not depend on the other rows and tokens.
//!
//! Not here: loops over rows. That is [`super::matmul`].

mod blocks32;
mod extensions;
mod floats;
mod i_quants;
pub(super) mod intrinsics;
mod k_quants;

pub(super) use blocks32::dot32;
pub(super) use extensions::{Dotprod, I8mm};
pub(super) use floats::{dot_bf16, dot_f16, dot_f32, scores_f16, sum_values_f16};
pub(super) use k_quants::dot256;

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use intrinsics::*;

use bytemuck::Pod;

use super::blocks::blocks;
use super::matmul::per_token;

/// Integer dot products of bytes with one instruction set.
///
/// An implementation may add a product to any lane, because the caller sums all lanes to one integer.
pub(super) trait ByteDot: Copy {
    /// Returns four partial sums of the products of 16 weights from -128 to 127 and activations from -127 to 127.
    fn sum16(self, weights: int8x16_t, values: int8x16_t) -> int32x4_t;

    /// Returns four partial sums of the products of 32 weights and activations. If `small` is set, all weights are from
    /// -64 to 63.
    fn sum32(self, weights: [int8x16_t; 2], values: [int8x16_t; 2], small: bool) -> int32x4_t;
}

/// NEON without extensions, which every 64-bit ARM processor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BaseNeon;

impl ByteDot for BaseNeon {
    #[inline(always)]
    fn sum16(self, weights: int8x16_t, values: int8x16_t) -> int32x4_t {
        // A lane is at most 2 * 128 * 127 = 32512.
        let low = vmull_s8(vget_low_s8(weights), vget_low_s8(values));
        vpaddlq_s16(vmlal_high_s8(low, weights, values))
    }

    #[inline(always)]
    fn sum32(self, weights: [int8x16_t; 2], values: [int8x16_t; 2], small: bool) -> int32x4_t {
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
    #[inline(always)]
    fn sum16(self, weights: int8x16_t, values: int8x16_t) -> int32x4_t {
        self.sdot(vdupq_n_s32(0), weights, values)
    }

    #[inline(always)]
    fn sum32(self, weights: [int8x16_t; 2], values: [int8x16_t; 2], _small: bool) -> int32x4_t {
        self.sdot(self.sdot(vdupq_n_s32(0), weights[0], values[0]), weights[1], values[1])
    }
}

/// Converts four f16 values, given by their bits, to f32.
#[inline(always)]
fn four_halves(bits: [u16; 4]) -> float32x4_t {
    vcvt_f32_f16(vreinterpret_f16_u16(cast(bits)))
}

/// Casts the bytes of four rows of equal length to blocks.
#[inline(always)]
fn four_rows<'a, B: Pod>(rows: &[&'a [u8]; 4]) -> [&'a [B]; 4] {
    let first: &[B] = blocks(rows[0]);
    std::array::from_fn(|r| &blocks(rows[r])[..first.len()])
}

/// Returns the sum of the lanes of each of four registers.
#[inline(always)]
fn four_sums([a, b, c, d]: [int32x4_t; 4]) -> int32x4_t {
    vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d))
}

/// Shifts every byte left by `places` bits, or right if `places` is negative.
#[inline(always)]
fn shifted(bytes: uint8x16_t, places: i32) -> uint8x16_t {
    vshlq_u8(bytes, vdupq_n_s8(places as i8))
}

/// Returns the low four bits of each of 16 bytes, and the high four bits of each.
#[inline(always)]
fn nibbles(bytes: [u8; 16]) -> [uint8x16_t; 2] {
    let bytes = cast(bytes);
    [vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8::<4>(bytes)]
}

/// Returns the entries of a codebook for 16 indices.
#[inline(always)]
fn entries(codebook: [i8; 16], indices: uint8x16_t) -> int8x16_t {
    vqtbl1q_s8(cast(codebook), indices)
}

/// Expands each of 16 bits to a byte: 0xff if the bit is set, otherwise 0.
#[inline(always)]
fn set_bits(bits: [u8; 2]) -> uint8x16_t {
    let one_bit_each = cast([0x8040_2010_0804_0201_u64; 2]);
    vtstq_u8(cast(bits.map(vdup_n_u8)), one_bit_each)
}
