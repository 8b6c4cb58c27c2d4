//! Unpacking of the weights of each format for panels.
//!
//! A weight becomes an unsigned byte, from which an offset is subtracted. Some formats are unpacked to codebook indices,
//! which are looked up later.
//!
//! In most formats, bits of the stored bytes only have to be shifted and joined. Then the same code unpacks four bytes
//! of one block at a time, or those of blocks of sixteen rows, which are interleaved ([`Words`]).
//!
//! Not here: the layout of the stored blocks, see [`crate::blocks`].

// Only kernels for x86-64 unpack scales and interleaved words.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]

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
    /// The number of bytes that have the quants, a multiple of four; 0 if blocks cannot be unpacked word by word.
    const STORED_BYTES: usize = 0;
    /// Whether the stored bytes have the scales and minima of groups.
    const STORES_SCALES: bool = false;

    /// Returns the bytes that have the quants.
    fn stored(&self) -> &[u8] {
        &[]
    }

    /// Unpacks the stored bytes of a block of each row to their quants.
    fn unpack_words<W: Words>(stored: &[W], quants: &mut [W]) {
        unreachable!("{} stored bytes and {} quants are not unpacked by words", stored.len(), quants.len());
    }

    /// Unpacks the scales of 16 groups, then their minima, from the stored bytes, two in each word.
    fn unpack_scale_words<W: Words>(stored: &[W], scales: &mut [W]) {
        unreachable!("{} stored bytes and {} scales are not unpacked by words", stored.len(), scales.len());
    }

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

/// Returns four equal bytes as a 32-bit integer.
const fn repeat4(byte: u8) -> u32 {
    u32::from_le_bytes([byte; 4])
}

/// Four adjacent bytes, a *word*, of one row or of each of sixteen rows.
///
/// Operations on a whole register are written out, because the compiler finds them in loops over words in some cases
/// only.
pub(super) trait Words: Copy {
    fn and(self, mask: u32) -> Self;
    fn or(self, other: Self) -> Self;
    fn xor(self, mask: u32) -> Self;
    /// Shifts each word to the left. Bits move into the next byte.
    fn shift_left(self, bits: u32) -> Self;
    /// Shifts each word to the right. Bits move into the byte before.
    fn shift_right(self, bits: u32) -> Self;
}

impl Words for u32 {
    #[inline(always)]
    fn and(self, mask: u32) -> Self {
        self & mask
    }

    #[inline(always)]
    fn or(self, other: Self) -> Self {
        self | other
    }

    #[inline(always)]
    fn xor(self, mask: u32) -> Self {
        self ^ mask
    }

    #[inline(always)]
    fn shift_left(self, bits: u32) -> Self {
        self << bits
    }

    #[inline(always)]
    fn shift_right(self, bits: u32) -> Self {
        self >> bits
    }
}

/// Implements [`Words`] for registers with words of sixteen rows.
#[cfg(target_arch = "x86_64")]
macro_rules! register_words {
    ($type:ty: $(fn $name:ident($self:ident, $argument:ident: $argument_type:ty) => $result:expr)+) => {
        impl Words for $type {
            $(
                #[inline(always)]
                fn $name($self, $argument: $argument_type) -> Self {
                    // SAFETY: `Panel::unpack_stored` and `Panel::unpack_stored_scales`, the only callers, require
                    // these instructions.
                    unsafe { $result }
                }
            )+
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(super) use register_words;

/// Unpacks four-bit integers from runs of `RUN` words: first the low nibbles of a run, then its high nibbles.
#[inline(always)]
fn four_bits<W: Words, const RUN: usize>(out: &mut [W], words: &[W]) {
    for (out, words) in out.chunks_exact_mut(2 * RUN).zip(words.as_chunks::<RUN>().0) {
        for (at, word) in words.iter().enumerate() {
            out[at] = word.and(repeat4(15));
            out[RUN + at] = word.shift_right(4).and(repeat4(15));
        }
    }
}

/// Unpacks two-bit integers from runs of eight words: first the two lowest bits of each byte of a run, then the next two
/// bits of each byte, up to the two highest bits.
#[inline(always)]
fn two_bits<W: Words>(out: &mut [W], words: &[W]) {
    for (out, words) in out.as_chunks_mut::<32>().0.iter_mut().zip(words.as_chunks::<8>().0) {
        for (at, out) in out.iter_mut().enumerate() {
            *out = words[at % 8].shift_right(2 * (at / 8) as u32).and(repeat4(3));
        }
    }
}

/// Sets bit `position` of each of 256 quants: bit g of byte i of `bits` belongs to quant i of group g, a group of 32.
#[inline(always)]
fn high_bits<W: Words>(out: &mut [W], bits: &[W], position: u32) {
    for (group, out) in (0..).zip(out.chunks_exact_mut(8)) {
        for (out, word) in out.iter_mut().zip(bits) {
            *out = out.or(word.shift_right(group).and(repeat4(1)).shift_left(position));
        }
    }
}

/// Unpacks 32 five-bit integers: bit j of the first word is the fifth bit of integer j, and the other words have the low
/// four bits.
#[inline(always)]
fn five_bits<W: Words>(out: &mut [W], stored: &[W]) {
    four_bits::<_, 4>(out, &stored[1..]);
    for (at, out) in (0..).zip(out) {
        // Bit i of these four moves to bit 8 * i.
        let four = stored[0].shift_right(4 * at).and(15);
        let two = four.or(four.shift_left(14));
        *out = out.or(two.or(two.shift_left(7)).and(repeat4(1)).shift_left(4));
    }
}

#[inline(always)]
fn duplicate_halves<W: Words>(number: W) -> W {
    number.or(number.shift_left(16))
}

/// Unpacks the scales and minima of [`SixBitScales`](crate::blocks::SixBitScales) from a header. Each belongs to two
/// groups of 16 weights, which are those of one word.
#[inline(always)]
fn six_bit_scales<W: Words>(out: &mut [W], header: &[W]) {
    let (a, b, c) = (header[1], header[2], header[3]);
    for group in 0..4 {
        let from = 8 * group as u32;
        out[group] = duplicate_halves(a.shift_right(from).and(63));
        out[4 + group] = duplicate_halves(c.shift_right(from).and(15).or(a.shift_right(from + 2).and(0x30)));
        out[8 + group] = duplicate_halves(b.shift_right(from).and(63));
        out[12 + group] =
            duplicate_halves(c.shift_right(from + 4).and(15).or(b.shift_right(from + 2).and(0x30)));
    }
}

/// Widens the lower two bytes of each word to 16 bits.
#[inline(always)]
fn widen<W: Words>(two: W) -> W {
    two.and(0xff).or(two.and(0xff00).shift_left(8))
}

/// Widens nibbles, which begin at bit `from` of each byte, to 16 bits: two in one word, and two in the next.
#[inline(always)]
fn widen_nibbles<W: Words>(out: &mut [W], words: &[W], from: u32) {
    for (out, word) in out.as_chunks_mut::<2>().0.iter_mut().zip(words) {
        let nibbles = word.shift_right(from).and(repeat4(15));
        *out = [widen(nibbles), widen(nibbles.shift_right(16))];
    }
}

/// Copies the signs of the lower bytes of 16-bit numbers to their upper bytes.
#[inline(always)]
fn extend_signs<W: Words>(numbers: W) -> W {
    let signs = numbers.and(0x0080_0080).shift_left(1);
    let signs = signs.or(signs.shift_left(1));
    let signs = signs.or(signs.shift_left(2));
    numbers.or(signs).or(signs.shift_left(4))
}

/// Widens signed bytes to 16 bits: two in one word, and two in the next.
#[inline(always)]
fn widen_signed<W: Words>(out: &mut [W], words: &[W]) {
    for (out, word) in out.as_chunks_mut::<2>().0.iter_mut().zip(words) {
        *out = [extend_signs(widen(*word)), extend_signs(widen(word.shift_right(16)))];
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

/// Implements [`UnpackBytes`] for block types of `$length` weights, given for each type the constants of the trait, and
/// either an expression that unpacks a block, or the number of its stored bytes, the field with the first of them, an
/// expression that unpacks their words, and perhaps one that unpacks the scales of groups.
macro_rules! unpack_bytes {
    (@one $length:literal $block:ident { $($name:ident: $type:ty = $value:expr),+ }
        |$this:ident, $quants:ident| $unpack:expr
    ) => {
        impl UnpackBytes<$length> for $block {
            $(const $name: $type = $value;)+

            #[inline(always)]
            fn unpack(&self, $quants: &mut [u8; $length]) {
                let $this = self;
                $unpack;
            }
        }
    };
    (@one $length:literal $block:ident { $($name:ident: $type:ty = $value:expr),+ }
        $bytes:literal from $first:ident |$stored:ident, $quants:ident| $unpack:expr $(, $scales:ident: $unpack_scales:expr)?
    ) => {
        impl UnpackBytes<$length> for $block {
            $(const $name: $type = $value;)+
            const STORED_BYTES: usize = $bytes;

            #[inline(always)]
            fn stored(&self) -> &[u8] {
                &bytemuck::bytes_of(self)[std::mem::offset_of!($block, $first)..][..$bytes]
            }

            #[inline(always)]
            fn unpack_words<W: Words>($stored: &[W], $quants: &mut [W]) {
                $unpack;
            }

            $(
                const STORES_SCALES: bool = true;

                #[inline(always)]
                fn unpack_scale_words<W: Words>($stored: &[W], $scales: &mut [W]) {
                    $unpack_scales;
                }
            )?

            #[inline(always)]
            fn unpack(&self, quants: &mut [u8; $length]) {
                let (mut stored, mut out) = ([0u32; $bytes / 4], [0u32; $length / 4]);
                bytemuck::cast_slice_mut(&mut stored).copy_from_slice(self.stored());
                Self::unpack_words(&stored, &mut out);
                quants.copy_from_slice(bytemuck::cast_slice(&out));
            }
        }
    };
    ($length:literal: $($block:ident { $($constants:tt)+ } { $($how:tt)+ })+) => {$(
        unpack_bytes! { @one $length $block { $($constants)+ } $($how)+ }
    )+};
}
unpack_bytes! { 256:
    BlockQ2K { MAX_QUANT: i32 = 3 } {
        80 from packed |stored, quants| two_bits(quants, &stored[4..]),
        scales: {
            let (scales, minima) = scales.split_at_mut(8);
            widen_nibbles(scales, &stored[..4], 0);
            widen_nibbles(minima, &stored[..4], 4);
        }
    }
    BlockQ3K { OFFSET: i32 = 4, MAX_QUANT: i32 = 7 } {
        96 from high_bits |stored, quants| {
            two_bits(quants, &stored[8..]);
            high_bits(quants, &stored[..8], 2);
        }
    }
    BlockQ4K { MAX_QUANT: i32 = 15 } {
        144 from scale |stored, quants| four_bits::<_, 8>(quants, &stored[4..]),
        scales: six_bit_scales(scales, &stored[..4])
    }
    BlockQ5K { MAX_QUANT: i32 = 31 } {
        176 from scale |stored, quants| {
            four_bits::<_, 8>(quants, &stored[12..]);
            high_bits(quants, &stored[4..12], 4);
        },
        scales: six_bit_scales(scales, &stored[..4])
    }
    BlockQ6K { OFFSET: i32 = 32, MAX_QUANT: i32 = 63 } {
        208 from low_bits |stored, quants| {
            four_bits::<_, 16>(quants, &stored[..32]);
            for (out, high) in quants.as_chunks_mut::<32>().0.iter_mut().zip(stored[32..].as_chunks::<8>().0) {
                for (at, out) in out.iter_mut().enumerate() {
                    *out = out.or(high[at % 8].shift_right(2 * (at / 8) as u32).and(repeat4(3)).shift_left(4));
                }
            }
        },
        scales: widen_signed(scales, &stored[48..])
    }
    // Weights in units of 1/8. The offset 9 is 8, which the entries of the grid contain, plus 1 for the shift.
    BlockIq1S { OFFSET: i32 = 9, MAX_QUANT: i32 = 18 } {
        |block, quants| for (row, out) in quants.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            // A byte is at most 16 + 2, so the addition does not carry into the next byte.
            let up = repeat(9 - block.offset(row / 4));
            *out = (block.grid_row(row) + up).to_le_bytes();
        }
    }
    BlockIq1M { OFFSET: i32 = 9, MAX_QUANT: i32 = 18 } {
        |block, quants| for (row, out) in quants.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let up = repeat(9 - block.offset(row));
            *out = (block.grid_row(row) + up).to_le_bytes();
        }
    }
    // The magnitudes are at most 43 in `IQ2` formats, 62 in `IQ3_XXS` and 15 in `IQ3_S`.
    BlockIq2Xxs { OFFSET: i32 = 128, MAX_QUANT: i32 = 171 } { |block, quants| signed_magnitudes(quants, block, 128) }
    BlockIq2Xs { OFFSET: i32 = 128, MAX_QUANT: i32 = 171 } { |block, quants| signed_magnitudes(quants, block, 128) }
    BlockIq2S { OFFSET: i32 = 128, MAX_QUANT: i32 = 171 } { |block, quants| signed_magnitudes(quants, block, 128) }
    BlockIq3Xxs { OFFSET: i32 = 128, MAX_QUANT: i32 = 190 } { |block, quants| signed_magnitudes(quants, block, 128) }
    BlockIq3S { OFFSET: i32 = 16, MAX_QUANT: i32 = 31 } { |block, quants| signed_magnitudes(quants, block, 16) }
    BlockIq4Xs { OFFSET: i32 = 128, MAX_QUANT: i32 = 241, CODEBOOK: Option<Codebook> = IQ4_CODEBOOK } {
        128 from quants |stored, quants| four_bits::<_, 4>(quants, stored)
    }
}
unpack_bytes! { 32:
    BlockQ4_0 { OFFSET: i32 = 8, MAX_QUANT: i32 = 15 } {
        16 from quants |stored, quants| four_bits::<_, 4>(quants, stored)
    }
    BlockQ4_1 { MAX_QUANT: i32 = 15 } { 16 from quants |stored, quants| four_bits::<_, 4>(quants, stored) }
    BlockQ5_0 { OFFSET: i32 = 16, MAX_QUANT: i32 = 31 } {
        20 from high_bits |stored, quants| five_bits(quants, stored)
    }
    BlockQ5_1 { MAX_QUANT: i32 = 31 } { 20 from high_bits |stored, quants| five_bits(quants, stored) }
    BlockQ8_0 { OFFSET: i32 = 128, MAX_QUANT: i32 = 255 } {
        32 from quants |stored, quants| for (quants, word) in quants.iter_mut().zip(stored) {
            *quants = word.xor(repeat4(0x80));
        }
    }
    BlockIq4Nl { OFFSET: i32 = 128, MAX_QUANT: i32 = 241, CODEBOOK: Option<Codebook> = IQ4_CODEBOOK } {
        16 from quants |stored, quants| four_bits::<_, 4>(quants, stored)
    }
    BlockMxfp4 { OFFSET: i32 = 12, MAX_QUANT: i32 = 24, CODEBOOK: Option<Codebook> = MXFP4_CODEBOOK } {
        16 from quants |stored, quants| four_bits::<_, 4>(quants, stored)
    }
}
