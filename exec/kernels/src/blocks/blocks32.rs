//! Formats with blocks of 32 weights: memory layouts and integer weights.
//!
//! A block has an f16 scale, in some formats an f16 minimum, and 32 integers. Four-bit integers are stored in 16
//! bytes: the low nibbles are the first 16 weights, the high nibbles the last 16 weights.

use bytemuck::{Pod, Zeroable};

/// `Q4_0`: weight = `scale * (q - 8)` with four-bit q.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ4_0 {
    scale: [u8; 2],
    pub(crate) quants: [u8; 16],
}

/// `Q4_1`: weight = `scale * q + minimum` with four-bit q.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ4_1 {
    scale: [u8; 2],
    minimum: [u8; 2],
    pub(crate) quants: [u8; 16],
}

/// `Q5_0`: weight = `scale * (q - 16)` with five-bit q.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ5_0 {
    scale: [u8; 2],
    /// The fifth bit of each weight: bit j of these 32 bits belongs to weight j.
    pub(crate) high_bits: [u8; 4],
    pub(crate) quants: [u8; 16],
}

/// `Q5_1`: weight = `scale * q + minimum` with five-bit q.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ5_1 {
    scale: [u8; 2],
    minimum: [u8; 2],
    /// The fifth bit of each weight: bit j of these 32 bits belongs to weight j.
    pub(crate) high_bits: [u8; 4],
    pub(crate) quants: [u8; 16],
}

/// `Q8_0`: weight = `scale * q` with signed eight-bit q.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ8_0 {
    scale: [u8; 2],
    pub(crate) quants: [i8; 32],
}

/// Returns the four-bit integer of the weight with index `index` (0 to 31) in a block of 32.
#[inline(always)]
pub(super) fn nibble(bytes: &[u8; 16], index: usize) -> u8 {
    bytes[index % 16] >> (4 * (index / 16)) & 15
}

/// Returns 16 if bit `index` of `bits` is set, otherwise 0.
#[inline(always)]
fn fifth(bits: [u8; 4], index: usize) -> u8 {
    (bits[index / 8] >> (index % 8) & 1) << 4
}

scaled! { BlockQ4_0, BlockQ4_1 minimum, BlockQ5_0, BlockQ5_1 minimum, BlockQ8_0 }

integers! {
    BlockQ4_0: |block, index| nibble(&block.quants, index) as i8 - 8;
    BlockQ4_1: |block, index| nibble(&block.quants, index);
    BlockQ5_0: |block, index| (nibble(&block.quants, index) | fifth(block.high_bits, index)) as i8 - 16;
    BlockQ5_1: |block, index| nibble(&block.quants, index) | fifth(block.high_bits, index);
    BlockQ8_0: |block, index| block.quants[index];
}
