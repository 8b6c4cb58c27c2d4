//! Formats whose stored integers are indices of a codebook: memory layouts and integer weights.
//!
//! In `IQ4_NL` and `IQ4_XS` a four-bit index selects one of 16 values, which are denser near zero. In `IQ1_S` an
//! eleven-bit index selects a group of eight weights. The codebooks are part of the format.

use bytemuck::{Pod, Zeroable};

use super::blocks32::nibble;
use super::{IQ1_S_GRID, IntegerBlock256};

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

/// `IQ1_S`, 256 weights: weight = `scale * scales[j] * (g + shift)`, j = index / 32. The codebook gives g, which is
/// -1, 0 or 1; the shift is +1/8 or -1/8 for all weights of a sub-block.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockIq1S {
    scale: [u8; 2],
    /// The lower eight bits of the codebook index of each group of eight weights.
    low_bits: [u8; 32],
    /// For each sub-block of 32 weights: the upper three bits of its four codebook indices, three bits of its scale,
    /// and the sign bit of its shift.
    high_bits: [[u8; 2]; 8],
}

scaled! { BlockIq4Nl, BlockIq4Xs, BlockIq1S }

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

impl BlockIq1S {
    #[inline(always)]
    fn high_bits_of(&self, sub_block: usize) -> u16 {
        u16::from_le_bytes(self.high_bits[sub_block])
    }

    /// Returns the integer scale of a sub-block of 32 weights, an odd number from 1 to 15.
    #[inline(always)]
    pub(crate) fn sub_scale(&self, sub_block: usize) -> u8 {
        2 * (self.high_bits_of(sub_block) >> 12 & 7) as u8 + 1
    }

    /// Returns 7 or 9: the bytes of a sub-block in `IQ1_S_GRID`, minus this offset, are 8 times its unscaled weights.
    #[inline(always)]
    pub(crate) fn offset(&self, sub_block: usize) -> u8 {
        if self.high_bits_of(sub_block) >> 15 == 0 { 7 } else { 9 }
    }

    /// Returns the entry of `IQ1_S_GRID` for eight weights, given the index of their group in the block (0 to 31).
    #[inline(always)]
    pub(crate) fn grid_entry(&self, group: usize) -> u64 {
        let high = self.high_bits_of(group / 4) >> (3 * (group % 4)) & 7;
        IQ1_S_GRID[usize::from(u16::from(self.low_bits[group]) | high << 8)]
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

/// The integer of a weight is `8 * (g + shift)` in the symbols of [`BlockIq1S`], that is 8 g + 1 or 8 g - 1.
/// `SCALE_FACTOR` divides the scale of the block by eight, which is exact.
impl IntegerBlock256 for BlockIq1S {
    const SCALE_FACTOR: f32 = 0.125;
    const GROUP_LENGTH: usize = 32;

    #[inline(always)]
    fn quant(&self, index: usize) -> i32 {
        let entry = (self.grid_entry(index / 8) >> (8 * (index % 8))) as u8;
        i32::from(entry) - i32::from(self.offset(index / 32))
    }

    #[inline(always)]
    fn scales(&self) -> [i8; 16] {
        std::array::from_fn(|group| self.sub_scale(group / 2).cast_signed())
    }
}
