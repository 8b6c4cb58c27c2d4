//! Layouts of quantised blocks, and their dequantisation.
//!
//! The GGUF layouts as structs that lie on the mapped bytes, and their dequantisation, in files by family.
//! Every product is one f32 multiplication, in the order the reference Python package `gguf` uses, so that the
//! result is equal to its result bit for bit (vectors in `tests/data`). Layouts are those of ggml-common.h.
//!
//! Not here: dot products, which never build the f32 weights; see [`super::scalar`].

/// Blocks with an f16 `scale`: its value, and its bits for kernels that convert several at once.
macro_rules! scaled {
    ($($block:ident)+) => {$(
        impl $block {
            #[inline(always)]
            pub(crate) fn scale(&self) -> f32 {
                $crate::blocks::half(self.scale)
            }
            #[inline(always)]
            pub(crate) fn scale_bits(&self) -> u16 {
                u16::from_le_bytes(self.scale)
            }
        }
    )+};
}

/// Blocks with an f16 `minimum` besides.
macro_rules! with_minimum {
    ($($block:ident)+) => {$(
        impl $block {
            #[inline(always)]
            pub(crate) fn minimum(&self) -> f32 {
                $crate::blocks::half(self.minimum)
            }
            #[inline(always)]
            pub(crate) fn minimum_bits(&self) -> u16 {
                u16::from_le_bytes(self.minimum)
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

/// A block as it is stored.
trait Stored: Pod {
    /// Weights in it.
    const LENGTH: usize;

    /// One of them.
    fn weight(&self, index: usize) -> f32;
}

/// The blocks that `row` is made of. The length was checked when the tensor table was.
#[inline(always)]
pub(crate) fn blocks<B: Pod>(row: &[u8]) -> &[B] {
    bytemuck::cast_slice(row)
}

/// A number stored as f16.
#[inline(always)]
fn half(bytes: [u8; 2]) -> f32 {
    f16::from_le_bytes(bytes).to_f32()
}

/// A BF16 weight: the upper half of an f32.
#[inline(always)]
pub(crate) fn bf16(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// Writes the f32 weights that `row` stores into `out`, `[length]`.
pub fn dequantise(format: KernelFormat, row: &[u8], out: &mut [f32]) -> Result<(), KernelError> {
    let wanted = format.row_bytes(out.len());
    if wanted != Some(row.len()) {
        return Err(KernelError::RowBytes { format, length: out.len(), found: row.len() });
    }
    match format {
        KernelFormat::F32 => {
            for (value, bytes) in out.iter_mut().zip(row.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*bytes);
            }
        }
        KernelFormat::F16 => {
            for (value, bytes) in out.iter_mut().zip(row.as_chunks::<2>().0) {
                *value = half(*bytes);
            }
        }
        KernelFormat::Bf16 => {
            for (value, bytes) in out.iter_mut().zip(row.as_chunks::<2>().0) {
                *value = bf16(*bytes);
            }
        }
        KernelFormat::Q4_0 => decode::<BlockQ4_0>(row, out),
        KernelFormat::Q4_1 => decode::<BlockQ4_1>(row, out),
        KernelFormat::Q5_0 => decode::<BlockQ5_0>(row, out),
        KernelFormat::Q5_1 => decode::<BlockQ5_1>(row, out),
        KernelFormat::Q8_0 => decode::<BlockQ8_0>(row, out),
        KernelFormat::Q2K => decode::<BlockQ2K>(row, out),
        KernelFormat::Q3K => decode::<BlockQ3K>(row, out),
        KernelFormat::Q4K => decode::<BlockQ4K>(row, out),
        KernelFormat::Q5K => decode::<BlockQ5K>(row, out),
        KernelFormat::Q6K => decode::<BlockQ6K>(row, out),
        KernelFormat::Iq1S => decode::<BlockIq1S>(row, out),
        KernelFormat::Iq4Nl => decode::<BlockIq4Nl>(row, out),
        KernelFormat::Iq4Xs => decode::<BlockIq4Xs>(row, out),
    }
    Ok(())
}

fn decode<B: Stored>(row: &[u8], out: &mut [f32]) {
    for (block, out) in blocks::<B>(row).iter().zip(out.chunks_exact_mut(B::LENGTH)) {
        for (index, value) in out.iter_mut().enumerate() {
            *value = block.weight(index);
        }
    }
}
