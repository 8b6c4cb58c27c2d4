//! Unpacking of the weights of each format for panels.
//!
//! A weight becomes an unsigned byte, from which an offset is subtracted. Eight adjacent weights are unpacked at once,
//! as the bytes of a 64-bit integer. Some formats are unpacked to codebook indices, which are looked up when rows are
//! interleaved.
//!
//! Not here: the layout of the stored blocks, see [`crate::blocks`].

use crate::blocks::{
    BlockIq1M, BlockIq1S, BlockIq2S, BlockIq2Xs, BlockIq2Xxs, BlockIq3S, BlockIq3Xxs, BlockIq4Nl, BlockIq4Xs,
    BlockMxfp4, BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K,
    BlockQ8_0, IQ4_VALUES, IntegerBlock32, IntegerBlock256, MXFP4_VALUES, SignMagnitudeBlock,
};

/// The quants of the 16 indices of a codebook.
pub(super) type Codebook = [u8; 16];

/// A block of N weights that can be unpacked to one byte per weight, its quant.
pub(super) trait UnpackBytes<const N: usize> {
    /// The value of a quant that represents the weight zero.
    const OFFSET: i32 = 0;
    /// The maximum value of a quant, or of a [`Self::CODEBOOK`] entry.
    const MAX_QUANT: i32;
    /// The codebook, if the bytes are its indices.
    const CODEBOOK: Option<Codebook> = None;

    /// Writes the quants of the block, or their codebook indices, to `quants`.
    fn unpack(&self, quants: &mut [u8; N]);
}

/// A block of 256 weights: weight j, in group g = j / 16, is
/// `scale * scales[g] * (quants[j] - OFFSET) - minimum * minima[g]`.
pub(super) trait Block256: IntegerBlock256 + UnpackBytes<256> {}
impl<B: IntegerBlock256 + UnpackBytes<256>> Block256 for B {}

/// A block of 32 weights: weight j is `scale * (quants[j] - OFFSET) + minimum`.
pub(super) trait Block32: IntegerBlock32 + UnpackBytes<32> {}
impl<B: IntegerBlock32 + UnpackBytes<32>> Block32 for B {}

/// Returns eight equal bytes as a 64-bit integer.
const fn repeat(byte: u8) -> u64 {
    u64::from_le_bytes([byte; 8])
}

/// Applies `of` to each group of eight bytes, as a 64-bit integer, and writes the results to `out`. `of` must mask out
/// bits that it shifts into other bytes.
#[inline(always)]
fn map_bytes<const N: usize>(out: &mut [u8; N], bytes: &[u8; N], of: impl Fn(u64) -> u64) {
    for (out, bytes) in out.as_chunks_mut::<8>().0.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *out = of(u64::from_le_bytes(*bytes)).to_le_bytes();
    }
}

/// Applies `of` to each group of eight bytes, as a 64-bit integer, and ORs the results into `out`.
#[inline(always)]
fn or_bytes(out: &mut [u8; 32], bytes: &[u8; 32], of: impl Fn(u64) -> u64) {
    for (out, bytes) in out.as_chunks_mut::<8>().0.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *out = (u64::from_le_bytes(*out) | of(u64::from_le_bytes(*bytes))).to_le_bytes();
    }
}

/// Unpacks four-bit integers from runs of 32 bytes: first the 32 low nibbles of a run, then its 32 high nibbles.
#[inline(always)]
fn four_bits(out: &mut [u8; 256], bytes: &[u8; 128]) {
    for (out, bytes) in out.as_chunks_mut::<64>().0.iter_mut().zip(bytes.as_chunks::<32>().0) {
        let [low, high] = out.as_chunks_mut::<32>().0 else { unreachable!("64 bytes are twice 32 bytes") };
        map_bytes(low, bytes, |eight| eight & repeat(15));
        map_bytes(high, bytes, |eight| eight >> 4 & repeat(15));
    }
}

/// Unpacks two-bit integers from runs of 32 bytes: first the two lowest bits of each byte of a run, then the next two
/// bits of each byte, up to the two highest bits.
#[inline(always)]
fn two_bits(out: &mut [u8; 256], bytes: &[u8; 64]) {
    for (out, bytes) in out.as_chunks_mut::<128>().0.iter_mut().zip(bytes.as_chunks::<32>().0) {
        for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            map_bytes(out, bytes, |eight| eight >> (2 * group) & repeat(3));
        }
    }
}

/// Sets bit `position` of each of 256 quants: bit g of byte i of `bits` belongs to quant i of group g, a group of 32.
#[inline(always)]
fn high_bits(out: &mut [u8; 256], bits: &[u8; 32], position: u32) {
    for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        or_bytes(out, bits, |eight| (eight >> group & repeat(1)) << position);
    }
}

/// Unpacks 32 four-bit integers: the first 16 from the low nibbles of the bytes, the last 16 from the high nibbles.
#[inline(always)]
fn nibbles(out: &mut [u8; 32], bytes: &[u8; 16]) {
    let [low, high] = out.as_chunks_mut::<16>().0 else { unreachable!("32 bytes are twice 16 bytes") };
    map_bytes(low, bytes, |eight| eight & repeat(15));
    map_bytes(high, bytes, |eight| eight >> 4 & repeat(15));
}

/// Unpacks 32 five-bit integers: the low four bits as [`nibbles`] does; bit j of `high` is the fifth bit of integer j.
#[inline(always)]
fn five_bits(out: &mut [u8; 32], bytes: &[u8; 16], high: [u8; 4]) {
    nibbles(out, bytes);
    for (out, bits) in out.as_chunks_mut::<8>().0.iter_mut().zip(high) {
        *out = (u64::from_le_bytes(*out) | bit_bytes(bits) << 4).to_le_bytes();
    }
}

/// Expands each of eight bits to a byte with the value 0 or 1.
#[inline(always)]
fn bit_bytes(bits: u8) -> u64 {
    // Byte j of the product keeps bit j of `bits`; the addition carries it into the highest bit of the byte.
    let own = (u64::from(bits) * repeat(1)) & 0x8040_2010_0804_0201;
    ((own + repeat(0x7f)) & repeat(0x80)) >> 7
}

/// Unpacks weights from signs and magnitudes, plus `offset`, a power of two above all magnitudes.
#[inline(always)]
fn signed_magnitudes(out: &mut [u8; 256], block: &impl SignMagnitudeBlock, offset: u8) {
    for (group, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let negative = bit_bytes(block.signs(group));
        // The two's complement of a negative weight, in as many bits as `offset` has. Magnitudes are not zero, so the
        // addition does not carry into the next byte.
        let inverted = negative * u64::from(2 * u16::from(offset) - 1);
        let weights = (block.magnitudes(group) ^ inverted) + negative;
        // Inverting the sign bit adds the offset.
        *out = (weights ^ repeat(offset)).to_le_bytes();
    }
}

/// The codebook of `IQ4_NL` and `IQ4_XS`, with 128 added to each entry.
const IQ4_CODEBOOK: Option<Codebook> = Some(with_offset(IQ4_VALUES, 128));

/// The codebook of `MXFP4`, with 12 added to each entry.
const MXFP4_CODEBOOK: Option<Codebook> = Some(with_offset(MXFP4_VALUES, 12));

const fn with_offset(values: [i8; 16], offset: u8) -> Codebook {
    let mut codebook = [0; 16];
    let mut at = 0;
    while at < 16 {
        codebook[at] = values[at].cast_unsigned().wrapping_add(offset);
        at += 1;
    }
    codebook
}

/// Implements [`UnpackBytes`] for block types of `$length` weights, given for each type the constants of the trait and
/// an expression that unpacks a block.
macro_rules! unpack_bytes {
    ($length:literal: $(
        $block:ident { $($name:ident: $type:ty = $value:expr),+ } |$this:ident, $quants:ident| $unpack:expr;
    )+) => {$(
        impl UnpackBytes<$length> for $block {
            $(const $name: $type = $value;)+

            #[inline(always)]
            fn unpack(&self, $quants: &mut [u8; $length]) {
                let $this = self;
                $unpack;
            }
        }
    )+};
}
unpack_bytes! { 256:
    BlockQ2K { MAX_QUANT: i32 = 3 } |block, quants| two_bits(quants, &block.quants);
    BlockQ3K { OFFSET: i32 = 4, MAX_QUANT: i32 = 7 } |block, quants| {
        two_bits(quants, &block.quants);
        high_bits(quants, &block.high_bits, 2);
    };
    BlockQ4K { MAX_QUANT: i32 = 15 } |block, quants| four_bits(quants, &block.quants);
    BlockQ5K { MAX_QUANT: i32 = 31 } |block, quants| {
        four_bits(quants, &block.quants);
        high_bits(quants, &block.high_bits, 4);
    };
    BlockQ6K { OFFSET: i32 = 32, MAX_QUANT: i32 = 63 } |block, quants| {
        let (lows, highs) = (block.low_bits.as_chunks::<64>().0, block.high_bits.as_chunks::<32>().0);
        for (out, (low, high)) in quants.as_chunks_mut::<128>().0.iter_mut().zip(lows.iter().zip(highs)) {
            let low = low.as_chunks::<32>().0;
            for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                map_bytes(out, &low[group % 2], |eight| eight >> (4 * (group / 2)) & repeat(15));
                or_bytes(out, high, |eight| (eight >> (2 * group) & repeat(3)) << 4);
            }
        }
    };
    // Weights in units of 1/8. The offset 9 is 8, which the entries of the grid contain, plus 1 for the shift.
    BlockIq1S { OFFSET: i32 = 9, MAX_QUANT: i32 = 18 } |block, quants| {
        for (row, out) in quants.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            // A byte is at most 16 + 2, so the addition does not carry into the next byte.
            let up = repeat(9 - block.offset(row / 4));
            *out = (block.grid_row(row) + up).to_le_bytes();
        }
    };
    BlockIq1M { OFFSET: i32 = 9, MAX_QUANT: i32 = 18 } |block, quants| {
        for (row, out) in quants.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let up = repeat(9 - block.offset(row));
            *out = (block.grid_row(row) + up).to_le_bytes();
        }
    };
    // The magnitudes are at most 43 in `IQ2` formats, 62 in `IQ3_XXS` and 15 in `IQ3_S`.
    BlockIq2Xxs { OFFSET: i32 = 128, MAX_QUANT: i32 = 171 } |block, quants| signed_magnitudes(quants, block, 128);
    BlockIq2Xs { OFFSET: i32 = 128, MAX_QUANT: i32 = 171 } |block, quants| signed_magnitudes(quants, block, 128);
    BlockIq2S { OFFSET: i32 = 128, MAX_QUANT: i32 = 171 } |block, quants| signed_magnitudes(quants, block, 128);
    BlockIq3Xxs { OFFSET: i32 = 128, MAX_QUANT: i32 = 190 } |block, quants| signed_magnitudes(quants, block, 128);
    BlockIq3S { OFFSET: i32 = 16, MAX_QUANT: i32 = 31 } |block, quants| signed_magnitudes(quants, block, 16);
    BlockIq4Xs { OFFSET: i32 = 128, MAX_QUANT: i32 = 241, CODEBOOK: Option<Codebook> = IQ4_CODEBOOK } |block, quants| {
        for (out, bytes) in quants.as_chunks_mut::<32>().0.iter_mut().zip(block.quants.as_chunks::<16>().0) {
            nibbles(out, bytes);
        }
    };
}
unpack_bytes! { 32:
    BlockQ4_0 { OFFSET: i32 = 8, MAX_QUANT: i32 = 15 } |block, quants| nibbles(quants, &block.quants);
    BlockQ4_1 { MAX_QUANT: i32 = 15 } |block, quants| nibbles(quants, &block.quants);
    BlockQ5_0 { OFFSET: i32 = 16, MAX_QUANT: i32 = 31 } |block, quants| {
        five_bits(quants, &block.quants, block.high_bits);
    };
    BlockQ5_1 { MAX_QUANT: i32 = 31 } |block, quants| five_bits(quants, &block.quants, block.high_bits);
    BlockQ8_0 { OFFSET: i32 = 128, MAX_QUANT: i32 = 255 } |block, quants| {
        map_bytes(quants, bytemuck::cast_ref(&block.quants), |eight| eight ^ repeat(0x80));
    };
    BlockIq4Nl { OFFSET: i32 = 128, MAX_QUANT: i32 = 241, CODEBOOK: Option<Codebook> = IQ4_CODEBOOK } |block, quants| {
        nibbles(quants, &block.quants);
    };
    BlockMxfp4 { OFFSET: i32 = 12, MAX_QUANT: i32 = 24, CODEBOOK: Option<Codebook> = MXFP4_CODEBOOK } |block, quants| {
        nibbles(quants, &block.quants);
    };
}
