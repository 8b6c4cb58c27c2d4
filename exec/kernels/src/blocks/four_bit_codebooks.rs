//! Formats whose weights are four-bit indices of a codebook: memory layouts and integer weights.
//!
//! The codebook of `IQ4_NL` and `IQ4_XS` has 16 values, which are denser near zero. It is part of the format.

use bytemuck::{Pod, Zeroable};

use super::IntegerBlock256;
use super::blocks32::nibble;

/// The codebook of `IQ4_NL` and `IQ4_XS`. source: `kvalues_iq4nl` of ggml-common.h
pub(crate) const IQ4_VALUES: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// `IQ4_NL`, 32 weights: weight = `scale * IQ4_VALUES[q]`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockIq4Nl {
    scale: [u8; 2],
    pub(crate) quants: [u8; 16],
}

/// `IQ4_XS`, 256 weights: weight = `scale * scales[j] * IQ4_VALUES[q]`, j = index / 32.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockIq4Xs {
    scale: [u8; 2],
    /// The upper two bits of each of the eight sub-block scales.
    scales_high: [u8; 2],
    /// The lower four bits of each of the eight sub-block scales.
    scales_low: [u8; 4],
    /// Codebook indices: 16 bytes for each sub-block, in the layout of `BlockIq4Nl`.
    pub(crate) quants: [u8; 128],
}

scaled! { BlockIq4Nl, BlockIq4Xs }

integers! {
    BlockIq4Nl: |block, index| IQ4_VALUES[usize::from(nibble(&block.quants, index))];
}

impl BlockIq4Xs {
    /// Returns the integer scale of a sub-block of 32 weights, from -32 to 31.
    #[inline(always)]
    pub(crate) fn sub_scale(&self, sub_block: usize) -> i8 {
        let low = self.scales_low[sub_block / 2] >> (4 * (sub_block % 2)) & 15;
        let high = (u16::from_le_bytes(self.scales_high) >> (2 * sub_block) & 3) as u8;
        (low | high << 4) as i8 - 32
    }
}

impl IntegerBlock256 for BlockIq4Xs {
    const GROUP_LENGTH: usize = 32;

    #[inline(always)]
    fn quant(&self, index: usize) -> i32 {
        let bytes = &self.quants.as_chunks::<16>().0[index / 32];
        i32::from(IQ4_VALUES[usize::from(nibble(bytes, index % 32))])
    }

    #[inline(always)]
    fn scales(&self) -> [i8; 16] {
        std::array::from_fn(|group| self.sub_scale(group / 2))
    }
}
