//! Dot products of K-quants with rounded activations, in AVX2.
//!
//! `Q4_K` and `Q6_K`, the most common formats, have hand-written functions. The other formats, including those of
//! [`super::i_quants`], define only what is loaded once per block, how a group of 32 weights is unpacked, and what is
//! subtracted from the sum of a block.

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::x86_64::*;

use super::{half_bits, load, load_half, lowest, one_sum, per_token, prefetch, two_sums, unsigned};
use crate::activations::QuantisedRow;
use crate::blocks::{
    BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K, HalfScaledBlock, IntegerBlock256, blocks,
};

/// Widens eight bytes to eight 32-bit lanes, with the value of the byte in both i16 halves of its lane.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn pairs(bytes: u64) -> __m256i {
    let wide = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes as i64));
    _mm256_or_si256(wide, _mm256_slli_epi32::<16>(wide))
}

/// Returns the lanes of [`pairs`] in memory. Broadcasts from memory leave the shuffle port free, which kernels need.
#[inline]
#[target_feature(enable = "avx2")]
fn stored_pairs(bytes: u64) -> [u32; 8] {
    bytemuck::must_cast(pairs(bytes))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn dot_q4_k<const T: usize>(row: &[u8], input: &[QuantisedRow<'_>; T]) -> [f32; T] {
    let row = blocks::<BlockQ4K>(row);
    let quants: [&[[i8; 256]]; T] = per_token(input, |input| &input.quants.as_chunks().0[..row.len()]);
    let sums: [&[[i16; 16]]; T] = per_token(input, |input| &input.sums.as_chunks().0[..row.len()]);
    let scales: [&[f32]; T] = per_token(input, |input| &input.scales[..row.len()]);
    let low_bits = _mm256_set1_epi8(15);
    let mut dots = [_mm_setzero_ps(); T];
    for (at, block) in row.iter().enumerate() {
        prefetch(block);
        let (block_scales, minima) = block.scales_and_minima();
        let minima = pairs(minima);
        let scale_pairs = stored_pairs(block_scales);
        let (scale, minimum) = two_halves(block.scale_and_minimum_bits());
        let mut activations = [&quants[0][at]; T];
        for t in 1..T {
            activations[t] = &quants[t][at];
        }
        let mut totals = [_mm256_setzero_si256(); T];
        for (run, bytes) in block.quants.as_chunks::<32>().0.iter().enumerate() {
            let bytes = load(bytes);
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
            let factors = (scale * scales[t][at], minimum * scales[t][at]);
            dots[t] = with_minima(factors, totals[t], load(&sums[t][at]), minima, dots[t]);
        }
    }
    lowest(dots)
}

/// The indices of a byte shuffle for each group g of 32 weights in half a block. A register contains eight i16 scales
/// twice: the shuffle copies scale 2g to all lanes of the lower half, and scale 2g + 1 to all lanes of the upper half.
static SCALE_SHUFFLES: [[i8; 32]; 4] = {
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
pub(crate) fn dot_q6_k<const T: usize>(row: &[u8], input: &[QuantisedRow<'_>; T]) -> [f32; T] {
    let row = blocks::<BlockQ6K>(row);
    let quants: [&[[i8; 256]]; T] = per_token(input, |input| &input.quants.as_chunks().0[..row.len()]);
    let sums: [&[[i16; 16]]; T] = per_token(input, |input| &input.sums.as_chunks().0[..row.len()]);
    let scales: [&[f32]; T] = per_token(input, |input| &input.scales[..row.len()]);
    let low_bits = _mm256_set1_epi8(15);
    let top_bits = _mm256_set1_epi8(0x30);
    let mut dots = [_mm_setzero_ps(); T];
    for (at, block) in row.iter().enumerate() {
        prefetch(block);
        let wide_scales = _mm256_cvtepi8_epi16(load_half(&block.scales)); // [16] i16
        let mut activations = [&quants[0][at]; T];
        for t in 1..T {
            activations[t] = &quants[t][at];
        }
        let mut totals = [_mm256_setzero_si256(); T];
        for (part, half_scales) in twice(wide_scales).into_iter().enumerate() {
            let low = block.low_bits.as_chunks::<32>().0;
            let (low0, low1) = (load(&low[2 * part]), load(&low[2 * part + 1]));
            let high = load(&block.high_bits.as_chunks::<32>().0[part]);
            let group = [
                (low0, _mm256_slli_epi16::<4>(high)),
                (low1, _mm256_slli_epi16::<2>(high)),
                (_mm256_srli_epi16::<4>(low0), high),
                (_mm256_srli_epi16::<4>(low1), _mm256_srli_epi16::<2>(high)),
            ];
            for g in 0..4 {
                let (low, top) = group[g];
                let weights =
                    _mm256_or_si256(_mm256_and_si256(low, low_bits), _mm256_and_si256(top, top_bits));
                let scale = _mm256_shuffle_epi8(half_scales, load(&SCALE_SHUFFLES[g]));
                for t in 0..T {
                    let group_of_token = load(&activations[t].as_chunks::<32>().0[4 * part + g]);
                    let sum = _mm256_madd_epi16(_mm256_maddubs_epi16(weights, group_of_token), scale);
                    totals[t] = _mm256_add_epi32(totals[t], sum);
                }
            }
        }
        let scale = half_bits(block.scale_bits());
        for t in 0..T {
            let offset = _mm256_madd_epi16(load(&sums[t][at]), wide_scales);
            let total = _mm256_sub_epi32(totals[t], _mm256_slli_epi32::<5>(offset));
            dots[t] = _mm_fmadd_ss(_mm_set_ss(scale * scales[t][at]), one_sum(total), dots[t]);
        }
    }
    lowest(dots)
}

/// Defines dot products for formats with blocks of 256 weights. Arguments of each format: `$load` loads the scales of a
/// block, `$group::<G>` returns group G (32 weights as bytes, and their scales as 16 i16), `$multiply` multiplies the
/// weights by the activations, and `$finish` scales the sum of the block and subtracts the minima or the offset.
macro_rules! dots256 {
    ($($name:ident: $block:ty, $load:ident, $group:ident, $multiply:ident, $finish:ident;)+) => {
        $($crate::avx2::k_quants::dots256! {
            @ $name: $block, $load, $group, $multiply, $finish, 0 1 2 3 4 5 6 7
        })+
    };
    (@ $name:ident: $block:ty, $load:ident, $group:ident, $multiply:ident, $finish:ident, $($g:literal)+) => {
        #[inline]
        #[target_feature(enable = "avx2,fma,f16c")]
        pub(crate) fn $name<const T: usize>(row: &[u8], input: &[QuantisedRow<'_>; T]) -> [f32; T] {
            let row = blocks::<$block>(row);
            let quants: [&[[i8; 256]]; T] = per_token(input, |input| &input.quants.as_chunks().0[..row.len()]);
            let sums: [&[[i16; 16]]; T] = per_token(input, |input| &input.sums.as_chunks().0[..row.len()]);
            let scales: [&[f32]; T] = per_token(input, |input| &input.scales[..row.len()]);
            let mut dots = [_mm_setzero_ps(); T];
            for (at, block) in row.iter().enumerate() {
                prefetch(block);
                let loaded = $load(block);
                let mut totals = [_mm256_setzero_si256(); T];
                $(
                    let (weights, scale) = $group::<$g>(block, &loaded);
                    for t in 0..T {
                        let activations = load(&quants[t][at].as_chunks::<32>().0[$g]);
                        let sum = _mm256_madd_epi16($multiply(weights, activations), scale);
                        totals[t] = _mm256_add_epi32(totals[t], sum);
                    }
                )+
                for t in 0..T {
                    dots[t] = $finish(&loaded, totals[t], load(&sums[t][at]), scales[t][at], dots[t]);
                }
            }
            lowest(dots)
        }
    };
}
pub(super) use dots256;

dots256! {
    dot_q2_k: BlockQ2K, load_q2_k, group_q2_k, unsigned, subtract_minima;
    dot_q3_k: BlockQ3K, load_q3_k, group_q3_k, unsigned, subtract_offset;
    dot_q5_k: BlockQ5K, load_q5_k, group_q5_k, unsigned, subtract_minima;
}

/// The parts of a block of 256 weights that are loaded once for all groups of 32 weights.
pub(super) struct Loaded<Scales> {
    pub(super) scale: f32,
    pub(super) minimum: f32,
    pub(super) scales: Scales,
    /// 16 integers (i16), by which the sums of 16 activations are multiplied. The products are subtracted from the sum
    /// of the block.
    pub(super) subtracted: __m256i,
    /// The high bits of the weights: bit g of byte i belongs to weight i of group g, a group of 32 weights.
    pub(super) high_bits: __m256i,
}

/// The loaded parts of a block with sub-blocks of 16 weights: for each half, a register with its i16 scales twice.
pub(super) type Loaded16 = Loaded<[__m256i; 2]>;

/// The loaded parts of a block with sub-blocks of 32 weights: the scales, each as a pair of equal i16.
type Loaded32 = Loaded<[u32; 8]>;

/// Shifts all bytes so that bit `from` becomes bit `to`. The caller must mask out bits that cross into other bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn shifted(bytes: __m256i, from: i32, to: i32) -> __m256i {
    if from > to {
        _mm256_srl_epi16(bytes, _mm_cvtsi32_si128(from - to))
    } else {
        _mm256_sll_epi16(bytes, _mm_cvtsi32_si128(to - from))
    }
}

/// Returns two registers: one with the lower eight of 16 i16 scales twice, and one with the upper eight scales twice.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn twice(wide_scales: __m256i) -> [__m256i; 2] {
    let (low, high) = (_mm256_castsi256_si128(wide_scales), _mm256_extracti128_si256::<1>(wide_scales));
    [_mm256_broadcastsi128_si256(low), _mm256_broadcastsi128_si256(high)]
}

/// Returns the scale of each pair of adjacent weights of group G, a group of 32 weights.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn spread<const G: usize>(loaded: &Loaded16) -> __m256i {
    _mm256_shuffle_epi8(loaded.scales[G / 4], load(&SCALE_SHUFFLES[G % 4]))
}

/// Converts two f16 values, given by their bits, to f32: the value in the low 16 bits, then that in the high 16 bits.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn two_halves(bits: u32) -> (f32, f32) {
    let halves = _mm_cvtph_ps(_mm_cvtsi32_si128(bits as i32));
    (_mm_cvtss_f32(halves), _mm_cvtss_f32(_mm_movehdup_ps(halves)))
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_q2_k(block: &BlockQ2K) -> Loaded16 {
    let packed = load_half(&block.packed);
    let low_bits = _mm_set1_epi8(15);
    let scales = _mm256_cvtepu8_epi16(_mm_and_si128(packed, low_bits));
    let minima = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16::<4>(packed), low_bits));
    let (scale, minimum) = two_halves(block.scale_and_minimum_bits());
    let high = _mm256_setzero_si256();
    Loaded { scale, minimum, scales: twice(scales), subtracted: minima, high_bits: high }
}

#[inline]
#[target_feature(enable = "avx2")]
fn group_q2_k<const G: usize>(block: &BlockQ2K, loaded: &Loaded16) -> (__m256i, __m256i) {
    let bytes = load(&block.quants.as_chunks::<32>().0[G / 4]);
    let weights = _mm256_and_si256(shifted(bytes, 2 * (G as i32 % 4), 0), _mm256_set1_epi8(3));
    (weights, spread::<G>(loaded))
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_q3_k(block: &BlockQ3K) -> Loaded16 {
    let scales = _mm256_cvtepi8_epi16(load_half(&block.scales()));
    let subtracted = _mm256_slli_epi16::<2>(scales);
    let (scale, high) = (half_bits(block.scale_bits()), load(&block.high_bits));
    Loaded { scale, minimum: 0.0, scales: twice(scales), subtracted, high_bits: high }
}

#[inline]
#[target_feature(enable = "avx2")]
fn group_q3_k<const G: usize>(block: &BlockQ3K, loaded: &Loaded16) -> (__m256i, __m256i) {
    let bytes = load(&block.quants.as_chunks::<32>().0[G / 4]);
    let low = _mm256_and_si256(shifted(bytes, 2 * (G as i32 % 4), 0), _mm256_set1_epi8(3));
    let third = _mm256_and_si256(shifted(loaded.high_bits, G as i32, 2), _mm256_set1_epi8(4));
    (_mm256_or_si256(low, third), spread::<G>(loaded))
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_q5_k(block: &BlockQ5K) -> Loaded32 {
    let (scales, minima) = block.scales_and_minima();
    let (scale, minimum) = two_halves(block.scale_and_minimum_bits());
    let (scales, high_bits) = (stored_pairs(scales), load(&block.high_bits));
    Loaded { scale, minimum, scales, subtracted: pairs(minima), high_bits }
}

#[inline]
#[target_feature(enable = "avx2")]
fn group_q5_k<const G: usize>(block: &BlockQ5K, loaded: &Loaded32) -> (__m256i, __m256i) {
    let bytes = load(&block.quants.as_chunks::<32>().0[G / 2]);
    let low = _mm256_and_si256(shifted(bytes, 4 * (G as i32 % 2), 0), _mm256_set1_epi8(15));
    let fifth = _mm256_and_si256(shifted(loaded.high_bits, G as i32, 4), _mm256_set1_epi8(16));
    (_mm256_or_si256(low, fifth), _mm256_set1_epi32(loaded.scales[G] as i32))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn subtract_minima<S>(loaded: &Loaded<S>, total: __m256i, sums: __m256i, scale: f32, dot: __m128) -> __m128 {
    with_minima((loaded.scale * scale, loaded.minimum * scale), total, sums, loaded.subtracted, dot)
}

/// Adds the result of a block to `dot`: `scale` times the sum of `total`, minus `minimum` times the sum of the products
/// of `sums` and `minima`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn with_minima(
    (scale, minimum): (f32, f32),
    total: __m256i,
    sums: __m256i,
    minima: __m256i,
    dot: __m128,
) -> __m128 {
    let subtracted = _mm256_madd_epi16(sums, minima);
    let both = two_sums(total, subtracted);
    let dot = _mm_fmadd_ss(_mm_set_ss(scale), both, dot);
    _mm_fnmadd_ss(_mm_set_ss(minimum), _mm_movehdup_ps(both), dot)
}

/// Adds the sum of `total - sums * loaded.subtracted`, times the scales of the block and the token, to `dot`.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn subtract_offset<S>(
    loaded: &Loaded<S>,
    total: __m256i,
    sums: __m256i,
    scale: f32,
    dot: __m128,
) -> __m128 {
    let total = _mm256_sub_epi32(total, _mm256_madd_epi16(sums, loaded.subtracted));
    _mm_fmadd_ss(_mm_set_ss(loaded.scale * scale), one_sum(total), dot)
}
