//! What do the bytes of a quantised block mean?
//!
//! The GGUF layouts of `Q8_0`, `Q4_K` and `Q6_K` as structs that lie on the mapped bytes, and their
//! dequantisation. Every product below is one f32 multiplication, in the order the reference Python package
//! `gguf` uses, so that the result is equal to its result bit for bit (vectors in `tests/data`).
//!
//! Not here: dot products, which never build the f32 weights; see [`super::scalar`].

use bytemuck::{Pod, Zeroable};
use half::f16;

use super::{KernelError, Supported};

/// 32 weights of eight bits under one scale.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ8_0 {
    scale: [u8; 2],
    pub(crate) quants: [i8; 32],
}

/// 256 weights of four bits: weight = `scale * scales[j] * q - minimum * minima[j]`, j = index / 32.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ4K {
    scale: [u8; 2],
    minimum: [u8; 2],
    packed: [u8; 12],
    /// Four runs of 32 bytes; a run's low nibbles are 32 weights and its high nibbles the next 32.
    pub(crate) quants: [u8; 128],
}

/// 256 weights of six bits: weight = `scale * scales[j] * (q - 32)`, j = index / 16.
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

impl BlockQ8_0 {
    #[inline(always)]
    pub(crate) fn scale(&self) -> f32 {
        f16::from_le_bytes(self.scale).to_f32()
    }
    #[inline(always)]
    pub(crate) fn scale_bits(&self) -> u16 {
        u16::from_le_bytes(self.scale)
    }
}

impl BlockQ4K {
    #[inline(always)]
    pub(crate) fn scale(&self) -> f32 {
        f16::from_le_bytes(self.scale).to_f32()
    }
    #[inline(always)]
    pub(crate) fn minimum(&self) -> f32 {
        f16::from_le_bytes(self.minimum).to_f32()
    }
    /// Scale in the low half, minimum in the high half, as they lie.
    #[inline(always)]
    pub(crate) fn scale_and_minimum_bits(&self) -> u32 {
        u32::from(u16::from_le_bytes(self.scale)) | u32::from(u16::from_le_bytes(self.minimum)) << 16
    }

    /// The eight 6-bit scales and the eight 6-bit minima, one a byte, first in the lowest byte.
    #[inline(always)]
    pub(crate) fn scales_and_minima(&self) -> (u64, u64) {
        let word = |at: usize| {
            u32::from_le_bytes([
                self.packed[at],
                self.packed[at + 1],
                self.packed[at + 2],
                self.packed[at + 3],
            ])
        };
        let (a, b, c) = (word(0), word(4), word(8));
        let low = (a & 0x3f3f_3f3f, b & 0x3f3f_3f3f);
        // The last four of each: low four bits in `c`, high two in the top bits of `a` and `b`.
        let scales = (c & 0x0f0f_0f0f) | ((a >> 2) & 0x3030_3030);
        let minima = ((c >> 4) & 0x0f0f_0f0f) | ((b >> 2) & 0x3030_3030);
        (u64::from(low.0) | u64::from(scales) << 32, u64::from(low.1) | u64::from(minima) << 32)
    }

    /// The 4-bit number of weight `index`.
    #[inline(always)]
    pub(crate) fn quant(&self, index: usize) -> u8 {
        let byte = self.quants[index / 64 * 32 + index % 32];
        if index % 64 < 32 { byte & 15 } else { byte >> 4 }
    }
}

impl BlockQ6K {
    #[inline(always)]
    pub(crate) fn scale(&self) -> f32 {
        f16::from_le_bytes(self.scale).to_f32()
    }
    #[inline(always)]
    pub(crate) fn scale_bits(&self) -> u16 {
        u16::from_le_bytes(self.scale)
    }

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

/// The blocks that `row` is made of. The length was checked when the tensor table was.
#[inline(always)]
pub(crate) fn blocks<B: Pod>(row: &[u8]) -> &[B] {
    bytemuck::cast_slice(row)
}

/// Writes the f32 weights that `row` stores into `out`, `[length]`.
pub fn dequantise(format: Supported, row: &[u8], out: &mut [f32]) -> Result<(), KernelError> {
    let wanted = format.row_bytes(out.len());
    if wanted != Some(row.len()) {
        return Err(KernelError::RowBytes { format, length: out.len(), found: row.len() });
    }
    match format {
        Supported::F32 => {
            for (value, bytes) in out.iter_mut().zip(row.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*bytes);
            }
        }
        Supported::F16 => {
            for (value, bytes) in out.iter_mut().zip(row.as_chunks::<2>().0) {
                *value = f16::from_le_bytes(*bytes).to_f32();
            }
        }
        Supported::Q8_0 => dequantise_q8_0(blocks(row), out),
        Supported::Q4K => dequantise_q4_k(blocks(row), out),
        Supported::Q6K => dequantise_q6_k(blocks(row), out),
    }
    Ok(())
}

fn dequantise_q8_0(row: &[BlockQ8_0], out: &mut [f32]) {
    for (block, out) in row.iter().zip(out.as_chunks_mut::<32>().0) {
        let scale = block.scale();
        for (value, &quant) in out.iter_mut().zip(&block.quants) {
            *value = scale * f32::from(quant);
        }
    }
}

fn dequantise_q4_k(row: &[BlockQ4K], out: &mut [f32]) {
    for (block, out) in row.iter().zip(out.as_chunks_mut::<256>().0) {
        let (scales, minima) = block.scales_and_minima();
        let (scales, minima) = (scales.to_le_bytes(), minima.to_le_bytes());
        for (index, value) in out.iter_mut().enumerate() {
            let scale = block.scale() * f32::from(scales[index / 32]);
            let minimum = block.minimum() * f32::from(minima[index / 32]);
            *value = scale * f32::from(block.quant(index)) - minimum;
        }
    }
}

fn dequantise_q6_k(row: &[BlockQ6K], out: &mut [f32]) {
    for (block, out) in row.iter().zip(out.as_chunks_mut::<256>().0) {
        for (index, value) in out.iter_mut().enumerate() {
            let scale = block.scale() * f32::from(block.scales[index / 16]);
            *value = scale * f32::from(i16::from(block.quant(index)) - 32);
        }
    }
}
