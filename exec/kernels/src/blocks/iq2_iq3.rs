//! `IQ2` and `IQ3` formats: magnitudes from a codebook, with a sign bit for each weight. Memory layouts and integer
//! weights.
//!
//! An index selects eight magnitudes of the codebook (`IQ2`) or four (`IQ3`). The codebooks are part of the formats,
//! see [`super::grids`]. `IQ2_XXS`, `IQ2_XS` and `IQ3_XXS` store seven of eight signs: the number of negative weights
//! in a group of eight is even.

use bytemuck::{Pod, Zeroable};

use super::grids::{IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID};
use super::{IntegerBlock256, ScaledBlock};

/// A block of 256 weights with magnitudes from a codebook.
pub(crate) trait SignMagnitudeBlock: ScaledBlock {
    /// Returns the magnitudes of eight weights, that of the first weight in the lowest byte. `group` is the index of
    /// the eight weights in the block (0 to 31).
    fn magnitudes(&self, group: usize) -> u64;

    /// Returns the signs of eight weights: bit j is set if weight j of the group is negative.
    fn signs(&self, group: usize) -> u8;
}

/// `IQ2_XXS`: weight = `scale / 8 * (2 * scales[j] + 1) * g` with four-bit `scales[j]`, j = index / 32. The codebook
/// gives the magnitude of g.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockIq2Xxs {
    scale: [u8; 2],
    pub(crate) sub_blocks: [Iq2XxsSubBlock; 8],
}

/// 32 weights of `IQ2_XXS`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Iq2XxsSubBlock {
    /// The codebook index of each group of eight weights.
    pub(crate) indices: [u8; 4],
    signs_and_scale: SignsAndScale,
}

/// The signs of 32 weights, four times seven bits, and their scale, the upper four bits.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(transparent)]
pub(crate) struct SignsAndScale([u8; 4]);

/// `IQ2_XS`: weight = `scale / 8 * (2 * scales[j] + 1) * g` with four-bit `scales[j]`, j = index / 16. The codebook
/// gives the magnitude of g.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockIq2Xs {
    scale: [u8; 2],
    /// For each group of eight weights: nine bits of a codebook index, then seven bits of signs.
    pub(crate) groups: [[u8; 2]; 32],
    pub(crate) scales: [u8; 8],
}

/// `IQ2_S`: weight = `scale / 8 * (2 * scales[j] + 1) * g` with four-bit `scales[j]`, j = index / 16. The codebook
/// gives the magnitude of g.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockIq2S {
    scale: [u8; 2],
    /// The lower eight bits of the codebook index of each group of eight weights.
    pub(crate) low_bits: [u8; 32],
    pub(crate) signs: [u8; 32],
    /// For each sub-block of 32 weights: the upper two bits of its four codebook indices.
    pub(crate) high_bits: [u8; 8],
    pub(crate) scales: [u8; 8],
}

/// `IQ3_XXS`: weight = `scale / 4 * (2 * scales[j] + 1) * g` with four-bit `scales[j]`, j = index / 32. The codebook
/// gives the magnitude of g.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockIq3Xxs {
    scale: [u8; 2],
    /// The codebook index of every four weights.
    pub(crate) indices: [u8; 64],
    /// For each sub-block of 32 weights.
    pub(crate) signs_and_scales: [SignsAndScale; 8],
}

/// `IQ3_S`: weight = `scale * (2 * scales[j] + 1) * g` with four-bit `scales[j]`, j = index / 32. The codebook gives
/// the magnitude of g.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockIq3S {
    scale: [u8; 2],
    /// The lower eight bits of the codebook index of every four weights.
    pub(crate) low_bits: [u8; 64],
    /// For each sub-block of 32 weights: the upper bit of its eight codebook indices.
    pub(crate) high_bits: [u8; 8],
    pub(crate) signs: [u8; 32],
    pub(crate) scales: [u8; 4],
}

/// The signs of eight weights for each value of seven sign bits: the eighth bit makes the number of set bits even.
static EVEN_SIGNS: [u8; 128] = {
    let mut signs = [0; 128];
    let mut bits: u8 = 0;
    while bits < 128 {
        signs[bits as usize] = bits | (bits.count_ones() as u8 % 2) << 7;
        bits += 1;
    }
    signs
};

impl SignsAndScale {
    /// Returns the signs of eight weights, given the index of their group in the sub-block (0 to 3).
    #[inline(always)]
    fn signs(self, group: usize) -> u8 {
        EVEN_SIGNS[(u32::from_le_bytes(self.0) >> (7 * group) & 127) as usize]
    }

    #[inline(always)]
    fn scale(self) -> u8 {
        self.0[3] >> 4
    }
}

impl BlockIq2Xs {
    #[inline(always)]
    fn group(&self, group: usize) -> usize {
        usize::from(u16::from_le_bytes(self.groups[group]))
    }
}

/// Returns four-bit integer `index` of `bytes`: the low nibble of a byte precedes its high nibble.
#[inline(always)]
fn nibble(bytes: &[u8], index: usize) -> u8 {
    bytes[index / 2] >> (4 * (index % 2)) & 15
}

/// Combines two rows of four magnitudes.
#[inline(always)]
fn eight(first: [u8; 4], second: [u8; 4]) -> u64 {
    u64::from(u32::from_le_bytes(first)) | u64::from(u32::from_le_bytes(second)) << 32
}

/// Implements [`SignMagnitudeBlock`] and [`IntegerBlock256`] for formats, given the power of two in their formula, the
/// number of weights with the same scale, and expressions for the magnitudes and the signs of a group of eight weights
/// and for the four-bit scale of 16 weights.
macro_rules! sign_magnitude {
    ($(
        $block:ident, $factor:literal, $length:literal, |$this:ident, $at:ident| {
            magnitudes: $magnitudes:expr,
            signs: $signs:expr,
            scale: $scale:expr,
        }
    )+) => {
        scaled! { $($block),+ }

        $(
            impl SignMagnitudeBlock for $block {
                #[inline(always)]
                fn magnitudes(&self, $at: usize) -> u64 {
                    let $this = self;
                    $magnitudes
                }

                #[inline(always)]
                fn signs(&self, $at: usize) -> u8 {
                    let $this = self;
                    $signs
                }
            }

            impl IntegerBlock256 for $block {
                const SCALE_FACTOR: f32 = $factor;
                const GROUP_LENGTH: usize = $length;

                #[inline(always)]
                fn quant(&self, index: usize) -> i32 {
                    let magnitude = i32::from((self.magnitudes(index / 8) >> (8 * (index % 8))) as u8);
                    if self.signs(index / 8) >> (index % 8) & 1 == 0 { magnitude } else { -magnitude }
                }

                #[inline(always)]
                fn scales(&self) -> [i8; 16] {
                    let $this = self;
                    std::array::from_fn(|$at| 2 * ($scale).cast_signed() + 1)
                }
            }
        )+
    };
}
sign_magnitude! {
    BlockIq2Xxs, 0.125, 32, |block, at| {
        magnitudes: u64::from_le_bytes(IQ2_XXS_GRID[usize::from(block.sub_blocks[at / 4].indices[at % 4])]),
        signs: block.sub_blocks[at / 4].signs_and_scale.signs(at % 4),
        scale: block.sub_blocks[at / 2].signs_and_scale.scale(),
    }
    BlockIq2Xs, 0.125, 16, |block, at| {
        magnitudes: u64::from_le_bytes(IQ2_XS_GRID[block.group(at) & 511]),
        signs: EVEN_SIGNS[block.group(at) >> 9],
        scale: nibble(&block.scales, at),
    }
    BlockIq2S, 0.125, 16, |block, at| {
        magnitudes: {
            let high = usize::from(block.high_bits[at / 4] >> (2 * (at % 4)) & 3);
            u64::from_le_bytes(IQ2_S_GRID[usize::from(block.low_bits[at]) | high << 8])
        },
        signs: block.signs[at],
        scale: nibble(&block.scales, at),
    }
    BlockIq3Xxs, 0.25, 32, |block, at| {
        magnitudes: {
            let [first, second] = block.indices.as_chunks::<2>().0[at].map(usize::from);
            eight(IQ3_XXS_GRID[first], IQ3_XXS_GRID[second])
        },
        signs: block.signs_and_scales[at / 4].signs(at % 4),
        scale: block.signs_and_scales[at / 2].scale(),
    }
    BlockIq3S, 1.0, 32, |block, at| {
        magnitudes: {
            let [first, second] = block.low_bits.as_chunks::<2>().0[at].map(usize::from);
            let high = usize::from(block.high_bits[at / 4] >> (2 * (at % 4)));
            eight(IQ3_S_GRID[first | (high & 1) << 8], IQ3_S_GRID[second | (high >> 1 & 1) << 8])
        },
        signs: block.signs[at],
        scale: nibble(&block.scales, at / 2),
    }
}
