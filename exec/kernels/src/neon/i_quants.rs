//! Dot products of I-quants in blocks of 256, which have a codebook, with rounded activations, in NEON.

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use super::intrinsics::*;
use super::k_quants::{Unpack256, widen_eight, widen_sixteen};
use super::{iq4_values, nibbles};
use crate::blocks::{BlockIq1S, BlockIq4Xs};

impl Unpack256 for BlockIq4Xs {
    const IS_SMALL: bool = false;

    #[inline(always)]
    fn group(&self, group: usize) -> [int8x16_t; 2] {
        nibbles(self.quants.as_chunks().0[group]).map(iq4_values)
    }

    #[inline(always)]
    fn wide_scales(&self) -> [i32; 16] {
        let mut scales = [0; 16];
        for (sub_block, scale) in scales[..8].iter_mut().enumerate() {
            *scale = self.sub_scale(sub_block);
        }
        widen_sixteen(cast(scales))
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
