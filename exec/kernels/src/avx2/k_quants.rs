//! Dot products of K-quants with rounded activations, in AVX2.
//!
//! A format, including those of [`super::i_quants`], defines what is loaded once for a block of four rows, how a group
//! of 32 weights is unpacked, and what is subtracted from the sum of a block. The arithmetic in between is the same
//! for all formats.

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::x86_64::*;

use bytemuck::must_cast;

use super::{FourRows, MultiplyAdd, four_halves, four_sums, load, load_half, per_token, two_of, unsigned};
use crate::activations::QuantisedRow;
use crate::blocks::{
    BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K, HalfScaledBlock, IntegerBlock256, SixBitScales,
};

/// Defines dot products of four rows for formats with blocks of 256 weights. Arguments of each format: `$load` loads
/// the scales of four blocks, `$group::<G>` returns group G of a block (32 weights as bytes, and their scales as 16
/// i16), `$multiply` multiplies the weights by the activations, and `$finish` scales the sums of the four blocks and
/// subtracts the minima or the offset.
macro_rules! dots256 {
    ($($name:ident: $block:ty, $load:ident, $group:ident, $multiply:ident, $finish:ident;)+) => {
        $($crate::avx2::k_quants::dots256! {
            @ $name: $block, $load, $group, $multiply, $finish, 0 1 2 3 4 5 6 7
        })+
    };
    (@ $name:ident: $block:ty, $load:ident, $group:ident, $multiply:ident, $finish:ident, $($g:literal)+) => {
        #[inline]
        #[target_feature(enable = "avx2,fma,f16c")]
        pub(crate) fn $name<I: MultiplyAdd, const T: usize>(
            instructions: I,
            rows: &[&[u8]; 4],
            input: &[QuantisedRow<'_>; T],
        ) -> [[f32; 4]; T] {
            let rows = FourRows::<$block>::new(rows);
            let length = rows.length();
            let quants: [&[[i8; 256]]; T] = per_token(input, |input| &input.quants.as_chunks().0[..length]);
            let sums: [&[[i16; 16]]; T] = per_token(input, |input| &input.sums.as_chunks().0[..length]);
            let scales: [&[f32]; T] = per_token(input, |input| &input.scales[..length]);
            let mut dots = [_mm_setzero_ps(); T];
            for at in 0..length {
                let blocks = rows.blocks(at);
                let loaded = $load(blocks);
                // The compiler must not keep the scales in registers: broadcasts from memory need no shuffle.
                let block_scales = std::hint::black_box(&loaded.scales);
                let mut totals = [[_mm256_setzero_si256(); 4]; T];
                $(
                    rows.prefetch::<I>(at..at + 1, $g, 8);
                    for r in 0..4 {
                        let (weights, scale) = $group::<$g>(blocks[r], &block_scales[r]);
                        for t in 0..T {
                            let activations = load(&quants[t][at].as_chunks::<32>().0[$g]);
                            let products = $multiply(weights, activations);
                            totals[t][r] = instructions.add_pairs(totals[t][r], products, scale);
                        }
                    }
                    for t in 0..T {
                        $crate::avx2::compute_here(&mut totals[t]);
                    }
                )+
                for t in 0..T {
                    dots[t] = $finish(&loaded, totals[t], load(&sums[t][at]), scales[t][at], dots[t]);
                }
            }
            dots.map(bytemuck::must_cast)
        }
    };
}
pub(super) use dots256;

dots256! {
    dot_q2_k: BlockQ2K, load_q2_k, group_q2_k, unsigned, subtract_minima;
    dot_q3_k: BlockQ3K, load_q3_k, group_q3_k, unsigned, subtract_offset;
    dot_q4_k: BlockQ4K, load_six_bit_scales, group_q4_k, unsigned, subtract_eight_minima;
    dot_q5_k: BlockQ5K, load_six_bit_scales, group_q5_k, unsigned, subtract_eight_minima;
    dot_q6_k: BlockQ6K, load_q6_k, group_q6_k, unsigned, subtract_offset;
}

/// The parts of a block of each of four rows that are loaded once for all groups of 32 weights.
pub(super) struct Loaded<Scales, Subtracted> {
    /// The scales of the four blocks.
    pub(super) scale: __m128,
    /// The scales of the minima of the four blocks.
    pub(super) minimum: __m128,
    /// The integer scales of each block.
    pub(super) scales: [Scales; 4],
    /// The integers by which the sums of activations are multiplied. The products are subtracted from the sum of the
    /// block, directly or after the multiplication by `minimum`.
    pub(super) subtracted: Subtracted,
}

/// The scales of a block with sub-blocks of 16 weights, for each half.
pub(super) type Scales16 = [[i16; 8]; 2];

/// The loaded parts of blocks with sub-blocks of 16 weights. For each row, 16 integers are subtracted.
pub(super) type Loaded16 = Loaded<Scales16, [__m256i; 4]>;

/// The loaded parts of blocks with six-bit scales and minima: each scale as a pair of equal i16, and the eight minima of
/// the first two rows, then of the last two rows.
type LoadedSixBit = Loaded<[u32; 8], [__m256i; 2]>;

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

/// Returns the scale of each pair of adjacent weights of group G, a group of 32 weights.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn spread<const G: usize>(scales: &Scales16) -> __m256i {
    _mm256_shuffle_epi8(two_of(load_half(&scales[G / 4])), load(&SCALE_SHUFFLES[G % 4]))
}

/// Returns the f16 scales of four blocks, times `SCALE_FACTOR`.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn four_scales<B: HalfScaledBlock + IntegerBlock256>(blocks: [&B; 4]) -> __m128 {
    let [a, b, c, d] = blocks;
    let scales = four_halves([a.scale_bits(), b.scale_bits(), c.scale_bits(), d.scale_bits()]);
    _mm_mul_ps(scales, _mm_set1_ps(B::SCALE_FACTOR))
}

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

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_q2_k(blocks: [&BlockQ2K; 4]) -> Loaded16 {
    let low_bits = _mm_set1_epi8(15);
    let [a, b, c, d] = blocks;
    let minimum = four_halves([a.minimum_bits(), b.minimum_bits(), c.minimum_bits(), d.minimum_bits()]);
    let (mut scales, mut subtracted) = ([Scales16::default(); 4], [_mm256_setzero_si256(); 4]);
    for r in 0..4 {
        let packed = load_half(&blocks[r].packed);
        scales[r] = must_cast(_mm256_cvtepu8_epi16(_mm_and_si128(packed, low_bits)));
        subtracted[r] = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16::<4>(packed), low_bits));
    }
    Loaded { scale: four_scales(blocks), minimum, scales, subtracted }
}

#[inline]
#[target_feature(enable = "avx2")]
fn group_q2_k<const G: usize>(block: &BlockQ2K, scales: &Scales16) -> (__m256i, __m256i) {
    let bytes = load(&block.quants.as_chunks::<32>().0[G / 4]);
    let weights = _mm256_and_si256(shifted(bytes, 2 * (G as i32 % 4), 0), _mm256_set1_epi8(3));
    (weights, spread::<G>(scales))
}

/// The index in [`BlockQ3K::last_bytes`] of each byte of the words a b a b, and of the word c four times. The words are
/// those of [`BlockQ3K::scales`].
pub(crate) static Q3_K_WORDS: [[i8; 16]; 2] = [
    [2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5, 6, 7, 8, 9],
    [10, 11, 12, 13, 10, 11, 12, 13, 10, 11, 12, 13, 10, 11, 12, 13],
];

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_q3_k(blocks: [&BlockQ3K; 4]) -> Loaded16 {
    let (mut scales, mut subtracted) = ([Scales16::default(); 4], [_mm256_setzero_si256(); 4]);
    for two in 0..2 {
        let (first, second) =
            (load_half(blocks[2 * two].last_bytes()), load_half(blocks[2 * two + 1].last_bytes()));
        let bytes = _mm256_set_m128i(second, first);
        let low = _mm256_shuffle_epi8(bytes, two_of(load_half(&Q3_K_WORDS[0])));
        let low = _mm256_srlv_epi32(low, two_of(_mm_setr_epi32(0, 0, 4, 4)));
        let high = _mm256_shuffle_epi8(bytes, two_of(load_half(&Q3_K_WORDS[1])));
        let high = _mm256_srlv_epi32(high, two_of(_mm_setr_epi32(0, 2, 4, 6)));
        let high = _mm256_slli_epi16::<4>(_mm256_and_si256(high, _mm256_set1_epi8(3)));
        let six_bits = _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi8(15)), high);
        let signed = _mm256_sub_epi8(six_bits, _mm256_set1_epi8(32));
        let halves = [_mm256_castsi256_si128(signed), _mm256_extracti128_si256::<1>(signed)];
        for r in 0..2 {
            let wide = _mm256_cvtepi8_epi16(halves[r]);
            scales[2 * two + r] = must_cast(wide);
            subtracted[2 * two + r] = _mm256_slli_epi16::<2>(wide);
        }
    }
    Loaded { scale: four_scales(blocks), minimum: _mm_setzero_ps(), scales, subtracted }
}

#[inline]
#[target_feature(enable = "avx2")]
fn group_q3_k<const G: usize>(block: &BlockQ3K, scales: &Scales16) -> (__m256i, __m256i) {
    let bytes = load(&block.quants.as_chunks::<32>().0[G / 4]);
    let low = _mm256_and_si256(shifted(bytes, 2 * (G as i32 % 4), 0), _mm256_set1_epi8(3));
    let third = _mm256_and_si256(shifted(load(&block.high_bits), G as i32, 2), _mm256_set1_epi8(4));
    (_mm256_or_si256(low, third), spread::<G>(scales))
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_q6_k(blocks: [&BlockQ6K; 4]) -> Loaded16 {
    let (mut scales, mut subtracted) = ([Scales16::default(); 4], [_mm256_setzero_si256(); 4]);
    for r in 0..4 {
        let wide = _mm256_cvtepi8_epi16(load_half(&blocks[r].scales));
        scales[r] = must_cast(wide);
        subtracted[r] = _mm256_slli_epi16::<5>(wide);
    }
    Loaded { scale: four_scales(blocks), minimum: _mm_setzero_ps(), scales, subtracted }
}

#[inline]
#[target_feature(enable = "avx2")]
fn group_q6_k<const G: usize>(block: &BlockQ6K, scales: &Scales16) -> (__m256i, __m256i) {
    let low = load(&block.low_bits.as_chunks::<32>().0[2 * (G / 4) + G % 2]);
    let low = _mm256_and_si256(shifted(low, 4 * (G as i32 % 4 / 2), 0), _mm256_set1_epi8(15));
    let high = load(&block.high_bits.as_chunks::<32>().0[G / 4]);
    let high = _mm256_and_si256(shifted(high, 2 * (G as i32 % 4), 4), _mm256_set1_epi8(0x30));
    (_mm256_or_si256(low, high), spread::<G>(scales))
}

/// The indices of a byte shuffle that widens eight bytes, which are in both halves of a register, to pairs of equal
/// 16-bit integers.
static PAIRS: [i8; 32] = {
    let mut pairs = [-1; 32]; // a negative index selects zero
    let mut byte = 0;
    while byte < 32 {
        pairs[byte] = byte as i8 / 4;
        byte += 2;
    }
    pairs
};

/// Masks for four bytes: the low six bits, the low four bits, and the two bits above them.
pub(crate) const SIX_BITS: i32 = 0x3f3f_3f3f;
pub(crate) const FOUR_BITS: i32 = 0x0f0f_0f0f;
pub(crate) const TOP_BITS: i32 = 0x3030_3030;

/// Unpacks the scales and minima of four blocks, two rows at a time. A half of a register has the header of a row: the
/// f16 scale and minimum, and three words a, b, c, see [`SixBitScales`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_six_bit_scales<B: SixBitScales>(blocks: [&B; 4]) -> LoadedSixBit {
    let mut scales = [[0; 8]; 4];
    let (mut minima, mut halves) = ([_mm256_setzero_si256(); 2], [_mm256_setzero_si256(); 2]);
    for two in 0..2 {
        let (first, second) = (load_half(blocks[2 * two].header()), load_half(blocks[2 * two + 1].header()));
        let headers = _mm256_set_m128i(second, first);
        // The words a c b c, the last shifted by four bits, have the low bits; the words a and b have the high bits.
        let low = _mm256_shuffle_epi32::<0b11_10_11_01>(headers);
        let low = _mm256_srlv_epi32(low, two_of(_mm_setr_epi32(0, 0, 0, 4)));
        let low = _mm256_and_si256(low, two_of(_mm_setr_epi32(SIX_BITS, FOUR_BITS, SIX_BITS, FOUR_BITS)));
        let high = _mm256_srli_epi32::<2>(_mm256_shuffle_epi32::<0b10_00_01_00>(headers));
        let high = _mm256_and_si256(high, two_of(_mm_setr_epi32(0, TOP_BITS, 0, TOP_BITS)));
        // For each row eight scales, then eight minima.
        let bytes = _mm256_or_si256(low, high);
        let (first, second) = (
            _mm256_permute4x64_epi64::<0b00_00_00_00>(bytes),
            _mm256_permute4x64_epi64::<0b10_10_10_10>(bytes),
        );
        scales[2 * two] = must_cast(_mm256_shuffle_epi8(first, load(&PAIRS)));
        scales[2 * two + 1] = must_cast(_mm256_shuffle_epi8(second, load(&PAIRS)));
        minima[two] = _mm256_unpackhi_epi8(bytes, _mm256_setzero_si256());
        halves[two] = headers;
    }
    let [scale, minimum] = scales_and_minima(halves);
    Loaded { scale, minimum, scales, subtracted: minima }
}

/// Returns the scales of four blocks and the scales of their minima, given the headers of the first two blocks, then of
/// the last two blocks.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn scales_and_minima([first, last]: [__m256i; 2]) -> [__m128; 2] {
    let words = _mm256_unpacklo_epi32(first, last);
    let words = _mm_unpacklo_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
    let order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    must_cast(_mm256_cvtph_ps(_mm_shuffle_epi8(words, order)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn group_q4_k<const G: usize>(block: &BlockQ4K, scales: &[u32; 8]) -> (__m256i, __m256i) {
    let bytes = load(&block.quants.as_chunks::<32>().0[G / 2]);
    let weights = _mm256_and_si256(shifted(bytes, 4 * (G as i32 % 2), 0), _mm256_set1_epi8(15));
    (weights, _mm256_set1_epi32(scales[G] as i32))
}

#[inline]
#[target_feature(enable = "avx2")]
fn group_q5_k<const G: usize>(block: &BlockQ5K, scales: &[u32; 8]) -> (__m256i, __m256i) {
    let bytes = load(&block.quants.as_chunks::<32>().0[G / 2]);
    let low = _mm256_and_si256(shifted(bytes, 4 * (G as i32 % 2), 0), _mm256_set1_epi8(15));
    let fifth = _mm256_and_si256(shifted(load(&block.high_bits), G as i32, 4), _mm256_set1_epi8(16));
    (_mm256_or_si256(low, fifth), _mm256_set1_epi32(scales[G] as i32))
}

/// Adds the results of four blocks without an offset or minima to `dots`: `scale` times the sums of `totals`.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn only_scale<S, M>(
    loaded: &Loaded<S, M>,
    totals: [__m256i; 4],
    _sums: __m256i,
    scale: f32,
    dots: __m128,
) -> __m128 {
    let scale = _mm_mul_ps(loaded.scale, _mm_set1_ps(scale));
    _mm_fmadd_ps(scale, _mm_cvtepi32_ps(four_sums(totals)), dots)
}

/// Adds the results of four blocks to `dots`: `scale` times the sums of `totals - sums * loaded.subtracted`.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn subtract_offset<S>(
    loaded: &Loaded<S, [__m256i; 4]>,
    mut totals: [__m256i; 4],
    sums: __m256i,
    scale: f32,
    dots: __m128,
) -> __m128 {
    for (total, integers) in totals.iter_mut().zip(loaded.subtracted) {
        *total = _mm256_sub_epi32(*total, _mm256_madd_epi16(sums, integers));
    }
    only_scale(loaded, totals, sums, scale, dots)
}

/// Adds the results of four blocks to `dots`: `scale` times the sums of `totals`, minus `minimum` times the sums of the
/// products of `sums` and 16 minima.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn subtract_minima(
    loaded: &Loaded16,
    totals: [__m256i; 4],
    sums: __m256i,
    scale: f32,
    dots: __m128,
) -> __m128 {
    let mut subtracted = loaded.subtracted;
    for minima in &mut subtracted {
        *minima = _mm256_madd_epi16(sums, *minima);
    }
    let dots = only_scale(loaded, totals, sums, scale, dots);
    subtract(loaded.minimum, four_sums(subtracted), scale, dots)
}

/// Does what [`subtract_minima`] does for blocks with eight minima, each for 32 weights.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn subtract_eight_minima(
    loaded: &LoadedSixBit,
    totals: [__m256i; 4],
    sums: __m256i,
    scale: f32,
    dots: __m128,
) -> __m128 {
    let sums_of_32 = _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
    let twice = _mm256_packs_epi32(sums_of_32, sums_of_32);
    let twice = _mm256_permute4x64_epi64::<0b10_00_10_00>(twice); // [2, 8] i16
    let [first, last] = loaded.subtracted;
    let (first, last) = (_mm256_madd_epi16(first, twice), _mm256_madd_epi16(last, twice));
    // Rows 0 and 2 in the lower half, rows 1 and 3 in the upper half.
    let pairs = _mm256_add_epi32(_mm256_unpacklo_epi32(first, last), _mm256_unpackhi_epi32(first, last));
    let (even, odd) = (_mm256_castsi256_si128(pairs), _mm256_extracti128_si256::<1>(pairs));
    let subtracted = _mm_add_epi32(_mm_unpacklo_epi32(even, odd), _mm_unpackhi_epi32(even, odd));
    let dots = only_scale(loaded, totals, sums, scale, dots);
    subtract(loaded.minimum, subtracted, scale, dots)
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn subtract(minimum: __m128, sums: __m128i, scale: f32, dots: __m128) -> __m128 {
    _mm_fnmadd_ps(_mm_mul_ps(minimum, _mm_set1_ps(scale)), _mm_cvtepi32_ps(sums), dots)
}
