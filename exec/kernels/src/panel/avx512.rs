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

use super::unpack::{Block32, Block256, Codebook, UnpackBytes, Words, register_words};
use super::{
    Line, PANEL_ROWS, Panel, PanelKernel, Sums, Tile, adjacent_stored, copy_stored, multiply, pack_scales,
    panel_kernel, unpack,
};
use crate::avx2;
use crate::avx512::add_pairs;
use crate::blocks::ScaledBlock;
use crate::interleaved::avx512::unpack_group;
use crate::matmul::MatmulTask;
use crate::x86_64::Avx512;

/// Computes a part of a matmul. The weight format must satisfy [`is_profitable`](super::is_profitable).
pub(crate) fn matmul(avx512: Avx512, task: MatmulTask<'_, '_>) {
    multiply::<_, 8>(avx512, task);
}

panel_kernel! { Avx512, __m512i, "avx512f,avx512bw,avx512vl,avx512vnni,f16c"
    fn unpack256<B: Block256>(panel: &mut Panel, group: &[u8], blocks: Range<usize>) {
        unpack_group::<B, 256>(panel, group, blocks);
    }

    fn unpack32<B: Block32>(panel: &mut Panel, group: &[u8], blocks: Range<usize>) {
        unpack_group::<B, 32>(panel, group, blocks);
    }
}

/// Implements [`PanelKernel::multiply256`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
fn multiply256<B: Block256, const T: usize>(tile: &Tile<'_, T>, sums: &mut Sums<T>) {
    let Tile { panel, blocks, input } = tile;
    let mut floats: [__m512; T] = sums.map(must_cast);
    for (at, block) in blocks.clone().enumerate() {
        let quants: &[Line; 64] = &panel.quants.as_chunks().0[at];
        let [pairs_of_scales, minima] = panel.group_scales[at].as_chunks::<8>().0 else {
            unreachable!("16 are twice 8")
        };
        let mut activations = [&input[0].quants.as_chunks::<4>().0.as_chunks::<64>().0[0]; T];
        let mut sums_of = [&input[0].sums.as_chunks::<2>().0.as_chunks::<8>().0[0]; T];
        let mut factors = [0.0; T];
        for t in 0..T {
            activations[t] = &input[t].quants.as_chunks().0.as_chunks().0[block];
            sums_of[t] = &input[t].sums.as_chunks().0.as_chunks().0[block];
            factors[t] = input[t].scales[block];
        }
        let mut totals = products::<B, T>(quants, pairs_of_scales, &activations);
        if B::OFFSET != 0 {
            let off = weighted_sums(pairs_of_scales, &sums_of);
            for t in 0..T {
                let off = _mm512_mullo_epi32(off[t], _mm512_set1_epi32(B::OFFSET));
                totals[t] = _mm512_sub_epi32(totals[t], off);
            }
        }
        let block_scale = must_cast(panel.scales[at]);
        for t in 0..T {
            let scale = _mm512_mul_ps(block_scale, _mm512_set1_ps(factors[t]));
            floats[t] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(totals[t]), floats[t]);
        }
        if B::HAS_MINIMUM {
            let block_minimum = must_cast(panel.minima[at]);
            let off = weighted_sums(minima, &sums_of);
            for t in 0..T {
                let minimum = _mm512_mul_ps(block_minimum, _mm512_set1_ps(factors[t]));
                floats[t] = _mm512_fnmadd_ps(minimum, _mm512_cvtepi32_ps(off[t]), floats[t]);
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
pub(crate) const fn fits_in_16_bits(max_quant: i32) -> bool {
    16 * 127 * max_quant <= i16::MAX as i32
}

/// Broadcasts two or four adjacent values of a token, 32 bits in total, to all lanes of a register.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn broadcast<N: Pod>(values: &N) -> __m512i {
    _mm512_set1_epi32(must_cast(*values))
}

register_words! { __m512i:
    fn and(self, mask: u32) => _mm512_and_si512(self, _mm512_set1_epi32(mask.cast_signed()))
    fn or(self, other: Self) => _mm512_or_si512(self, other)
    fn xor(self, mask: u32) => _mm512_xor_si512(self, _mm512_set1_epi32(mask.cast_signed()))
    fn shift_left(self, bits: u32) => _mm512_sll_epi32(self, _mm_cvtsi32_si128(bits.cast_signed()))
    fn shift_right(self, bits: u32) => _mm512_srl_epi32(self, _mm_cvtsi32_si128(bits.cast_signed()))
}

/// Interleaves the first `count` bytes of the rows, so that each line has four bytes of all rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn interleave(rows: &[&[u8]; PANEL_ROWS], lines: &mut [Line], count: usize) {
    for (at, lines) in lines.as_chunks_mut::<16>().0.iter_mut().enumerate().take(count.div_ceil(64)) {
        let mut parts = [_mm512_setzero_si512(); PANEL_ROWS];
        for (part, row) in parts.iter_mut().zip(rows) {
            *part = must_cast(row.as_chunks::<64>().0[at]);
        }
        *lines = must_cast(transpose(&parts));
    }
}

/// Replaces codebook indices by the entries of the codebook.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn look_up(codebook: &Codebook, quants: &mut [Line]) {
    let table = _mm512_broadcast_i32x4(avx2::load_half(codebook));
    for line in quants {
        *line = must_cast(_mm512_shuffle_epi8(table, must_cast(*line)));
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

/// Converts the f16 numbers in the lower halves of the lanes to floats times `factor`, those in the upper halves to
/// floats.
#[inline]
#[target_feature(enable = "avx512f")]
fn from_halves(line: &Line, factor: f32) -> [Line; 2] {
    let [lower, upper] = halves(must_cast(*line));
    [must_cast(_mm512_mul_ps(lower, _mm512_set1_ps(factor))), must_cast(upper)]
}

/// Converts the f16 numbers in the lower and in the upper halves of the lanes to floats.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn halves(line: __m512i) -> [__m512; 2] {
    [
        _mm512_cvtph_ps(_mm512_cvtepi32_epi16(line)),
        _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(line))),
    ]
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

/// Returns, for sixteen rows and T tokens, the dot product of the scales or minima of each row (`factors`) and the
/// activation sums of each token.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn weighted_sums<const T: usize>(factors: &[Line; 8], sums: &[&[[i16; 2]; 8]; T]) -> [__m512i; T] {
    let mut totals = [_mm512_setzero_si512(); T];
    for (pair, factors) in factors.iter().enumerate() {
        for t in 0..T {
            totals[t] = add_pairs(totals[t], must_cast(*factors), broadcast(&sums[t][pair]));
        }
    }
    totals
}

/// Returns, for sixteen rows and T tokens, the sum over a block of weight times integer scale times activation.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
fn products<B: Block256, const T: usize>(
    quants: &[Line; 64],
    pairs_of_scales: &[Line; 8],
    activations: &[&[[i8; 4]; 64]; T],
) -> [__m512i; T] {
    let mut totals = [_mm512_setzero_si512(); T];
    for (pair, lines) in quants.as_chunks::<8>().0.iter().enumerate() {
        let scales: __m512i = must_cast(pairs_of_scales[pair]);
        // Each lane has the scales of two groups of 16 weights. For a 16-bit product, the other one is zero.
        let scales = if fits_in_16_bits(B::MAX_QUANT) && B::GROUP_LENGTH == 16 {
            [_mm512_and_si512(scales, _mm512_set1_epi32(0xffff)), _mm512_srli_epi32::<16>(scales)]
        } else {
            [_mm512_srai_epi32::<16>(_mm512_slli_epi32::<16>(scales)), _mm512_srai_epi32::<16>(scales)]
        };
        let mut dots = [_mm512_setzero_si512(); T];
        for (four, line) in lines.iter().enumerate() {
            for t in 0..T {
                let values = broadcast(&activations[t][8 * pair + four]);
                dots[t] = _mm512_dpbusd_epi32(dots[t], must_cast(*line), values);
            }
            if four == 7 || (four == 3 && B::GROUP_LENGTH == 16) {
                let scales = scales[four / 4];
                for t in 0..T {
                    totals[t] = if fits_in_16_bits(B::MAX_QUANT) && B::GROUP_LENGTH == 16 {
                        add_pairs(totals[t], dots[t], scales)
                    } else {
                        _mm512_add_epi32(totals[t], _mm512_mullo_epi32(dots[t], scales))
                    };
                    dots[t] = _mm512_setzero_si512();
                }
            }
        }
    }
    totals
}
