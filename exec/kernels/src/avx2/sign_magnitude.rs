//! Dot products of the `IQ2` and `IQ3` formats, whose weights have a sign bit and a magnitude from a codebook, with
//! rounded activations, in AVX2.
//!
//! The signs and the codebook indices of a block are unpacked in registers and stored, because each look-up loads its
//! index. The sign of a weight is moved to its activation: `maddubs` needs unsigned weights.

#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use std::arch::x86_64::*;

use bytemuck::must_cast;

use super::i_quants::Scaled;
use super::k_quants::{Loaded, Scales16, dots256, four_scales, only_scale, spread};
use super::{
    FourRows, MultiplyAdd, bit_fields_to_bytes, eight_of_four, four_of_eight, load, per_token, set_bits,
    u16_indices,
};
use crate::activations::QuantisedRow;
use crate::blocks::{
    BlockIq2S, BlockIq2Xs, BlockIq2Xxs, BlockIq3S, BlockIq3Xxs, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID,
    IQ3_S_GRID, IQ3_XXS_GRID,
};

dots256! {
    dot_iq2_xxs: BlockIq2Xxs, load_iq2_xxs, group_iq2_xxs, with_signs, only_scale;
    dot_iq2_xs: BlockIq2Xs, load_iq2_xs, group_iq2_xs, with_signs, only_scale;
    dot_iq2_s: BlockIq2S, load_iq2_s, group_iq2_s, with_signs, only_scale;
    dot_iq3_xxs: BlockIq3Xxs, load_iq3_xxs, group_iq3_xxs, with_signs, only_scale;
    dot_iq3_s: BlockIq3S, load_iq3_s, group_iq3_s, with_signs, only_scale;
}

/// The unpacked parts of a block: the codebook indices, if they are packed, the signs of each 32 weights, and the scales.
#[derive(Clone, Copy)]
struct Unpacked<Indices, Scales> {
    indices: Indices,
    signs: [u32; 8],
    scales: Scales,
}

/// The magnitudes of 32 weights, and -1 or 1 for each weight.
type Signed = (__m256i, __m256i);

/// Multiplies 32 weights by 32 activations and adds adjacent products.
#[inline]
#[target_feature(enable = "avx2")]
fn with_signs((magnitudes, signs): Signed, activations: __m256i) -> __m256i {
    _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(activations, signs))
}

/// Expands 32 sign bits to 32 bytes, 1 or -1.
#[inline]
#[target_feature(enable = "avx2")]
fn signs(bits: u32) -> __m256i {
    _mm256_or_si256(set_bits(bits.to_le_bytes()), _mm256_set1_epi8(1))
}

/// Defines a function that unpacks blocks of four rows, given an expression that unpacks one block.
macro_rules! load {
    ($($name:ident: $block:ty => $indices:ty = $no_indices:expr, $scales:ty, |$this:ident| $unpack:expr;)+) => {$(
        #[inline]
        #[target_feature(enable = "avx2,f16c")]
        fn $name(blocks: [&$block; 4]) -> Scaled<Unpacked<$indices, $scales>> {
            let mut scales = [Unpacked { indices: $no_indices, signs: [0; 8], scales: <$scales>::default() }; 4];
            for r in 0..4 {
                let $this = blocks[r];
                scales[r] = $unpack;
            }
            Loaded { scale: four_scales(blocks), minimum: _mm_setzero_ps(), scales, subtracted: () }
        }
    )+};
}
load! {
    load_iq2_xxs: BlockIq2Xxs => () = (), [u32; 8], |block| {
        // The sub-blocks have four indices, then signs and a scale.
        let [low, high] = block.sub_blocks.as_chunks::<4>().0 else { unreachable!("eight are twice four") };
        let (low, high) = (_mm256_castsi256_ps(load(low)), _mm256_castsi256_ps(load(high)));
        let mixed = _mm256_castps_si256(_mm256_shuffle_ps::<0b11_01_11_01>(low, high));
        let (signs, scales) = signs_and_scales(_mm256_permute4x64_epi64::<0b11_01_10_00>(mixed));
        Unpacked { indices: (), signs, scales }
    };
    load_iq2_xs: BlockIq2Xs => [u16; 32] = [0; 32], Scales16, |block| {
        let [low, high] = block.groups.as_chunks::<16>().0 else { unreachable!("32 are twice 16") };
        let (low, high) = (load(low), load(high));
        let index_bits = _mm256_set1_epi16(511);
        let indices = [_mm256_and_si256(low, index_bits), _mm256_and_si256(high, index_bits)];
        let mixed = _mm256_packus_epi16(_mm256_srli_epi16::<9>(low), _mm256_srli_epi16::<9>(high));
        let signs = with_eighth_sign(_mm256_permute4x64_epi64::<0b11_01_10_00>(mixed));
        Unpacked { indices: must_cast(indices), signs, scales: sixteen_scales(block.scales) }
    };
    load_iq2_s: BlockIq2S => [u16; 32] = [0; 32], Scales16, |block| {
        let high = _mm256_cvtepu8_epi32(_mm_set1_epi64x(i64::from_le_bytes(block.high_bits)));
        let indices = u16_indices(load(&block.low_bits), bit_fields_to_bytes::<2>(high));
        Unpacked { indices, signs: must_cast(block.signs), scales: sixteen_scales(block.scales) }
    };
    load_iq3_xxs: BlockIq3Xxs => () = (), [u32; 8], |block| {
        let (signs, scales) = signs_and_scales(load(&block.signs_and_scales));
        Unpacked { indices: (), signs, scales }
    };
    load_iq3_s: BlockIq3S => [u16; 64] = [0; 64], [u32; 8], |block| {
        let mut indices = [[0; 32]; 2];
        let low_bits = block.low_bits.as_chunks::<32>().0;
        for ((indices, low), high) in indices.iter_mut().zip(low_bits).zip(block.high_bits.as_chunks().0) {
            *indices = u16_indices(load(low), _mm256_and_si256(set_bits(*high), _mm256_set1_epi8(1)));
        }
        let nibbles = _mm256_set1_epi32(i32::from_le_bytes(block.scales));
        let nibbles = _mm256_srlv_epi32(nibbles, _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
        let scales = odd_pairs(_mm256_and_si256(nibbles, _mm256_set1_epi32(15)));
        Unpacked { indices: must_cast(indices), signs: must_cast(block.signs), scales }
    };
}

#[inline]
#[target_feature(enable = "avx2")]
fn group_iq2_xxs<const G: usize>(
    block: &BlockIq2Xxs,
    unpacked: &Unpacked<(), [u32; 8]>,
) -> (Signed, __m256i) {
    let magnitudes = four_of_eight(&IQ2_XXS_GRID, &block.sub_blocks[G].indices);
    ((magnitudes, signs(unpacked.signs[G])), pair::<G>(&unpacked.scales))
}

#[inline]
#[target_feature(enable = "avx2")]
fn group_iq2_xs<const G: usize>(
    _: &BlockIq2Xs,
    unpacked: &Unpacked<[u16; 32], Scales16>,
) -> (Signed, __m256i) {
    let magnitudes = four_of_eight(&IQ2_XS_GRID, &unpacked.indices.as_chunks().0[G]);
    ((magnitudes, signs(unpacked.signs[G])), spread::<G>(&unpacked.scales))
}

#[inline]
#[target_feature(enable = "avx2")]
fn group_iq2_s<const G: usize>(_: &BlockIq2S, unpacked: &Unpacked<[u16; 32], Scales16>) -> (Signed, __m256i) {
    let magnitudes = four_of_eight(&IQ2_S_GRID, &unpacked.indices.as_chunks().0[G]);
    ((magnitudes, signs(unpacked.signs[G])), spread::<G>(&unpacked.scales))
}

#[inline]
#[target_feature(enable = "avx2")]
fn group_iq3_xxs<const G: usize>(
    block: &BlockIq3Xxs,
    unpacked: &Unpacked<(), [u32; 8]>,
) -> (Signed, __m256i) {
    let magnitudes = eight_of_four(&IQ3_XXS_GRID, &block.indices.as_chunks().0[G]);
    ((magnitudes, signs(unpacked.signs[G])), pair::<G>(&unpacked.scales))
}

#[inline]
#[target_feature(enable = "avx2")]
fn group_iq3_s<const G: usize>(_: &BlockIq3S, unpacked: &Unpacked<[u16; 64], [u32; 8]>) -> (Signed, __m256i) {
    let magnitudes = eight_of_four(&IQ3_S_GRID, &unpacked.indices.as_chunks().0[G]);
    ((magnitudes, signs(unpacked.signs[G])), pair::<G>(&unpacked.scales))
}

/// Returns the scale of group G, a pair of equal i16, in all lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn pair<const G: usize>(scales: &[u32; 8]) -> __m256i {
    _mm256_set1_epi32(scales[G] as i32)
}

/// Returns `2 * scale + 1` for each of eight scales, as a pair of equal i16.
#[inline]
#[target_feature(enable = "avx2")]
fn odd_pairs(scales: __m256i) -> [u32; 8] {
    let odd = _mm256_or_si256(_mm256_slli_epi32::<1>(scales), _mm256_set1_epi32(1));
    must_cast(_mm256_or_si256(odd, _mm256_slli_epi32::<16>(odd)))
}

/// Returns `2 * scale + 1` for each of 16 four-bit scales.
#[inline]
#[target_feature(enable = "avx2")]
fn sixteen_scales(packed: [u8; 8]) -> Scales16 {
    let packed = _mm_set1_epi64x(i64::from_le_bytes(packed));
    let low_bits = _mm_set1_epi8(15);
    let low = _mm_and_si128(packed, low_bits);
    let high = _mm_and_si128(_mm_srli_epi16::<4>(packed), low_bits);
    let wide = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(low, high));
    must_cast(_mm256_or_si256(_mm256_slli_epi16::<1>(wide), _mm256_set1_epi16(1)))
}

/// Unpacks eight 32-bit integers: the signs of 32 weights, four times seven bits, and a scale in the upper four bits.
#[inline]
#[target_feature(enable = "avx2")]
fn signs_and_scales(packed: __m256i) -> ([u32; 8], [u32; 8]) {
    (with_eighth_sign(bit_fields_to_bytes::<7>(packed)), odd_pairs(_mm256_srli_epi32::<28>(packed)))
}

/// Sets the highest bit of each of 32 bytes so that the number of set bits is even. The bit must be clear.
#[inline]
#[target_feature(enable = "avx2")]
fn with_eighth_sign(bytes: __m256i) -> [u32; 8] {
    // The lowest bit of each byte becomes the parity of the byte. Bits that cross into other bytes do not reach it.
    let parity = _mm256_xor_si256(bytes, _mm256_srli_epi16::<4>(bytes));
    let parity = _mm256_xor_si256(parity, _mm256_srli_epi16::<2>(parity));
    let parity = _mm256_xor_si256(parity, _mm256_srli_epi16::<1>(parity));
    let eighth = _mm256_and_si256(_mm256_slli_epi16::<7>(parity), _mm256_set1_epi8(-128));
    must_cast(_mm256_or_si256(bytes, eighth))
}
