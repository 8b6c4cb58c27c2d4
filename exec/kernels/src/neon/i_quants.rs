//! Dot products of I-quants in blocks of 256, which have a codebook, with rounded activations, in NEON.

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use super::intrinsics::*;
use super::k_quants::{Unpack256, widen_eight};
use super::{entries, nibbles, set_bits};
use crate::blocks::{
    BlockIq1M, BlockIq1S, BlockIq4Xs, HalfScaledBlock, IQ4_VALUES, IntegerBlock256, SignMagnitudeBlock,
};

impl Unpack256 for BlockIq4Xs {
    const IS_SMALL: bool = false;

    #[inline(always)]
    fn group(&self, group: usize) -> [int8x16_t; 2] {
        nibbles(self.quants.as_chunks().0[group]).map(|numbers| entries(IQ4_VALUES, numbers))
    }
}

/// Weights are unpacked in units of 1/8, so that they are integers.
impl Unpack256 for BlockIq1S {
    #[inline(always)]
    fn group(&self, group: usize) -> [int8x16_t; 2] {
        let offset = vdupq_n_u8(self.offset(group));
        let rows: [u64; 4] = std::array::from_fn(|at| self.grid_row(4 * group + at));
        cast::<_, [uint8x16_t; 2]>(rows).map(|numbers| cast(vsubq_u8(numbers, offset)))
    }

    #[inline(always)]
    fn wide_scales(&self) -> [i32; 16] {
        widen_eight(u64::from_le_bytes(std::array::from_fn(|sub_block| self.sub_scale(sub_block))))
    }
}

/// Weights are unpacked in units of 1/8, as those of `IQ1_S`.
impl Unpack256 for BlockIq1M {
    #[inline(always)]
    fn group(&self, group: usize) -> [int8x16_t; 2] {
        let rows: [u64; 4] = std::array::from_fn(|at| self.grid_row(4 * group + at));
        let offsets: [[u8; 8]; 4] = std::array::from_fn(|at| [self.offset(4 * group + at); 8]);
        let (rows, offsets): ([uint8x16_t; 2], [uint8x16_t; 2]) = (cast(rows), cast(offsets));
        std::array::from_fn(|half| cast(vsubq_u8(rows[half], offsets[half])))
    }
}

impl<B: SignMagnitudeBlock + HalfScaledBlock + IntegerBlock256> Unpack256 for B {
    #[inline(always)]
    fn group(&self, group: usize) -> [int8x16_t; 2] {
        let magnitudes: [u64; 4] = std::array::from_fn(|at| self.magnitudes(4 * group + at));
        let magnitudes: [uint8x16_t; 2] = cast(magnitudes);
        std::array::from_fn(|half| {
            let negative = set_bits(std::array::from_fn(|at| self.signs(4 * group + 2 * half + at)));
            // The two's complement of a negative weight is the complement of its magnitude, plus one.
            cast(vsubq_u8(veorq_u8(magnitudes[half], negative), negative))
        })
    }
}
