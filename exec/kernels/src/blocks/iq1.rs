//! `IQ1_S` and `IQ1_M`: weights -1, 0 or 1 from a codebook, plus a shift. Memory layouts and integer weights.
//!
//! An eleven-bit index selects eight weights of the codebook. The codebook is part of the format, see [`super::grids`].

use bytemuck::{Pod, Zeroable};

use super::grids::IQ1_GRID;
use super::{HalfScaledBlock, IntegerBlock256};

/// `IQ1_S`, 256 weights: weight = `scale * scales[j] * (g + shift)`, j = index / 32. The codebook gives g, which is
/// -1, 0 or 1; the shift is +1/8 or -1/8 for all weights of a sub-block.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockIq1S {
    scale: [u8; 2],
    /// The lower eight bits of the codebook index of each group of eight weights.
    pub(crate) low_bits: [u8; 32],
    /// For each sub-block of 32 weights: the upper three bits of its four codebook indices, three bits of its scale,
    /// and the sign bit of its shift.
    pub(crate) high_bits: [[u8; 2]; 8],
}

/// `IQ1_M`, 256 weights: weight = `scale * (2 * scales[j] + 1) * (g + shift)` with three-bit `scales[j]`, j = index /
/// 16. The codebook gives g, which is -1, 0 or 1; the shift is +1/8 or -1/8 for eight weights.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockIq1M {
    /// The lower eight bits of the codebook index of each group of eight weights.
    pub(crate) low_bits: [u8; 32],
    /// Four bits for each group of eight weights: the upper three bits of its codebook index, and the sign bit of its
    /// shift.
    pub(crate) high_bits: [u8; 16],
    /// For every 64 weights: four scales of three bits, then four bits of the f16 scale of the block, the lowest bits
    /// first.
    pub(crate) packed: [[u8; 2]; 4],
}

scaled! { BlockIq1S }

scaled_by_half! { BlockIq1M }

impl HalfScaledBlock for BlockIq1M {
    #[inline(always)]
    fn scale_bits(&self) -> u16 {
        let [a, b, c, d] = self.packed.map(|[_, byte]| u16::from(byte >> 4));
        a | b << 4 | c << 8 | d << 12
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

    /// Returns 7 or 9: the bytes of a sub-block in `IQ1_GRID`, minus this offset, are 8 times its unscaled weights.
    #[inline(always)]
    pub(crate) fn offset(&self, sub_block: usize) -> u8 {
        if self.high_bits_of(sub_block) >> 15 == 0 { 7 } else { 9 }
    }

    /// Returns the row of `IQ1_GRID` for eight weights, given the index of their group in the block (0 to 31).
    #[inline(always)]
    pub(crate) fn grid_row(&self, group: usize) -> u64 {
        let high = self.high_bits_of(group / 4) >> (3 * (group % 4)) & 7;
        grid_row(self.low_bits[group], high as u8)
    }
}

impl BlockIq1M {
    #[inline(always)]
    fn high_bits_of(&self, group: usize) -> u8 {
        self.high_bits[group / 2] >> (4 * (group % 2))
    }

    /// Returns 7 or 9: the bytes of the row of a group of eight weights, minus this offset, are 8 times its unscaled
    /// weights.
    #[inline(always)]
    pub(crate) fn offset(&self, group: usize) -> u8 {
        7 + (self.high_bits_of(group) >> 2 & 2)
    }

    /// Returns the row of `IQ1_GRID` for eight weights, given the index of their group in the block (0 to 31).
    #[inline(always)]
    pub(crate) fn grid_row(&self, group: usize) -> u64 {
        grid_row(self.low_bits[group], self.high_bits_of(group))
    }
}

/// Returns the row of the codebook with an eleven-bit index, given by its lower eight and upper three bits, with the
/// byte of the first weight in the lowest eight bits.
#[inline(always)]
fn grid_row(low_bits: u8, high_bits: u8) -> u64 {
    u64::from_le_bytes(IQ1_GRID[usize::from(low_bits) | usize::from(high_bits & 7) << 8])
}

/// The integer of a weight is `8 * (g + shift)` in the symbols of [`BlockIq1S`], that is 8 g + 1 or 8 g - 1.
/// `SCALE_FACTOR` divides the scale of the block by eight, which is exact.
impl IntegerBlock256 for BlockIq1S {
    const SCALE_FACTOR: f32 = 0.125;
    const GROUP_LENGTH: usize = 32;

    #[inline(always)]
    fn quant(&self, index: usize) -> i32 {
        let entry = (self.grid_row(index / 8) >> (8 * (index % 8))) as u8;
        i32::from(entry) - i32::from(self.offset(index / 32))
    }

    #[inline(always)]
    fn scales(&self) -> [i8; 16] {
        std::array::from_fn(|group| self.sub_scale(group / 2).cast_signed())
    }
}

/// The integers are those of [`BlockIq1S`].
impl IntegerBlock256 for BlockIq1M {
    const SCALE_FACTOR: f32 = 0.125;

    #[inline(always)]
    fn quant(&self, index: usize) -> i32 {
        let entry = (self.grid_row(index / 8) >> (8 * (index % 8))) as u8;
        i32::from(entry) - i32::from(self.offset(index / 8))
    }

    #[inline(always)]
    fn scales(&self) -> [i8; 16] {
        std::array::from_fn(|at| {
            let packed = u16::from_le_bytes(self.packed[at / 4]);
            2 * (packed >> (3 * (at % 4)) & 7) as i8 + 1
        })
    }
}
