//! Dot products of weights in blocks of 32 with rounded activations, in NEON.
//!
//! A format defines how the 32 weights of a block are unpacked to signed bytes. The arithmetic after that is the same
//! for all formats.

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use super::intrinsics::*;
use super::{ByteDot, entries, four_halves, four_rows, four_sums, nibbles, per_token, set_bits};
use crate::activations::QuantisedRow;
use crate::blocks::{
    BlockIq4Nl, BlockMxfp4, BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0, HalfScaledBlock,
    IQ4_VALUES, MXFP4_VALUES, ScaledBlock,
};

/// A block of 32 weights that can be unpacked to signed bytes.
pub(crate) trait Unpack32: ScaledBlock {
    /// Whether all integer weights are from -64 to 63: the argument `small` of [`ByteDot::sum32`].
    const IS_SMALL: bool;

    /// Returns the 32 integer weights of the block, before the multiplication by the scale.
    fn weights(&self) -> [int8x16_t; 2];

    /// Returns the scales of four blocks.
    fn scales(blocks: [&Self; 4]) -> float32x4_t;

    /// Returns the minima of four blocks, or zeros if the format has none.
    fn minima(blocks: [&Self; 4]) -> float32x4_t;
}

/// Returns the dot products of four rows of weights in blocks of 32 with the activations of T tokens.
#[inline]
pub(crate) fn dot32<P: ByteDot, B: Unpack32, const T: usize>(
    instructions: P,
    rows: &[&[u8]; 4],
    input: &[QuantisedRow<'_>; T],
) -> [[f32; 4]; T] {
    let rows = four_rows::<B>(rows);
    let length = rows[0].len();
    let quants: [&[[i8; 32]]; T] = per_token(input, |input| &input.quants.as_chunks().0[..length]);
    let scales: [&[f32]; T] = per_token(input, |input| &input.scales[..length]);
    let sums: [&[i16]; T] = per_token(input, |input| &input.sums[..length]);
    let mut dots = [vdupq_n_f32(0.0); T];
    for at in 0..length {
        let blocks = rows.map(|row| &row[at]);
        let weights = blocks.map(B::weights);
        let (block_scales, minima) = (B::scales(blocks), B::minima(blocks));
        for t in 0..T {
            let values = cast(quants[t][at]);
            let totals = weights.map(|weights| instructions.sum32(weights, values, B::IS_SMALL));
            let scale = vmulq_n_f32(block_scales, scales[t][at]);
            dots[t] = vfmaq_f32(dots[t], scale, vcvtq_f32_s32(four_sums(totals)));
            if B::HAS_MINIMUM {
                let sum = vdupq_n_f32(f32::from(sums[t][at]));
                dots[t] = vfmaq_f32(dots[t], vmulq_n_f32(minima, scales[t][at]), sum);
            }
        }
    }
    dots.map(cast)
}

macro_rules! unpack {
    ($($block:ty, small: $small:literal, |$this:ident| $weights:expr;)+) => {$(
        impl Unpack32 for $block {
            const IS_SMALL: bool = $small;

            #[inline(always)]
            fn weights(&self) -> [int8x16_t; 2] {
                let $this = self;
                $weights
            }

            #[inline(always)]
            fn scales(blocks: [&Self; 4]) -> float32x4_t {
                four_halves(blocks.map(HalfScaledBlock::scale_bits))
            }

            #[inline(always)]
            fn minima(blocks: [&Self; 4]) -> float32x4_t {
                four_halves(blocks.map(HalfScaledBlock::minimum_bits))
            }
        }
    )+};
}
unpack! {
    BlockQ4_0, small: true, |block| {
        nibbles(block.quants).map(|numbers| vsubq_s8(cast(numbers), vdupq_n_s8(8)))
    };
    BlockQ4_1, small: true, |block| cast(nibbles(block.quants));
    BlockQ5_0, small: true, |block| {
        with_fifth(block.quants, block.high_bits).map(|numbers| vsubq_s8(numbers, vdupq_n_s8(16)))
    };
    BlockQ5_1, small: true, |block| with_fifth(block.quants, block.high_bits);
    BlockQ8_0, small: false, |block| cast(block.quants);
    BlockIq4Nl, small: false, |block| nibbles(block.quants).map(|numbers| entries(IQ4_VALUES, numbers));
}

impl Unpack32 for BlockMxfp4 {
    const IS_SMALL: bool = true;

    #[inline(always)]
    fn weights(&self) -> [int8x16_t; 2] {
        nibbles(self.quants).map(|numbers| entries(MXFP4_VALUES, numbers))
    }

    #[inline(always)]
    fn scales(blocks: [&Self; 4]) -> float32x4_t {
        cast(blocks.map(ScaledBlock::scale))
    }

    #[inline(always)]
    fn minima(_: [&Self; 4]) -> float32x4_t {
        vdupq_n_f32(0.0)
    }
}

/// Unpacks 32 five-bit integers: the low four bits are in `quants`, and bit j of `high` is the fifth bit of integer j.
#[inline(always)]
fn with_fifth(quants: [u8; 16], high: [u8; 4]) -> [int8x16_t; 2] {
    let mut weights = [vdupq_n_s8(0); 2];
    for (half, numbers) in nibbles(quants).into_iter().enumerate() {
        let fifth = vandq_u8(set_bits([high[2 * half], high[2 * half + 1]]), vdupq_n_u8(16));
        weights[half] = cast(vorrq_u8(numbers, fifth));
    }
    weights
}
