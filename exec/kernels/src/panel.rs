//! Panels: sixteen rows of weights unpacked once and multiplied with many tokens.
//!
//! A dot product with its elements in the lanes ends in a horizontal sum for each row and token. With sixteen
//! *rows* in the lanes there is none: one instruction multiplies four neighbouring weights of each row by the same
//! four activations of a token. For that the weights are packed, four columns of sixteen rows side by side; each weight
//! is unpacked once for all tokens. Goto and van de Geijn 2008 call such a block a panel.
//!
//! A block's products are one exact integer ([`super`]), so that the bits are those of the oracle.
//!
//! A panel has at most `COLUMNS` columns, so that it stays in the first-level cache beside a tile of tokens.
//!
//! Not here: the multiplication itself, which depends on the instruction set (`avx2`, `avx512`, `neon`).

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
use super::blocks;
use super::product::Tile;

/// Rows of weights in a panel.
pub const ROWS: usize = 16;

/// The largest number of columns of a panel.
const COLUMNS: usize = 1024;

/// The number of tokens from which packing weights into panels saves time.
///
/// source: measured with `product_speed`, see `docs/studies/kernels/batches.md`; a cautious choice, not where it
/// breaks even.
const MIN_TOKENS: usize = 12;

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
    unpacked_scales: [[[i8; 32]; ROWS]; BLOCKS256],
    /// Four columns a line.
    quants: [Line; COLUMNS / 4],
    /// Eight lines of pairs of scales, then eight of minima.
    group_scales: [[Line; 16]; BLOCKS256],
    scales: [Line; BLOCKS32],
    minima: [Line; BLOCKS32],
}

/// Whether multiplying `tokens` rows of input panel by panel is faster than dot products.
pub fn is_profitable(format: KernelFormat, tokens: usize) -> bool {
    tokens >= MIN_TOKENS && !matches!(format, KernelFormat::F32 | KernelFormat::F16 | KernelFormat::Bf16)
}

impl Panel {
    /// Unpacks some blocks of each row. Rows beyond the end of the matrix are left unchanged.
    #[inline(always)]
    fn unpack256<B: Block256>(&mut self, rows: &[&[B]; ROWS], blocks: Range<usize>) {
        for (row, all) in rows.iter().enumerate() {
            let Some(blocks) = all.get(blocks.clone()) else { continue };
            let quants = self.unpacked[row].as_chunks_mut::<256>().0;
            for (at, (block, quants)) in blocks.iter().zip(quants).enumerate() {
                let [scales, minima] = self.unpacked_scales[at][row].as_chunks_mut::<16>().0 else {
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
    std::array::from_fn(|at| if first + at < end { blocks::blocks(tile.matrix.row(first + at)) } else { &[] })
}

/// The buffers of one thread.
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

/// The part that depends on the instruction set: packing a panel and multiplying it by T tokens.
///
/// # Safety
/// The processor has the instructions.
trait PanelKernel {
    /// Unpacks some blocks of each row and interleaves the rows.
    unsafe fn pack256<B: Block256>(panel: &mut Panel, rows: &[&[B]; ROWS], blocks: Range<usize>);

    /// The same of blocks of 32.
    unsafe fn pack32<B: Block32>(panel: &mut Panel, rows: &[&[B]; ROWS], blocks: Range<usize>);

    /// Adds the products of the blocks that fill the panel and T tokens to `sums`.
    unsafe fn multiply256<B: Block256, const T: usize>(
        panel: &Panel,
        blocks: Range<usize>,
        input: &[QuantisedRow<'_>; T],
        sums: &mut [[f32; ROWS]; T],
    );

    /// The same of blocks of 32.
    unsafe fn multiply32<B: Block32, const T: usize>(
        panel: &Panel,
        blocks: Range<usize>,
        input: &[QuantisedRow<'_>; T],
        sums: &mut [[f32; ROWS]; T],
    );
}

/// Implements packing for x86-64, where panels hold unsigned bytes, with the module's `interleave` functions.
#[cfg(target_arch = "x86_64")]
macro_rules! pack {
    ($features:literal) => {
        #[target_feature(enable = $features)]
        unsafe fn pack256<B: Block256>(panel: &mut Panel, rows: &[&[B]; ROWS], blocks: Range<usize>) {
            let count = blocks.len();
            panel.unpack256(rows, blocks);
            interleave(&panel.unpacked, B::FROM_CODEBOOK, count * 256, &mut panel.quants);
            for (unpacked, lines) in panel.unpacked_scales.iter().zip(&mut panel.group_scales).take(count) {
                interleave_scales(unpacked, lines);
            }
        }

        #[target_feature(enable = $features)]
        unsafe fn pack32<B: Block32>(panel: &mut Panel, rows: &[&[B]; ROWS], blocks: Range<usize>) {
            let count = blocks.len();
            panel.unpack32(rows, blocks);
            interleave(&panel.unpacked, B::FROM_CODEBOOK, count * 32, &mut panel.quants);
        }
    };
}
#[cfg(target_arch = "x86_64")]
use pack;

/// All rows and tokens of a tile of a format for which [`is_profitable`] is true; T tokens share a load of weights.
///
/// # Safety
/// The processor has the instructions of `M`, and no other thread writes these rows.
unsafe fn multiply<M: PanelKernel, const T: usize>(tile: Tile<'_>) {
    WORKSPACE.with_borrow_mut(|workspace| {
        macro_rules! plain {
            ($dot:ident) => {
                unreachable!("there are no panels of {}", tile.matrix.format)
            };
        }
        macro_rules! blocks {
            ($block:ident, row32, $dot:ident) => {
                multiply_rows32::<M, blocks::$block, T>(tile, workspace)
            };
            ($block:ident, row256, $dot:ident) => {
                multiply_rows256::<M, blocks::$block, T>(tile, workspace)
            };
        }
        // SAFETY: the caller's promise.
        unsafe {
            for_format!(tile.matrix.format, plain, blocks);
        }
    });
}

macro_rules! multiply_rows {
    ($($name:ident: $block:ident, $length:literal, $row:ident, $pack:ident, $multiply:ident;)+) => {$(
        /// # Safety
        /// That of [`multiply`].
        unsafe fn $name<M: PanelKernel, B: $block, const T: usize>(tile: Tile<'_>, workspace: &mut Workspace) {
            let Workspace { panel, sums } = workspace;
            let blocks = tile.matrix.length / $length;
            for first in (tile.first..tile.first + tile.count).step_by(ROWS) {
                let rows = rows_of::<B>(&tile, first);
                sums.clear();
                sums.resize(tile.input.tokens(), [0.0; ROWS]);
                for from in (0..blocks).step_by(COLUMNS / $length) {
                    let blocks = from..blocks.min(from + COLUMNS / $length);
                    // SAFETY: the caller's promise.
                    unsafe { M::$pack(panel, &rows, blocks.clone()) };
                    let (tiles, rest) = sums.as_chunks_mut::<T>();
                    let singles = tiles.len() * T;
                    for (at, sums) in tiles.iter_mut().enumerate() {
                        let input = std::array::from_fn(|t| tile.input.$row(at * T + t));
                        // SAFETY: the caller's promise.
                        unsafe { M::$multiply::<B, T>(panel, blocks.clone(), &input, sums) };
                    }
                    for (at, sums) in rest.iter_mut().enumerate() {
                        let input = [tile.input.$row(singles + at)];
                        // SAFETY: the caller's promise.
                        unsafe { M::$multiply::<B, 1>(panel, blocks.clone(), &input, std::array::from_mut(sums)) };
                    }
                }
                // SAFETY: the caller's promise.
                unsafe { write_sums(&tile, first, sums) };
            }
        }
    )+};
}
multiply_rows! {
    multiply_rows256: Block256, 256, row256, pack256, multiply256;
    multiply_rows32: Block32, 32, row32, pack32, multiply32;
}

/// Writes the sums of the rows from `first` on, [tokens].
///
/// # Safety
/// No other thread writes these rows.
unsafe fn write_sums(tile: &Tile<'_>, first: usize, sums: &[[f32; ROWS]]) {
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
