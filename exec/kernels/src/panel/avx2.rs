//! Multiplication of a panel by a tile of tokens, in AVX2.
//!
//! A `Line` is two registers of eight rows. `maddubs` multiplies four unsigned weights of each row by four signed
//! activations, which are broadcast from memory, and adds adjacent products in 16 bits. Several 16-bit sums are added
//! before `madd` multiplies them by their scale and adds adjacent results in 32 bits. A sum of two products is at most
//! 2 * 127 times the maximum quant. So eight sums fit in 16 bits for four-bit weights, four for five-bit weights, and
//! two for six-bit weights.
//!
//! Weights of seven or eight bits are packed with an offset of 128. The kernel subtracts the offset, and moves the sign
//! of each weight to the activations, because `maddubs` needs unsigned weights. One sum of two products then fits in 16
//! bits (2 * 127 * 128), but two sums do not.
//!
//! Bounds: the sum of a group in 32 bits is at most 32 * 128 * 127 * 128 = 6.7e7, and that of a block 5.3e8.

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::x86_64::*;
use std::array;
use std::ops::Range;

use bytemuck::{Pod, must_cast};

use super::unpack::{Block32, Block256, Codebook, UnpackBytes, Words, register_words};
use super::{
    Line, PANEL_ROWS, Panel, PanelKernel, Sums, Tile, adjacent_stored, copy_stored, multiply, pack_scales,
    panel_kernel, unpack,
};
use crate::avx2::{load as load_one, load_half};
use crate::blocks::ScaledBlock;
use crate::matmul::MatmulTask;
use crate::x86_64::Avx2;

/// Computes a part of a matmul. The weight format must satisfy [`is_profitable`](super::is_profitable).
pub(crate) fn matmul(avx2: Avx2, task: MatmulTask<'_, '_>) {
    multiply::<_, 4>(avx2, task);
}

panel_kernel! { Avx2, Pair, "avx2,fma,f16c" }

/// Implements [`PanelKernel::multiply256`].
#[inline]
#[target_feature(enable = "avx2,fma")]
fn multiply256<B: Block256, const T: usize>(tile: &Tile<'_, T>, sums: &mut Sums<T>) {
    match lines_in_16_bits(B::MAX_QUANT, B::GROUP_LENGTH / 4) {
        8 => multiply_lines256::<B, 8, T>(tile, sums),
        4 => multiply_lines256::<B, 4, T>(tile, sums),
        2 => multiply_lines256::<B, 2, T>(tile, sums),
        _ => multiply_lines256::<B, EIGHT_BIT_LINES, T>(tile, sums),
    }
}

/// Implements [`PanelKernel::multiply32`].
#[inline]
#[target_feature(enable = "avx2,fma")]
fn multiply32<B: Block32, const T: usize>(tile: &Tile<'_, T>, sums: &mut Sums<T>) {
    match lines_in_16_bits(B::MAX_QUANT, 8) {
        8 => multiply_lines32::<B, 8, T>(tile, sums),
        4 => multiply_lines32::<B, 4, T>(tile, sums),
        2 => multiply_lines32::<B, 2, T>(tile, sums),
        _ => multiply_lines32::<B, EIGHT_BIT_LINES, T>(tile, sums),
    }
}

/// Number of lines whose products fit in a 16-bit sum if weights have seven or eight bits. Kernels that add this number
/// of lines first subtract the offset of the weights.
const EIGHT_BIT_LINES: usize = 1;

/// Returns the number of lines, at most `max_lines`, whose products fit in a 16-bit sum for quants up to `max_quant`.
const fn lines_in_16_bits(max_quant: i32, max_lines: usize) -> usize {
    let mut count = max_lines;
    while count > EIGHT_BIT_LINES && 2 * 127 * max_quant * count as i32 > i16::MAX as i32 {
        count /= 2;
    }
    count
}

/// Two registers for the sixteen rows of a panel, eight rows in each.
type Pair = [__m256i; 2];

#[inline]
#[target_feature(enable = "avx2")]
fn load(line: &Line) -> Pair {
    let [low, high] = line.0.as_chunks::<8>().0 else { unreachable!("16 are twice 8") };
    [load_one(low), load_one(high)]
}

/// Broadcasts two or four adjacent values of a token, 32 bits in total, to all lanes of a register.
#[inline]
#[target_feature(enable = "avx2")]
fn broadcast<N: Pod>(values: &N) -> __m256i {
    _mm256_set1_epi32(must_cast(*values))
}

register_words! { Pair:
    fn and(self, mask: u32) => {
        let mask = _mm256_set1_epi32(mask.cast_signed());
        [_mm256_and_si256(self[0], mask), _mm256_and_si256(self[1], mask)]
    }
    fn or(self, other: Self) => [_mm256_or_si256(self[0], other[0]), _mm256_or_si256(self[1], other[1])]
    fn xor(self, mask: u32) => {
        let mask = _mm256_set1_epi32(mask.cast_signed());
        [_mm256_xor_si256(self[0], mask), _mm256_xor_si256(self[1], mask)]
    }
    fn shift_left(self, bits: u32) => {
        let bits = _mm_cvtsi32_si128(bits.cast_signed());
        [_mm256_sll_epi32(self[0], bits), _mm256_sll_epi32(self[1], bits)]
    }
    fn shift_right(self, bits: u32) => {
        let bits = _mm_cvtsi32_si128(bits.cast_signed());
        [_mm256_srl_epi32(self[0], bits), _mm256_srl_epi32(self[1], bits)]
    }
}

/// Interleaves the first `count` bytes of the rows, so that each line has four bytes of all rows.
#[inline]
#[target_feature(enable = "avx2")]
fn interleave(rows: &[&[u8]; PANEL_ROWS], lines: &mut [Line], count: usize) {
    for (at, lines) in lines.as_chunks_mut::<8>().0.iter_mut().enumerate().take(count.div_ceil(32)) {
        for (half, eight) in rows.as_chunks::<8>().0.iter().enumerate() {
            let mut parts = [_mm256_setzero_si256(); 8];
            for (part, row) in parts.iter_mut().zip(eight) {
                *part = load_one(&row.as_chunks::<32>().0[at]);
            }
            store_all(&transpose(&parts), lines, half);
        }
    }
}

/// Replaces codebook indices by the entries of the codebook.
#[inline]
#[target_feature(enable = "avx2")]
fn look_up(codebook: &Codebook, quants: &mut [Line]) {
    let table = _mm256_broadcastsi128_si256(load_half(codebook));
    for half in quants.iter_mut().flat_map(|line| line.0.as_chunks_mut::<8>().0) {
        *half = must_cast(_mm256_shuffle_epi8(table, load_one(half)));
    }
}

/// Interleaves the unpacked scales and minima of a block, so that each line has two scales, or two minima, of all rows.
#[inline]
#[target_feature(enable = "avx2")]
fn interleave_scales(unpacked: &[[i8; 32]; PANEL_ROWS], lines: &mut [Line; 16]) {
    for (at, lines) in lines.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        for (half, eight) in unpacked.as_chunks::<8>().0.iter().enumerate() {
            let mut rows = [_mm256_setzero_si256(); 8];
            for (row, numbers) in rows.iter_mut().zip(eight) {
                *row = _mm256_cvtepi8_epi16(load_half(&numbers.as_chunks::<16>().0[at]));
            }
            store_all(&transpose(&rows), lines, half);
        }
    }
}

/// Converts the f16 numbers in the lower halves of the lanes to floats times `factor`, those in the upper halves to
/// floats.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn from_halves(line: &Line, factor: f32) -> [Line; 2] {
    let [first, last] = load(line);
    let lower = _mm256_set1_epi32(0xffff);
    let floats = |first, last| {
        // Packing works on each half of the registers.
        let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(first, last));
        let last = _mm256_extracti128_si256::<1>(packed);
        [_mm256_cvtph_ps(_mm256_castsi256_si128(packed)), _mm256_cvtph_ps(last)]
    };
    let scales = floats(_mm256_and_si256(first, lower), _mm256_and_si256(last, lower));
    let minima = floats(_mm256_srli_epi32::<16>(first), _mm256_srli_epi32::<16>(last));
    let factor = _mm256_set1_ps(factor);
    [must_cast(scales.map(|scales| _mm256_mul_ps(scales, factor))), must_cast(minima)]
}

/// Stores one register in the lower (0) or upper (1) half of each of eight lines.
#[inline]
#[target_feature(enable = "avx2")]
fn store_all(values: &[__m256i; 8], lines: &mut [Line; 8], half: usize) {
    for (line, value) in lines.iter_mut().zip(values) {
        line.0.as_chunks_mut::<8>().0[half] = must_cast(*value);
    }
}

/// Transposes a matrix of eight by eight 32-bit elements.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose(rows: &[__m256i; 8]) -> [__m256i; 8] {
    let mut fours = *rows;
    for at in [0, 4] {
        let low = [
            _mm256_unpacklo_epi32(rows[at], rows[at + 1]),
            _mm256_unpacklo_epi32(rows[at + 2], rows[at + 3]),
        ];
        let high = [
            _mm256_unpackhi_epi32(rows[at], rows[at + 1]),
            _mm256_unpackhi_epi32(rows[at + 2], rows[at + 3]),
        ];
        fours[at] = _mm256_unpacklo_epi64(low[0], low[1]);
        fours[at + 1] = _mm256_unpackhi_epi64(low[0], low[1]);
        fours[at + 2] = _mm256_unpacklo_epi64(high[0], high[1]);
        fours[at + 3] = _mm256_unpackhi_epi64(high[0], high[1]);
    }
    // Half h of `fours[4 * i + c]` is now column 4 * h + c of rows 4 * i..4 * i + 4.
    let mut columns = fours;
    for c in 0..4 {
        columns[c] = _mm256_permute2x128_si256::<0x20>(fours[c], fours[4 + c]);
        columns[4 + c] = _mm256_permute2x128_si256::<0x31>(fours[c], fours[4 + c]);
    }
    columns
}

/// Returns the dot product of the scales or minima of each row (`factors`) and the activation sums of a token.
#[inline]
#[target_feature(enable = "avx2")]
fn weighted_sums(factors: &[Line], sums: &[[i16; 2]]) -> Pair {
    let mut totals = [_mm256_setzero_si256(); 2];
    for (pair, sums) in factors.iter().zip(sums) {
        let (pair, sums) = (load(pair), broadcast(sums));
        for (total, pair) in totals.iter_mut().zip(pair) {
            *total = _mm256_add_epi32(*total, _mm256_madd_epi16(pair, sums));
        }
    }
    totals
}

/// Multiplies `LINES` lines by the activations of T tokens, sums the products in 16 bits, and adds the sums, times
/// `scales`, to `totals`. Subtracts the offset of the weights only if `LINES` is [`EIGHT_BIT_LINES`].
#[inline]
#[target_feature(enable = "avx2")]
fn add_products<const LINES: usize, const T: usize>(
    lines: &[Line; LINES],
    activations: &[&[[i8; 4]; LINES]; T],
    scales: Pair,
    totals: &mut [Pair; T],
) {
    let mut dots = [[_mm256_setzero_si256(); 2]; T];
    for four in 0..LINES {
        let mut weights = load(&lines[four]);
        if LINES == EIGHT_BIT_LINES {
            let offset = _mm256_set1_epi8(i8::MIN);
            weights = [_mm256_xor_si256(weights[0], offset), _mm256_xor_si256(weights[1], offset)];
        }
        for t in 0..T {
            let values = broadcast(&activations[t][four]);
            for half in 0..2 {
                let products = if LINES == EIGHT_BIT_LINES {
                    let values = _mm256_sign_epi8(values, weights[half]);
                    _mm256_maddubs_epi16(_mm256_abs_epi8(weights[half]), values)
                } else {
                    _mm256_maddubs_epi16(weights[half], values)
                };
                dots[t][half] = _mm256_add_epi16(dots[t][half], products);
            }
        }
    }
    for t in 0..T {
        for half in 0..2 {
            let products = _mm256_madd_epi16(dots[t][half], scales[half]);
            totals[t][half] = _mm256_add_epi32(totals[t][half], products);
        }
    }
}

/// Copies the upper 16-bit half of each 32-bit lane to the lower half, or the lower half to the upper half.
#[inline]
#[target_feature(enable = "avx2")]
fn twice(numbers: Pair, upper: bool) -> Pair {
    let order = if upper {
        [0x0706_0706_0302_0302, 0x0f0e_0f0e_0b0a_0b0a]
    } else {
        [0x0504_0504_0100_0100, 0x0d0c_0d0c_0908_0908]
    };
    let order = _mm256_set_epi64x(order[1], order[0], order[1], order[0]);
    [_mm256_shuffle_epi8(numbers[0], order), _mm256_shuffle_epi8(numbers[1], order)]
}

/// Returns, for sixteen rows and T tokens, the sum over a block of weight times integer scale times activation.
#[inline]
#[target_feature(enable = "avx2")]
fn products<B: Block256, const LINES: usize, const T: usize>(
    quants: &[Line; 64],
    pairs_of_scales: &[Line],
    activations: &[&[[[i8; 4]; 8]; 8]; T],
) -> [Pair; T] {
    let mut totals = [[_mm256_setzero_si256(); 2]; T];
    for (pair, (scales, lines)) in pairs_of_scales.iter().zip(quants.as_chunks::<8>().0).enumerate() {
        let scales = load(scales);
        for (part, lines) in lines.as_chunks::<LINES>().0.iter().enumerate() {
            let scales = if B::GROUP_LENGTH == 32 { scales } else { twice(scales, part * LINES >= 4) };
            let mut values = [activations[0][pair].as_chunks::<LINES>().0; T];
            for t in 0..T {
                values[t] = activations[t][pair].as_chunks::<LINES>().0;
            }
            add_products(lines, &array::from_fn(|t| &values[t][part]), scales, &mut totals);
        }
    }
    totals
}

/// Computes [`multiply256`]. Sums the products of `LINES` lines in 16 bits.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn multiply_lines256<B: Block256, const LINES: usize, const T: usize>(
    tile: &Tile<'_, T>,
    sums: &mut Sums<T>,
) {
    let Tile { panel, blocks, input } = tile;
    let mut activations = [input[0].quants.as_chunks::<4>().0.as_chunks::<8>().0.as_chunks::<8>().0; T];
    let mut sums_of = [input[0].sums.as_chunks::<2>().0.as_chunks::<8>().0; T];
    for t in 0..T {
        activations[t] = input[t].quants.as_chunks::<4>().0.as_chunks::<8>().0.as_chunks::<8>().0;
        sums_of[t] = input[t].sums.as_chunks::<2>().0.as_chunks::<8>().0;
    }
    for (at, block) in blocks.clone().enumerate() {
        let quants: &[Line; 64] = &panel.quants.as_chunks().0[at];
        let (pairs_of_scales, minima) = panel.group_scales[at].split_at(8);
        let values = array::from_fn(|t| &activations[t][block]);
        let totals = products::<B, LINES, T>(quants, pairs_of_scales, &values);
        let (block_scale, block_minimum) = (load(&panel.scales[at]), load(&panel.minima[at]));
        for t in 0..T {
            let factor = _mm256_set1_ps(input[t].scales[block]);
            let mut floats: [__m256; 2] = must_cast(sums[t]);
            let mut total = totals[t];
            if B::OFFSET != 0 && LINES != EIGHT_BIT_LINES {
                let off = weighted_sums(pairs_of_scales, &sums_of[t][block]);
                for half in 0..2 {
                    let off = _mm256_mullo_epi32(off[half], _mm256_set1_epi32(B::OFFSET));
                    total[half] = _mm256_sub_epi32(total[half], off);
                }
            }
            for half in 0..2 {
                let scale = _mm256_mul_ps(_mm256_castsi256_ps(block_scale[half]), factor);
                floats[half] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(total[half]), floats[half]);
            }
            if B::HAS_MINIMUM {
                let off = weighted_sums(minima, &sums_of[t][block]);
                for half in 0..2 {
                    let minimum = _mm256_mul_ps(_mm256_castsi256_ps(block_minimum[half]), factor);
                    floats[half] = _mm256_fnmadd_ps(minimum, _mm256_cvtepi32_ps(off[half]), floats[half]);
                }
            }
            sums[t] = must_cast(floats);
        }
    }
}

/// Computes [`multiply32`]. Sums the products of `LINES` lines in 16 bits.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn multiply_lines32<B: Block32, const LINES: usize, const T: usize>(tile: &Tile<'_, T>, sums: &mut Sums<T>) {
    let Tile { panel, blocks, input } = tile;
    let ones = [_mm256_set1_epi16(1); 2];
    for (at, block) in blocks.clone().enumerate() {
        let quants: &[Line; 8] = &panel.quants.as_chunks().0[at];
        let mut totals = [[_mm256_setzero_si256(); 2]; T];
        for (part, lines) in quants.as_chunks::<LINES>().0.iter().enumerate() {
            let mut values = [input[0].quants.as_chunks::<4>().0.as_chunks::<LINES>().0; T];
            for t in 0..T {
                values[t] = &input[t].quants.as_chunks::<4>().0.as_chunks::<LINES>().0[8 / LINES * block..];
            }
            add_products(lines, &array::from_fn(|t| &values[t][part]), ones, &mut totals);
        }
        let (block_scale, block_minimum) = (load(&panel.scales[at]), load(&panel.minima[at]));
        for t in 0..T {
            let factor = _mm256_set1_ps(input[t].scales[block]);
            let sum = i32::from(input[t].sums[block]);
            let mut floats: [__m256; 2] = must_cast(sums[t]);
            for half in 0..2 {
                let mut total = totals[t][half];
                if LINES != EIGHT_BIT_LINES {
                    total = _mm256_sub_epi32(total, _mm256_set1_epi32(B::OFFSET * sum));
                }
                let scale = _mm256_mul_ps(_mm256_castsi256_ps(block_scale[half]), factor);
                floats[half] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(total), floats[half]);
                if B::HAS_MINIMUM {
                    let minimum = _mm256_mul_ps(_mm256_castsi256_ps(block_minimum[half]), factor);
                    floats[half] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(sum as f32), floats[half]);
                }
            }
            sums[t] = must_cast(floats);
        }
    }
}
