//! Blocks of 256 weights under integer scales: layouts and dequantisation.
//!
//! A block has sub-blocks of 16 or 32 weights, each with an integer scale and in some formats an integer
//! minimum; one or two f16 numbers scale those.

use bytemuck::{Pod, Zeroable};

use super::Scaled;

/// weight = `scale * scales[j] * q - minimum * minima[j]`, q of two bits, j = index / 16.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ2K {
    /// Low four bits the scale, high four the minimum.
    pub(crate) packed: [u8; 16],
    /// 32 bytes for each half of 128 weights, with two bits of four groups each.
    pub(crate) quants: [u8; 64],
    scale: [u8; 2],
    minimum: [u8; 2],
}

/// weight = `scale * (scales[j] - 32) * (q - 4)`, q of three bits, j = index / 16.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ3K {
    /// The third bits: bit g of 32 bytes is for group g of 32 weights.
    pub(crate) high: [u8; 32],
    /// The low two, as in `BlockQ2K`.
    pub(crate) quants: [u8; 64],
    packed: [u8; 12],
    scale: [u8; 2],
}

/// weight = `scale * scales[j] * q - minimum * minima[j]`, q of four bits, j = index / 32.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ4K {
    scale: [u8; 2],
    minimum: [u8; 2],
    packed: [u8; 12],
    /// Four runs of 32 bytes; a run's low nibbles are 32 weights and its high nibbles the next 32.
    pub(crate) quants: [u8; 128],
}

/// weight = `scale * scales[j] * q - minimum * minima[j]`, q of five bits, j = index / 32.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ5K {
    scale: [u8; 2],
    minimum: [u8; 2],
    packed: [u8; 12],
    /// The fifth bits: bit g of 32 bytes is for group g of 32 weights.
    pub(crate) high: [u8; 32],
    /// The low four, as in `BlockQ4K`.
    pub(crate) quants: [u8; 128],
}

/// weight = `scale * scales[j] * (q - 32)`, q of six bits, j = index / 16.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ6K {
    /// Low four bits: of each half of 128 weights, 64 bytes.
    pub(crate) low: [u8; 128],
    /// High two bits: of each half, 32 bytes with two bits of four groups each.
    pub(crate) high: [u8; 64],
    pub(crate) scales: [i8; 16],
    scale: [u8; 2],
}

/// Four bytes as they lie in 12.
#[inline(always)]
fn word(packed: &[u8; 12], at: usize) -> u32 {
    u32::from_le_bytes([packed[at], packed[at + 1], packed[at + 2], packed[at + 3]])
}

/// The eight 6-bit scales and the eight 6-bit minima of `Q4_K` and `Q5_K`, one per byte, first in the lowest.
#[inline(always)]
fn scales_and_minima(packed: &[u8; 12]) -> (u64, u64) {
    let (a, b, c) = (word(packed, 0), word(packed, 4), word(packed, 8));
    let low = (a & 0x3f3f_3f3f, b & 0x3f3f_3f3f);
    // The last four of each: low four bits in `c`, high two in the top bits of `a` and `b`.
    let scales = (c & 0x0f0f_0f0f) | ((a >> 2) & 0x3030_3030);
    let minima = ((c >> 4) & 0x0f0f_0f0f) | ((b >> 2) & 0x3030_3030);
    (u64::from(low.0) | u64::from(scales) << 32, u64::from(low.1) | u64::from(minima) << 32)
}

/// The two bits of weight `index`.
#[inline(always)]
fn two_bits(quants: &[u8; 64], index: usize) -> u8 {
    quants[index / 128 * 32 + index % 32] >> (2 * (index % 128 / 32)) & 3
}

/// The four bits of weight `index`.
#[inline(always)]
fn four_bits(quants: &[u8; 128], index: usize) -> u8 {
    quants[index / 64 * 32 + index % 32] >> (4 * (index % 64 / 32)) & 15
}

scaled! { BlockQ2K minimum, BlockQ3K, BlockQ4K minimum, BlockQ5K minimum, BlockQ6K }

impl BlockQ2K {
    /// The quant at `index`, 0 to 3.
    #[inline(always)]
    pub(crate) fn quant(&self, index: usize) -> u8 {
        two_bits(&self.quants, index)
    }
}

impl BlockQ3K {
    /// The sixteen scales, -32 to 31.
    #[inline(always)]
    pub(crate) fn scales(&self) -> [i8; 16] {
        // Low four bits: first eight in the low nibbles of `a` and `b`, the others in the high ones. Upper two: of
        // scale j in byte j % 4 of `c`.
        let (a, b, c) = (word(&self.packed, 0), word(&self.packed, 4), word(&self.packed, 8));
        let mut scales = [0; 16];
        for part in 0..4 {
            let low = [a, b][part % 2] >> (4 * (part / 2)) & 0x0f0f_0f0f;
            let all = low | (c >> (2 * part) & 0x0303_0303) << 4;
            for (scale, byte) in scales[4 * part..4 * part + 4].iter_mut().zip(all.to_le_bytes()) {
                *scale = byte as i8 - 32;
            }
        }
        scales
    }

    /// The 3-bit number of weight `index`, 0 to 7; 4 stands for zero.
    #[inline(always)]
    pub(crate) fn quant(&self, index: usize) -> u8 {
        two_bits(&self.quants, index) | (self.high[index % 32] >> (index / 32) & 1) << 2
    }
}

impl BlockQ4K {
    /// The eight 6-bit scales and the eight 6-bit minima, one per byte, first in the lowest byte.
    #[inline(always)]
    pub(crate) fn scales_and_minima(&self) -> (u64, u64) {
        scales_and_minima(&self.packed)
    }

    /// The 4-bit number of weight `index`.
    #[inline(always)]
    pub(crate) fn quant(&self, index: usize) -> u8 {
        four_bits(&self.quants, index)
    }
}

impl BlockQ5K {
    /// The same as for `BlockQ4K`.
    #[inline(always)]
    pub(crate) fn scales_and_minima(&self) -> (u64, u64) {
        scales_and_minima(&self.packed)
    }

    /// The 5-bit number of weight `index`.
    #[inline(always)]
    pub(crate) fn quant(&self, index: usize) -> u8 {
        four_bits(&self.quants, index) | (self.high[index % 32] >> (index / 32) & 1) << 4
    }
}

impl BlockQ6K {
    /// The 6-bit number of weight `index`, 0 to 63; 32 stands for zero.
    #[inline(always)]
    pub(crate) fn quant(&self, index: usize) -> u8 {
        let (part, within) = (index / 128, index % 128);
        let (group, at) = (within / 32, within % 32);
        let low = self.low[part * 64 + (group % 2) * 32 + at];
        let low = if group < 2 { low & 15 } else { low >> 4 };
        low | (self.high[part * 32 + at] >> (2 * group) & 3) << 4
    }
}

/// Weight `index`, of number `quant`, under one of eight scales and one of eight minima.
fn with_minima<B: Scaled>(block: &B, (scales, minima): (u64, u64), quant: u8, index: usize) -> f32 {
    let scale = block.scale() * f32::from(scales.to_le_bytes()[index / 32]);
    let minimum = block.minimum() * f32::from(minima.to_le_bytes()[index / 32]);
    scale * f32::from(quant) - minimum
}

stored! {
    256 BlockQ2K: |block, index| {
        let packed = block.packed[index / 16];
        let scale = block.scale() * f32::from(packed & 15);
        let minimum = block.minimum() * f32::from(packed >> 4);
        scale * f32::from(block.quant(index)) - minimum
    };
    256 BlockQ3K: |block, index| {
        let scale = block.scale() * f32::from(block.scales()[index / 16]);
        scale * (f32::from(block.quant(index)) - 4.0)
    };
    256 BlockQ4K: |block, index| with_minima(block, block.scales_and_minima(), block.quant(index), index);
    256 BlockQ5K: |block, index| with_minima(block, block.scales_and_minima(), block.quant(index), index);
    256 BlockQ6K: |block, index| {
        let scale = block.scale() * f32::from(block.scales[index / 16]);
        scale * f32::from(i16::from(block.quant(index)) - 32)
    };
}
