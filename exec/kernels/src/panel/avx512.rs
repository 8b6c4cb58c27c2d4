//! Multiplication of a panel by a tile of tokens, in AVX-512 with VNNI.
//!
//! `vpdpbusd` multiplies four unsigned weights of each of sixteen rows by four signed activations and adds the
//! products in 32 bits. The activations of a token are broadcast from memory. Eight tokens share each load of
//! weights.
//!
//! Bounds: the sum of a group is at most 32 * 255 * 127 = 1.04e6, and that of a block 2.7e8, so nothing overflows.

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::x86_64::*;
use std::ops::Range;

use bytemuck::{Pod, must_cast};

use super::unpack::{Block32, Block256, Codebook};
use super::{Line, PANEL_ROWS, Panel, PanelKernel, Sums, Tile, multiply, panel_kernel};
use crate::avx2;
use crate::matmul::MatmulTask;
use crate::x86_64::Avx512;

/// Computes a part of a matmul. The weight format must satisfy [`is_profitable`](super::is_profitable).
pub(crate) fn matmul(avx512: Avx512, task: MatmulTask<'_, '_>) {
    multiply::<_, 8>(avx512, task);
}

panel_kernel! { Avx512 }

/// Implements [`PanelKernel::multiply256`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
fn multiply256<B: Block256, const T: usize>(tile: &Tile<'_, T>, sums: &mut Sums<T>) {
    let Tile { panel, blocks, input } = tile;
    let mut floats: [__m512; T] = sums.map(must_cast);
    for (at, block) in blocks.clone().enumerate() {
        let quants: &[Line; 64] = &panel.quants.as_chunks().0[at];
        let (pairs_of_scales, minima) = panel.group_scales[at].split_at(8);
        let mut activations = [&input[0].quants.as_chunks::<4>().0[..64]; T];
        let mut sums_of = [&input[0].sums.as_chunks::<2>().0[..8]; T];
        for t in 0..T {
            activations[t] = &input[t].quants.as_chunks::<4>().0[block * 64..][..64];
            sums_of[t] = &input[t].sums.as_chunks::<2>().0[block * 8..][..8];
        }
        let mut totals = products::<B, T>(quants, pairs_of_scales, &activations);
        let block_scale = must_cast(panel.scales[at]);
        let block_minimum = must_cast(panel.minima[at]);
        for t in 0..T {
            let factor = _mm512_set1_ps(input[t].scales[block]);
            if B::OFFSET != 0 {
                let off = weighted_sums(pairs_of_scales, sums_of[t]);
                let off = _mm512_mullo_epi32(off, _mm512_set1_epi32(B::OFFSET));
                totals[t] = _mm512_sub_epi32(totals[t], off);
            }
            let total = _mm512_cvtepi32_ps(totals[t]);
            floats[t] = _mm512_fmadd_ps(_mm512_mul_ps(block_scale, factor), total, floats[t]);
            if B::HAS_MINIMUM {
                let off = _mm512_cvtepi32_ps(weighted_sums(minima, sums_of[t]));
                floats[t] = _mm512_fnmadd_ps(_mm512_mul_ps(block_minimum, factor), off, floats[t]);
            }
        }
    }
    *sums = floats.map(must_cast);
}

/// Implements [`PanelKernel::multiply32`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
fn multiply32<B: Block32, const T: usize>(tile: &Tile<'_, T>, sums: &mut Sums<T>) {
    let Tile { panel, blocks, input } = tile;
    let mut floats: [__m512; T] = sums.map(must_cast);
    for (at, block) in blocks.clone().enumerate() {
        let quants: &[Line; 8] = &panel.quants.as_chunks().0[at];
        let mut activations = [input[0].quants.as_chunks::<4>().0; T];
        for t in 0..T {
            activations[t] = &input[t].quants.as_chunks::<4>().0[block * 8..][..8];
        }
        let mut dots = [_mm512_setzero_si512(); T];
        for four in 0..8 {
            let weights = must_cast(quants[four]);
            for t in 0..T {
                let values = broadcast(&activations[t][four]);
                dots[t] = _mm512_dpbusd_epi32(dots[t], weights, values);
            }
        }
        let block_scale = must_cast(panel.scales[at]);
        let block_minimum = must_cast(panel.minima[at]);
        for t in 0..T {
            let sum = i32::from(input[t].sums[block]);
            let total = _mm512_sub_epi32(dots[t], _mm512_set1_epi32(B::OFFSET * sum));
            let factor = _mm512_set1_ps(input[t].scales[block]);
            let scale = _mm512_mul_ps(block_scale, factor);
            floats[t] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(total), floats[t]);
            if B::HAS_MINIMUM {
                let minimum = _mm512_mul_ps(block_minimum, factor);
                floats[t] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(sum as f32), floats[t]);
            }
        }
    }
    *sums = floats.map(must_cast);
}

/// Whether the sum of 16 products of a quant up to `max_quant` and an activation fits in 16 bits.
const fn fits_in_16_bits(max_quant: i32) -> bool {
    16 * 127 * max_quant <= i16::MAX as i32
}

/// Broadcasts two or four adjacent values of a token, 32 bits in total, to all lanes of a register.
#[inline]
#[target_feature(enable = "avx512f")]
fn broadcast<N: Pod>(values: &N) -> __m512i {
    _mm512_set1_epi32(must_cast(*values))
}

/// Interleaves the unpacked quants of the panel, so that each line has four columns of all rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn interleave(panel: &mut Panel, codebook: Option<Codebook>, columns: usize) {
    let Panel { unpacked, quants, .. } = panel;
    let table = _mm512_broadcast_i32x4(avx2::load_half(&codebook.unwrap_or_default()));
    for (at, lines) in quants.as_chunks_mut::<16>().0.iter_mut().enumerate().take(columns.div_ceil(64)) {
        let mut rows = [_mm512_setzero_si512(); PANEL_ROWS];
        for (row, bytes) in rows.iter_mut().zip(&*unpacked) {
            *row = must_cast(bytes.as_chunks::<64>().0[at]);
            if codebook.is_some() {
                *row = _mm512_shuffle_epi8(table, *row);
            }
        }
        *lines = must_cast(transpose(&rows));
    }
}

/// Interleaves the unpacked scales and minima of a block, so that each line has two scales, or two minima, of all rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn interleave_scales(unpacked: &[[i8; 32]; PANEL_ROWS], lines: &mut [Line; 16]) {
    let mut rows = [_mm512_setzero_si512(); PANEL_ROWS];
    for (row, numbers) in rows.iter_mut().zip(unpacked) {
        *row = _mm512_cvtepi8_epi16(avx2::load(numbers));
    }
    *lines = must_cast(transpose(&rows));
}

#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(rows: &[__m512i; 16]) -> [__m512i; 16] {
    let mut fours = *rows;
    for at in (0..16).step_by(4) {
        let low = [
            _mm512_unpacklo_epi32(rows[at], rows[at + 1]),
            _mm512_unpacklo_epi32(rows[at + 2], rows[at + 3]),
        ];
        let high = [
            _mm512_unpackhi_epi32(rows[at], rows[at + 1]),
            _mm512_unpackhi_epi32(rows[at + 2], rows[at + 3]),
        ];
        fours[at] = _mm512_unpacklo_epi64(low[0], low[1]);
        fours[at + 1] = _mm512_unpackhi_epi64(low[0], low[1]);
        fours[at + 2] = _mm512_unpacklo_epi64(high[0], high[1]);
        fours[at + 3] = _mm512_unpackhi_epi64(high[0], high[1]);
    }
    // Quarter q of `fours[4 * i + c]` is now column 4 * q + c of rows 4 * i..4 * i + 4.
    let mut columns = fours;
    for c in 0..4 {
        let even = [
            _mm512_shuffle_i32x4::<0x88>(fours[c], fours[4 + c]),
            _mm512_shuffle_i32x4::<0x88>(fours[8 + c], fours[12 + c]),
        ];
        let odd = [
            _mm512_shuffle_i32x4::<0xdd>(fours[c], fours[4 + c]),
            _mm512_shuffle_i32x4::<0xdd>(fours[8 + c], fours[12 + c]),
        ];
        columns[c] = _mm512_shuffle_i32x4::<0x88>(even[0], even[1]);
        columns[4 + c] = _mm512_shuffle_i32x4::<0x88>(odd[0], odd[1]);
        columns[8 + c] = _mm512_shuffle_i32x4::<0xdd>(even[0], even[1]);
        columns[12 + c] = _mm512_shuffle_i32x4::<0xdd>(odd[0], odd[1]);
    }
    columns
}

/// Returns the dot product of the scales or minima of each row (`factors`) and the activation sums of a token.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn weighted_sums(factors: &[Line], sums: &[[i16; 2]]) -> __m512i {
    let mut total = _mm512_setzero_si512();
    for (pair, sums) in factors.iter().zip(sums) {
        total = _mm512_dpwssd_epi32(total, must_cast(*pair), broadcast(sums));
    }
    total
}

/// Returns, for sixteen rows and T tokens, the sum over a block of weight times integer scale times activation.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
fn products<B: Block256, const T: usize>(
    quants: &[Line; 64],
    pairs_of_scales: &[Line],
    activations: &[&[[i8; 4]]; T],
) -> [__m512i; T] {
    let mut totals = [_mm512_setzero_si512(); T];
    for (pair, pairs_of_sixteen) in pairs_of_scales.iter().zip(quants.as_chunks::<8>().0).enumerate() {
        let (pair_of_scales, lines) = pairs_of_sixteen;
        for half in 0..2 {
            let mut dots = [_mm512_setzero_si512(); T];
            for four in 4 * half..4 * half + 4 {
                let weights = must_cast(lines[four]);
                for t in 0..T {
                    let values = broadcast(&activations[t][8 * pair + four]);
                    dots[t] = _mm512_dpbusd_epi32(dots[t], weights, values);
                }
            }
            let scales = must_cast(*pair_of_scales);
            // Each lane has the scales of two groups. For a 16-bit product, select the scale of this half, with zero
            // in the upper 16 bits. For a 32-bit product, sign-extend it.
            let scales = match (fits_in_16_bits(B::MAX_QUANT), half) {
                (true, 0) => _mm512_and_si512(scales, _mm512_set1_epi32(0xffff)),
                (true, _) => _mm512_srli_epi32::<16>(scales),
                (false, 0) => _mm512_srai_epi32::<16>(_mm512_slli_epi32::<16>(scales)),
                (false, _) => _mm512_srai_epi32::<16>(scales),
            };
            for t in 0..T {
                totals[t] = if fits_in_16_bits(B::MAX_QUANT) {
                    _mm512_dpwssd_epi32(totals[t], dots[t], scales)
                } else {
                    _mm512_add_epi32(totals[t], _mm512_mullo_epi32(dots[t], scales))
                };
            }
        }
    }
    totals
}
