//! Multiplication of a panel by a tile of tokens, in NEON.
//!
//! A `Line` is four registers of four rows. Weights are packed as signed bytes, with their offset subtracted. A
//! register of four rows and four columns is multiplied by four activations of each of eight tokens; each lane sums
//! one row. `sdot` does this in one instruction. On processors without `sdot`, the products of sixteen columns are
//! added in 16 bits if the weights are small enough, and then widened. `smmla` multiplies two rows of eight columns by
//! eight activations of two tokens. For `smmla`, two lines are packed as rows of eight columns, and the sums are sorted
//! by token once per block.
//!
//! Bounds: the sum of a group is at most 32 * 128 * 127 = 5.2e5, and that of a block 256 * 128 * 127 * 128 = 5.3e8.

use std::array;
use std::ops::Range;

use half::f16;

use super::unpack::{Block32, Block256, Codebook};
use super::{Line, PANEL_ROWS, Panel, PanelKernel, Sums, Tile, multiply, pack_scales, unpack};
use crate::activations::QuantisedRow;
use crate::blocks::ScaledBlock;
use crate::matmul::MatmulTask;
#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use crate::neon::intrinsics::*;
use crate::neon::{BaseNeon, Dotprod, I8mm};

/// Number of tokens in a tile. For four rows, the sums of a group and of a block then take 16 registers.
const TOKENS: usize = 8;

/// Computes a part of a matmul. The weight format must satisfy [`is_profitable`](super::is_profitable).
pub(crate) fn matmul(instructions: impl ByteMatmul, task: MatmulTask<'_, '_>) {
    multiply::<_, TOKENS>(instructions, task);
}

/// Integer products of four weight rows and the activations of T tokens, computed with one instruction set.
pub(crate) trait ByteMatmul: Copy {
    /// Whether each pair of lines is packed as rows of eight columns, instead of two lines with rows of four columns.
    const ROWS_OF_EIGHT: bool = false;

    /// Adds the products of sixteen columns to `totals`. If `small` is set, all weights are from -32 to 32.
    fn multiply_columns<const T: usize>(
        self,
        columns: [int8x16_t; 4],
        values: [&[i8; 16]; T],
        small: bool,
        totals: &mut [int32x4_t; T],
    );

    /// Adds the sums of a group of weights, times the integer scales of the four rows, to `totals`.
    #[inline]
    fn add_scaled<const T: usize>(
        self,
        totals: &mut [int32x4_t; T],
        sums: &[int32x4_t; T],
        scales: int32x4_t,
    ) {
        for t in 0..T {
            totals[t] = vmlaq_s32(totals[t], sums[t], scales);
        }
    }

    /// Reorders the sums of [`Self::multiply_columns`], so that each register has the sums of four rows for one token.
    #[inline]
    fn by_token<const T: usize>(self, totals: [int32x4_t; T]) -> [int32x4_t; T] {
        totals
    }
}

impl ByteMatmul for BaseNeon {
    #[inline]
    fn multiply_columns<const T: usize>(
        self,
        columns: [int8x16_t; 4],
        values: [&[i8; 16]; T],
        small: bool,
        totals: &mut [int32x4_t; T],
    ) {
        for t in 0..T {
            let values = cast(*values[t]);
            let values = [
                vdup_laneq_s32::<0>(values),
                vdup_laneq_s32::<1>(values),
                vdup_laneq_s32::<2>(values),
                vdup_laneq_s32::<3>(values),
            ];
            if small {
                // A lane has four products, and adjacent lanes are added: at most 8 * 32 * 127 = 32512.
                let (mut low, mut high) = (vdupq_n_s16(0), vdupq_n_s16(0));
                for four in 0..4 {
                    let values = cast(values[four]);
                    low = vmlal_s8(low, vget_low_s8(columns[four]), values);
                    high = vmlal_s8(high, vget_high_s8(columns[four]), values);
                }
                totals[t] = vpadalq_s16(totals[t], vpaddq_s16(low, high));
            } else {
                for four in 0..4 {
                    let values = cast(values[four]);
                    // At most 2 * 128 * 127 = 32512.
                    let low = vmull_s8(vget_low_s8(columns[four]), values);
                    let high = vmull_s8(vget_high_s8(columns[four]), values);
                    totals[t] = vpadalq_s16(totals[t], vpaddq_s16(low, high));
                }
            }
        }
    }
}

impl ByteMatmul for Dotprod {
    #[inline]
    fn multiply_columns<const T: usize>(
        self,
        columns: [int8x16_t; 4],
        values: [&[i8; 16]; T],
        _small: bool,
        totals: &mut [int32x4_t; T],
    ) {
        for t in 0..T {
            let values = cast(*values[t]);
            totals[t] = self.sdot_lane::<0>(totals[t], columns[0], values);
            totals[t] = self.sdot_lane::<1>(totals[t], columns[1], values);
            totals[t] = self.sdot_lane::<2>(totals[t], columns[2], values);
            totals[t] = self.sdot_lane::<3>(totals[t], columns[3], values);
        }
    }
}

/// The sums of tokens 2p and 2p + 1 are in two registers: rows 0 and 1 in the first, rows 2 and 3 in the second.
impl ByteMatmul for I8mm {
    const ROWS_OF_EIGHT: bool = true;

    #[inline]
    fn multiply_columns<const T: usize>(
        self,
        columns: [int8x16_t; 4],
        values: [&[i8; 16]; T],
        small: bool,
        totals: &mut [int32x4_t; T],
    ) {
        if T % 2 == 1 {
            return self.dotprod().multiply_columns(rows_of_four(columns), values, small, totals);
        }
        for (totals, values) in totals.as_chunks_mut::<2>().0.iter_mut().zip(values.as_chunks::<2>().0) {
            let [first, second] = values.map(|values| cast(*values));
            let (early, late) = (cast(vzip1q_s64(first, second)), cast(vzip2q_s64(first, second)));
            totals[0] = self.smmla(self.smmla(totals[0], columns[0], early), columns[2], late);
            totals[1] = self.smmla(self.smmla(totals[1], columns[1], early), columns[3], late);
        }
    }

    #[inline]
    fn add_scaled<const T: usize>(
        self,
        totals: &mut [int32x4_t; T],
        sums: &[int32x4_t; T],
        scales: int32x4_t,
    ) {
        let pairs = [vzip1q_s32(scales, scales), vzip2q_s32(scales, scales)];
        for t in 0..T {
            totals[t] = vmlaq_s32(totals[t], sums[t], if T % 2 == 1 { scales } else { pairs[t % 2] });
        }
    }

    #[inline]
    fn by_token<const T: usize>(self, mut totals: [int32x4_t; T]) -> [int32x4_t; T] {
        if T.is_multiple_of(2) {
            for pair in totals.as_chunks_mut::<2>().0 {
                *pair = [vuzp1q_s32(pair[0], pair[1]), vuzp2q_s32(pair[0], pair[1])];
            }
        }
        totals
    }
}

/// Reorders four registers, each with four rows of four columns, to registers with two rows of eight columns.
#[inline]
fn rows_of_eight(columns: [int32x4_t; 4]) -> [int32x4_t; 4] {
    let [a, b, c, d] = columns;
    [vzip1q_s32(a, b), vzip2q_s32(a, b), vzip1q_s32(c, d), vzip2q_s32(c, d)]
}

/// Reorders four registers, each with two rows of eight columns, to registers with four rows of four columns.
#[inline]
fn rows_of_four(columns: [int8x16_t; 4]) -> [int8x16_t; 4] {
    let [a, b, c, d] = cast(columns);
    cast([vuzp1q_s32(a, b), vuzp2q_s32(a, b), vuzp1q_s32(c, d), vuzp2q_s32(c, d)])
}

impl<L: ByteMatmul> PanelKernel for L {
    fn pack256<B: Block256>(self, panel: &mut Panel, rows: &[&[B]; PANEL_ROWS], blocks: Range<usize>) {
        let count = blocks.len();
        pack_scales(panel, rows, &blocks, B::SCALE_FACTOR);
        unpack(&mut panel.unpacked, rows, &blocks);
        interleave::<L>(panel, B::CODEBOOK, count * 256, B::OFFSET as u8);
        panel.read_group_scales(rows, &blocks);
        for (unpacked, lines) in panel.unpacked_scales.iter().zip(&mut panel.group_scales).take(count) {
            interleave_scales(unpacked, lines);
        }
    }

    fn pack32<B: Block32>(self, panel: &mut Panel, rows: &[&[B]; PANEL_ROWS], blocks: Range<usize>) {
        pack_scales(panel, rows, &blocks, 1.0);
        unpack(&mut panel.unpacked, rows, &blocks);
        interleave::<L>(panel, B::CODEBOOK, blocks.len() * 32, B::OFFSET as u8);
    }

    fn multiply256<B: Block256, const T: usize>(self, tile: &Tile<'_, T>, sums: &mut Sums<T>) {
        let Tile { panel, blocks, input } = tile;
        for (at, block) in blocks.clone().enumerate() {
            let input = array::from_fn(|t| of_block(&input[t], block));
            for rows in 0..PANEL_ROWS / 4 {
                block256::<L, B, T>(self, panel, at, rows, &input, sums);
            }
        }
    }

    fn multiply32<B: Block32, const T: usize>(self, tile: &Tile<'_, T>, sums: &mut Sums<T>) {
        let Tile { panel, blocks, input } = tile;
        for (at, block) in blocks.clone().enumerate() {
            for rows in 0..PANEL_ROWS / 4 {
                block32::<L, B, T>(self, panel, at, rows, block, input, sums);
            }
        }
    }
}

pack_scales! {}

/// Converts the f16 numbers in the lower halves of the lanes to floats times `factor`, those in the upper halves to
/// floats.
fn from_halves(line: &Line, factor: f32) -> [Line; 2] {
    let lower = |[a, b, _, _]: [u8; 4]| (f16::from_le_bytes([a, b]).to_f32() * factor).to_le_bytes();
    let upper = |[_, _, c, d]: [u8; 4]| f16::from_le_bytes([c, d]).to_f32().to_le_bytes();
    [Line(line.0.map(lower)), Line(line.0.map(upper))]
}

/// Whether all weights of a format are from -32 to 32. A weight is a quant, from 0 to `max_quant`, minus `offset`.
const fn is_small(max_quant: i32, offset: i32) -> bool {
    max_quant - offset <= 32 && offset <= 32
}

/// The activations of a token for one block of 256 weights.
#[derive(Clone, Copy)]
struct OfBlock<'a> {
    quants: &'a [[i8; 16]; 16],
    sums: &'a [[i16; 2]; 8],
    scale: f32,
}

#[inline]
fn of_block<'a>(row: &QuantisedRow<'a>, block: usize) -> OfBlock<'a> {
    OfBlock {
        quants: &row.quants.as_chunks::<16>().0.as_chunks().0[block],
        sums: &row.sums.as_chunks::<2>().0.as_chunks().0[block],
        scale: row.scales[block],
    }
}

#[inline]
fn four_rows(line: &Line, rows: usize) -> int32x4_t {
    cast(line.0.as_chunks::<4>().0[rows])
}

/// Loads rows `4 * rows` to `4 * rows + 3` from each of four lines.
#[inline]
fn columns(lines: &[Line; 4], rows: usize) -> [int8x16_t; 4] {
    lines.each_ref().map(|line| cast(four_rows(line, rows)))
}

/// Adds the products of one block of 256 weights in each of four rows with the activations of T tokens to `sums`.
#[inline]
fn block256<L: ByteMatmul, B: Block256, const T: usize>(
    instructions: L,
    panel: &Panel,
    at: usize,
    rows: usize,
    input: &[OfBlock<'_>; T],
    sums: &mut Sums<T>,
) {
    let quants: &[[Line; 8]; 8] = &panel.quants.as_chunks().0.as_chunks().0[at];
    let (pairs_of_scales, minima) = panel.group_scales[at].split_at(8);
    let small = const { is_small(B::MAX_QUANT, B::OFFSET) };
    let mut totals = [vdupq_n_s32(0); T];
    for (pair, lines) in quants.iter().enumerate() {
        let scales = four_rows(&pairs_of_scales[pair], rows);
        // Each lane has the scales of two groups.
        let scales = [vshrq_n_s32::<16>(vshlq_n_s32::<16>(scales)), vshrq_n_s32::<16>(scales)];
        let mut group = [vdupq_n_s32(0); T];
        for (half, lines) in lines.as_chunks::<4>().0.iter().enumerate() {
            let values = input.each_ref().map(|token| &token.quants[2 * pair + half]);
            instructions.multiply_columns(columns(lines, rows), values, small, &mut group);
            if B::GROUP_LENGTH == 16 || half == 1 {
                instructions.add_scaled(&mut totals, &group, scales[half]);
                group = [vdupq_n_s32(0); T];
            }
        }
    }
    let totals = instructions.by_token(totals);
    let (scale, minimum) =
        (cast(four_rows(&panel.scales[at], rows)), cast(four_rows(&panel.minima[at], rows)));
    for t in 0..T {
        let sums = &mut sums[t].as_chunks_mut::<4>().0[rows];
        let factors = vmulq_n_f32(scale, input[t].scale);
        let mut floats = vfmaq_f32(cast(*sums), factors, vcvtq_f32_s32(totals[t]));
        if B::HAS_MINIMUM {
            let factors = vmulq_n_f32(minimum, input[t].scale);
            let off = weighted_sums(minima, rows, input[t].sums);
            floats = vfmsq_f32(floats, factors, vcvtq_f32_s32(off));
        }
        *sums = cast(floats);
    }
}

/// Adds the products of one block of 32 weights in each of four rows with the activations of T tokens to `sums`.
#[inline]
fn block32<L: ByteMatmul, B: Block32, const T: usize>(
    instructions: L,
    panel: &Panel,
    at: usize,
    rows: usize,
    block: usize,
    input: &[QuantisedRow<'_>; T],
    sums: &mut Sums<T>,
) {
    let quants: &[[Line; 4]; 2] = &panel.quants.as_chunks().0.as_chunks().0[at];
    let small = const { is_small(B::MAX_QUANT, B::OFFSET) };
    let mut totals = [vdupq_n_s32(0); T];
    for (half, lines) in quants.iter().enumerate() {
        let values = input.each_ref().map(|token| &token.quants.as_chunks().0[2 * block + half]);
        instructions.multiply_columns(columns(lines, rows), values, small, &mut totals);
    }
    let totals = instructions.by_token(totals);
    let (scale, minimum) =
        (cast(four_rows(&panel.scales[at], rows)), cast(four_rows(&panel.minima[at], rows)));
    for t in 0..T {
        let sums = &mut sums[t].as_chunks_mut::<4>().0[rows];
        let factors = vmulq_n_f32(scale, input[t].scales[block]);
        let mut floats = vfmaq_f32(cast(*sums), factors, vcvtq_f32_s32(totals[t]));
        if B::HAS_MINIMUM {
            let factors = vmulq_n_f32(minimum, input[t].scales[block]);
            floats = vfmaq_f32(floats, factors, vdupq_n_f32(f32::from(input[t].sums[block])));
        }
        *sums = cast(floats);
    }
}

/// Returns, for each of four rows, the sum of the products of its minima and the activation sums of a token.
#[inline]
fn weighted_sums(minima: &[Line], rows: usize, sums: &[[i16; 2]; 8]) -> int32x4_t {
    let (mut low, mut high) = (vdupq_n_s32(0), vdupq_n_s32(0));
    for (pair, sums) in minima.iter().zip(sums) {
        let pair = cast(four_rows(pair, rows));
        let sums = cast(vdupq_n_s32(cast(*sums)));
        low = vmlal_s16(low, vget_low_s16(pair), vget_low_s16(sums));
        high = vmlal_high_s16(high, pair, sums);
    }
    vpaddq_s32(low, high)
}

/// Subtracts `offset` from the unpacked quants of the panel and interleaves them, so that each line has four columns of
/// all rows. If `L::ROWS_OF_EIGHT` is set, each pair of lines has eight columns of all rows.
#[inline]
fn interleave<L: ByteMatmul>(panel: &mut Panel, codebook: Option<Codebook>, columns: usize, offset: u8) {
    let Panel { unpacked, quants, .. } = panel;
    for (at, lines) in quants.as_chunks_mut::<4>().0.iter_mut().enumerate().take(columns / 16) {
        for (four, rows) in unpacked.as_chunks::<4>().0.iter().enumerate() {
            let signed = rows.each_ref().map(|row| {
                let mut numbers = cast(row.as_chunks::<16>().0[at]);
                if let Some(codebook) = codebook {
                    numbers = vqtbl1q_u8(cast(codebook), numbers);
                }
                cast(vsubq_u8(numbers, vdupq_n_u8(offset)))
            });
            let columns = transpose(signed);
            store_all(if L::ROWS_OF_EIGHT { rows_of_eight(columns) } else { columns }, lines, four);
        }
    }
}

/// Interleaves the unpacked scales and minima of a block, so that each line has two scales, or two minima, of all rows.
#[inline]
fn interleave_scales(unpacked: &[[i8; 32]; PANEL_ROWS], lines: &mut [Line; 16]) {
    for (at, lines) in lines.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        for (four, rows) in unpacked.as_chunks::<4>().0.iter().enumerate() {
            let wide = rows.each_ref().map(|row| {
                let numbers = cast(row.as_chunks::<16>().0[at / 2]);
                cast(if at % 2 == 0 { vmovl_s8(vget_low_s8(numbers)) } else { vmovl_high_s8(numbers) })
            });
            store_all(transpose(wide), lines, four);
        }
    }
}

#[inline]
fn store_all(values: [int32x4_t; 4], lines: &mut [Line; 4], rows: usize) {
    for (line, value) in lines.iter_mut().zip(values) {
        line.0.as_chunks_mut::<4>().0[rows] = cast(value);
    }
}

/// Transposes a matrix of four by four 32-bit elements.
#[inline]
fn transpose(rows: [int32x4_t; 4]) -> [int32x4_t; 4] {
    let [a, b, c, d] = rows;
    let (even, odd) = ([vtrn1q_s32(a, b), vtrn1q_s32(c, d)], [vtrn2q_s32(a, b), vtrn2q_s32(c, d)]);
    let (even, odd): ([int64x2_t; 2], [int64x2_t; 2]) = (cast(even), cast(odd));
    cast([
        vtrn1q_s64(even[0], even[1]),
        vtrn1q_s64(odd[0], odd[1]),
        vtrn2q_s64(even[0], even[1]),
        vtrn2q_s64(odd[0], odd[1]),
    ])
}
