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

use std::marker::PhantomData;

use bytemuck::AnyBitPattern;

use crate::blocks::{
    BlockIq1M, BlockIq1S, BlockIq2S, BlockIq2Xs, BlockIq2Xxs, BlockIq3S, BlockIq3Xxs, BlockIq4Nl, BlockIq4Xs,
    BlockMxfp4, BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K,
    BlockQ8_0, IQ4_VALUES, IntegerBlock32, IntegerBlock256, MXFP4_VALUES, SignMagnitudeBlock,
};

/// The quants of the 16 indices of a codebook.
pub(crate) type Codebook = [u8; 16];

/// A block of N weights that can be unpacked to one byte per weight, its quant.
pub(crate) trait UnpackBytes<const N: usize> {
    /// The value of a quant that represents the weight zero.
    const OFFSET: i32 = 0;
    /// The maximum value of a quant, or of a [`Self::CODEBOOK`] entry.
    const MAX_QUANT: i32;
    /// The codebook, if the bytes are its indices.
    const CODEBOOK: Option<Codebook> = None;
    /// The number of bytes that have the quants, a multiple of four; 0 if blocks cannot be unpacked word by word.
    const STORED_BYTES: usize = 0;
    /// The position of these bytes in a block.
    const FIRST_STORED: usize = 0;

    /// Returns the place of a stored word among the words of an interleaved block. The words are in the order in which
    /// unpacking all columns, after the scales, first uses them: processors read ahead of rising addresses only.
    fn interleaved_place(word: usize) -> usize {
        word
    }

    /// Whether the stored bytes have the scales and minima of groups.
    const STORES_SCALES: bool = false;

    /// Returns the bytes that have the quants.
    fn stored(&self) -> &[u8] {
        &[]
    }

    /// Unpacks the quants of column `column` (four weights) from the stored words of a block, or of a block of each row.
    fn unpack_column<W: Words>(stored: impl Stored, column: usize) -> W {
        let _ = stored;
        unreachable!("column {column} is not unpacked alone");
    }

    /// Unpacks the scales of 16 groups, then their minima, from the stored words, two in each word.
    fn unpack_scale_words<W: Words>(stored: impl Stored, scales: &mut [W]) {
        let _ = stored;
        unreachable!("{} scales are not unpacked by words", scales.len());
    }

    /// Writes the quants of the block, or their codebook indices, to `quants`.
    fn unpack(&self, quants: &mut [u8; N]);
}

/// A block of 256 weights: weight j, in group g = j / 16, is
/// `scale * scales[g] * (quants[j] - OFFSET) - minimum * minima[g]`.
pub(crate) trait Block256: IntegerBlock256 + UnpackBytes<256> {}
impl<B: IntegerBlock256 + UnpackBytes<256>> Block256 for B {}

/// A block of 32 weights: weight j is `scale * (quants[j] - OFFSET) + minimum`.
pub(crate) trait Block32: IntegerBlock32 + UnpackBytes<32> {}
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
pub(crate) trait Words: AnyBitPattern {
    /// Returns the words with the index `at`.
    #[inline(always)]
    fn load(stored: &[u8], at: usize) -> Self {
        bytemuck::pod_read_unaligned(&stored[at * size_of::<Self>()..][..size_of::<Self>()])
    }

    fn and(self, mask: u32) -> Self;
    fn or(self, other: Self) -> Self;
    fn xor(self, mask: u32) -> Self;
    /// Shifts each word to the left. Bits move into the next byte.
    fn shift_left(self, bits: u32) -> Self;
    /// Shifts each word to the right. Bits move into the byte before.
    fn shift_right(self, bits: u32) -> Self;
}

/// The stored words of a block, or of a block of each of sixteen rows.
pub(crate) trait Stored: Copy {
    /// Returns the words with the index `at` in a block.
    fn word<W: Words>(self, at: usize) -> W;
}

/// Words in the order of the block.
impl Stored for &[u8] {
    #[inline(always)]
    fn word<W: Words>(self, at: usize) -> W {
        W::load(self, at)
    }
}

/// Words in the order of [`UnpackBytes::interleaved_place`].
pub(crate) struct Interleaved<'a, B, const N: usize> {
    pub(crate) bytes: &'a [u8],
    block: PhantomData<B>,
}

impl<'a, B, const N: usize> Interleaved<'a, B, N> {
    #[inline(always)]
    pub(crate) fn new(bytes: &'a [u8]) -> Interleaved<'a, B, N> {
        Interleaved { bytes, block: PhantomData }
    }
}

impl<B, const N: usize> Clone for Interleaved<'_, B, N> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<B, const N: usize> Copy for Interleaved<'_, B, N> {}

impl<B: UnpackBytes<N>, const N: usize> Stored for Interleaved<'_, B, N> {
    #[inline(always)]
    fn word<W: Words>(self, at: usize) -> W {
        W::load(self.bytes, B::interleaved_place(at))
    }
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
pub(crate) use register_words;

/// Returns column `column` of four-bit integers in runs of `RUN` words, from word `first` on: the low nibbles of a run
/// come first, then its high nibbles.
#[inline(always)]
fn four_bits<W: Words, const RUN: usize>(stored: impl Stored, first: usize, column: usize) -> W {
    let (run, at) = (column / (2 * RUN), column % (2 * RUN));
    let word = stored.word::<W>(first + RUN * run + at % RUN);
    word.shift_right(4 * (at / RUN) as u32).and(repeat4(15))
}

/// Returns column `column` of two-bit integers in runs of eight words, from word `first` on: the two lowest bits of each
/// byte of a run come first, then the next two bits of each byte, up to the two highest bits.
#[inline(always)]
fn two_bits<W: Words>(stored: impl Stored, first: usize, column: usize) -> W {
    let word = stored.word::<W>(first + 8 * (column / 32) + column % 8);
    word.shift_right(2 * (column / 8 % 4) as u32).and(repeat4(3))
}

/// Returns column `column` of 256 bits, as numbers with this bit at `position`: bit g of byte i, from word `first` on,
/// belongs to quant i of group g, a group of 32.
#[inline(always)]
fn high_bits<W: Words>(stored: impl Stored, first: usize, column: usize, position: u32) -> W {
    let word = stored.word::<W>(first + column % 8);
    word.shift_right((column / 8) as u32).and(repeat4(1)).shift_left(position)
}

/// Returns column `column` of 32 five-bit integers: bit j of the first word is the fifth bit of integer j, and the other
/// words have the low four bits.
#[inline(always)]
fn five_bits<W: Words>(stored: impl Stored, column: usize) -> W {
    // Bit i of these four moves to bit 8 * i.
    let four = stored.word::<W>(0).shift_right(4 * column as u32).and(15);
    let two = four.or(four.shift_left(14));
    four_bits::<W, 4>(stored, 1, column).or(two.or(two.shift_left(7)).and(repeat4(1)).shift_left(4))
}

#[inline(always)]
fn duplicate_halves<W: Words>(number: W) -> W {
    number.or(number.shift_left(16))
}

/// Unpacks the scales and minima of [`SixBitScales`](crate::blocks::SixBitScales) from a header. Each belongs to two
/// groups of 16 weights, which are those of one word.
#[inline(always)]
fn six_bit_scales<W: Words>(out: &mut [W], header: impl Stored) {
    let (a, b, c) = (header.word::<W>(1), header.word::<W>(2), header.word::<W>(3));
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
fn widen_nibbles<W: Words>(out: &mut [W], stored: impl Stored, from: u32) {
    for (at, out) in out.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let nibbles = stored.word::<W>(at).shift_right(from).and(repeat4(15));
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
fn widen_signed<W: Words>(out: &mut [W], bytes: W) {
    out[0] = extend_signs(widen(bytes));
    out[1] = extend_signs(widen(bytes.shift_right(16)));
}

/// Subtracts 32 from bytes below 64.
#[inline(always)]
fn minus_32<W: Words>(bytes: W) -> W {
    let bytes = bytes.xor(repeat4(32));
    let sign = bytes.and(repeat4(32));
    bytes.or(sign.shift_left(1)).or(sign.shift_left(2))
}

/// Returns the place of word `at`, if the first eight of such words are each followed by another word.
#[inline(always)]
const fn after_pairs(at: usize) -> usize {
    if at < 8 { 2 * at } else { 8 + at }
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
        $bytes:literal from $first:ident |$stored:ident, $column:ident| $unpack:expr
        $(, $scales:ident: $unpack_scales:expr $(, order: |$word:ident| $place:expr)?)?
    ) => {
        impl UnpackBytes<$length> for $block {
            $(const $name: $type = $value;)+
            const STORED_BYTES: usize = $bytes;
            const FIRST_STORED: usize = std::mem::offset_of!($block, $first);

            #[inline(always)]
            fn stored(&self) -> &[u8] {
                &bytemuck::bytes_of(self)[Self::FIRST_STORED..][..$bytes]
            }

            #[inline(always)]
            fn unpack_column<W: Words>($stored: impl Stored, $column: usize) -> W {
                $unpack
            }

            $(
                const STORES_SCALES: bool = true;

                #[inline(always)]
                fn unpack_scale_words<W: Words>($stored: impl Stored, $scales: &mut [W]) {
                    $unpack_scales;
                }

                $(
                    #[inline(always)]
                    fn interleaved_place($word: usize) -> usize {
                        $place
                    }
                )?
            )?

            #[inline(always)]
            fn unpack(&self, quants: &mut [u8; $length]) {
                let stored = self.stored();
                for (column, quants) in quants.as_chunks_mut().0.iter_mut().enumerate() {
                    *quants = Self::unpack_column::<u32>(stored, column).to_le_bytes();
                }
            }
        }
    };
    ($length:literal: $($block:ident { $($constants:tt)+ } { $($how:tt)+ })+) => {$(
        unpack_bytes! { @one $length $block { $($constants)+ } $($how)+ }
    )+};
}
unpack_bytes! { 256:
    BlockQ2K { MAX_QUANT: i32 = 3 } {
        80 from packed |stored, column| two_bits(stored, 4, column),
        scales: {
            let (scales, minima) = scales.split_at_mut(8);
            widen_nibbles(scales, stored, 0);
            widen_nibbles(minima, stored, 4);
        }
    }
    BlockQ3K { OFFSET: i32 = 4, MAX_QUANT: i32 = 7 } {
        108 from high_bits |stored, column| two_bits::<W>(stored, 8, column).or(high_bits(stored, 0, column, 2)),
        scales: for part in 0..4 {
            // See `IntegerBlock256::scales` of this format.
            let low = stored.word::<W>(24 + part % 2).shift_right(4 * (part as u32 / 2)).and(repeat4(15));
            let high = stored.word::<W>(26).shift_right(2 * part as u32).and(repeat4(3));
            widen_signed(&mut scales[2 * part..2 * part + 2], minus_32(low.or(high.shift_left(4))));
        },
        order: |word| match word {
            0..8 => 3 + 2 * word + 1,
            8..24 => 3 + after_pairs(word - 8),
            _ => word - 24,
        }
    }
    BlockQ4K { MAX_QUANT: i32 = 15 } {
        144 from scale |stored, column| four_bits::<_, 8>(stored, 4, column),
        scales: six_bit_scales(scales, stored)
    }
    BlockQ5K { MAX_QUANT: i32 = 31 } {
        176 from scale |stored, column| {
            four_bits::<W, 8>(stored, 12, column).or(high_bits(stored, 4, column, 4))
        },
        scales: six_bit_scales(scales, stored),
        order: |word| match word {
            0..4 => word,
            4..12 => 4 + 2 * (word - 4) + 1,
            _ => 4 + after_pairs(word - 12),
        }
    }
    BlockQ6K { OFFSET: i32 = 32, MAX_QUANT: i32 = 63 } {
        208 from low_bits |stored, column| {
            four_bits::<W, 16>(stored, 0, column).or(two_bits::<W>(stored, 32, column).shift_left(4))
        },
        scales: for (part, scales) in scales[..8].as_chunks_mut::<2>().0.iter_mut().enumerate() {
            widen_signed(scales, stored.word::<W>(48 + part));
        },
        order: |word| match word {
            0..32 => 4 + 24 * (word / 16) + after_pairs(word % 16),
            32..48 => 4 + 24 * ((word - 32) / 8) + 2 * (word % 8) + 1,
            _ => word - 48,
        }
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
        136 from scale |stored, column| four_bits::<_, 4>(stored, 2, column),
        scales: for (group, scales) in scales[..8].iter_mut().enumerate() {
            let low = stored.word::<W>(1).shift_right(4 * group as u32).and(15);
            let high = stored.word::<W>(0).shift_right(16 + 2 * group as u32).and(3);
            *scales = duplicate_halves(extend_signs(minus_32(low.or(high.shift_left(4))).and(0xff)));
        }
    }
}
unpack_bytes! { 32:
    BlockQ4_0 { OFFSET: i32 = 8, MAX_QUANT: i32 = 15 } {
        16 from quants |stored, column| four_bits::<_, 4>(stored, 0, column)
    }
    BlockQ4_1 { MAX_QUANT: i32 = 15 } { 16 from quants |stored, column| four_bits::<_, 4>(stored, 0, column) }
    BlockQ5_0 { OFFSET: i32 = 16, MAX_QUANT: i32 = 31 } {
        20 from high_bits |stored, column| five_bits(stored, column)
    }
    BlockQ5_1 { MAX_QUANT: i32 = 31 } { 20 from high_bits |stored, column| five_bits(stored, column) }
    BlockQ8_0 { OFFSET: i32 = 128, MAX_QUANT: i32 = 255 } {
        32 from quants |stored, column| stored.word::<W>(column).xor(repeat4(0x80))
    }
    BlockIq4Nl { OFFSET: i32 = 128, MAX_QUANT: i32 = 241, CODEBOOK: Option<Codebook> = IQ4_CODEBOOK } {
        16 from quants |stored, column| four_bits::<_, 4>(stored, 0, column)
    }
    BlockMxfp4 { OFFSET: i32 = 12, MAX_QUANT: i32 = 24, CODEBOOK: Option<Codebook> = MXFP4_CODEBOOK } {
        16 from quants |stored, column| four_bits::<_, 4>(stored, 0, column)
    }
}
