//! Blocks of 32 weights: layouts and dequantisation.
//!
//! A scale, for some formats a minimum, and 32 integers; of four bits the low halves of 16 bytes are the first
//! 16 weights and the high halves the others.

use bytemuck::{Pod, Zeroable};

use super::Scaled;

/// weight = `scale * (q - 8)`, q of four bits.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ4_0 {
    scale: [u8; 2],
    pub(crate) quants: [u8; 16],
}

/// weight = `scale * q + minimum`, q of four bits.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ4_1 {
    scale: [u8; 2],
    minimum: [u8; 2],
    pub(crate) quants: [u8; 16],
}

/// weight = `scale * (q - 16)`, q of five bits.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ5_0 {
    scale: [u8; 2],
    /// The fifth bit of weight j is bit j.
    pub(crate) high: [u8; 4],
    pub(crate) quants: [u8; 16],
}

/// weight = `scale * q + minimum`, q of five bits.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ5_1 {
    scale: [u8; 2],
    minimum: [u8; 2],
    /// The fifth bit of weight j is bit j.
    pub(crate) high: [u8; 4],
    pub(crate) quants: [u8; 16],
}

/// weight = `scale * q`, q of eight bits, signed.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ8_0 {
    scale: [u8; 2],
    pub(crate) quants: [i8; 32],
}

/// The 4-bit number at `index` of 32.
#[inline(always)]
pub(super) fn nibble(bytes: &[u8; 16], index: usize) -> u8 {
    bytes[index % 16] >> (4 * (index / 16)) & 15
}

#[inline(always)]
fn fifth(bits: [u8; 4], index: usize) -> u8 {
    (bits[index / 8] >> (index % 8) & 1) << 4
}

scaled! { BlockQ4_0, BlockQ4_1 minimum, BlockQ5_0, BlockQ5_1 minimum, BlockQ8_0 }

impl BlockQ4_0 {
    /// The quant at `index`, -8 to 7.
    #[inline(always)]
    pub(crate) fn quant(&self, index: usize) -> i8 {
        nibble(&self.quants, index) as i8 - 8
    }
}

impl BlockQ4_1 {
    /// The quant at `index`, 0 to 15.
    #[inline(always)]
    pub(crate) fn quant(&self, index: usize) -> u8 {
        nibble(&self.quants, index)
    }
}

impl BlockQ5_0 {
    /// The quant at `index`, -16 to 15.
    #[inline(always)]
    pub(crate) fn quant(&self, index: usize) -> i8 {
        (nibble(&self.quants, index) | fifth(self.high, index)) as i8 - 16
    }
}

impl BlockQ5_1 {
    /// The quant at `index`, 0 to 31.
    #[inline(always)]
    pub(crate) fn quant(&self, index: usize) -> u8 {
        nibble(&self.quants, index) | fifth(self.high, index)
    }
}

stored! {
    32 BlockQ4_0: |block, index| block.scale() * f32::from(block.quant(index));
    32 BlockQ4_1: |block, index| block.scale() * f32::from(block.quant(index)) + block.minimum();
    32 BlockQ5_0: |block, index| block.scale() * f32::from(block.quant(index));
    32 BlockQ5_1: |block, index| block.scale() * f32::from(block.quant(index)) + block.minimum();
    32 BlockQ8_0: |block, index| block.scale() * f32::from(block.quants[index]);
}
