//! Dot products of K-quants with rounded activations, in NEON.
//!
//! A format, including those of [`super::i_quants`], defines how a group of 32 weights is unpacked to signed bytes, and
//! the integer scales and minima of the groups. The arithmetic after that is the same for all formats.

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use super::intrinsics::*;
use super::{ByteDot, four_halves, four_rows, four_sums, per_token, shifted};
use crate::activations::QuantisedRow;
use crate::blocks::{
    BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K, HalfScaledBlock, IntegerBlock256, SixBitScales,
};

/// A block of 256 weights that can be unpacked in groups of 32.
pub(crate) trait Unpack256: HalfScaledBlock + IntegerBlock256 {
    /// Whether all integer weights are from -64 to 63. This is the argument `small` of [`ByteDot::sum32`].
    const IS_SMALL: bool = true;

    /// Returns the 32 integer weights of a group, before the multiplication by their scales.
    fn group(&self, group: usize) -> [int8x16_t; 2];

    /// Returns the integer scales of the block, one for each [`GROUP_LENGTH`](IntegerBlock256::GROUP_LENGTH) weights.
    #[inline(always)]
    fn wide_scales(&self) -> [i32; 16] {
        let scales = self.scales();
        if Self::GROUP_LENGTH == 16 {
            return widen_sixteen(cast(scales));
        }
        let mut each = [0; 16];
        for (group, scale) in each[..8].iter_mut().enumerate() {
            *scale = scales[2 * group];
        }
        widen_sixteen(cast(each))
    }

    /// Returns the 16 integer minima of the block, one for each 16 weights.
    #[inline(always)]
    fn wide_minima(&self) -> [int16x8_t; 2] {
        let minima = cast(self.minima());
        [vmovl_s8(vget_low_s8(minima)), vmovl_high_s8(minima)]
    }
}

/// Repeats a block of code for each group of 32 weights in a block of 256; `$group` is a constant, the index of the group.
macro_rules! for_each_group {
    ($group:ident, $body:block) => {
        for_each_group! { $group, $body, 0 1 2 3 4 5 6 7 }
    };
    ($group:ident, $body:block, $($index:literal)+) => {
        $({
            const $group: usize = $index;
            $body
        })+
    };
}

/// Returns the dot products of four rows of weights in blocks of 256 with the activations of T tokens.
#[inline]
pub(crate) fn dot256<P: ByteDot, B: Unpack256, const T: usize>(
    instructions: P,
    rows: &[&[u8]; 4],
    input: &[QuantisedRow<'_>; T],
) -> [[f32; 4]; T] {
    let rows = four_rows::<B>(rows);
    let length = rows[0].len();
    let quants: [&[[i8; 256]]; T] = per_token(input, |input| &input.quants.as_chunks().0[..length]);
    let sums: [&[[i16; 16]]; T] = per_token(input, |input| &input.sums.as_chunks().0[..length]);
    let scales: [&[f32]; T] = per_token(input, |input| &input.scales[..length]);
    let mut dots = [vdupq_n_f32(0.0); T];
    for at in 0..length {
        let blocks = rows.map(|row| &row[at]);
        let block_scales = blocks.map(B::wide_scales);
        let activations: [&[[i8; 32]]; T] = per_token(&quants, |quants| quants[at].as_chunks().0);
        let mut totals = [[vdupq_n_s32(0); 4]; T];
        for_each_group!(GROUP, {
            for r in 0..4 {
                let weights = blocks[r].group(GROUP);
                for t in 0..T {
                    let values = cast(activations[t][GROUP]);
                    totals[t][r] = add_group::<P, B>(
                        instructions,
                        totals[t][r],
                        weights,
                        values,
                        &block_scales[r],
                        GROUP,
                    );
                }
            }
        });
        let scale = vmulq_n_f32(four_halves(blocks.map(B::scale_bits)), B::SCALE_FACTOR);
        for t in 0..T {
            let scale = vmulq_n_f32(scale, scales[t][at]);
            dots[t] = vfmaq_f32(dots[t], scale, vcvtq_f32_s32(four_sums(totals[t])));
        }
        if B::HAS_MINIMUM {
            let minimum = four_halves(blocks.map(B::minimum_bits));
            let minima = blocks.map(B::wide_minima);
            for t in 0..T {
                let subtracted = minima.map(|minima| products_of_sums(minima, sums[t][at]));
                let minimum = vmulq_n_f32(minimum, scales[t][at]);
                dots[t] = vfmsq_f32(dots[t], minimum, vcvtq_f32_s32(four_sums(subtracted)));
            }
        }
    }
    dots.map(cast)
}

/// Adds the products of a group of 32 weights and activations, times the scales of the weights, to `total`.
#[inline(always)]
fn add_group<P: ByteDot, B: Unpack256>(
    instructions: P,
    total: int32x4_t,
    weights: [int8x16_t; 2],
    values: [int8x16_t; 2],
    scales: &[i32; 16],
    group: usize,
) -> int32x4_t {
    if B::GROUP_LENGTH == 32 {
        return vmlaq_n_s32(total, instructions.sum32(weights, values, B::IS_SMALL), scales[group]);
    }
    let total = vmlaq_n_s32(total, instructions.sum16(weights[0], values[0]), scales[2 * group]);
    vmlaq_n_s32(total, instructions.sum16(weights[1], values[1]), scales[2 * group + 1])
}

/// Multiplies the sums of 16 activations by the minima of a block. The sum of all lanes is at most 16 * 63 * 16 * 127.
#[inline(always)]
fn products_of_sums(minima: [int16x8_t; 2], sums: [i16; 16]) -> int32x4_t {
    let sums: [int16x8_t; 2] = cast(sums);
    let total = vmull_s16(vget_low_s16(minima[0]), vget_low_s16(sums[0]));
    let total = vmlal_high_s16(total, minima[0], sums[0]);
    let total = vmlal_s16(total, vget_low_s16(minima[1]), vget_low_s16(sums[1]));
    vmlal_high_s16(total, minima[1], sums[1])
}

/// Widens 16 signed bytes to i32.
#[inline(always)]
pub(super) fn widen_sixteen(bytes: int8x16_t) -> [i32; 16] {
    let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
    cast([
        vmovl_s16(vget_low_s16(low)),
        vmovl_high_s16(low),
        vmovl_s16(vget_low_s16(high)),
        vmovl_high_s16(high),
    ])
}

/// Widens eight bytes from 0 to 127 to i32. Returns the eight integers, followed by eight zeros.
#[inline(always)]
pub(super) fn widen_eight(bytes: u64) -> [i32; 16] {
    widen_sixteen(cast([bytes, 0]))
}

/// Widens eight bytes from 0 to 127 to i16 and repeats each, so that there are 16.
#[inline(always)]
fn twice(bytes: u64) -> [int16x8_t; 2] {
    let wide = vmovl_s8(cast(bytes));
    [vzip1q_s16(wide, wide), vzip2q_s16(wide, wide)]
}

#[inline(always)]
fn masked(bytes: [uint8x16_t; 2], mask: u8) -> [uint8x16_t; 2] {
    bytes.map(|bytes| vandq_u8(bytes, vdupq_n_u8(mask)))
}

/// Shifts each of 32 bytes left by `places` bits (right if `places` is negative) and ANDs the result with `mask`.
#[inline(always)]
fn bits(bytes: &[u8; 32], places: i32, mask: u8) -> [uint8x16_t; 2] {
    masked(cast::<_, [uint8x16_t; 2]>(*bytes).map(|bytes| shifted(bytes, places)), mask)
}

/// ORs the bytes of `low` and `high` and subtracts `offset` from each.
#[inline(always)]
fn joined(low: [uint8x16_t; 2], high: [uint8x16_t; 2], offset: i8) -> [int8x16_t; 2] {
    let of = |half: usize| vsubq_s8(cast(vorrq_u8(low[half], high[half])), vdupq_n_s8(offset));
    [of(0), of(1)]
}

/// Implements [`Unpack256`] for block types, given an expression for the weights of a group. If a method is named that
/// returns the packed scales and minima, it replaces the default methods for them.
macro_rules! unpack {
    ($($block:ty $(, $scales_and_minima:ident)?: |$this:ident, $group:ident| $weights:expr;)+) => {$(
        impl Unpack256 for $block {
            #[inline(always)]
            fn group(&self, $group: usize) -> [int8x16_t; 2] {
                let $this = self;
                $weights
            }

            $(
                #[inline(always)]
                fn wide_scales(&self) -> [i32; 16] {
                    widen_eight(self.$scales_and_minima().0)
                }

                #[inline(always)]
                fn wide_minima(&self) -> [int16x8_t; 2] {
                    twice(self.$scales_and_minima().1)
                }
            )?
        }
    )+};
}
unpack! {
    BlockQ2K: |block, group| {
        let bytes = &block.quants.as_chunks().0[group / 4];
        cast(bits(bytes, -2 * (group as i32 % 4), 3))
    };
    BlockQ3K: |block, group| {
        let low = bits(&block.quants.as_chunks().0[group / 4], -2 * (group as i32 % 4), 3);
        joined(low, bits(&block.high_bits, 2 - group as i32, 4), 4)
    };
    BlockQ4K, scales_and_minima: |block, group| {
        let bytes = &block.quants.as_chunks().0[group / 2];
        cast(bits(bytes, -4 * (group as i32 % 2), 15))
    };
    BlockQ5K, scales_and_minima: |block, group| {
        let low = bits(&block.quants.as_chunks().0[group / 2], -4 * (group as i32 % 2), 15);
        joined(low, bits(&block.high_bits, 4 - group as i32, 16), 0)
    };
    BlockQ6K: |block, group| {
        let (part, within) = (group / 4, group % 4);
        let low = bits(&block.low_bits.as_chunks().0[2 * part + within % 2], -4 * (within as i32 / 2), 15);
        let high = bits(&block.high_bits.as_chunks().0[part], 4 - 2 * within as i32, 0x30);
        joined(low, high, 32)
    };
}
