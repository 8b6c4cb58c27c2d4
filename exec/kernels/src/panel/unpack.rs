//! Unpacks the weights of each format for panels.
//!
//! All formats with blocks of 256 are unpacked to one form, and all with blocks of 32 to another: unsigned bytes,
//! from which an offset is subtracted, with integer and f32 scales. Eight adjacent weights are unpacked at once, as
//! the bytes of a 64-bit integer. Two formats are unpacked to codebook indices, which are looked up when rows are
//! interleaved.
//!
//! Not here: the layout of the stored blocks, see [`crate::blocks`].

use crate::blocks::{
    BlockIq1S, BlockIq4Nl, BlockIq4Xs, BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0,
    BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0, IQ4_VALUES, IntegerBlock32, IntegerBlock256,
};

/// A block of 256 weights: weight j, in group g = j / 16, is
/// `scale * scales[g] * (quants[j] - OFFSET) - minimum * minima[g]`.
pub(super) trait Block256: IntegerBlock256 {
    /// The unpacked quant of a zero weight.
    const OFFSET: i32 = 0;
    /// The maximum unpacked quant or entry of [`CODEBOOK`].
    const MAX_QUANT: i32;
    /// Whether quants are unpacked to indices of [`CODEBOOK`].
    const FROM_CODEBOOK: bool = false;

    /// Writes the unpacked quants.
    fn unpack(&self, quants: &mut [u8; 256]);
}

/// A block of 32 weights: weight j is `scale * (quants[j] - OFFSET) + minimum`.
pub(super) trait Block32: IntegerBlock32 {
    /// The unpacked quant of a zero weight.
    const OFFSET: i32 = 0;
    /// The maximum unpacked quant or entry of [`CODEBOOK`].
    const MAX_QUANT: i32;
    /// Whether quants are unpacked to indices of [`CODEBOOK`].
    const FROM_CODEBOOK: bool = false;

    /// Writes the unpacked quants.
    fn unpack(&self, quants: &mut [u8; 32]);
}

const fn repeat(byte: u8) -> u64 {
    u64::from_le_bytes([byte; 8])
}

/// Applies `of` to every eight adjacent bytes. `of` must mask out bits that it shifts into other bytes.
#[inline(always)]
fn map_bytes<const N: usize>(out: &mut [u8; N], bytes: &[u8; N], of: impl Fn(u64) -> u64) {
    for (out, bytes) in out.as_chunks_mut::<8>().0.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *out = of(u64::from_le_bytes(*bytes)).to_le_bytes();
    }
}

/// Applies `of` to every eight adjacent bytes and ORs the results into `out`.
#[inline(always)]
fn or_bytes(out: &mut [u8; 32], bytes: &[u8; 32], of: impl Fn(u64) -> u64) {
    for (out, bytes) in out.as_chunks_mut::<8>().0.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *out = (u64::from_le_bytes(*out) | of(u64::from_le_bytes(*bytes))).to_le_bytes();
    }
}

/// Unpacks four-bit integers in groups of 32: first the low nibbles of 32 bytes, then their high nibbles, and so on.
#[inline(always)]
fn four_bits(out: &mut [u8; 256], bytes: &[u8; 128]) {
    for (out, bytes) in out.as_chunks_mut::<64>().0.iter_mut().zip(bytes.as_chunks::<32>().0) {
        let [low, high] = out.as_chunks_mut::<32>().0 else { unreachable!("64 are twice 32") };
        map_bytes(low, bytes, |eight| eight & repeat(15));
        map_bytes(high, bytes, |eight| eight >> 4 & repeat(15));
    }
}

/// Unpacks two-bit integers in groups of 32: first the two lowest bits of 32 bytes, then the next two, and so on.
#[inline(always)]
fn two_bits(out: &mut [u8; 256], bytes: &[u8; 64]) {
    for (out, bytes) in out.as_chunks_mut::<128>().0.iter_mut().zip(bytes.as_chunks::<32>().0) {
        for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            map_bytes(out, bytes, |eight| eight >> (2 * group) & repeat(3));
        }
    }
}

impl Block256 for BlockQ2K {
    const MAX_QUANT: i32 = 3;

    #[inline(always)]
    fn unpack(&self, quants: &mut [u8; 256]) {
        two_bits(quants, &self.quants);
    }
}

impl Block256 for BlockQ3K {
    const OFFSET: i32 = 4;
    const MAX_QUANT: i32 = 7;

    #[inline(always)]
    fn unpack(&self, quants: &mut [u8; 256]) {
        two_bits(quants, &self.quants);
        for (group, out) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            or_bytes(out, &self.high_bits, |eight| (eight >> group & repeat(1)) << 2);
        }
    }
}

impl Block256 for BlockQ4K {
    const MAX_QUANT: i32 = 15;

    #[inline(always)]
    fn unpack(&self, quants: &mut [u8; 256]) {
        four_bits(quants, &self.quants);
    }
}

impl Block256 for BlockQ5K {
    const MAX_QUANT: i32 = 31;

    #[inline(always)]
    fn unpack(&self, quants: &mut [u8; 256]) {
        four_bits(quants, &self.quants);
        for (group, out) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            or_bytes(out, &self.high_bits, |eight| (eight >> group & repeat(1)) << 4);
        }
    }
}

impl Block256 for BlockQ6K {
    const OFFSET: i32 = 32;
    const MAX_QUANT: i32 = 63;

    #[inline(always)]
    fn unpack(&self, quants: &mut [u8; 256]) {
        let (lows, highs) = (self.low_bits.as_chunks::<64>().0, self.high_bits.as_chunks::<32>().0);
        for (out, (low, high)) in quants.as_chunks_mut::<128>().0.iter_mut().zip(lows.iter().zip(highs)) {
            let low = low.as_chunks::<32>().0;
            for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                map_bytes(out, &low[group % 2], |eight| eight >> (4 * (group / 2)) & repeat(15));
                or_bytes(out, high, |eight| (eight >> (2 * group) & repeat(3)) << 4);
            }
        }
    }
}

/// Unpacks weights in units of one eighth. The offset 9 is 8, which the grid entries contain, plus 1 for the shift.
impl Block256 for BlockIq1S {
    const OFFSET: i32 = 9;
    const MAX_QUANT: i32 = 18;

    #[inline(always)]
    fn unpack(&self, quants: &mut [u8; 256]) {
        for (row, out) in quants.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            // A byte is at most 16 + 2, so the addition does not carry into the next byte.
            let up = repeat(9 - self.offset(row / 4));
            *out = (self.row(row) + up).to_le_bytes();
        }
    }
}

/// The codebook of `IQ4_NL` and `IQ4_XS`, with 128 added to each entry.
pub(super) const CODEBOOK: [u8; 16] = {
    let mut codebook = [0; 16];
    let mut at = 0;
    while at < 16 {
        codebook[at] = IQ4_VALUES[at].cast_unsigned() ^ 0x80;
        at += 1;
    }
    codebook
};

impl Block256 for BlockIq4Xs {
    const OFFSET: i32 = 128;
    const MAX_QUANT: i32 = 241;
    const FROM_CODEBOOK: bool = true;

    #[inline(always)]
    fn unpack(&self, quants: &mut [u8; 256]) {
        for (out, bytes) in quants.as_chunks_mut::<32>().0.iter_mut().zip(self.quants.as_chunks::<16>().0) {
            nibbles(out, bytes);
        }
    }
}

/// Unpacks 32 four-bit integers: the first 16 from the low nibbles of the bytes, the others from the high nibbles.
#[inline(always)]
fn nibbles(out: &mut [u8; 32], bytes: &[u8; 16]) {
    let [low, high] = out.as_chunks_mut::<16>().0 else { unreachable!("32 are twice 16") };
    map_bytes(low, bytes, |eight| eight & repeat(15));
    map_bytes(high, bytes, |eight| eight >> 4 & repeat(15));
}

/// Sets the fifth bit of each of 32 quants; bit j of `bits` is that of quant j.
#[inline(always)]
fn fifth_bits(out: &mut [u8; 32], bits: [u8; 4]) {
    for (out, bits) in out.as_chunks_mut::<8>().0.iter_mut().zip(bits) {
        // Byte j of the product keeps bit j of `bits`; the addition carries it into the highest bit of the byte.
        let own = (u64::from(bits) * repeat(1)) & 0x8040_2010_0804_0201;
        let fifth = ((own + repeat(0x7f)) & repeat(0x80)) >> 3;
        *out = (u64::from_le_bytes(*out) | fifth).to_le_bytes();
    }
}

impl Block32 for BlockQ4_0 {
    const OFFSET: i32 = 8;
    const MAX_QUANT: i32 = 15;

    #[inline(always)]
    fn unpack(&self, quants: &mut [u8; 32]) {
        nibbles(quants, &self.quants);
    }
}

impl Block32 for BlockQ4_1 {
    const MAX_QUANT: i32 = 15;

    #[inline(always)]
    fn unpack(&self, quants: &mut [u8; 32]) {
        nibbles(quants, &self.quants);
    }
}

impl Block32 for BlockQ5_0 {
    const OFFSET: i32 = 16;
    const MAX_QUANT: i32 = 31;

    #[inline(always)]
    fn unpack(&self, quants: &mut [u8; 32]) {
        nibbles(quants, &self.quants);
        fifth_bits(quants, self.high_bits);
    }
}

impl Block32 for BlockQ5_1 {
    const MAX_QUANT: i32 = 31;

    #[inline(always)]
    fn unpack(&self, quants: &mut [u8; 32]) {
        nibbles(quants, &self.quants);
        fifth_bits(quants, self.high_bits);
    }
}

impl Block32 for BlockQ8_0 {
    const OFFSET: i32 = 128;
    const MAX_QUANT: i32 = 255;

    #[inline(always)]
    fn unpack(&self, quants: &mut [u8; 32]) {
        map_bytes(quants, bytemuck::cast_ref(&self.quants), |eight| eight ^ repeat(0x80));
    }
}

impl Block32 for BlockIq4Nl {
    const OFFSET: i32 = 128;
    const MAX_QUANT: i32 = 241;
    const FROM_CODEBOOK: bool = true;

    #[inline(always)]
    fn unpack(&self, quants: &mut [u8; 32]) {
        nibbles(quants, &self.quants);
    }
}
