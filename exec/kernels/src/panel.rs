//! Panels: sixteen rows of weights unpacked once and multiplied with many tokens.
//!
//! A dot product with its elements in the lanes ends in a horizontal sum for each row and token. With sixteen
//! *rows* in the lanes there is none: one instruction multiplies four neighbouring weights of each row by the same
//! four activations of a token. For that the weights are laid out anew, four columns of sixteen rows side by side;
//! each weight is unpacked once and then meets all tokens. Goto and van de Geijn 2008 call such a block a panel.
//!
//! A block's products are one exact integer ([`super`]), so that the bits are those of the oracle.
//!
//! A panel has at most `COLUMNS` columns, so that it stays in the first-level cache beside a tile of tokens.
//!
//! Not here: the multiplication itself, which is a matter of instructions (`avx2`, `avx512`, `neon`).

// Processors without kernels of their own compute everything by the oracle.
#![cfg_attr(not(any(target_arch = "aarch64", target_arch = "x86_64")), allow(dead_code))]

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
mod integers;
#[cfg(target_arch = "aarch64")]
pub(super) mod neon;

use std::cell::RefCell;
use std::ops::Range;

use bytemuck::Zeroable;

use integers::{Block32, Block256};

use super::KernelFormat;
use super::activations::QuantisedRow;
use super::blocks::{
    BlockIq1S, BlockIq4Nl, BlockIq4Xs, BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0,
    BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0, blocks,
};
use super::product::Tile;

/// Rows of weights in a panel.
pub const ROWS: usize = 16;

/// Most columns of a panel.
const COLUMNS: usize = 1024;

/// Fewest tokens for which laying weights out anew pays.
///
/// source: measured with `product_speed`, see `docs/studies/kernels/batches.md`; a cautious choice, not where it
/// breaks even.
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
pub fn pays(format: KernelFormat, tokens: usize) -> bool {
    tokens >= FEWEST_TOKENS && !matches!(format, KernelFormat::F32 | KernelFormat::F16 | KernelFormat::Bf16)
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

/// What depends on the instructions: how a panel is filled, and how T tokens meet it.
///
/// # Safety
/// The processor has the instructions.
trait Method {
    /// Unpacks some blocks of each row and lays them out.
    unsafe fn fill256<B: Block256>(panel: &mut Panel, rows: &[&[B]; ROWS], blocks: Range<usize>);

    /// The same of blocks of 32.
    unsafe fn fill32<B: Block32>(panel: &mut Panel, rows: &[&[B]; ROWS], blocks: Range<usize>);

    /// Adds the products of the blocks that fill the panel and T tokens to `sums`.
    unsafe fn meet256<B: Block256, const T: usize>(
        panel: &Panel,
        blocks: Range<usize>,
        input: &[QuantisedRow<'_>; T],
        sums: &mut [[f32; ROWS]; T],
    );

    /// The same of blocks of 32.
    unsafe fn meet32<B: Block32, const T: usize>(
        panel: &Panel,
        blocks: Range<usize>,
        input: &[QuantisedRow<'_>; T],
        sums: &mut [[f32; ROWS]; T],
    );
}

/// All rows and tokens of a tile of a format for which [`pays`] is true; T tokens share a load of weights.
///
/// # Safety
/// The processor has the instructions of `M`, and no other thread writes these rows.
unsafe fn multiply<M: Method, const T: usize>(tile: Tile<'_>) {
    WORKSPACE.with_borrow_mut(|workspace| {
        // SAFETY: the caller's promise.
        unsafe {
            match tile.matrix.format {
                KernelFormat::Q4_0 => multiply32::<M, BlockQ4_0, T>(tile, workspace),
                KernelFormat::Q4_1 => multiply32::<M, BlockQ4_1, T>(tile, workspace),
                KernelFormat::Q5_0 => multiply32::<M, BlockQ5_0, T>(tile, workspace),
                KernelFormat::Q5_1 => multiply32::<M, BlockQ5_1, T>(tile, workspace),
                KernelFormat::Q8_0 => multiply32::<M, BlockQ8_0, T>(tile, workspace),
                KernelFormat::Iq4Nl => multiply32::<M, BlockIq4Nl, T>(tile, workspace),
                KernelFormat::Q2K => multiply256::<M, BlockQ2K, T>(tile, workspace),
                KernelFormat::Q3K => multiply256::<M, BlockQ3K, T>(tile, workspace),
                KernelFormat::Q4K => multiply256::<M, BlockQ4K, T>(tile, workspace),
                KernelFormat::Q5K => multiply256::<M, BlockQ5K, T>(tile, workspace),
                KernelFormat::Q6K => multiply256::<M, BlockQ6K, T>(tile, workspace),
                KernelFormat::Iq1S => multiply256::<M, BlockIq1S, T>(tile, workspace),
                KernelFormat::Iq4Xs => multiply256::<M, BlockIq4Xs, T>(tile, workspace),
                other => unreachable!("there are no panels of {other}"),
            }
        }
    });
}

/// A tile whose weights are in blocks of 256.
///
/// # Safety
/// That of [`multiply`].
unsafe fn multiply256<M: Method, B: Block256, const T: usize>(tile: Tile<'_>, workspace: &mut Workspace) {
    let Workspace { panel, sums } = workspace;
    let blocks = tile.matrix.length / 256;
    for first in (tile.first..tile.first + tile.count).step_by(ROWS) {
        let rows = rows_of::<B>(&tile, first);
        sums.clear();
        sums.resize(tile.input.tokens(), [0.0; ROWS]);
        for from in (0..blocks).step_by(BLOCKS256) {
            let blocks = from..blocks.min(from + BLOCKS256);
            // SAFETY: the caller's promise.
            unsafe { M::fill256(panel, &rows, blocks.clone()) };
            let (tiles, rest) = sums.as_chunks_mut::<T>();
            let singles = tiles.len() * T;
            for (at, sums) in tiles.iter_mut().enumerate() {
                let input = std::array::from_fn(|t| tile.input.row256(at * T + t));
                // SAFETY: the caller's promise.
                unsafe { M::meet256::<B, T>(panel, blocks.clone(), &input, sums) };
            }
            for (at, sums) in rest.iter_mut().enumerate() {
                let input = [tile.input.row256(singles + at)];
                // SAFETY: the caller's promise.
                unsafe { M::meet256::<B, 1>(panel, blocks.clone(), &input, std::array::from_mut(sums)) };
            }
        }
        // SAFETY: the caller's promise.
        unsafe { put_out(&tile, first, sums) };
    }
}

/// A tile whose weights are in blocks of 32.
///
/// # Safety
/// That of [`multiply`].
unsafe fn multiply32<M: Method, B: Block32, const T: usize>(tile: Tile<'_>, workspace: &mut Workspace) {
    let Workspace { panel, sums } = workspace;
    let blocks = tile.matrix.length / 32;
    for first in (tile.first..tile.first + tile.count).step_by(ROWS) {
        let rows = rows_of::<B>(&tile, first);
        sums.clear();
        sums.resize(tile.input.tokens(), [0.0; ROWS]);
        for from in (0..blocks).step_by(BLOCKS32) {
            let blocks = from..blocks.min(from + BLOCKS32);
            // SAFETY: the caller's promise.
            unsafe { M::fill32(panel, &rows, blocks.clone()) };
            let (tiles, rest) = sums.as_chunks_mut::<T>();
            let singles = tiles.len() * T;
            for (at, sums) in tiles.iter_mut().enumerate() {
                let input = std::array::from_fn(|t| tile.input.row32(at * T + t));
                // SAFETY: the caller's promise.
                unsafe { M::meet32::<B, T>(panel, blocks.clone(), &input, sums) };
            }
            for (at, sums) in rest.iter_mut().enumerate() {
                let input = [tile.input.row32(singles + at)];
                // SAFETY: the caller's promise.
                unsafe { M::meet32::<B, 1>(panel, blocks.clone(), &input, std::array::from_mut(sums)) };
            }
        }
        // SAFETY: the caller's promise.
        unsafe { put_out(&tile, first, sums) };
    }
}

/// Writes the sums of the rows from `first` on, [tokens].
///
/// # Safety
/// No other thread writes these rows.
unsafe fn put_out(tile: &Tile<'_>, first: usize, sums: &[[f32; ROWS]]) {
    let width = ROWS.min(tile.first + tile.count - first);
    for (token, sums) in sums.iter().enumerate() {
        // SAFETY: the rows are the tile's, and the caller promises the rest.
        unsafe {
            // Of a length that the compiler knows a copy is one instruction, not a call.
            if width == ROWS {
                tile.out.set_rows(token, first, sums);
            } else {
                tile.out.set_rows(token, first, &sums[..width]);
            }
        }
    }
}
