//! Memory layouts of quantised blocks of weights, and dequantisation.
//!
//! The structs have the layouts of the blocks in GGUF files (ggml-common.h), so the bytes of a memory-mapped file can
//! be cast to blocks. Dequantisation multiplies in f32 in the order of the reference Python package `gguf`, so that
//! results are equal bit for bit (test vectors in `tests/data`).
//!
//! Not here: dot products, which never create f32 weights; see [`super::scalar`].

/// Implements [`ScaledBlock`] and [`HalfScaledBlock`] for blocks with an f16 field `scale` and, if a second field is
/// named, an f16 minimum.
macro_rules! scaled {
    ($($block:ident $($minimum:ident)?),+) => {$(
        impl $crate::blocks::HalfScaledBlock for $block {
            #[inline(always)]
            fn scale_bits(&self) -> u16 {
                u16::from_le_bytes(self.scale)
            }
            $(
                #[inline(always)]
                fn minimum_bits(&self) -> u16 {
                    u16::from_le_bytes(self.$minimum)
                }
            )?
        }

        scaled_by_half! { $block $($minimum)? }
    )+};
}

/// Implements [`ScaledBlock`] for a [`HalfScaledBlock`]. If a field is named, the block has a minimum.
macro_rules! scaled_by_half {
    ($block:ident $($minimum:ident)?) => {
        impl $crate::blocks::ScaledBlock for $block {
            #[inline(always)]
            fn scale(&self) -> f32 {
                half::f16::from_bits($crate::blocks::HalfScaledBlock::scale_bits(self)).to_f32()
            }

            #[inline(always)]
            fn halves(&self) -> Option<[u16; 2]> {
                use $crate::blocks::HalfScaledBlock;
                Some([self.scale_bits(), self.minimum_bits()])
            }
            $(
                const HAS_MINIMUM: bool = true;
                #[inline(always)]
                fn minimum(&self) -> f32 {
                    half::f16::from_le_bytes(self.$minimum).to_f32()
                }
            )?
        }
    };
}

/// Implements [`IntegerBlock32`] for each block type, given an expression for the integer of the weight at an index.
macro_rules! integers {
    ($($block:ident: |$this:ident, $index:ident| $quant:expr;)+) => {$(
        impl $crate::blocks::IntegerBlock32 for $block {
            #[inline(always)]
            fn quant(&self, $index: usize) -> i32 {
                let $this = self;
                i32::from($quant)
            }
        }
    )+};
}

mod blocks32;
mod four_bit_codebooks;
mod grids;
mod iq1;
mod iq2_iq3;
mod k_quants;

use bytemuck::Pod;
use half::f16;
use hearth_profiles::{Bytes, Format};

use super::KernelError;
pub(crate) use blocks32::{BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0};
pub(crate) use four_bit_codebooks::{BlockIq4Nl, BlockIq4Xs, BlockMxfp4, IQ4_VALUES, MXFP4_VALUES};
#[cfg(target_arch = "x86_64")]
pub(crate) use grids::{IQ1_GRID, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID};
pub(crate) use iq1::{BlockIq1M, BlockIq1S};
pub(crate) use iq2_iq3::{BlockIq2S, BlockIq2Xs, BlockIq2Xxs, BlockIq3S, BlockIq3Xxs, SignMagnitudeBlock};
pub(crate) use k_quants::{BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K, SixBitScales};

/// A block of weights with a scale and, in some formats, a minimum.
pub(crate) trait ScaledBlock: Pod {
    const HAS_MINIMUM: bool = false;

    fn scale(&self) -> f32;

    #[inline(always)]
    fn minimum(&self) -> f32 {
        0.0
    }

    /// Returns the bits of the scale and of the minimum if the block has them as f16 numbers.
    #[inline(always)]
    fn halves(&self) -> Option<[u16; 2]> {
        None
    }
}

/// A block whose scale and minimum are stored as f16 numbers. Kernels that convert several of them at once use their
/// bits.
pub(crate) trait HalfScaledBlock: ScaledBlock {
    fn scale_bits(&self) -> u16;

    #[inline(always)]
    fn minimum_bits(&self) -> u16 {
        0
    }
}

/// A block of 32 weights: weight j is `scale * quant(j)`, plus the minimum if the format has one.
pub(crate) trait IntegerBlock32: ScaledBlock {
    fn quant(&self, index: usize) -> i32;
}

/// A block of 256 weights: weight j is `SCALE_FACTOR * scale * scales[j / 16] * quant(j)`, minus
/// `minimum * minima[j / 16]` if the format has minima.
pub(crate) trait IntegerBlock256: ScaledBlock {
    /// The factor by which the scale of the block is multiplied, a power of two.
    const SCALE_FACTOR: f32 = 1.0;
    /// Number of adjacent weights with the same integer scale and minimum: 16 or 32.
    const GROUP_LENGTH: usize = 16;

    fn quant(&self, index: usize) -> i32;

    fn scales(&self) -> [i8; 16];

    #[inline(always)]
    fn minima(&self) -> [i8; 16] {
        [0; 16]
    }
}

/// Casts the bytes of a row to blocks. The length of the row was checked when the GGUF file was opened.
#[inline(always)]
pub(crate) fn blocks<B: Pod>(row: &[u8]) -> &[B] {
    bytemuck::cast_slice(row)
}

/// Converts a little-endian BF16 value, which is the upper half of an f32, to f32.
#[inline(always)]
pub(crate) fn bf16_to_f32(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// Dequantises a row of weights into `out`. Returns an error if `row` does not have `out.len()` weights in `format`.
pub fn dequantise(format: Format, row: &[u8], out: &mut [f32]) -> Result<(), KernelError> {
    if format.row_bytes(out.len() as u64) != Some(Bytes(row.len() as u64)) {
        return Err(KernelError::RowBytes { format, length: out.len(), found: row.len() });
    }
    macro_rules! plain {
        (dot_f32) => {
            convert(row, out, f32::from_le_bytes)
        };
        (dot_f16) => {
            convert(row, out, |bytes| f16::from_le_bytes(bytes).to_f32())
        };
        (dot_bf16) => {
            convert(row, out, bf16_to_f32)
        };
    }
    macro_rules! blocks {
        ($block:ident, row32, $dot:ident) => {
            decode32::<$block>(row, out)
        };
        ($block:ident, row256, $dot:ident) => {
            decode256::<$block>(row, out)
        };
    }
    for_format!(format, plain, blocks);
    Ok(())
}

fn convert<const N: usize>(row: &[u8], out: &mut [f32], number: impl Fn([u8; N]) -> f32) {
    for (value, bytes) in out.iter_mut().zip(row.as_chunks::<N>().0) {
        *value = number(*bytes);
    }
}

fn decode32<B: IntegerBlock32>(row: &[u8], out: &mut [f32]) {
    for (block, out) in blocks::<B>(row).iter().zip(out.as_chunks_mut::<32>().0) {
        for (index, value) in out.iter_mut().enumerate() {
            *value = block.scale() * block.quant(index) as f32;
            if B::HAS_MINIMUM {
                *value += block.minimum();
            }
        }
    }
}

fn decode256<B: IntegerBlock256>(row: &[u8], out: &mut [f32]) {
    for (block, out) in blocks::<B>(row).iter().zip(out.as_chunks_mut::<256>().0) {
        let (scales, minima) = (block.scales(), block.minima());
        for (index, value) in out.iter_mut().enumerate() {
            let scale = B::SCALE_FACTOR * block.scale() * f32::from(scales[index / 16]);
            *value = scale * block.quant(index) as f32;
            if B::HAS_MINIMUM {
                *value -= block.minimum() * f32::from(minima[index / 16]);
            }
        }
    }
}
