//! Multiplication of interleaved weights by up to eight tokens at a time, in AVX-512 with VNNI.
//!
//! Weights are unpacked in registers, once for all tokens. The bounds of the sums are those of panels.

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::x86_64::*;
use std::ops::Range;

use bytemuck::must_cast;

use super::{GROUP_ROWS, rest_bytes, unit_blocks};
use crate::activations::QuantisedRow;
use crate::avx512::{add_pairs, compute_here, for_each};
use crate::blocks;
use crate::matmul::{MatmulTask, for_tiles};
use crate::panel::Panel;
use crate::panel::avx512::{broadcast, fits_in_16_bits, halves};
use crate::panel::unpack::{Block32, Block256, Interleaved, Stored, UnpackBytes};
use crate::x86_64::{Avx512, methods_with};

/// Number of tokens from which on weights are prefetched. A single token is bound by reading, and processors read one
/// sequence of rising addresses fastest by themselves. With more tokens they do not look ahead far enough. With two
/// tokens and one thread, Q4_K and Q4_0 lose a little and other formats gain more; with two threads, Q4_K gains too.
///
/// source: measured, see docs/studies/kernels/interleaved.md
const PREFETCH_TOKENS: usize = 2;

/// How far weights are prefetched.
///
/// source: measured, as above
const PREFETCH_BYTES: usize = 12 << 10;

macro_rules! multiply_groups {
    ($($name:ident: $block:ident, $row:ident, $dots:ident;)+) => {
        impl Avx512 {
            methods_with! { Avx512: $(
                /// Computes a part of a matmul with interleaved weights in blocks of one length.
                fn $name<B: $block>(task: MatmulTask<'_, '_>) {
                    let inputs: Vec<_> = (0..task.input.tokens()).map(|token| task.input.$row(token)).collect();
                    for first in task.out.rows().step_by(GROUP_ROWS) {
                        let group = task.matrix.slice(first, GROUP_ROWS).bytes;
                        let mut at = 0;
                        for_tiles!(8 4 3 2 1: inputs, at, |tile| {
                            for (t, dots) in $dots::<B, _>(group, tile).iter().enumerate() {
                                task.out.set_rows(at + t, first, dots);
                            }
                        });
                    }
                }
            )+ }
        }
    };
}
multiply_groups! {
    multiply_groups256: Block256, row256, dots256;
    multiply_groups32: Block32, row32, dots32;
}

/// Computes a part of a matmul with interleaved weights.
pub(super) fn multiply(avx512: Avx512, task: MatmulTask<'_, '_>) {
    macro_rules! plain {
        ($dot:ident) => {
            unreachable!("{} is not interleaved", task.matrix.format)
        };
    }
    macro_rules! blocks {
        ($block:ident, row32, $dot:ident) => {
            avx512.multiply_groups32::<blocks::$block>(task)
        };
        ($block:ident, row256, $dot:ident) => {
            avx512.multiply_groups256::<blocks::$block>(task)
        };
    }
    for_format!(task.matrix.format, plain, blocks);
}

/// Adjacent blocks of sixteen rows whose rests make a word, or fewer at the end of the rows.
struct Unit<'a> {
    /// The rests of each row.
    rests: __m512i,
    /// The words of all blocks.
    words: &'a [u8],
}

impl<'a> Unit<'a> {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn new<B: UnpackBytes<N>, const N: usize>(bytes: &'a [u8]) -> Unit<'a> {
        let count = bytes.len() / (GROUP_ROWS * size_of::<B>());
        let rest = rest_bytes::<B, N>() * count;
        let (rests, words) = bytes.split_at(GROUP_ROWS * rest);
        let rests = match rest {
            0 => _mm512_setzero_si512(),
            4 => rests.word(0),
            _ => {
                let mut lanes = [[0; 4]; GROUP_ROWS];
                for (lane, rests) in lanes.iter_mut().zip(rests.chunks_exact(rest)) {
                    lane[..rest].copy_from_slice(rests);
                }
                must_cast(lanes)
            }
        };
        Unit { rests, words }
    }

    /// Returns the scales and the minima of block `at` of the unit, whose words are `stored`.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn scales<B: UnpackBytes<N>, const N: usize>(
        &self,
        stored: Interleaved<'_, B, N>,
        at: usize,
    ) -> [__m512; 2] {
        let rest = _mm512_srl_epi32(self.rests, _mm_cvtsi32_si128((8 * rest_bytes::<B, N>() * at) as i32));
        match rest_bytes::<B, N>() {
            0 => halves(stored.word(0)),
            // `MXFP4`, see the scale of its block
            1 => {
                let exponents = _mm512_and_si512(rest, _mm512_set1_epi32(0xff));
                let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(exponents, _mm512_set1_epi32(1)));
                let small = _mm512_sllv_epi32(_mm512_set1_epi32(0x0020_0000), exponents);
                let is_small = _mm512_cmplt_epu32_mask(exponents, _mm512_set1_epi32(2));
                [must_cast(_mm512_mask_blend_epi32(is_small, normal, small)), _mm512_setzero_ps()]
            }
            _ => halves(rest),
        }
    }
}

/// Returns the quants of column `column` of each row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn column<B: UnpackBytes<N>, const N: usize>(stored: Interleaved<'_, B, N>, column: usize) -> __m512i {
    let quants: __m512i = B::unpack_column(stored, column);
    match B::CODEBOOK {
        Some(codebook) => _mm512_shuffle_epi8(_mm512_broadcast_i32x4(must_cast(codebook)), quants),
        None => quants,
    }
}

/// Prefetches one of N parts of the bytes that are [`PREFETCH_BYTES`] after `bytes`; they may be outside the matrix.
#[inline(always)]
fn prefetch<const N: usize>(bytes: &[u8], part: usize) {
    let there = bytes.as_ptr().wrapping_add(PREFETCH_BYTES);
    let lines = bytes.len().div_ceil(64);
    for line in part * lines / N..(part + 1) * lines / N {
        // SAFETY: a prefetch of any address is harmless: it cannot fault.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(there.wrapping_add(64 * line).cast()) };
    }
}

/// Returns the dot products of sixteen rows with each of T tokens, for blocks of 256 weights.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
fn dots256<B: Block256, const T: usize>(
    group: &[u8],
    input: &[QuantisedRow<'_>; T],
) -> [[f32; GROUP_ROWS]; T] {
    let in_16_bits = fits_in_16_bits(B::MAX_QUANT) && B::GROUP_LENGTH == 16;
    let mut dots = [_mm512_setzero_ps(); T];
    let mut block = 0;
    for unit in group.chunks(unit_blocks::<B, 256>() * GROUP_ROWS * size_of::<B>()) {
        if T >= PREFETCH_TOKENS && rest_bytes::<B, 256>() > 0 {
            prefetch::<1>(&unit[..64], 0);
        }
        let unit = Unit::new::<B, 256>(unit);
        for (at, words) in unit.words.chunks_exact(GROUP_ROWS * B::STORED_BYTES).enumerate() {
            let stored = Interleaved::<B, 256>::new(words);
            let mut activations = [&input[0].quants.as_chunks::<4>().0.as_chunks::<64>().0[0]; T];
            let mut sums = [&input[0].sums.as_chunks::<2>().0.as_chunks::<8>().0[0]; T];
            for t in 0..T {
                activations[t] = &input[t].quants.as_chunks().0.as_chunks().0[block];
                sums[t] = &input[t].sums.as_chunks().0.as_chunks().0[block];
            }
            // Those of two groups of sixteen weights in each lane: first the scales, then the minima.
            let mut pairs = [_mm512_setzero_si512(); 16];
            B::unpack_scale_words(stored, &mut pairs);
            let mut totals = [_mm512_setzero_si512(); T];
            for_each! { G in 0 1 2 3 4 5 6 7 => {
                if T >= PREFETCH_TOKENS {
                    prefetch::<8>(words, G);
                }
                // For a 16-bit product, the other scale of the pair is zero.
                let scales = if in_16_bits {
                    [_mm512_and_si512(pairs[G], _mm512_set1_epi32(0xffff)), _mm512_srli_epi32::<16>(pairs[G])]
                } else {
                    let shifted = _mm512_slli_epi32::<16>(pairs[G]);
                    [_mm512_srai_epi32::<16>(shifted), _mm512_srai_epi32::<16>(pairs[G])]
                };
                let mut products = [_mm512_setzero_si512(); T];
                for_each! { I in 0 1 2 3 4 5 6 7 => {
                    let weights = column(stored, 8 * G + I);
                    for t in 0..T {
                        let values = broadcast(&activations[t][8 * G + I]);
                        products[t] = _mm512_dpbusd_epi32(products[t], weights, values);
                    }
                    if I == 7 || (I == 3 && B::GROUP_LENGTH == 16) {
                        for t in 0..T {
                            totals[t] = if in_16_bits {
                                add_pairs(totals[t], products[t], scales[I / 4])
                            } else {
                                _mm512_add_epi32(totals[t], _mm512_mullo_epi32(products[t], scales[I / 4]))
                            };
                            products[t] = _mm512_setzero_si512();
                        }
                    }
                } }
                // The compiler would add the groups in another order, and load weights in that order.
                compute_here(&mut totals);
            } }
            let [scale, minimum] = unit.scales(stored, at);
            for t in 0..T {
                let mut off = _mm512_setzero_si512();
                if B::OFFSET != 0 || B::HAS_MINIMUM {
                    for_each! { G in 0 1 2 3 4 5 6 7 => {
                        let factors = if B::HAS_MINIMUM { pairs[8 + G] } else { pairs[G] };
                        off = add_pairs(off, factors, broadcast(&sums[t][G]));
                    } }
                }
                if B::OFFSET != 0 {
                    let off = _mm512_mullo_epi32(off, _mm512_set1_epi32(B::OFFSET));
                    totals[t] = _mm512_sub_epi32(totals[t], off);
                }
                let factor = _mm512_set1_ps(input[t].scales[block]);
                let scale = _mm512_mul_ps(scale, factor);
                dots[t] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(totals[t]), dots[t]);
                if B::HAS_MINIMUM {
                    let minimum = _mm512_mul_ps(minimum, factor);
                    dots[t] = _mm512_fnmadd_ps(minimum, _mm512_cvtepi32_ps(off), dots[t]);
                }
            }
            block += 1;
        }
    }
    dots.map(must_cast)
}

/// Returns the dot products of sixteen rows with each of T tokens, for blocks of 32 weights.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
fn dots32<B: Block32, const T: usize>(group: &[u8], input: &[QuantisedRow<'_>; T]) -> [[f32; GROUP_ROWS]; T] {
    let mut dots = [_mm512_setzero_ps(); T];
    let mut block = 0;
    for unit in group.chunks(unit_blocks::<B, 32>() * GROUP_ROWS * size_of::<B>()) {
        if T >= PREFETCH_TOKENS {
            prefetch::<1>(unit, 0);
        }
        let unit = Unit::new::<B, 32>(unit);
        for (at, words) in unit.words.chunks_exact(GROUP_ROWS * B::STORED_BYTES).enumerate() {
            let stored = Interleaved::<B, 32>::new(words);
            let mut activations = [&input[0].quants.as_chunks::<4>().0.as_chunks::<8>().0[0]; T];
            for t in 0..T {
                activations[t] = &input[t].quants.as_chunks().0.as_chunks().0[block];
            }
            let mut products = [_mm512_setzero_si512(); T];
            for_each! { I in 0 1 2 3 4 5 6 7 => {
                let weights = column(stored, I);
                for t in 0..T {
                    products[t] = _mm512_dpbusd_epi32(products[t], weights, broadcast(&activations[t][I]));
                }
            } }
            let [scale, minimum] = unit.scales(stored, at);
            for t in 0..T {
                let sum = i32::from(input[t].sums[block]);
                let total = _mm512_sub_epi32(products[t], _mm512_set1_epi32(B::OFFSET * sum));
                let factor = _mm512_set1_ps(input[t].scales[block]);
                let scale = _mm512_mul_ps(scale, factor);
                dots[t] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(total), dots[t]);
                if B::HAS_MINIMUM {
                    let minimum = _mm512_mul_ps(minimum, factor);
                    dots[t] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(sum as f32), dots[t]);
                }
            }
            block += 1;
        }
    }
    dots.map(must_cast)
}

/// Unpacks blocks of a group of rows to a panel. `blocks` are the indices of the blocks, whole units.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
pub(crate) fn unpack_group<B: UnpackBytes<N>, const N: usize>(
    panel: &mut Panel,
    group: &[u8],
    blocks: Range<usize>,
) {
    let block_bytes = GROUP_ROWS * size_of::<B>();
    let bytes = &group[blocks.start * block_bytes..blocks.end * block_bytes];
    let mut block = 0;
    for unit in bytes.chunks(unit_blocks::<B, N>() * block_bytes) {
        prefetch::<1>(unit, 0);
        let unit = Unit::new::<B, N>(unit);
        for (at, words) in unit.words.chunks_exact(GROUP_ROWS * B::STORED_BYTES).enumerate() {
            let stored = Interleaved::<B, N>::new(words);
            for (group, lines) in
                panel.quants[block * N / 4..][..N / 4].as_chunks_mut::<8>().0.iter_mut().enumerate()
            {
                for_each! { I in 0 1 2 3 4 5 6 7 => {
                    lines[I] = must_cast(column(stored, 8 * group + I));
                } }
            }
            if B::STORES_SCALES {
                B::unpack_scale_words::<__m512i>(
                    stored,
                    bytemuck::cast_slice_mut(&mut panel.group_scales[block]),
                );
            }
            [panel.scales[block], panel.minima[block]] = unit.scales(stored, at).map(must_cast);
            block += 1;
        }
    }
}
