//! K-quants, formats with blocks of 256 weights: memory layouts and integer weights.
//!
//! A block has sub-blocks of 16 or 32 weights, each with an integer scale and, in some formats, an integer minimum.
//! These integers are multiplied by the f16 scale and the f16 minimum of the block.

use bytemuck::{Pod, Zeroable};

use super::{HalfScaledBlock, IntegerBlock256};

/// `Q2_K`: weight = `scale * scales[j] * q - minimum * minima[j]` with two-bit q, j = index / 16.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ2K {
    /// The scale (low four bits) and the minimum (high four bits) of each sub-block.
    pub(crate) packed: [u8; 16],
    /// 32 bytes for each half of the block. Byte i has the two bits of weight i of each of four groups of 32 weights.
    pub(crate) quants: [u8; 64],
    scale: [u8; 2],
    minimum: [u8; 2],
}

/// `Q3_K`: weight = `scale * (scales[j] - 32) * (q - 4)` with three-bit q, j = index / 16.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ3K {
    /// The third bit of each weight: bit g of byte i belongs to weight i of group g, a group of 32 weights.
    pub(crate) high_bits: [u8; 32],
    /// The low two bits of each weight, in the layout of `BlockQ2K::quants`.
    pub(crate) quants: [u8; 64],
    packed: [u8; 12],
    scale: [u8; 2],
}

/// `Q4_K`: weight = `scale * scales[j] * q - minimum * minima[j]` with four-bit q, j = index / 32.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ4K {
    pub(crate) scale: [u8; 2],
    minimum: [u8; 2],
    #[allow(dead_code)] // see `SixBitScales`
    packed: [u8; 12],
    /// Four runs of 32 bytes. The low nibbles of a run are 32 weights, and the high nibbles are the next 32 weights.
    pub(crate) quants: [u8; 128],
}

/// `Q5_K`: weight = `scale * scales[j] * q - minimum * minima[j]` with five-bit q, j = index / 32.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ5K {
    pub(crate) scale: [u8; 2],
    minimum: [u8; 2],
    #[allow(dead_code)] // see `SixBitScales`
    packed: [u8; 12],
    /// The fifth bit of each weight: bit g of byte i belongs to weight i of group g, a group of 32 weights.
    pub(crate) high_bits: [u8; 32],
    /// The low four bits of each weight, in the layout of `BlockQ4K::quants`.
    pub(crate) quants: [u8; 128],
}

/// `Q6_K`: weight = `scale * scales[j] * (q - 32)` with six-bit q, j = index / 16.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ6K {
    /// The low four bits of each weight: 64 bytes for each half of the block (128 weights).
    pub(crate) low_bits: [u8; 128],
    /// The high two bits of each weight, in the layout of `BlockQ2K::quants`.
    pub(crate) high_bits: [u8; 64],
    pub(crate) scales: [i8; 16],
    scale: [u8; 2],
}

#[inline(always)]
fn word(packed: &[u8; 12], at: usize) -> u32 {
    u32::from_le_bytes([packed[at], packed[at + 1], packed[at + 2], packed[at + 3]])
}

/// Repeats each of the eight scales or minima of sub-blocks of 32 weights, so that there is one for every 16 weights.
#[inline(always)]
fn twice(eight: u64) -> [i8; 16] {
    let eight = eight.to_le_bytes();
    std::array::from_fn(|group| eight[group / 2].cast_signed())
}

#[inline(always)]
fn two_bits(quants: &[u8; 64], index: usize) -> u8 {
    quants[index / 128 * 32 + index % 32] >> (2 * (index % 128 / 32)) & 3
}

#[inline(always)]
fn four_bits(quants: &[u8; 128], index: usize) -> u8 {
    quants[index / 64 * 32 + index % 32] >> (4 * (index % 64 / 32)) & 15
}

scaled! { BlockQ2K minimum, BlockQ3K, BlockQ4K minimum, BlockQ5K minimum, BlockQ6K }

impl IntegerBlock256 for BlockQ2K {
    #[inline(always)]
    fn quant(&self, index: usize) -> i32 {
        i32::from(two_bits(&self.quants, index))
    }

    #[inline(always)]
    fn scales(&self) -> [i8; 16] {
        self.packed.map(|packed| (packed & 15).cast_signed())
    }

    #[inline(always)]
    fn minima(&self) -> [i8; 16] {
        self.packed.map(|packed| (packed >> 4).cast_signed())
    }
}

impl BlockQ3K {
    /// Returns the last 16 bytes of the block: two bytes of `quants`, `packed` and `scale`.
    #[inline(always)]
    #[allow(dead_code)] // for x86-64
    pub(crate) fn last_bytes(&self) -> &[u8; 16] {
        bytemuck::bytes_of(self).last_chunk().expect("a block is longer than 16 bytes")
    }
}

impl IntegerBlock256 for BlockQ3K {
    #[inline(always)]
    fn quant(&self, index: usize) -> i32 {
        i32::from(two_bits(&self.quants, index) | (self.high_bits[index % 32] >> (index / 32) & 1) << 2) - 4
    }

    #[inline(always)]
    fn scales(&self) -> [i8; 16] {
        // The low four bits of the first eight scales are in the low nibbles of `a` and `b`, those of the others in
        // the high nibbles. The upper two bits of scale j are in byte j % 4 of `c`.
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
}

/// A block that begins with its f16 scale, its f16 minimum and 12 bytes with eight six-bit scales and eight six-bit
/// minima. In the three words a, b, c of these bytes, a has the first four scales and b the first four minima, in the
/// low six bits of their bytes. Of the last four scales and minima, the low four bits are in the low and high nibbles of
/// c, and the high two bits are in the high two bits of a and b.
pub(crate) trait SixBitScales: HalfScaledBlock + IntegerBlock256 {
    /// Returns the scale, the minimum and the packed scales and minima.
    #[inline(always)]
    fn header(&self) -> &[u8; 16] {
        bytemuck::bytes_of(self).first_chunk().expect("a block is longer than its header")
    }

    /// Returns the eight 6-bit scales and the eight 6-bit minima, one per byte, the first in the lowest byte.
    #[inline(always)]
    fn scales_and_minima(&self) -> (u64, u64) {
        let [_, a, b, c] = bytemuck::must_cast::<_, [[u8; 4]; 4]>(*self.header()).map(u32::from_le_bytes);
        let low = (a & 0x3f3f_3f3f, b & 0x3f3f_3f3f);
        let scales = (c & 0x0f0f_0f0f) | ((a >> 2) & 0x3030_3030);
        let minima = ((c >> 4) & 0x0f0f_0f0f) | ((b >> 2) & 0x3030_3030);
        (u64::from(low.0) | u64::from(scales) << 32, u64::from(low.1) | u64::from(minima) << 32)
    }
}

/// Implements [`SixBitScales`] and [`IntegerBlock256`] for formats in which the eight sub-blocks have six-bit scales and
/// six-bit minima, given an expression for the integer of the weight at an index.
macro_rules! six_bit_minima {
    ($($block:ident: |$this:ident, $index:ident| $quant:expr;)+) => {$(
        impl SixBitScales for $block {}

        impl IntegerBlock256 for $block {
            const GROUP_LENGTH: usize = 32;

            #[inline(always)]
            fn quant(&self, $index: usize) -> i32 {
                let $this = self;
                i32::from($quant)
            }

            #[inline(always)]
            fn scales(&self) -> [i8; 16] {
                twice(self.scales_and_minima().0)
            }

            #[inline(always)]
            fn minima(&self) -> [i8; 16] {
                twice(self.scales_and_minima().1)
            }
        }
    )+};
}
six_bit_minima! {
    BlockQ4K: |block, index| four_bits(&block.quants, index);
    BlockQ5K: |block, index| {
        four_bits(&block.quants, index) | (block.high_bits[index % 32] >> (index / 32) & 1) << 4
    };
}

impl IntegerBlock256 for BlockQ6K {
    #[inline(always)]
    fn quant(&self, index: usize) -> i32 {
        let (part, within) = (index / 128, index % 128);
        let (group, at) = (within / 32, within % 32);
        let low = self.low_bits[part * 64 + (group % 2) * 32 + at];
        let low = if group < 2 { low & 15 } else { low >> 4 };
        i32::from(low | (self.high_bits[part * 32 + at] >> (2 * group) & 3) << 4) - 32
    }

    #[inline(always)]
    fn scales(&self) -> [i8; 16] {
        self.scales
    }
}
