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
mod integers;

use std::cell::RefCell;
use std::ops::Range;

use bytemuck::Zeroable;

use integers::{Block32, Block256};

use super::Supported;
use super::blocks::{
    BlockIq1S, BlockIq4Nl, BlockIq4Xs, BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0,
    BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0, blocks,
};
use super::product::Tile;

/// Rows of weights in a panel.
pub(crate) const ROWS: usize = 16;

/// Most columns of a panel.
const COLUMNS: usize = 1024;

/// Fewest tokens for which laying weights out anew pays.
const FEWEST_TOKENS: usize = 12;

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
    minima: [Line; BLOCKS32],
}

/// Whether `tokens` rows of input are best multiplied panel by panel.
pub(crate) fn pays(format: Supported, tokens: usize) -> bool {
    tokens >= FEWEST_TOKENS && !matches!(format, Supported::F32 | Supported::F16 | Supported::Bf16)
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
            for (at, (block, quants)) in blocks.iter().zip(quants).enumerate() {
                let [scale, minimum] = block.integers(quants);
                self.scales[at].0[row] = scale.to_le_bytes();
                self.minima[at].0[row] = minimum.to_le_bytes();
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
                Supported::Q4_0 => avx512::multiply32::<BlockQ4_0>(tile, workspace),
                Supported::Q4_1 => avx512::multiply32::<BlockQ4_1>(tile, workspace),
                Supported::Q5_0 => avx512::multiply32::<BlockQ5_0>(tile, workspace),
                Supported::Q5_1 => avx512::multiply32::<BlockQ5_1>(tile, workspace),
                Supported::Q8_0 => avx512::multiply32::<BlockQ8_0>(tile, workspace),
                Supported::Iq4Nl => avx512::multiply32::<BlockIq4Nl>(tile, workspace),
                Supported::Q2K => avx512::multiply256::<BlockQ2K>(tile, workspace),
                Supported::Q3K => avx512::multiply256::<BlockQ3K>(tile, workspace),
                Supported::Q4K => avx512::multiply256::<BlockQ4K>(tile, workspace),
                Supported::Q5K => avx512::multiply256::<BlockQ5K>(tile, workspace),
                Supported::Q6K => avx512::multiply256::<BlockQ6K>(tile, workspace),
                Supported::Iq1S => avx512::multiply256::<BlockIq1S>(tile, workspace),
                Supported::Iq4Xs => avx512::multiply256::<BlockIq4Xs>(tile, workspace),
                other => unreachable!("there are no panels of {other}"),
            }
        }
    });
}
