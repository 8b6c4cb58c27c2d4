//! Dot products of weights in blocks of 32 with rounded activations, in NEON.
//!
//! A format defines how the 32 weights of a block are unpacked to signed bytes. The arithmetic after that is the same
//! for all formats. Four blocks are summed together.

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use super::intrinsics::*;
use super::{ByteDot, entries, four_halves, nibbles, per_token, set_bits};
use crate::activations::QuantisedRow;
use crate::blocks::{
    BlockIq4Nl, BlockMxfp4, BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0, HalfScaledBlock,
    IQ4_VALUES, MXFP4_VALUES, ScaledBlock, blocks,
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

/// Returns the dot products of a row of weights in blocks of 32 with the activations of T tokens.
#[inline]
pub(crate) fn dot32<P: ByteDot, B: Unpack32, const T: usize>(
    instructions: P,
    row: &[u8],
    input: &[QuantisedRow<'_>; T],
) -> [f32; T] {
    let row = blocks::<B>(row);
    let quants: [&[[i8; 32]]; T] = per_token(input, |input| &input.quants.as_chunks().0[..row.len()]);
    let scales: [&[f32]; T] = per_token(input, |input| &input.scales[..row.len()]);
    let sums: [&[i16]; T] = per_token(input, |input| &input.sums[..row.len()]);
    let (fours, rest) = row.as_chunks::<4>();
    let mut dots = [0.0f32; T];
    for (at, four) in fours.iter().enumerate() {
        let weights = four.each_ref().map(B::weights);
        let (block_scales, minima) = (B::scales(four.each_ref()), B::minima(four.each_ref()));
        for t in 0..T {
            let quants = &quants[t].as_chunks::<4>().0[at];
            let [a, b, c, d] =
                std::array::from_fn(|n| instructions.sum32(weights[n], cast(quants[n]), B::IS_SMALL));
            let totals = vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
            let token_scales = cast(scales[t].as_chunks::<4>().0[at]);
            let factors: [f32; 4] = cast(vmulq_f32(block_scales, token_scales));
            let totals: [f32; 4] = cast(vcvtq_f32_s32(totals));
            if B::HAS_MINIMUM {
                let minima: [f32; 4] = cast(vmulq_f32(minima, token_scales));
                let sums: [f32; 4] = cast(four_sums(sums[t].as_chunks::<4>().0[at]));
                for n in 0..4 {
                    dots[t] = factors[n].mul_add(totals[n], dots[t]);
                    dots[t] = minima[n].mul_add(sums[n], dots[t]);
                }
            } else {
                for n in 0..4 {
                    dots[t] = factors[n].mul_add(totals[n], dots[t]);
                }
            }
        }
    }
    for (at, block) in (4 * fours.len()..).zip(rest) {
        let weights = block.weights();
        let [scale, ..]: [f32; 4] = cast(B::scales([block; 4]));
        let [minimum, ..]: [f32; 4] = cast(B::minima([block; 4]));
        for t in 0..T {
            let total = vaddvq_s32(instructions.sum32(weights, cast(quants[t][at]), B::IS_SMALL));
            dots[t] = (scale * scales[t][at]).mul_add(total as f32, dots[t]);
            if B::HAS_MINIMUM {
                dots[t] = (minimum * scales[t][at]).mul_add(f32::from(sums[t][at]), dots[t]);
            }
        }
    }
    dots
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

/// Converts four integers to floats.
#[inline(always)]
fn four_sums(values: [i16; 4]) -> float32x4_t {
    vcvtq_f32_s32(vmovl_s16(cast(values)))
}
