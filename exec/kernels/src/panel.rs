//! Packed GEMM: panels of sixteen weight rows, which are unpacked once for the activations of many tokens.
//!
//! A dot product whose *elements* are in vector lanes ends with a horizontal sum for each row and token. With sixteen
//! *rows* in the lanes no such sum is needed: one instruction multiplies four adjacent weights of each row by the
//! same four activations of a token. For this the weights are packed: four columns of all sixteen rows are adjacent
//! in memory. Each weight is unpacked once for all tokens. Goto and van de Geijn 2008 call such a block a panel.
//!
//! The products of a block are added to one exact integer ([`super`]): the result equals that of the scalar kernel.
//!
//! A panel has at most `MAX_COLUMNS` columns, so that it stays in the L1 cache together with a tile of tokens.
//!
//! Not here: the multiplication, which depends on the instruction set (`avx2`, `avx512`, `neon`).

// Targets without native kernels compute everything with scalar code.
#![cfg_attr(not(any(target_arch = "aarch64", target_arch = "x86_64")), allow(dead_code))]

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(super) mod neon;
mod unpack;

use std::cell::RefCell;
use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use hearth_profiles::Format;

use unpack::{Block32, Block256};

use super::activations::QuantisedRow;
use super::blocks;
use super::matmul::{MatmulOutput, MatmulTask};

/// Number of weight rows in a panel.
pub const PANEL_ROWS: usize = 16;

/// Maximum number of columns of a panel.
const MAX_COLUMNS: usize = 1024;

/// Minimum number of tokens for which weights are packed into panels.
///
/// source: measured with `matmul_speed`, see `docs/studies/kernels/batches.md`; chosen well above break-even
const MIN_TOKENS: usize = 12;

/// A cache line of a panel, 64 bytes: for each of the sixteen rows, four bytes, two 16-bit integers or one float.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([[u8; 4]; PANEL_ROWS]);

/// Maximum number of blocks of 256 weights in a row of a panel.
const BLOCKS256: usize = MAX_COLUMNS / 256;
/// Maximum number of blocks of 32 weights in a row of a panel.
const BLOCKS32: usize = MAX_COLUMNS / 32;

/// Sixteen weight rows of up to [`MAX_COLUMNS`] columns: unpacked row by row, and interleaved as kernels read them.
#[derive(Debug, Clone, Copy, Zeroable)]
#[repr(C)]
struct Panel {
    /// The quants of each row, one per byte.
    unpacked: [[u8; MAX_COLUMNS]; PANEL_ROWS],
    /// For each block of 256 weights and each row: the scales of its 16 groups, then the minima of these groups.
    unpacked_scales: [[[i8; 32]; PANEL_ROWS]; BLOCKS256],
    /// The interleaved quants: a line has four columns of all rows.
    quants: [Line; MAX_COLUMNS / 4],
    /// The interleaved scales and minima of groups. For each block of 256 weights: eight lines with two scales of each
    /// row, then eight lines with two minima of each row.
    group_scales: [[Line; 16]; BLOCKS256],
    scales: [Line; BLOCKS32],
    minima: [Line; BLOCKS32],
}

/// Whether panels are faster than dot products for weights in `format` and a batch of `tokens` tokens.
pub fn is_profitable(format: Format, tokens: usize) -> bool {
    tokens >= MIN_TOKENS && !matches!(format, Format::F32 | Format::F16 | Format::Bf16)
}

impl Panel {
    /// Unpacks blocks of 256 weights of each row; `blocks` are their indices. An empty row leaves the panel unchanged.
    #[inline(always)]
    fn unpack256<B: Block256>(&mut self, rows: &[&[B]; PANEL_ROWS], blocks: Range<usize>) {
        for (row, all) in rows.iter().enumerate() {
            let Some(blocks) = all.get(blocks.clone()) else { continue };
            let quants = self.unpacked[row].as_chunks_mut::<256>().0;
            for (at, (block, quants)) in blocks.iter().zip(quants).enumerate() {
                let [scales, minima] = self.unpacked_scales[at][row].as_chunks_mut::<16>().0 else {
                    unreachable!("32 are twice 16")
                };
                block.unpack(quants);
                *scales = block.scales();
                *minima = block.minima();
                self.scales[at].0[row] = (B::SCALE_FACTOR * block.scale()).to_le_bytes();
                self.minima[at].0[row] = block.minimum().to_le_bytes();
            }
        }
    }

    /// Unpacks blocks of 32 weights of each row; `blocks` are their indices. An empty row leaves the panel unchanged.
    #[inline(always)]
    fn unpack32<B: Block32>(&mut self, rows: &[&[B]; PANEL_ROWS], blocks: Range<usize>) {
        for (row, all) in rows.iter().enumerate() {
            let Some(blocks) = all.get(blocks.clone()) else { continue };
            let quants = self.unpacked[row].as_chunks_mut::<32>().0;
            for (at, (block, quants)) in blocks.iter().zip(quants).enumerate() {
                block.unpack(quants);
                self.scales[at].0[row] = block.scale().to_le_bytes();
                self.minima[at].0[row] = block.minimum().to_le_bytes();
            }
        }
    }
}

/// Returns the blocks of sixteen weight rows, starting at row `first`. Rows after the last row of the task are empty.
fn rows_of<'a, B: Pod>(task: &MatmulTask<'a, '_>, first: usize) -> [&'a [B]; PANEL_ROWS] {
    let end = task.out.rows().end;
    std::array::from_fn(|at| if first + at < end { blocks::blocks(task.matrix.row(first + at)) } else { &[] })
}

#[derive(Debug)]
struct Workspace {
    panel: Box<Panel>,
    /// The partial sums of the sixteen rows of the panel, for each token.
    sums: Vec<[f32; PANEL_ROWS]>,
}

thread_local! {
    /// The panel and the sums of this thread. All calls reuse them, so that a call does not allocate.
    static WORKSPACE: RefCell<Workspace> = RefCell::new(Workspace { panel: bytemuck::zeroed_box(), sums: Vec::new() });
}

/// The packed blocks of a panel with the indices `blocks` in a row, and the activations of T tokens to multiply by.
struct Tile<'a, const T: usize> {
    panel: &'a Panel,
    blocks: Range<usize>,
    input: [QuantisedRow<'a>; T],
}

/// The partial sums of the sixteen rows of a panel for T tokens.
type Sums<const T: usize> = [[f32; PANEL_ROWS]; T];

/// The packing and the multiplication of panels with one instruction set. A value of an implementation exists only
/// where the processor has the instructions.
trait PanelKernel: Copy {
    /// Unpacks blocks of 256 weights of each row and interleaves the rows. `blocks` are the indices of the blocks.
    fn pack256<B: Block256>(self, panel: &mut Panel, rows: &[&[B]; PANEL_ROWS], blocks: Range<usize>);

    /// Unpacks blocks of 32 weights of each row and interleaves the rows. `blocks` are the indices of the blocks.
    fn pack32<B: Block32>(self, panel: &mut Panel, rows: &[&[B]; PANEL_ROWS], blocks: Range<usize>);

    /// Multiplies the packed blocks of 256 weights by the activations of the tile and adds the products to `sums`.
    fn multiply256<B: Block256, const T: usize>(self, tile: &Tile<'_, T>, sums: &mut Sums<T>);

    /// Multiplies the packed blocks of 32 weights by the activations of the tile and adds the products to `sums`.
    fn multiply32<B: Block32, const T: usize>(self, tile: &Tile<'_, T>, sums: &mut Sums<T>);
}

/// Implements [`PanelKernel`] for the proof type `$instructions` with the functions `interleave`, `interleave_scales`,
/// `multiply256` and `multiply32` of the invoking module.
#[cfg(target_arch = "x86_64")]
macro_rules! panel_kernel {
    ($instructions:ident) => {
        impl PanelKernel for $instructions {
            $crate::x86_64::methods_with! { $instructions:
                fn pack256<B: Block256>(panel: &mut Panel, rows: &[&[B]; PANEL_ROWS], blocks: Range<usize>) {
                    let count = blocks.len();
                    panel.unpack256(rows, blocks);
                    interleave(panel, B::CODEBOOK, count * 256);
                    for (unpacked, lines) in panel.unpacked_scales.iter().zip(&mut panel.group_scales).take(count) {
                        interleave_scales(unpacked, lines);
                    }
                }

                fn pack32<B: Block32>(panel: &mut Panel, rows: &[&[B]; PANEL_ROWS], blocks: Range<usize>) {
                    let count = blocks.len();
                    panel.unpack32(rows, blocks);
                    interleave(panel, B::CODEBOOK, count * 32);
                }

                fn multiply256<B: Block256, const T: usize>(tile: &Tile<'_, T>, sums: &mut Sums<T>) {
                    multiply256::<B, T>(tile, sums);
                }

                fn multiply32<B: Block32, const T: usize>(tile: &Tile<'_, T>, sums: &mut Sums<T>) {
                    multiply32::<B, T>(tile, sums);
                }
            }
        }
    };
}
#[cfg(target_arch = "x86_64")]
use panel_kernel;

/// Computes a part of a matmul for which [`is_profitable`] holds, in tiles of T tokens that share loads of weights.
fn multiply<M: PanelKernel, const T: usize>(kernel: M, task: MatmulTask<'_, '_>) {
    WORKSPACE.with_borrow_mut(|workspace| {
        macro_rules! plain {
            ($dot:ident) => {
                unreachable!("there are no panels of {}", task.matrix.format)
            };
        }
        macro_rules! blocks {
            ($block:ident, row32, $dot:ident) => {
                multiply_rows32::<M, blocks::$block, T>(kernel, task, workspace)
            };
            ($block:ident, row256, $dot:ident) => {
                multiply_rows256::<M, blocks::$block, T>(kernel, task, workspace)
            };
        }
        for_format!(task.matrix.format, plain, blocks);
    });
}

macro_rules! multiply_rows {
    ($($name:ident: $block:ident, $length:literal, $row:ident, $pack:ident, $multiply:ident;)+) => {$(
        /// Implements [`multiply`] for weights in blocks of one length.
        fn $name<M: PanelKernel, B: $block, const T: usize>(
            kernel: M,
            task: MatmulTask<'_, '_>,
            workspace: &mut Workspace,
        ) {
            let Workspace { panel, sums } = workspace;
            let blocks = task.matrix.row_length / $length;
            for first in task.out.rows().step_by(PANEL_ROWS) {
                let rows = rows_of::<B>(&task, first);
                sums.clear();
                sums.resize(task.input.tokens(), [0.0; PANEL_ROWS]);
                for from in (0..blocks).step_by(MAX_COLUMNS / $length) {
                    let blocks = from..blocks.min(from + MAX_COLUMNS / $length);
                    kernel.$pack(panel, &rows, blocks.clone());
                    let (tiles, rest) = sums.as_chunks_mut::<T>();
                    let singles = tiles.len() * T;
                    for (at, sums) in tiles.iter_mut().enumerate() {
                        let input = std::array::from_fn(|t| task.input.$row(at * T + t));
                        let tile = Tile { panel, blocks: blocks.clone(), input };
                        kernel.$multiply::<B, T>(&tile, sums);
                    }
                    for (at, sums) in rest.iter_mut().enumerate() {
                        let input = [task.input.$row(singles + at)];
                        let tile = Tile { panel, blocks: blocks.clone(), input };
                        kernel.$multiply::<B, 1>(&tile, std::array::from_mut(sums));
                    }
                }
                write_sums(task.out, first, sums);
            }
        }
    )+};
}
multiply_rows! {
    multiply_rows256: Block256, 256, row256, pack256, multiply256;
    multiply_rows32: Block32, 32, row32, pack32, multiply32;
}

/// Writes the sums of a panel, which starts at weight row `first`, to the output of the matmul for all tokens.
fn write_sums(out: &mut MatmulOutput<'_>, first: usize, sums: &[[f32; PANEL_ROWS]]) {
    for (token, sums) in sums.iter().enumerate() {
        out.set_first_rows(token, first, sums);
    }
}
