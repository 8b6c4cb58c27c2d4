//! How are the dot products of [`super::scalar`] made fast on x86-64?
//!
//! AVX2, FMA and F16C. `maddubs` multiplies unsigned weights by signed activations and adds neighbours
//! (largest: 2 * 63 * 127, far from 2^15), `madd` multiplies by the integer scales and adds neighbours again.
//! All of a block is added up as integers before it meets an f32. Each function takes T tokens, so that weights
//! are unpacked once for all of them; per token the arithmetic is the same.
//!
//! Not here: loops over rows. That is [`super::product`].

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::x86_64::*;

use half::f16;

use super::activations::QuantisedRow;
use super::blocks::{BlockQ4K, BlockQ6K, BlockQ8_0, blocks};

#[inline]
#[target_feature(enable = "avx2")]
fn load(bytes: &[i8; 32]) -> __m256i {
    // SAFETY: an unaligned load of the 32 bytes that the reference covers.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_unsigned(bytes: &[u8; 32]) -> __m256i {
    // SAFETY: an unaligned load of the 32 bytes that the reference covers.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_sums(sums: &[i16; 16]) -> __m256i {
    // SAFETY: an unaligned load of the 32 bytes that the reference covers.
    unsafe { _mm256_loadu_si256(sums.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_floats(values: &[f32; 8]) -> __m256 {
    // SAFETY: an unaligned load of the 32 bytes that the reference covers.
    unsafe { _mm256_loadu_ps(values.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn widen(halves: &[u8; 16]) -> __m256 {
    // SAFETY: an unaligned load of the 16 bytes that the reference covers.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(halves.as_ptr().cast()) })
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn half_bits(bits: u16) -> f32 {
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))))
}

/// How far ahead of the arithmetic weights are fetched. The processor's own prefetching stops at the end of a
/// 4 KiB page; without this one core reads at 60 % of what it can.
const AHEAD: usize = 4096;

/// Asks for the cache lines `AHEAD` bytes after a block, which may belong to the next row or to nobody.
#[inline]
#[target_feature(enable = "avx2")]
fn fetch_ahead<B>(block: &B) {
    let there = std::ptr::from_ref(block).cast::<i8>().wrapping_add(AHEAD);
    for line in (0..size_of::<B>()).step_by(64) {
        // It reads nothing and cannot fault, wherever it points.
        _mm_prefetch::<_MM_HINT_T0>(there.wrapping_add(line));
    }
}

/// One thing of each token. Closures of functions with target features are not inlined into library functions,
/// so that this one, and its closures' callers outside of block loops, have none.
#[inline(always)]
fn each<'a, I, S: ?Sized, const T: usize>(input: &'a [I; T], of: impl Fn(&'a I) -> &'a S) -> [&'a S; T] {
    std::array::from_fn(|t| of(&input[t]))
}

/// The sums of both registers, as floats in the two lowest lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn two_sums(first: __m256i, second: __m256i) -> __m128 {
    let pairs = _mm256_hadd_epi32(first, second);
    let four = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256::<1>(pairs));
    _mm_cvtepi32_ps(_mm_hadd_epi32(four, four))
}

/// The sum of a register as a float in the lowest lane.
#[inline]
#[target_feature(enable = "avx2")]
fn one_sum(values: __m256i) -> __m128 {
    let four = _mm_add_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256::<1>(values));
    let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b1110>(four));
    _mm_cvtepi32_ps(_mm_add_epi32(two, _mm_shuffle_epi32::<1>(two)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn lowest<const T: usize>(dots: [__m128; T]) -> [f32; T] {
    let mut lowest = [0.0; T];
    for t in 0..T {
        lowest[t] = _mm_cvtss_f32(dots[t]);
    }
    lowest
}

/// One 8-bit number of each of eight sub-blocks, as an i16 pair in each 32-bit lane.
#[inline]
#[target_feature(enable = "avx2")]
fn pairs(bytes: u64) -> __m256i {
    let wide = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes as i64));
    _mm256_or_si256(wide, _mm256_slli_epi32::<16>(wide))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn dot_q4_k<const T: usize>(row: &[u8], input: &[QuantisedRow<'_>; T]) -> [f32; T] {
    let row = blocks::<BlockQ4K>(row);
    let quants: [&[[i8; 256]]; T] = each(input, |input| &input.quants.as_chunks().0[..row.len()]);
    let sums: [&[[i16; 16]]; T] = each(input, |input| &input.sums.as_chunks().0[..row.len()]);
    let scales: [&[f32]; T] = each(input, |input| &input.scales[..row.len()]);
    let low_bits = _mm256_set1_epi8(15);
    let mut dots = [_mm_setzero_ps(); T];
    for (at, block) in row.iter().enumerate() {
        fetch_ahead(block);
        let (block_scales, minima) = block.scales_and_minima();
        let minima = pairs(minima);
        let mut scale_pairs = [0u32; 8];
        // SAFETY: an unaligned store of 32 bytes into the array. Broadcasting from memory leaves the shuffle
        // port to the multiplications.
        unsafe { _mm256_storeu_si256(scale_pairs.as_mut_ptr().cast(), pairs(block_scales)) };
        let halves = _mm_cvtph_ps(_mm_cvtsi32_si128(block.scale_and_minimum_bits() as i32));
        let (scale, minimum) = (_mm_cvtss_f32(halves), _mm_cvtss_f32(_mm_movehdup_ps(halves)));
        let mut activations = [&quants[0][at]; T];
        for t in 1..T {
            activations[t] = &quants[t][at];
        }
        let mut totals = [_mm256_setzero_si256(); T];
        for (run, bytes) in block.quants.as_chunks::<32>().0.iter().enumerate() {
            let bytes = load_unsigned(bytes);
            let low = _mm256_and_si256(bytes, low_bits);
            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low_bits);
            let low_scale = _mm256_set1_epi32(scale_pairs[2 * run] as i32);
            let high_scale = _mm256_set1_epi32(scale_pairs[2 * run + 1] as i32);
            for t in 0..T {
                let groups = activations[t].as_chunks::<32>().0;
                let first = _mm256_maddubs_epi16(low, load(&groups[2 * run]));
                let second = _mm256_maddubs_epi16(high, load(&groups[2 * run + 1]));
                let first = _mm256_madd_epi16(first, low_scale);
                let second = _mm256_madd_epi16(second, high_scale);
                totals[t] = _mm256_add_epi32(totals[t], _mm256_add_epi32(first, second));
            }
        }
        for t in 0..T {
            let subtracted = _mm256_madd_epi16(load_sums(&sums[t][at]), minima);
            let both = two_sums(totals[t], subtracted);
            dots[t] = _mm_fmadd_ss(_mm_set_ss(scale * scales[t][at]), both, dots[t]);
            dots[t] = _mm_fnmadd_ss(_mm_set_ss(minimum * scales[t][at]), _mm_movehdup_ps(both), dots[t]);
        }
    }
    lowest(dots)
}

/// Byte shuffles that spread scales 2g and 2g + 1, of eight i16, over the halves of group g.
static SPREAD: [[i8; 32]; 4] = {
    let mut spread = [[0; 32]; 4];
    let mut at = 0;
    while at < 128 {
        let (group, byte) = (at / 32, at % 32);
        spread[group][byte] = (4 * group + 2 * (byte / 16) + byte % 2) as i8;
        at += 1;
    }
    spread
};

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn dot_q6_k<const T: usize>(row: &[u8], input: &[QuantisedRow<'_>; T]) -> [f32; T] {
    let row = blocks::<BlockQ6K>(row);
    let quants: [&[[i8; 256]]; T] = each(input, |input| &input.quants.as_chunks().0[..row.len()]);
    let sums: [&[[i16; 16]]; T] = each(input, |input| &input.sums.as_chunks().0[..row.len()]);
    let scales: [&[f32]; T] = each(input, |input| &input.scales[..row.len()]);
    let low_bits = _mm256_set1_epi8(15);
    let top_bits = _mm256_set1_epi8(0x30);
    let mut dots = [_mm_setzero_ps(); T];
    for (at, block) in row.iter().enumerate() {
        fetch_ahead(block);
        // SAFETY: an unaligned load of the 16 scales.
        let packed_scales = unsafe { _mm_loadu_si128(block.scales.as_ptr().cast()) };
        let wide_scales = _mm256_cvtepi8_epi16(packed_scales); // [16] i16
        let halves = [_mm256_castsi256_si128(wide_scales), _mm256_extracti128_si256::<1>(wide_scales)];
        let mut activations = [&quants[0][at]; T];
        for t in 1..T {
            activations[t] = &quants[t][at];
        }
        let mut totals = [_mm256_setzero_si256(); T];
        for (part, half_scales) in halves.into_iter().enumerate() {
            let half_scales = _mm256_broadcastsi128_si256(half_scales); // eight i16 twice
            let low = block.low.as_chunks::<32>().0;
            let (low0, low1) = (load_unsigned(&low[2 * part]), load_unsigned(&low[2 * part + 1]));
            let high = load_unsigned(&block.high.as_chunks::<32>().0[part]);
            let group = [
                _mm256_or_si256(
                    _mm256_and_si256(low0, low_bits),
                    _mm256_and_si256(_mm256_slli_epi16::<4>(high), top_bits),
                ),
                _mm256_or_si256(
                    _mm256_and_si256(low1, low_bits),
                    _mm256_and_si256(_mm256_slli_epi16::<2>(high), top_bits),
                ),
                _mm256_or_si256(
                    _mm256_and_si256(_mm256_srli_epi16::<4>(low0), low_bits),
                    _mm256_and_si256(high, top_bits),
                ),
                _mm256_or_si256(
                    _mm256_and_si256(_mm256_srli_epi16::<4>(low1), low_bits),
                    _mm256_and_si256(_mm256_srli_epi16::<2>(high), top_bits),
                ),
            ];
            for g in 0..4 {
                let scale = _mm256_shuffle_epi8(half_scales, load(&SPREAD[g]));
                for t in 0..T {
                    let group_of_token = load(&activations[t].as_chunks::<32>().0[4 * part + g]);
                    let sum = _mm256_madd_epi16(_mm256_maddubs_epi16(group[g], group_of_token), scale);
                    totals[t] = _mm256_add_epi32(totals[t], sum);
                }
            }
        }
        let scale = half_bits(block.scale_bits());
        for t in 0..T {
            let offset = _mm256_madd_epi16(load_sums(&sums[t][at]), wide_scales);
            let total = _mm256_sub_epi32(totals[t], _mm256_slli_epi32::<5>(offset));
            dots[t] = _mm_fmadd_ss(_mm_set_ss(scale * scales[t][at]), one_sum(total), dots[t]);
        }
    }
    lowest(dots)
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn dot_q8_0<const T: usize>(row: &[u8], input: &[QuantisedRow<'_>; T]) -> [f32; T] {
    let row = blocks::<BlockQ8_0>(row);
    let quants: [&[[i8; 32]]; T] = each(input, |input| &input.quants.as_chunks().0[..row.len()]);
    let scales: [&[f32]; T] = each(input, |input| &input.scales[..row.len()]);
    let ones = _mm256_set1_epi16(1);
    let mut dots = [_mm_setzero_ps(); T];
    for (at, block) in row.iter().enumerate() {
        fetch_ahead(block);
        let weights = load(&block.quants);
        // maddubs wants one side unsigned: |w| * (sign(w) a) = w a. -128 becomes 128 as an unsigned byte.
        let magnitudes = _mm256_abs_epi8(weights);
        let scale = half_bits(block.scale_bits());
        for t in 0..T {
            let signed = _mm256_sign_epi8(load(&quants[t][at]), weights);
            let sum = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitudes, signed), ones);
            dots[t] = _mm_fmadd_ss(_mm_set_ss(scale * scales[t][at]), one_sum(sum), dots[t]);
        }
    }
    lowest(dots)
}

/// Four registers of eight lanes, the elements after the last whole 32, and the tree.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn finish(lanes: [__m256; 4], rest: impl Iterator<Item = (f32, f32)>) -> f32 {
    let mut all = [0.0f32; 32];
    for (part, lanes) in all.as_chunks_mut::<8>().0.iter_mut().zip(lanes) {
        // SAFETY: an unaligned store of the eight floats that the reference covers.
        unsafe { _mm256_storeu_ps(part.as_mut_ptr(), lanes) };
    }
    for (lane, (weight, value)) in all.iter_mut().zip(rest) {
        *lane = weight.mul_add(value, *lane);
    }
    super::tree(super::fold(all))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn dot_f16<const T: usize>(row: &[u8], input: &[&[f32]; T]) -> [f32; T] {
    let (chunks, rest) = row.as_chunks::<64>();
    let values: [&[[f32; 32]]; T] = each(input, |input| &input.as_chunks().0[..chunks.len()]);
    let mut lanes = [[_mm256_setzero_ps(); 4]; T];
    for (at, chunk) in chunks.iter().enumerate() {
        fetch_ahead(chunk);
        for (part, halves) in chunk.as_chunks::<16>().0.iter().enumerate() {
            let weights = widen(halves);
            for t in 0..T {
                let values = load_floats(&values[t][at].as_chunks::<8>().0[part]);
                lanes[t][part] = _mm256_fmadd_ps(weights, values, lanes[t][part]);
            }
        }
    }
    let mut sums = [0.0; T];
    for t in 0..T {
        let rest = rest.as_chunks::<2>().0.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f32());
        sums[t] = finish(lanes[t], rest.zip(input[t][32 * chunks.len()..].iter().copied()));
    }
    sums
}

#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn dot_f32<const T: usize>(row: &[u8], input: &[&[f32]; T]) -> [f32; T] {
    let (chunks, rest) = row.as_chunks::<128>();
    let values: [&[[f32; 32]]; T] = each(input, |input| &input.as_chunks().0[..chunks.len()]);
    let mut lanes = [[_mm256_setzero_ps(); 4]; T];
    for (at, chunk) in chunks.iter().enumerate() {
        fetch_ahead(chunk);
        for (part, bytes) in chunk.as_chunks::<32>().0.iter().enumerate() {
            let weights = _mm256_castsi256_ps(load_unsigned(bytes));
            for t in 0..T {
                let values = load_floats(&values[t][at].as_chunks::<8>().0[part]);
                lanes[t][part] = _mm256_fmadd_ps(weights, values, lanes[t][part]);
            }
        }
    }
    let mut sums = [0.0; T];
    for t in 0..T {
        let rest = rest.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        sums[t] = finish(lanes[t], rest.zip(input[t][32 * chunks.len()..].iter().copied()));
    }
    sums
}

/// `scores[t] = scale * dot(query, keys[t])` over f16 keys, `[positions, key_length]`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn scores_f16(query: &[f32], scale: f32, keys: &[f16], scores: &mut [f32]) {
    for (score, key) in scores.iter_mut().zip(keys.chunks_exact(query.len())) {
        let [dot] = dot_f16(bytemuck::cast_slice(key), &[query]);
        *score = dot * scale;
    }
}

/// `out = sum of probabilities[t] * values[t]` over f16 values, `[positions, value_length]`, t ascending.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn mix_f16(probabilities: &[f32], values: &[f16], out: &mut [f32]) {
    out.fill(0.0);
    for (&probability, value) in probabilities.iter().zip(values.chunks_exact(out.len())) {
        let factor = _mm256_set1_ps(probability);
        let (chunks, rest) = out.as_chunks_mut::<8>();
        let halves = value.as_chunks::<8>();
        for (out, value) in chunks.iter_mut().zip(halves.0) {
            let value: &[u8; 16] = bytemuck::cast_ref(value);
            let sum = _mm256_fmadd_ps(factor, widen(value), load_floats(out));
            // SAFETY: an unaligned store of the eight floats that the reference covers.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), sum) };
        }
        for (out, value) in rest.iter_mut().zip(halves.1) {
            *out = probability.mul_add(value.to_f32(), *out);
        }
    }
}
