//! A panel times a tile of tokens, in AVX2.
//!
//! A line is two registers of eight rows. `maddubs` multiplies four unsigned weights of each row by four signed
//! activations, which come from memory by a broadcast, and adds neighbours in 16 bits. Several such products are
//! added up in 16 bits before `madd` multiplies them by their scale and adds neighbours in 32 bits: as many as
//! cannot overflow, 2 * 127 * the largest quant each, eight of four-bit weights, four of five bits, two of six.
//! Eight-bit weights are stored 128 above themselves. They lose that, their magnitude is the unsigned side and their
//! sign goes to the activations; no two of these products can be added in 16 bits, but one fits: 2 * 127 * 128.
//!
//! Bounds: a group's sum in 32 bits is at most 32 * 128 * 127 * 128 = 6.7e7 and a block's at most 5.3e8.

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::x86_64::*;
use std::array;
use std::ops::Range;

use bytemuck::Pod;

use super::integers::{Block32, Block256, CODEBOOK};
use super::{COLUMNS, Line, Panel, PanelKernel, ROWS, multiply, pack};
use crate::activations::QuantisedRow;
use crate::product::Tile;

/// Computes all rows and tokens of a tile, whose format must satisfy [`is_profitable`](super::is_profitable).
///
/// # Safety
/// The processor has AVX2, FMA and F16C, and no other thread writes these rows.
pub(crate) unsafe fn all_rows(tile: Tile<'_>) {
    // SAFETY: the caller's promise.
    unsafe { multiply::<Avx2, 4>(tile) };
}

/// AVX2, FMA and F16C.
struct Avx2;

impl PanelKernel for Avx2 {
    pack! { "avx2,fma,f16c" }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn multiply256<B: Block256, const T: usize>(
        panel: &Panel,
        blocks: Range<usize>,
        input: &[QuantisedRow<'_>; T],
        sums: &mut [[f32; ROWS]; T],
    ) {
        match products_in_16_bits(B::LARGEST, B::GROUP / 4) {
            8 => multiply256::<B, 8, T>(panel, blocks, input, sums),
            4 => multiply256::<B, 4, T>(panel, blocks, input, sums),
            2 => multiply256::<B, 2, T>(panel, blocks, input, sums),
            _ => multiply256::<B, SIGNED, T>(panel, blocks, input, sums),
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn multiply32<B: Block32, const T: usize>(
        panel: &Panel,
        blocks: Range<usize>,
        input: &[QuantisedRow<'_>; T],
        sums: &mut [[f32; ROWS]; T],
    ) {
        match products_in_16_bits(B::LARGEST, 8) {
            8 => multiply32::<B, 8, T>(panel, blocks, input, sums),
            4 => multiply32::<B, 4, T>(panel, blocks, input, sums),
            2 => multiply32::<B, 2, T>(panel, blocks, input, sums),
            _ => multiply32::<B, SIGNED, T>(panel, blocks, input, sums),
        }
    }
}

/// Products of four columns that are added up in 16 bits, where weights are of eight bits and signed.
const SIGNED: usize = 1;

/// How many products of four columns can be added up in 16 bits, of as many as `most`.
const fn products_in_16_bits(largest: i32, most: usize) -> usize {
    let mut count = most;
    while count > SIGNED && 2 * 127 * largest * count as i32 > i16::MAX as i32 {
        count /= 2;
    }
    count
}

/// Two registers of eight rows.
type Pair = [__m256i; 2];

#[inline]
#[target_feature(enable = "avx2")]
fn load(line: &Line) -> Pair {
    let [low, high] = line.0.as_chunks::<8>().0 else { unreachable!("16 are twice 8") };
    // SAFETY: loads of the 32 bytes that each reference covers.
    unsafe { [_mm256_loadu_si256(low.as_ptr().cast()), _mm256_loadu_si256(high.as_ptr().cast())] }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_floats(line: &[f32; ROWS]) -> [__m256; 2] {
    // SAFETY: loads of the 64 bytes that the reference covers.
    unsafe { [_mm256_loadu_ps(line.as_ptr()), _mm256_loadu_ps(line[8..].as_ptr())] }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store_floats(line: &mut [f32; ROWS], values: [__m256; 2]) {
    // SAFETY: stores of the 64 bytes that the reference covers.
    unsafe {
        _mm256_storeu_ps(line.as_mut_ptr(), values[0]);
        _mm256_storeu_ps(line[8..].as_mut_ptr(), values[1]);
    }
}

/// Two or four neighbouring numbers of a token, 32 bits in total, for all rows.
#[inline]
#[target_feature(enable = "avx2")]
fn broadcast<N: Pod>(neighbours: &N) -> __m256i {
    _mm256_set1_epi32(bytemuck::pod_read_unaligned(bytemuck::bytes_of(neighbours)))
}

/// Lays out what was unpacked, four columns a line.
#[inline]
#[target_feature(enable = "avx2")]
fn interleave(
    unpacked: &[[u8; COLUMNS]; ROWS],
    from_codebook: bool,
    columns: usize,
    lines: &mut [Line; COLUMNS / 4],
) {
    // SAFETY: a load of the 16 bytes that the array has.
    let codebook = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(CODEBOOK.as_ptr().cast()) });
    for (at, lines) in lines.as_chunks_mut::<8>().0.iter_mut().enumerate().take(columns / 32) {
        for (half, eight) in unpacked.as_chunks::<8>().0.iter().enumerate() {
            let mut rows = [_mm256_setzero_si256(); 8];
            for (row, bytes) in rows.iter_mut().zip(eight) {
                let bytes: &[u8; 32] = &bytes.as_chunks().0[at];
                // SAFETY: a load of the 32 bytes that the reference covers.
                *row = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
                if from_codebook {
                    *row = _mm256_shuffle_epi8(codebook, *row);
                }
            }
            store_all(&transpose(&rows), lines, half);
        }
    }
}

/// Interleaves the unpacked scales, two values per line.
#[inline]
#[target_feature(enable = "avx2")]
fn interleave_scales(unpacked: &[[i8; 32]; ROWS], lines: &mut [Line; 16]) {
    for (at, lines) in lines.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        for (half, eight) in unpacked.as_chunks::<8>().0.iter().enumerate() {
            let mut rows = [_mm256_setzero_si256(); 8];
            for (row, numbers) in rows.iter_mut().zip(eight) {
                let numbers: &[i8; 16] = &numbers.as_chunks().0[at];
                // SAFETY: a load of the 16 bytes that the reference covers.
                *row = _mm256_cvtepi8_epi16(unsafe { _mm_loadu_si128(numbers.as_ptr().cast()) });
            }
            store_all(&transpose(&rows), lines, half);
        }
    }
}

/// Writes one half of each line.
#[inline]
#[target_feature(enable = "avx2")]
fn store_all(values: &[__m256i; 8], lines: &mut [Line; 8], half: usize) {
    for (line, value) in lines.iter_mut().zip(values) {
        let rows = &mut line.0.as_chunks_mut::<8>().0[half];
        // SAFETY: a store of the 32 bytes that the reference covers.
        unsafe { _mm256_storeu_si256(rows.as_mut_ptr().cast(), *value) };
    }
}

/// A matrix of eight by eight 32-bit numbers, turned about its diagonal.
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

/// Sixteen numbers of each row, times a token's sums of sixteen activations.
#[inline]
#[target_feature(enable = "avx2")]
fn weighted_sums(numbers: &[Line], sums: &[[i16; 2]]) -> Pair {
    let mut totals = [_mm256_setzero_si256(); 2];
    for (pair, sums) in numbers.iter().zip(sums) {
        let (pair, sums) = (load(pair), broadcast(sums));
        for (total, pair) in totals.iter_mut().zip(pair) {
            *total = _mm256_add_epi32(*total, _mm256_madd_epi16(pair, sums));
        }
    }
    totals
}

/// Adds products of `FOURS` lines and T tokens in 16 bits, and then, times `scales`, to `totals`.
///
/// Signed weights are read as they are and take their offset with them; others keep it.
#[inline]
#[target_feature(enable = "avx2")]
fn add_products<const FOURS: usize, const T: usize>(
    lines: &[Line; FOURS],
    activations: &[&[[i8; 4]; FOURS]; T],
    scales: Pair,
    totals: &mut [Pair; T],
) {
    let mut dots = [[_mm256_setzero_si256(); 2]; T];
    for four in 0..FOURS {
        let mut weights = load(&lines[four]);
        if FOURS == SIGNED {
            let offset = _mm256_set1_epi8(i8::MIN);
            weights = [_mm256_xor_si256(weights[0], offset), _mm256_xor_si256(weights[1], offset)];
        }
        for t in 0..T {
            let values = broadcast(&activations[t][four]);
            for half in 0..2 {
                let products = if FOURS == SIGNED {
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

/// Duplicates the lower, or the upper, 16-bit number of each lane.
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

/// The integers of a block of sixteen rows and T tokens: weights times scales times activations.
#[inline]
#[target_feature(enable = "avx2")]
fn products<B: Block256, const FOURS: usize, const T: usize>(
    quants: &[Line; 64],
    pairs_of_scales: &[Line],
    activations: &[&[[[i8; 4]; 8]; 8]; T],
) -> [Pair; T] {
    let mut totals = [[_mm256_setzero_si256(); 2]; T];
    for (pair, (scales, lines)) in pairs_of_scales.iter().zip(quants.as_chunks::<8>().0).enumerate() {
        let scales = load(scales);
        for (part, lines) in lines.as_chunks::<FOURS>().0.iter().enumerate() {
            let scales = if B::GROUP == 32 { scales } else { twice(scales, part * FOURS >= 4) };
            let mut values = [activations[0][pair].as_chunks::<FOURS>().0; T];
            for t in 0..T {
                values[t] = activations[t][pair].as_chunks::<FOURS>().0;
            }
            add_products(lines, &array::from_fn(|t| &values[t][part]), scales, &mut totals);
        }
    }
    totals
}

/// T tokens on a panel of some blocks.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn multiply256<B: Block256, const FOURS: usize, const T: usize>(
    panel: &Panel,
    blocks: Range<usize>,
    input: &[QuantisedRow<'_>; T],
    sums: &mut [[f32; ROWS]; T],
) {
    let mut activations = [input[0].quants.as_chunks::<4>().0.as_chunks::<8>().0.as_chunks::<8>().0; T];
    let mut sums_of = [input[0].sums.as_chunks::<2>().0.as_chunks::<8>().0; T];
    for t in 0..T {
        activations[t] = input[t].quants.as_chunks::<4>().0.as_chunks::<8>().0.as_chunks::<8>().0;
        sums_of[t] = input[t].sums.as_chunks::<2>().0.as_chunks::<8>().0;
    }
    for (at, block) in blocks.enumerate() {
        let quants: &[Line; 64] = &panel.quants.as_chunks().0[at];
        let (pairs_of_scales, minima) = panel.group_scales[at].split_at(8);
        let values = array::from_fn(|t| &activations[t][block]);
        let totals = products::<B, FOURS, T>(quants, pairs_of_scales, &values);
        let (block_scale, block_minimum) = (load(&panel.scales[at]), load(&panel.minima[at]));
        for t in 0..T {
            let factor = _mm256_set1_ps(input[t].scales[block]);
            let mut floats = load_floats(&sums[t]);
            let mut total = totals[t];
            if B::OFFSET != 0 && FOURS != SIGNED {
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
            if B::MINIMA {
                let off = weighted_sums(minima, &sums_of[t][block]);
                for half in 0..2 {
                    let minimum = _mm256_mul_ps(_mm256_castsi256_ps(block_minimum[half]), factor);
                    floats[half] = _mm256_fnmadd_ps(minimum, _mm256_cvtepi32_ps(off[half]), floats[half]);
                }
            }
            store_floats(&mut sums[t], floats);
        }
    }
}

/// T tokens on a panel of some blocks.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn multiply32<B: Block32, const FOURS: usize, const T: usize>(
    panel: &Panel,
    blocks: Range<usize>,
    input: &[QuantisedRow<'_>; T],
    sums: &mut [[f32; ROWS]; T],
) {
    let ones = [_mm256_set1_epi16(1); 2];
    for (at, block) in blocks.enumerate() {
        let quants: &[Line; 8] = &panel.quants.as_chunks().0[at];
        let mut totals = [[_mm256_setzero_si256(); 2]; T];
        for (part, lines) in quants.as_chunks::<FOURS>().0.iter().enumerate() {
            let mut values = [input[0].quants.as_chunks::<4>().0.as_chunks::<FOURS>().0; T];
            for t in 0..T {
                values[t] = &input[t].quants.as_chunks::<4>().0.as_chunks::<FOURS>().0[8 / FOURS * block..];
            }
            add_products(lines, &array::from_fn(|t| &values[t][part]), ones, &mut totals);
        }
        let (block_scale, block_minimum) = (load(&panel.scales[at]), load(&panel.minima[at]));
        for t in 0..T {
            let factor = _mm256_set1_ps(input[t].scales[block]);
            let sum = i32::from(input[t].sums[block]);
            let mut floats = load_floats(&sums[t]);
            for half in 0..2 {
                let mut total = totals[t][half];
                if FOURS != SIGNED {
                    total = _mm256_sub_epi32(total, _mm256_set1_epi32(B::OFFSET * sum));
                }
                let scale = _mm256_mul_ps(_mm256_castsi256_ps(block_scale[half]), factor);
                floats[half] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(total), floats[half]);
                if B::MINIMA {
                    let minimum = _mm256_mul_ps(_mm256_castsi256_ps(block_minimum[half]), factor);
                    floats[half] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(sum as f32), floats[half]);
                }
            }
            store_floats(&mut sums[t], floats);
        }
    }
}
