//! Dot products of K-quants with the rounded activations of one token, in AVX-512.
//!
//! A tile is four adjacent blocks of a row. `vpdpbusd` adds products of four weights, `vpdpwssd` multiplies them by the
//! integer scales. The sums of the tiles of four rows are kept until they are added to the dot products, so that the four
//! rows are the lanes of this chain of additions.

use std::mem::MaybeUninit;

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::x86_64::*;

use bytemuck::must_cast;

use super::{
    add_pairs, compute_here, for_each, four_of, load, load_twice, partial_sums, prefetch, sums_of_fours,
    sums_of_quarters,
};
use crate::activations::{QuantisedRow, SingleToken};
use crate::avx2::{self, FOUR_BITS, FourRows, Q3_K_WORDS, SIX_BITS, TOP_BITS};
use crate::blocks::{
    BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K, HalfScaledBlock, ScaledBlock, SixBitScales,
};
use crate::x86_64::Avx512;

/// Number of blocks in a tile.
const TILE: usize = 4;

/// Maximum number of tiles of a row whose sums are kept.
const MAX_TILES: usize = 16;

/// The activations of a token for a tile.
#[derive(Clone, Copy)]
struct TileInput<'a> {
    quants: &'a [[i8; 256]; TILE],
    by_nibble: &'a [[i8; 256]; TILE],
    sums: &'a [[i16; 16]; TILE],
    sums_of_32: &'a [[i16; 8]; TILE],
    scales: &'a [f32; TILE],
}

/// The activations of a token for adjacent tiles.
struct Input<'a> {
    quants: &'a [[[i8; 256]; TILE]],
    by_nibble: &'a [[[i8; 256]; TILE]],
    sums: &'a [[[i16; 16]; TILE]],
    sums_of_32: &'a [[[i16; 8]; TILE]],
    scales: &'a [[f32; TILE]],
}

impl<'a> Input<'a> {
    /// Returns the activations for `tiles` tiles, the first of which begins with block `first`.
    #[inline(always)]
    fn new(input: &QuantisedRow<'a>, single: SingleToken<'a>, first: usize, tiles: usize) -> Input<'a> {
        Input {
            quants: &input.quants[256 * first..].as_chunks().0.as_chunks().0[..tiles],
            by_nibble: &single.by_nibble[256 * first..].as_chunks().0.as_chunks().0[..tiles],
            sums: &input.sums[16 * first..].as_chunks().0.as_chunks().0[..tiles],
            sums_of_32: &single.sums_of_32[8 * first..].as_chunks().0.as_chunks().0[..tiles],
            scales: &input.scales[first..].as_chunks().0[..tiles],
        }
    }

    #[inline(always)]
    fn tile(&self, at: usize) -> TileInput<'a> {
        TileInput {
            quants: &self.quants[at],
            by_nibble: &self.by_nibble[at],
            sums: &self.sums[at],
            sums_of_32: &self.sums_of_32[at],
            scales: &self.scales[at],
        }
    }
}

/// The sums of a tile of a row: factors of the products that are added to the dot product.
#[derive(Clone, Copy)]
struct TileSums {
    /// The scales of the blocks, then the scales of the minima, times the scales of the activations.
    scales: __m256,
    /// The sum of the products of each block, then the sum of its minima times activations.
    integers: __m256,
}

impl TileSums {
    #[inline]
    #[target_feature(enable = "avx2")]
    fn zero() -> TileSums {
        TileSums { scales: _mm256_setzero_ps(), integers: _mm256_setzero_ps() }
    }
}

/// Defines dot products for formats with blocks of 256 weights. Arguments of each format: the activations, in the order
/// of the weights that `$half` returns; the indices of its scales; the number by which these weights are too large, in
/// formats without minima; `$load`, which loads the scales of a tile; and `$half::<H>`, which returns the weights of half
/// a block as bytes, 64 in a register.
macro_rules! dots256 {
    ($($name:ident, $multiply:ident: $block:ident, $quants:ident, $indices:ident, $offset:expr, $load:ident, $half:ident;)+) => {$(
        #[inline]
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
        pub(crate) fn $name<const T: usize>(
            instructions: Avx512,
            four_rows: &[&[u8]; 4],
            input: &[QuantisedRow<'_>; T],
        ) -> [[f32; 4]; T] {
            /// Returns the sums of the last tile of a row, which overlaps the one before it.
            #[inline(never)]
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
            fn last_tile(row: &[$block], input: &QuantisedRow<'_>, single: SingleToken<'_>) -> TileSums {
                let tile = row.last_chunk().expect("the row has a tile");
                $multiply(tile, Input::new(input, single, row.len() - TILE, 1).tile(0))
            }

            let rows = FourRows::<$block>::new(four_rows).rows;
            let (tiles, rest) = (rows[0].len() / TILE, rows[0].len() % TILE);
            let single = match input[0].single {
                Some(single) if T == 1 && tiles > 0 => single,
                _ => return avx2::$name(instructions, four_rows, input),
            };
            let whole = Input::new(&input[0], single, 0, tiles);
            let mut kept = [[const { MaybeUninit::uninit() }; 4]; MAX_TILES];
            let mut last = [TileSums::zero(); 4];
            let mut dots = _mm_setzero_ps();
            for first in (0..tiles).step_by(MAX_TILES) {
                let part = first..tiles.min(first + MAX_TILES);
                for r in 0..4 {
                    let blocks = &rows[r].as_chunks::<TILE>().0[part.clone()];
                    for (at, (blocks, kept)) in blocks.iter().zip(&mut kept).enumerate() {
                        kept[r].write($multiply(blocks, whole.tile(first + at)));
                    }
                    if rest > 0 && part.end == tiles {
                        last[r] = last_tile(rows[r], &input[0], single);
                    }
                }
                for [a, b, c, d] in &kept[..part.len()] {
                    // SAFETY: the loop above has written them.
                    let sums = unsafe { [a.assume_init(), b.assume_init(), c.assume_init(), d.assume_init()] };
                    dots = add::<$block>(dots, sums, 0);
                }
            }
            if rest > 0 {
                dots = add::<$block>(dots, last, TILE - rest);
            }
            [must_cast(dots); T]
        }

        #[inline]
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
        fn $multiply(blocks: &[$block; TILE], input: TileInput<'_>) -> TileSums {
            let mut products = [[_mm512_setzero_si512(); 2]; TILE];
            for_each! { b in 0 1 2 3 => {
                prefetch(blocks, b);
                let weights = [$half::<0>(&blocks[b]), $half::<1>(&blocks[b])];
                let activations = input.$quants[b].as_chunks::<64>().0;
                for_each! { h in 0 1 => {
                    products[b][h] = _mm512_packs_epi32(
                        sums_of_fours(weights[h][0], load(&activations[2 * h])),
                        sums_of_fours(weights[h][1], load(&activations[2 * h + 1])),
                    );
                } }
                compute_here(&mut products[b]);
            } }
            let loaded = $load(blocks, input);
            let mut totals = [_mm512_setzero_si512(); TILE];
            for_each! { b in 0 1 2 3 => {
                for_each! { h in 0 1 => {
                    let scales = _mm512_permutexvar_epi16(load(&$indices[b][h]), loaded.integers[b / 2]);
                    totals[b] = add_pairs(totals[b], products[b][h], scales);
                } }
            } }
            let mut integers = sums_of_quarters(partial_sums(totals), loaded.subtracted);
            if $offset != 0 {
                let offsets = _mm_mullo_epi32(_mm256_extracti128_si256::<1>(integers), _mm_set1_epi32($offset));
                integers = _mm256_castsi128_si256(_mm_sub_epi32(_mm256_castsi256_si128(integers), offsets));
            }
            let scales = _mm256_mul_ps(loaded.scales, _mm256_broadcast_ps(&must_cast(*input.scales)));
            TileSums { scales, integers: _mm256_cvtepi32_ps(integers) }
        }
    )+};
}

dots256! {
    dot_q2_k, multiply_q2_k: BlockQ2K, quants, SIXTEEN_SCALES, 0, load_q2_k, half_q2_k;
    dot_q3_k, multiply_q3_k: BlockQ3K, quants, SIXTEEN_SCALES, 4, load_q3_k, half_q3_k;
    dot_q4_k, multiply_q4_k: BlockQ4K, by_nibble, EIGHT_SCALES, 0, load_six_bit_scales, half_q4_k;
    dot_q5_k, multiply_q5_k: BlockQ5K, by_nibble, EIGHT_SCALES, 0, load_six_bit_scales, half_q5_k;
    dot_q6_k, multiply_q6_k: BlockQ6K, quants, SIXTEEN_SCALES, 32, load_q6_k, half_q6_k;
}

/// Adds the sums of a tile of four rows to the dot products, block after block. The first `skipped` blocks are left out.
#[inline]
#[target_feature(enable = "avx2,fma,avx512f")]
fn add<B: ScaledBlock>(mut dots: __m128, [a, b, c, d]: [TileSums; 4], skipped: usize) -> __m128 {
    let (scales, minima) = by_block([a.scales, b.scales, c.scales, d.scales]);
    let (totals, subtracted) = by_block([a.integers, b.integers, c.integers, d.integers]);
    for b in skipped..TILE {
        dots = _mm_fmadd_ps(scales[b], totals[b], dots);
        if B::HAS_MINIMUM {
            dots = _mm_fnmadd_ps(minima[b], subtracted[b], dots);
        }
    }
    dots
}

/// Transposes the first four and the last four values of four rows.
#[inline]
#[target_feature(enable = "avx512f")]
fn by_block([a, b, c, d]: [__m256; 4]) -> ([__m128; 4], [__m128; 4]) {
    let (first, last): (__m512, __m512) = (must_cast([a, b]), must_cast([c, d]));
    let low = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
    let high = _mm512_add_epi32(low, _mm512_set1_epi32(4));
    (
        must_cast(_mm512_permutex2var_ps(first, low, last)),
        must_cast(_mm512_permutex2var_ps(first, high, last)),
    )
}

/// The scales of a tile.
struct Loaded {
    /// The scales of the blocks, then those of their minima.
    scales: __m256,
    /// The integer scales as i16. Formats with 16 of them: those of the first two blocks, then of the last two. Formats
    /// with eight: those of all blocks, twice.
    integers: [__m512i; 2],
    /// The sums of minima, or of integer scales, times activations. Each quarter has one of four parts of each block.
    subtracted: __m512i,
}

/// The indices of the shuffles that select the scales of the halves of each block from [`Loaded::integers`]. The 128
/// products of a half are added to 32, which [`_mm512_packs_epi32`] orders: each quarter has four sums of its first
/// register, then four sums of its second register.
type ScaleIndices = [[[i16; 32]; 2]; TILE];

/// Formats with 16 scales: a quarter of a register has a sixteenth of the block.
static SIXTEEN_SCALES: ScaleIndices = scale_indices(true);

/// Formats with eight scales, in the order of [`SingleToken::by_nibble`].
static EIGHT_SCALES: ScaleIndices = scale_indices(false);

const fn scale_indices(are_sixteen: bool) -> ScaleIndices {
    let mut indices = [[[0; 32]; 2]; TILE];
    let mut at = 0;
    while at < 64 * TILE {
        let (block, half, quarter, register) = (at / 64, at / 32 % 2, at / 8 % 4, at / 4 % 2);
        let index = if are_sixteen {
            16 * (block % 2) + 8 * half + 4 * register + quarter
        } else {
            8 * block + 4 * half + 2 * (quarter / 2) + register
        };
        indices[block][half][at % 32] = index as i16;
        at += 1;
    }
    indices
}

/// Multiplies 16 integers of each block, as [`Loaded::integers`] has them, by the sums of 16 activations.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn times_sums(integers: [__m512i; 2], input: TileInput<'_>) -> __m512i {
    let sums = input.sums.as_chunks::<2>().0;
    let first = _mm512_madd_epi16(load(&sums[0]), integers[0]);
    let last = _mm512_madd_epi16(load(&sums[1]), integers[1]);
    // Blocks 0, 2, 0, 2 in the first two quarters, blocks 1, 3, 1, 3 in the last two.
    let pairs = _mm512_add_epi32(_mm512_unpacklo_epi32(first, last), _mm512_unpackhi_epi32(first, last));
    _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15), pairs)
}

/// Widens 16 bytes of each block to i16, of the first two blocks and of the last two.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn widened(bytes: __m512i) -> [__m512i; 2] {
    [
        _mm512_cvtepi8_epi16(_mm512_castsi512_si256(bytes)),
        _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64::<1>(bytes)),
    ]
}

/// Returns the f16 scales of the blocks, then their minima.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn scales_and_minima<B: HalfScaledBlock>([a, b, c, d]: &[B; TILE]) -> __m256 {
    let scales = [a.scale_bits(), b.scale_bits(), c.scale_bits(), d.scale_bits()];
    let minima = [a.minimum_bits(), b.minimum_bits(), c.minimum_bits(), d.minimum_bits()];
    _mm256_cvtph_ps(must_cast([scales, minima]))
}

/// Shifts the upper half of a register to the right.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn upper_shifted<const BITS: i16>(bytes: __m512i) -> __m512i {
    let counts = _mm512_inserti64x4::<1>(_mm512_setzero_si512(), _mm256_set1_epi16(BITS));
    _mm512_srlv_epi16(bytes, counts)
}

/// Shifts all bytes so that bit `from` becomes bit `to`. The caller must mask out bits that cross into other bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn shifted(bytes: __m512i, from: i32, to: i32) -> __m512i {
    if from > to {
        _mm512_srl_epi16(bytes, _mm_cvtsi32_si128(from - to))
    } else {
        _mm512_sll_epi16(bytes, _mm_cvtsi32_si128(to - from))
    }
}

/// Returns the bits of `low` in the mask `low_mask` and the bits of `high` in the mask `high_mask`.
#[inline]
#[target_feature(enable = "avx512f")]
fn joined(low: __m512i, low_mask: i8, high: __m512i, high_mask: i8) -> __m512i {
    let low = _mm512_and_si512(low, _mm512_set1_epi8(low_mask));
    _mm512_ternarylogic_epi32::<0b1111_1000>(low, high, _mm512_set1_epi8(high_mask)) // a | b & c
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,f16c")]
fn load_q2_k(blocks: &[BlockQ2K; TILE], input: TileInput<'_>) -> Loaded {
    let [a, b, c, d] = blocks;
    let packed = must_cast([a.packed, b.packed, c.packed, d.packed]);
    let low_bits = _mm512_set1_epi8(15);
    let minima = _mm512_and_si512(_mm512_srli_epi16::<4>(packed), low_bits);
    Loaded {
        scales: scales_and_minima(blocks),
        integers: widened(_mm512_and_si512(packed, low_bits)),
        subtracted: times_sums(widened(minima), input),
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn half_q2_k<const H: usize>(block: &BlockQ2K) -> [__m512i; 2] {
    let bytes = upper_shifted::<2>(load_twice(&block.quants.as_chunks::<32>().0[H]));
    let two_bits = _mm512_set1_epi8(3);
    [_mm512_and_si512(bytes, two_bits), _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), two_bits)]
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,f16c")]
fn load_q3_k(blocks: &[BlockQ3K; TILE], input: TileInput<'_>) -> Loaded {
    let [a, b, c, d] = blocks;
    let bytes: __m512i = must_cast([*a.last_bytes(), *b.last_bytes(), *c.last_bytes(), *d.last_bytes()]);
    let low = _mm512_shuffle_epi8(bytes, four_of(must_cast(Q3_K_WORDS[0])));
    let low = _mm512_srlv_epi32(low, four_of(_mm_setr_epi32(0, 0, 4, 4)));
    let high = _mm512_shuffle_epi8(bytes, four_of(must_cast(Q3_K_WORDS[1])));
    let high = _mm512_slli_epi16::<4>(_mm512_srlv_epi32(high, four_of(_mm_setr_epi32(0, 2, 4, 6))));
    let integers = widened(_mm512_sub_epi8(joined(low, 15, high, 0x30), _mm512_set1_epi8(32)));
    Loaded { scales: scales_and_minima(blocks), integers, subtracted: times_sums(integers, input) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn half_q3_k<const H: usize>(block: &BlockQ3K) -> [__m512i; 2] {
    let bytes = upper_shifted::<2>(load_twice(&block.quants.as_chunks::<32>().0[H]));
    let third = upper_shifted::<1>(load_twice(&block.high_bits));
    let first_bit = 4 * H as i32;
    [
        joined(bytes, 3, shifted(third, first_bit, 2), 4),
        joined(_mm512_srli_epi16::<4>(bytes), 3, shifted(third, first_bit + 2, 2), 4),
    ]
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,f16c")]
fn load_q6_k(blocks: &[BlockQ6K; TILE], input: TileInput<'_>) -> Loaded {
    let [a, b, c, d] = blocks;
    let integers = widened(must_cast([a.scales, b.scales, c.scales, d.scales]));
    Loaded { scales: scales_and_minima(blocks), integers, subtracted: times_sums(integers, input) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn half_q6_k<const H: usize>(block: &BlockQ6K) -> [__m512i; 2] {
    let low = load(&block.low_bits.as_chunks::<64>().0[H]);
    let high = upper_shifted::<2>(load_twice(&block.high_bits.as_chunks::<32>().0[H]));
    [joined(low, 15, _mm512_slli_epi16::<4>(high), 0x30), joined(_mm512_srli_epi16::<4>(low), 15, high, 0x30)]
}

/// Unpacks the scales and minima of a tile. A quarter of a register has the header of a block: the f16 scale and minimum,
/// and three words a, b, c, see [`SixBitScales`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,f16c")]
fn load_six_bit_scales<B: SixBitScales>([a, b, c, d]: &[B; TILE], input: TileInput<'_>) -> Loaded {
    let headers: __m512i = must_cast([*a.header(), *b.header(), *c.header(), *d.header()]);
    // The words a c b c, the last shifted by four bits, have the low bits; the words a and b have the high bits.
    let low = _mm512_shuffle_epi32::<0b11_10_11_01>(headers);
    let low = _mm512_srlv_epi32(low, four_of(_mm_setr_epi32(0, 0, 0, 4)));
    let low = _mm512_and_si512(low, four_of(_mm_setr_epi32(SIX_BITS, FOUR_BITS, SIX_BITS, FOUR_BITS)));
    let high = _mm512_srli_epi32::<2>(_mm512_shuffle_epi32::<0b10_00_01_00>(headers));
    let high = _mm512_and_si512(high, four_of(_mm_setr_epi32(0, TOP_BITS, 0, TOP_BITS)));
    // In each quarter eight scales, then eight minima.
    let bytes = _mm512_or_si512(low, high);
    let integers = _mm512_unpacklo_epi8(bytes, _mm512_setzero_si512());
    let minima = _mm512_unpackhi_epi8(bytes, _mm512_setzero_si512());
    let products = _mm512_madd_epi16(minima, load(input.sums_of_32));
    let order = _mm256_setr_epi16(0, 8, 16, 24, 1, 9, 17, 25, 0, 0, 0, 0, 0, 0, 0, 0);
    let halves = _mm512_permutexvar_epi16(_mm512_castsi256_si512(order), headers);
    Loaded {
        scales: _mm256_cvtph_ps(_mm512_castsi512_si128(halves)),
        integers: [integers, integers],
        subtracted: _mm512_permutexvar_epi32(
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
            products,
        ),
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn half_q4_k<const H: usize>(block: &BlockQ4K) -> [__m512i; 2] {
    let bytes = load(&block.quants.as_chunks::<64>().0[H]);
    let four_bits = _mm512_set1_epi8(15);
    [_mm512_and_si512(bytes, four_bits), _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), four_bits)]
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn half_q5_k<const H: usize>(block: &BlockQ5K) -> [__m512i; 2] {
    let bytes = load(&block.quants.as_chunks::<64>().0[H]);
    let fifth = upper_shifted::<2>(load_twice(&block.high_bits));
    let first_bit = 4 * H as i32;
    [
        joined(bytes, 15, shifted(fifth, first_bit, 4), 16),
        joined(_mm512_srli_epi16::<4>(bytes), 15, shifted(fifth, first_bit + 1, 4), 16),
    ]
}
