//! How do many tokens meet sixteen rows of weights at once?
//!
//! A dot product with its elements in the lanes ends in a horizontal sum for each row and token. With sixteen
//! *rows* in the lanes there is none: one instruction multiplies four neighbouring weights of each row by the same
//! four activations of a token. For that the weights are laid out anew, four columns of sixteen rows side by side;
//! each weight is unpacked once and then meets all tokens. Goto and van de Geijn 2008 call such a block a panel.
//!
//! A block's products are one exact integer ([`super`]), so that the bits are those of the oracle.
//!
//! A panel has at most [`COLUMNS`] columns, so that it stays in the first-level cache beside a tile of tokens.
//!
//! Not here: the multiplication itself, which is a matter of instructions (`avx512`).

#[cfg(target_arch = "x86_64")]
mod avx512;

use std::cell::RefCell;
use std::ops::Range;

use bytemuck::Zeroable;

use super::Supported;
use super::blocks::{BlockQ4K, BlockQ6K, BlockQ8_0, blocks};
use super::product::Tile;

/// Rows of weights in a panel.
pub(crate) const ROWS: usize = 16;

/// Most columns of a panel.
const COLUMNS: usize = 1024;

/// Fewest tokens for which laying weights out anew pays.
const FEWEST_TOKENS: usize = 12;

/// A format of blocks of 256 as integers: weight j of group g = j / 16 is
/// `scale * scales[g] * (quants[j] - OFFSET) - minimum * minima[g]`.
trait Block256: bytemuck::Pod {
    /// What a weight of zero is stored as.
    const OFFSET: i32;
    /// Whether there are minima.
    const MINIMA: bool;
    /// Whether a sum of 16 products, at most 16 * 127 times the largest quant, fits 16 bits.
    const SMALL: bool;

    /// Writes quants, scales and minima of groups; gives scale and minimum.
    fn integers(&self, quants: &mut [u8; 256], scales: &mut [i8; 16], minima: &mut [i8; 16]) -> [f32; 2];
}

/// A format of blocks of 32 as integers: weight j is `scale * (quants[j] - OFFSET)`.
trait Block32: bytemuck::Pod {
    /// What a weight of zero is stored as.
    const OFFSET: i32;

    /// Writes quants; gives the scale.
    fn integers(&self, quants: &mut [u8; 32]) -> f32;
}

impl Block256 for BlockQ4K {
    const OFFSET: i32 = 0;
    const MINIMA: bool = true;
    const SMALL: bool = true;

    #[inline(always)]
    fn integers(&self, quants: &mut [u8; 256], scales: &mut [i8; 16], minima: &mut [i8; 16]) -> [f32; 2] {
        for (out, bytes) in quants.as_chunks_mut::<64>().0.iter_mut().zip(self.quants.as_chunks::<32>().0) {
            for (at, byte) in bytes.iter().enumerate() {
                out[at] = byte & 15;
                out[at + 32] = byte >> 4;
            }
        }
        let (eight_scales, eight_minima) = self.scales_and_minima();
        let (eight_scales, eight_minima) = (eight_scales.to_le_bytes(), eight_minima.to_le_bytes());
        *scales = std::array::from_fn(|group| eight_scales[group / 2].cast_signed());
        *minima = std::array::from_fn(|group| eight_minima[group / 2].cast_signed());
        [self.scale(), self.minimum()]
    }
}

impl Block256 for BlockQ6K {
    const OFFSET: i32 = 32;
    const MINIMA: bool = false;
    const SMALL: bool = false;

    #[inline(always)]
    fn integers(&self, quants: &mut [u8; 256], scales: &mut [i8; 16], _: &mut [i8; 16]) -> [f32; 2] {
        let (low, high) = (self.low.as_chunks::<64>().0, self.high.as_chunks::<32>().0);
        for (out, (low, high)) in quants.as_chunks_mut::<128>().0.iter_mut().zip(low.iter().zip(high)) {
            for at in 0..32 {
                out[at] = low[at] & 15 | (high[at] & 3) << 4;
                out[at + 32] = low[at + 32] & 15 | (high[at] >> 2 & 3) << 4;
                out[at + 64] = low[at] >> 4 | (high[at] >> 4 & 3) << 4;
                out[at + 96] = low[at + 32] >> 4 | (high[at] >> 6) << 4;
            }
        }
        *scales = self.scales;
        [self.scale(), 0.0]
    }
}

impl Block32 for BlockQ8_0 {
    const OFFSET: i32 = 128;

    #[inline(always)]
    fn integers(&self, quants: &mut [u8; 32]) -> f32 {
        for (out, quant) in quants.iter_mut().zip(&self.quants) {
            *out = quant.cast_unsigned() ^ 0x80;
        }
        self.scale()
    }
}

/// 64 bytes on a cache line of their own: four bytes, two 16-bit numbers or a float of each of sixteen rows.
#[derive(Debug, Clone, Copy, Zeroable)]
#[repr(C, align(64))]
struct Line([[u8; 4]; ROWS]);

/// Blocks of 256 in a panel.
const BLOCKS256: usize = COLUMNS / 256;
/// Blocks of 32 in a panel.
const BLOCKS32: usize = COLUMNS / 32;

/// Sixteen rows of up to [`COLUMNS`] columns, as they are unpacked and as they are laid out for a kernel.
#[derive(Debug, Clone, Copy, Zeroable)]
#[repr(C)]
struct Panel {
    unpacked: [[u8; COLUMNS]; ROWS],
    /// Scales of groups, then minima.
    unpacked_numbers: [[[i8; 32]; ROWS]; BLOCKS256],
    /// Four columns a line.
    quants: [Line; COLUMNS / 4],
    /// Eight lines of pairs of scales, then eight of minima.
    numbers: [[Line; 16]; BLOCKS256],
    scales: [Line; BLOCKS32],
    minima: [Line; BLOCKS256],
}

/// Whether `tokens` rows of input are best multiplied panel by panel.
pub(crate) fn pays(format: Supported, tokens: usize) -> bool {
    tokens >= FEWEST_TOKENS && matches!(format, Supported::Q8_0 | Supported::Q4K | Supported::Q6K)
}

impl Panel {
    /// Unpacks some blocks of each row; of a row that is not there, what was there before stays.
    #[inline(always)]
    fn unpack256<B: Block256>(&mut self, rows: &[&[B]; ROWS], blocks: Range<usize>) {
        for (row, all) in rows.iter().enumerate() {
            let Some(blocks) = all.get(blocks.clone()) else { continue };
            let quants = self.unpacked[row].as_chunks_mut::<256>().0;
            for (at, (block, quants)) in blocks.iter().zip(quants).enumerate() {
                let [scales, minima] = self.unpacked_numbers[at][row].as_chunks_mut::<16>().0 else {
                    unreachable!("32 are twice 16")
                };
                let [scale, minimum] = block.integers(quants, scales, minima);
                self.scales[at].0[row] = scale.to_le_bytes();
                self.minima[at].0[row] = minimum.to_le_bytes();
            }
        }
    }

    /// The same of blocks of 32.
    #[inline(always)]
    fn unpack32<B: Block32>(&mut self, rows: &[&[B]; ROWS], blocks: Range<usize>) {
        for (row, all) in rows.iter().enumerate() {
            let Some(blocks) = all.get(blocks.clone()) else { continue };
            let quants = self.unpacked[row].as_chunks_mut::<32>().0;
            for ((block, quants), scale) in blocks.iter().zip(quants).zip(&mut self.scales) {
                scale.0[row] = block.integers(quants).to_le_bytes();
            }
        }
    }
}

/// Sixteen rows of a tile from `first` on, in blocks.
fn rows_of<'a, B: bytemuck::Pod>(tile: &Tile<'a>, first: usize) -> [&'a [B]; ROWS] {
    let end = tile.first + tile.count;
    std::array::from_fn(|at| if first + at < end { blocks(tile.matrix.row(first + at)) } else { &[] })
}

/// What one thread needs while it multiplies panels.
#[derive(Debug)]
struct Workspace {
    panel: Box<Panel>,
    /// Sums so far of sixteen rows, [tokens].
    sums: Vec<[f32; ROWS]>,
}

thread_local! {
    /// Kept between calls, so that a chunk of rows allocates nothing.
    static WORKSPACE: RefCell<Workspace> = RefCell::new(Workspace { panel: bytemuck::zeroed_box(), sums: Vec::new() });
}

/// All rows and tokens of a tile of a format for which [`pays`] is true.
///
/// # Safety
/// The processor has AVX-512 (F, BW, VL) and VNNI.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn multiply(tile: Tile<'_>) {
    WORKSPACE.with_borrow_mut(|workspace| {
        // SAFETY: the caller's promise.
        unsafe {
            match tile.matrix.format {
                Supported::Q8_0 => avx512::multiply32::<BlockQ8_0>(tile, workspace),
                Supported::Q4K => avx512::multiply256::<BlockQ4K>(tile, workspace),
                Supported::Q6K => avx512::multiply256::<BlockQ6K>(tile, workspace),
                other => unreachable!("there are no panels of {other}"),
            }
        }
    });
}
