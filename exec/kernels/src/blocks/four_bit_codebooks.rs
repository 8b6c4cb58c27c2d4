//! Formats whose weights are four-bit indices of a codebook: memory layouts and integer weights.
//!
//! A codebook has 16 values, which are denser near zero. It is part of the format. The values of `MXFP4` are
//! floating-point numbers of four bits.

use bytemuck::{Pod, Zeroable};

use super::blocks32::nibble;
use super::{IntegerBlock256, ScaledBlock};

/// The codebook of `IQ4_NL` and `IQ4_XS`. source: `kvalues_iq4nl` of ggml-common.h
pub(crate) const IQ4_VALUES: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The codebook of `MXFP4`, times two: the numbers of the type E2M1, which has a sign bit, two bits of exponent and one
/// bit of mantissa. source: OCP Microscaling Formats (MX) Specification 1.0, section 5.3.3
pub(crate) const MXFP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

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
    pub(crate) scale: [u8; 2],
    /// The upper two bits of each of the eight sub-block scales.
    scales_high: [u8; 2],
    /// The lower four bits of each of the eight sub-block scales.
    scales_low: [u8; 4],
    /// Codebook indices: 16 bytes for each sub-block, in the layout of `BlockIq4Nl`.
    pub(crate) quants: [u8; 128],
}

/// `MXFP4`, 32 weights: weight = `2^(exponent - 127) * MXFP4_VALUES[q] / 2`. The kernels use half of the scale, because
/// the codebook is doubled.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockMxfp4 {
    pub(crate) exponent: u8,
    pub(crate) quants: [u8; 16],
}

impl ScaledBlock for BlockMxfp4 {
    /// Returns `2^(exponent - 128)`.
    ///
    /// Deviation: in the specification, exponent 255 means NaN. Here it is a power of two like the others, as in ggml.
    #[inline(always)]
    fn scale(&self) -> f32 {
        // 2^-128 and 2^-127 are subnormal numbers.
        let bits = match self.exponent {
            0 => 1 << 21,
            exponent => u32::from(exponent - 1) << 23 | u32::from(exponent == 1) << 22,
        };
        f32::from_bits(bits)
    }
}

scaled! { BlockIq4Nl, BlockIq4Xs }

integers! {
    BlockIq4Nl: |block, index| IQ4_VALUES[usize::from(nibble(&block.quants, index))];
    BlockMxfp4: |block, index| MXFP4_VALUES[usize::from(nibble(&block.quants, index))];
}

impl BlockIq4Xs {
    /// Returns the lower four bits of the eight scales, and their upper two bits.
    #[inline(always)]
    #[allow(dead_code)] // for x86-64
    pub(crate) fn packed_scales(&self) -> (i32, i32) {
        (i32::from_le_bytes(self.scales_low), i32::from(u16::from_le_bytes(self.scales_high)))
    }

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
