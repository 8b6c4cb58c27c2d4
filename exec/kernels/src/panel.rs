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
pub(super) mod unpack;

use std::cell::RefCell;
use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use hearth_profiles::Format;

#[cfg(target_arch = "x86_64")]
use unpack::Words;
use unpack::{Block32, Block256, UnpackBytes};

use super::activations::QuantisedRow;
use super::blocks::{self, ScaledBlock};
use super::matmul::{Layout, MatmulOutput, MatmulTask};

/// Number of weight rows in a panel.
pub const PANEL_ROWS: usize = 16;

/// Maximum number of columns of a panel.
const MAX_COLUMNS: usize = 1024;

/// Minimum number of tokens for which weights are packed into panels.
///
/// source: measured with `matmul_speed`, see `docs/studies/kernels/batches.md`; on aarch64, where blocks are unpacked
/// alone, chosen well above break-even
const MIN_TOKENS: usize = if cfg!(target_arch = "x86_64") { 8 } else { 12 };

/// A cache line of a panel, 64 bytes: for each of the sixteen rows, four bytes, two 16-bit integers or one float.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub(super) struct Line([[u8; 4]; PANEL_ROWS]);

/// The quants of each row of a panel, one per byte, or copies of their stored bytes.
type UnpackedRows = [[u8; MAX_COLUMNS]; PANEL_ROWS];

/// Maximum number of blocks of 256 weights in a row of a panel.
const BLOCKS256: usize = MAX_COLUMNS / 256;
/// Maximum number of blocks of 32 weights in a row of a panel.
const BLOCKS32: usize = MAX_COLUMNS / 32;

/// Sixteen weight rows of up to [`MAX_COLUMNS`] columns: unpacked row by row, and interleaved as kernels read them.
#[derive(Debug, Clone, Copy, Zeroable)]
#[repr(C)]
pub(super) struct Panel {
    unpacked: UnpackedRows,
    /// For each block of 256 weights and each row: the scales of its 16 groups, then the minima of these groups.
    unpacked_scales: [[[i8; 32]; PANEL_ROWS]; BLOCKS256],
    /// The interleaved stored bytes of formats that are unpacked word by word.
    stored: [Line; MAX_COLUMNS / 4],
    /// The interleaved quants: a line has four columns of all rows.
    pub(super) quants: [Line; MAX_COLUMNS / 4],
    /// The interleaved scales and minima of groups. For each block of 256 weights: eight lines with two scales of each
    /// row, then eight lines with two minima of each row.
    pub(super) group_scales: [[Line; 16]; BLOCKS256],
    pub(super) scales: [Line; BLOCKS32],
    pub(super) minima: [Line; BLOCKS32],
}

/// Whether panels are faster than dot products for weights in `format` and a batch of `tokens` tokens.
pub fn is_profitable(format: Format, tokens: usize) -> bool {
    tokens >= MIN_TOKENS && !matches!(format, Format::F32 | Format::F16 | Format::Bf16)
}

impl Panel {
    /// Unpacks the interleaved stored bytes of the first `count` blocks of all rows. `W` is a line in registers.
    ///
    /// # Safety
    /// The processor must have the instructions for `W`.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn unpack_stored<B: UnpackBytes<N>, W: Words + Pod, const N: usize>(&mut self, count: usize) {
        let quants: &mut [W] = bytemuck::cast_slice_mut(&mut self.quants);
        let blocks = bytemuck::cast_slice(&self.stored).chunks_exact(PANEL_ROWS * B::STORED_BYTES);
        for (stored, quants) in blocks.zip(quants.chunks_exact_mut(N / 4)).take(count) {
            for (column, quants) in quants.iter_mut().enumerate() {
                *quants = B::unpack_column(stored, column);
            }
        }
    }

    /// Unpacks the interleaved scales and minima of groups of the first `count` blocks of all rows. `W` is a line in
    /// registers.
    ///
    /// # Safety
    /// The processor must have the instructions for `W`.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn unpack_stored_scales<B: Block256, W: Words + Pod>(&mut self, count: usize) {
        let blocks = bytemuck::cast_slice(&self.stored).chunks_exact(PANEL_ROWS * B::STORED_BYTES);
        for (stored, scales) in blocks.zip(&mut self.group_scales).take(count) {
            B::unpack_scale_words::<W>(stored, bytemuck::cast_slice_mut(scales));
        }
    }

    /// Reads the scales and minima of blocks of each row: both to `scales` if they are f16 numbers.
    #[inline(always)]
    fn read_scales<B: ScaledBlock>(&mut self, rows: &[&[B]; PANEL_ROWS], blocks: &Range<usize>) {
        for (row, all) in rows.iter().enumerate() {
            let Some(blocks) = all.get(blocks.clone()) else { continue };
            for (at, block) in blocks.iter().enumerate() {
                if let Some(halves) = block.halves() {
                    self.scales[at].0[row] = bytemuck::must_cast(halves.map(u16::to_le_bytes));
                } else {
                    self.scales[at].0[row] = block.scale().to_le_bytes();
                    self.minima[at].0[row] = block.minimum().to_le_bytes();
                }
            }
        }
    }

    /// Reads the scales and minima of the groups of blocks of each row.
    #[inline(always)]
    fn read_group_scales<B: Block256>(&mut self, rows: &[&[B]; PANEL_ROWS], blocks: &Range<usize>) {
        for (row, all) in rows.iter().enumerate() {
            let Some(blocks) = all.get(blocks.clone()) else { continue };
            for (block, unpacked) in blocks.iter().zip(&mut self.unpacked_scales) {
                unpacked[row] = bytemuck::must_cast([block.scales(), block.minima()]);
            }
        }
    }
}

/// Unpacks the quants of blocks of each row; `blocks` are their indices. An empty row leaves `unpacked` unchanged.
#[inline(always)]
fn unpack<B: UnpackBytes<N>, const N: usize>(
    unpacked: &mut UnpackedRows,
    rows: &[&[B]; PANEL_ROWS],
    blocks: &Range<usize>,
) {
    for (row, unpacked) in rows.iter().zip(unpacked) {
        let Some(blocks) = row.get(blocks.clone()) else { continue };
        for (block, quants) in blocks.iter().zip(unpacked.as_chunks_mut::<N>().0) {
            block.unpack(quants);
        }
    }
}

/// Copies the stored bytes of blocks of each row. An empty row leaves `copies` unchanged.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn copy_stored<B: UnpackBytes<N>, const N: usize>(
    copies: &mut UnpackedRows,
    rows: &[&[B]; PANEL_ROWS],
    blocks: &Range<usize>,
) {
    for (row, copies) in rows.iter().zip(copies) {
        let Some(blocks) = row.get(blocks.clone()) else { continue };
        for (block, copy) in blocks.iter().zip(copies.chunks_exact_mut(B::STORED_BYTES)) {
            copy.copy_from_slice(block.stored());
        }
    }
}

/// Returns the stored bytes of blocks of each row if they are adjacent, and whole lines for [`PanelKernel`]s.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn adjacent_stored<'a, B: UnpackBytes<N> + Pod, const N: usize>(
    rows: &[&'a [B]; PANEL_ROWS],
    blocks: &Range<usize>,
) -> Option<[&'a [u8]; PANEL_ROWS]> {
    let bytes = blocks.len() * B::STORED_BYTES;
    if B::STORED_BYTES != size_of::<B>() || !bytes.is_multiple_of(64) {
        return None;
    }
    let mut adjacent = [&[][..]; PANEL_ROWS];
    for (adjacent, row) in adjacent.iter_mut().zip(rows) {
        *adjacent = bytemuck::cast_slice(row.get(blocks.clone())?);
    }
    Some(adjacent)
}

/// Returns the blocks of sixteen weight rows, starting at row `first`. Rows after the last row of the task are empty.
fn rows_of<'a, B: Pod>(task: &MatmulTask<'a, '_>, first: usize) -> [&'a [B]; PANEL_ROWS] {
    let end = task.out.rows().end;
    std::array::from_fn(|at| if first + at < end { blocks::blocks(task.matrix.row(first + at)) } else { &[] })
}

/// Prefetches `count` blocks of each of sixteen weight rows, from the block with the index `block` of row `row` on.
/// Hardware does not, because the rows are far apart.
#[inline(always)]
fn prefetch_blocks<B: Pod>(task: &MatmulTask<'_, '_>, (row, block): (usize, usize), count: usize) {
    for row in row..task.out.rows().end.min(row + PANEL_ROWS) {
        let blocks: &[B] = blocks::blocks(task.matrix.row(row));
        let blocks = &blocks[block..blocks.len().min(block + count)];
        bytemuck::cast_slice::<_, u8>(blocks).chunks(64).for_each(prefetch);
    }
}

/// Prefetches the cache line with the first byte, on processors for which Rust has an instruction for it.
#[inline(always)]
fn prefetch(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    crate::x86_64::prefetch(bytes);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
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
    input: &'a [QuantisedRow<'a>; T],
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

    /// Unpacks blocks of 256 weights of a group of interleaved rows. `blocks` are the indices of the blocks, whole units.
    fn unpack256<B: Block256>(self, _panel: &mut Panel, _group: &[u8], _blocks: Range<usize>) {
        unreachable!("this instruction set multiplies interleaved rows one after the other");
    }

    /// Unpacks blocks of 32 weights of a group of interleaved rows. `blocks` are the indices of the blocks, whole units.
    fn unpack32<B: Block32>(self, _panel: &mut Panel, _group: &[u8], _blocks: Range<usize>) {
        unreachable!("this instruction set multiplies interleaved rows one after the other");
    }

    /// Multiplies the packed blocks of 256 weights by the activations of the tile and adds the products to `sums`.
    fn multiply256<B: Block256, const T: usize>(self, tile: &Tile<'_, T>, sums: &mut Sums<T>);

    /// Multiplies the packed blocks of 32 weights by the activations of the tile and adds the products to `sums`.
    fn multiply32<B: Block32, const T: usize>(self, tile: &Tile<'_, T>, sums: &mut Sums<T>);
}

/// Defines `pack_scales`, with attributes, for a module that has `from_halves`.
macro_rules! pack_scales {
    ($(#[$attribute:meta])*) => {
        /// Reads the scales and minima of blocks of each row, and multiplies the scales by `factor`.
        #[inline]
        $(#[$attribute])*
        fn pack_scales<B: ScaledBlock>(
            panel: &mut Panel,
            rows: &[&[B]; PANEL_ROWS],
            blocks: &Range<usize>,
            factor: f32,
        ) {
            panel.read_scales(rows, blocks);
            if B::zeroed().halves().is_some() {
                for (scales, minima) in panel.scales.iter_mut().zip(&mut panel.minima).take(blocks.len()) {
                    [*scales, *minima] = from_halves(scales, factor);
                }
            }
        }
    };
}
#[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
use pack_scales;

/// Implements [`PanelKernel`] for the proof type `$instructions` with the functions `interleave`, `look_up`,
/// `interleave_scales`, `from_halves`, `multiply256` and `multiply32` of the invoking module. A value of `$words` is a
/// line in registers. `$more` are further methods.
#[cfg(target_arch = "x86_64")]
macro_rules! panel_kernel {
    ($instructions:ident, $words:ty, $features:literal $($more:tt)*) => {
        /// Unpacks the quants of blocks of each row and interleaves the rows: first the stored bytes, if possible, as
        /// they are fewer.
        #[inline]
        #[target_feature(enable = $features)]
        fn pack_quants<B: UnpackBytes<N> + Pod, const N: usize>(
            panel: &mut Panel,
            rows: &[&[B]; PANEL_ROWS],
            blocks: &Range<usize>,
        ) {
            let Panel { unpacked, quants, stored, .. } = panel;
            let (count, bytes) = (blocks.len(), blocks.len() * B::STORED_BYTES);
            if B::STORED_BYTES == 0 {
                unpack(unpacked, rows, blocks);
                interleave(&unpacked.each_ref().map(|row| &row[..]), quants, count * N);
                return;
            }
            if let Some(rows) = adjacent_stored(rows, blocks) {
                interleave(&rows, stored, bytes);
            } else {
                copy_stored(unpacked, rows, blocks);
                interleave(&unpacked.each_ref().map(|row| &row[..]), stored, bytes);
            }
            // SAFETY: this function requires the instructions.
            unsafe { panel.unpack_stored::<B, $words, N>(count) };
            if let Some(codebook) = B::CODEBOOK {
                look_up(&codebook, &mut panel.quants[..count * N / 4]);
            }
        }

        pack_scales! { #[target_feature(enable = $features)] }

        impl PanelKernel for $instructions {
            $crate::x86_64::methods_with! { $instructions:
                fn pack256<B: Block256>(panel: &mut Panel, rows: &[&[B]; PANEL_ROWS], blocks: Range<usize>) {
                    let count = blocks.len();
                    pack_scales(panel, rows, &blocks, B::SCALE_FACTOR);
                    pack_quants::<B, 256>(panel, rows, &blocks);
                    if B::STORES_SCALES {
                        // SAFETY: a value of the kernel exists only where the processor has the instructions.
                        unsafe { panel.unpack_stored_scales::<B, $words>(count) };
                    } else {
                        panel.read_group_scales(rows, &blocks);
                        let scales = panel.unpacked_scales.iter().zip(&mut panel.group_scales);
                        scales.take(count).for_each(|(unpacked, lines)| interleave_scales(unpacked, lines));
                    }
                }

                fn pack32<B: Block32>(panel: &mut Panel, rows: &[&[B]; PANEL_ROWS], blocks: Range<usize>) {
                    pack_scales(panel, rows, &blocks, 1.0);
                    pack_quants::<B, 32>(panel, rows, &blocks);
                }

                $($more)*

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

/// Computes a part of a matmul for which [`is_profitable`] holds, in tiles of tokens that share loads of weights: of T
/// tokens, and then of fewer.
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
    ($($name:ident: $block:ident, $length:literal, $row:ident, $pack:ident, $unpack:ident, $multiply:ident;)+) => {$(
        /// Implements [`multiply`] for weights in blocks of one length.
        fn $name<M: PanelKernel, B: $block, const T: usize>(
            kernel: M,
            task: MatmulTask<'_, '_>,
            workspace: &mut Workspace,
        ) {
            let Workspace { panel, sums } = workspace;
            let count = task.matrix.row_length / $length;
            let inputs: Vec<_> = (0..task.input.tokens()).map(|token| task.input.$row(token)).collect();
            for first in task.out.rows().step_by(PANEL_ROWS) {
                sums.clear();
                sums.resize(inputs.len(), [0.0; PANEL_ROWS]);
                for from in (0..count).step_by(MAX_COLUMNS / $length) {
                    let blocks = from..count.min(from + MAX_COLUMNS / $length);
                    if task.matrix.layout == Layout::Interleaved {
                        let group = task.matrix.slice(first, PANEL_ROWS).bytes;
                        kernel.$unpack::<B>(panel, group, blocks.clone());
                    } else {
                        kernel.$pack(panel, &rows_of::<B>(&task, first), blocks.clone());
                        let next = if blocks.end < count { (first, blocks.end) } else { (first + PANEL_ROWS, 0) };
                        prefetch_blocks::<B>(&task, next, MAX_COLUMNS / $length);
                    }
                    let mut at = 0;
                    macro_rules! tiles {
                        ($tokens:expr) => {
                            while let Some(input) = inputs[at..].first_chunk::<{ $tokens }>() {
                                let tile = Tile { panel, blocks: blocks.clone(), input };
                                let sums = sums[at..].first_chunk_mut().expect("as many sums as inputs");
                                kernel.$multiply::<B, { $tokens }>(&tile, sums);
                                at += $tokens;
                            }
                        };
                    }
                    tiles!(T);
                    tiles!(4);
                    tiles!(2);
                    tiles!(1);
                }
                write_sums(task.out, first, sums);
            }
        }
    )+};
}
multiply_rows! {
    multiply_rows256: Block256, 256, row256, pack256, unpack256, multiply256;
    multiply_rows32: Block32, 32, row32, pack32, unpack32, multiply32;
}

/// Writes the sums of a panel, which starts at weight row `first`, to the output of the matmul for all tokens.
fn write_sums(out: &mut MatmulOutput<'_>, first: usize, sums: &[[f32; PANEL_ROWS]]) {
    for (token, sums) in sums.iter().enumerate() {
        out.set_first_rows(token, first, sums);
    }
}
