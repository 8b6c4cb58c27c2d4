//! Dot products of I-quants in blocks of 256, which have a codebook, with rounded activations, in NEON.

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::aarch64::*;

use super::k_quants::{Unpack256, widen_eight, widen_sixteen};
use super::{iq4_values, load, nibbles, two_of_eight};
use crate::blocks::{BlockIq1S, BlockIq4Xs};

impl Unpack256 for BlockIq4Xs {
    const IS_SMALL: bool = false;

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn group(&self, group: usize) -> [int8x16_t; 2] {
        nibbles(&self.quants.as_chunks().0[group]).map(|numbers| iq4_values(numbers))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn wide_scales(&self) -> [i32; 16] {
        let mut scales = [0; 16];
        for (sub_block, scale) in scales[..8].iter_mut().enumerate() {
            *scale = self.sub_scale(sub_block);
        }
        widen_sixteen(load(&scales))
    }
}

/// Weights are unpacked in units of 1/8, so that they are integers.
impl Unpack256 for BlockIq1S {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn group(&self, group: usize) -> [int8x16_t; 2] {
        let offset = vdupq_n_u8(self.offset(group));
        let rows: [[u8; 8]; 4] = std::array::from_fn(|at| self.grid_entry(4 * group + at).to_le_bytes());
        let halves = [two_of_eight(&rows[0], &rows[1]), two_of_eight(&rows[2], &rows[3])];
        halves.map(|numbers| vreinterpretq_s8_u8(vsubq_u8(numbers, offset)))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn wide_scales(&self) -> [i32; 16] {
        widen_eight(u64::from_le_bytes(std::array::from_fn(|sub_block| self.sub_scale(sub_block))))
    }
}
