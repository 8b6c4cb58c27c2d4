//! Layouts of quantised blocks, and their dequantisation.
//!
//! The structs have the layouts of GGUF (ggml-common.h); references to them are cast from the mapped bytes.
//! Dequantisation multiplies in f32 in the order of the reference Python package `gguf`, so that results are equal
//! bit for bit (test vectors in `tests/data`).
//!
//! Not here: dot products, which never create f32 weights; see [`super::scalar`].

/// Implements [`ScaledBlock`] for blocks with an f16 field `scale` and, if a second field is named, an f16 minimum.
macro_rules! scaled {
    ($($block:ident $($minimum:ident)?),+) => {$(
        impl $crate::blocks::ScaledBlock for $block {
            #[inline(always)]
            fn scale_bits(&self) -> u16 {
                u16::from_le_bytes(self.scale)
            }
            $(
                const MINIMUM: bool = true;
                #[inline(always)]
                fn minimum_bits(&self) -> u16 {
                    u16::from_le_bytes(self.$minimum)
                }
            )?
        }
    )+};
}

/// Implements [`Dequantise`], given the length of a block and an expression for the weight at an index.
macro_rules! dequantised {
    ($($length:literal $block:ident: |$this:ident, $index:ident| $weight:expr;)+) => {$(
        impl $crate::blocks::Dequantise for $block {
            const LENGTH: usize = $length;
            fn weight(&self, $index: usize) -> f32 {
                let $this = self;
                $weight
            }
        }
    )+};
}

mod blocks32;
mod i_quants;
mod iq1_s_grid;
mod k_quants;

use bytemuck::Pod;
use half::f16;

use super::{KernelError, KernelFormat};
pub(crate) use blocks32::{BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0};
pub(crate) use i_quants::{BlockIq1S, BlockIq4Nl, BlockIq4Xs, IQ4_VALUES};
pub(crate) use iq1_s_grid::GRID;
pub(crate) use k_quants::{BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K};

/// A block with an f16 scale and, in some formats, an f16 minimum.
///
/// The methods that return bits are for kernels that convert several f16 values at once.
pub(crate) trait ScaledBlock: Pod {
    /// Whether the format has a minimum.
    const MINIMUM: bool = false;

    fn scale_bits(&self) -> u16;

    #[inline(always)]
    fn minimum_bits(&self) -> u16 {
        0
    }

    #[inline(always)]
    fn scale(&self) -> f32 {
        f16::from_bits(self.scale_bits()).to_f32()
    }

    #[inline(always)]
    fn minimum(&self) -> f32 {
        f16::from_bits(self.minimum_bits()).to_f32()
    }

    /// Returns the bits of the scale in the low half and those of the minimum in the high half.
    #[inline(always)]
    fn scale_and_minimum_bits(&self) -> u32 {
        u32::from(self.scale_bits()) | u32::from(self.minimum_bits()) << 16
    }
}

/// A block that can be dequantised.
trait Dequantise: Pod {
    /// Number of weights in a block.
    const LENGTH: usize;

    /// Returns the f32 weight at `index`.
    fn weight(&self, index: usize) -> f32;
}

/// Casts a row to its blocks. Its length was checked with the tensor table.
#[inline(always)]
pub(crate) fn blocks<B: Pod>(row: &[u8]) -> &[B] {
    bytemuck::cast_slice(row)
}

/// Converts BF16, the upper half of an f32, in little-endian order.
#[inline(always)]
pub(crate) fn bf16(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// Dequantises `row` into `out`, `[length]`. Fails if the bytes of `row` do not match the format and the length.
pub fn dequantise(format: KernelFormat, row: &[u8], out: &mut [f32]) -> Result<(), KernelError> {
    let wanted = format.row_bytes(out.len());
    if wanted != Some(row.len()) {
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
            convert(row, out, bf16)
        };
    }
    macro_rules! blocks {
        ($block:ident, $row:ident, $dot:ident) => {
            decode::<$block>(row, out)
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

fn decode<B: Dequantise>(row: &[u8], out: &mut [f32]) {
    for (block, out) in blocks::<B>(row).iter().zip(out.chunks_exact_mut(B::LENGTH)) {
        for (index, value) in out.iter_mut().enumerate() {
            *value = block.weight(index);
        }
    }
}
