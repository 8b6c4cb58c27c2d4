//! Packing of a file's blocks into the layout that products read on the GPU.
//!
//! A row of weights becomes texels of 16 bytes; which texel lies where is the layout's choice
//! (`crate::virtual_tensor::weights`). The numbers stay what they are: nothing is dequantised here. Where a format has
//! one f16 scale per block, scales go to an array of their own, two blocks per word and four outputs per texel, since
//! blocks of 18, 34 or 210 bytes lie on no boundary of four.
//!
//! ```text
//! F32         4 weights a texel          F16, BF16   8 weights a texel
//! Q8_0        2 texels for 32 weights    Q4_0        1 texel for 32: byte j has weights j and j + 16
//! Q4_K        9 texels for 256: scale, minimum and their 6-bit factors; then 8 as in Q4_0
//! Q6_K        13 texels for 256: factors; 8 of low bits as in Q4_0; 4 of high bits, two weights' bits a field
//! Row8        16 weights a texel         Row4        1 texel for 32, as Q4_0
//! ```
//!
//! The last two have one scale per row and are in no file: weights are converted to them (`crate::conversion`).
//!
//! The rearrangement is a separate kernel, run once over the raw bytes of the file.

use hearth_kernels::KernelFormat;

use super::quantise::{Scaled, UNIT};
use crate::device::Params;
use crate::error::GpuError;
use crate::virtual_tensor::{WeightOrder, WeightShape};

pub const THREADS: u32 = 64;

/// Groups along x; the rest go along y.
pub const GROUPS_ALONG: u32 = 32_768;

/// The largest code of an input.
const LARGEST_INPUT: usize = 127;

/// A format of weights on the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Packed {
    F32,
    F16,
    /// The upper half of single precision.
    Bf16,
    Q8_0,
    Q4_0,
    Q4K,
    Q6K,
    /// Eight bits with a scale per row.
    Row8,
    /// Four bits with a scale per row.
    Row4,
}

impl Packed {
    /// Formats that files have.
    pub const ALL: [Packed; 7] =
        [Packed::F32, Packed::F16, Packed::Bf16, Packed::Q8_0, Packed::Q4_0, Packed::Q4K, Packed::Q6K];

    /// Returns the format in a file, if there is one.
    pub fn stored(self) -> Option<KernelFormat> {
        match self {
            Packed::F32 => Some(KernelFormat::F32),
            Packed::F16 => Some(KernelFormat::F16),
            Packed::Bf16 => Some(KernelFormat::Bf16),
            Packed::Q8_0 => Some(KernelFormat::Q8_0),
            Packed::Q4_0 => Some(KernelFormat::Q4_0),
            Packed::Q4K => Some(KernelFormat::Q4K),
            Packed::Q6K => Some(KernelFormat::Q6K),
            Packed::Row8 | Packed::Row4 => None,
        }
    }

    /// Whether it has one scale per row.
    pub fn is_by_row(self) -> bool {
        matches!(self, Packed::Row8 | Packed::Row4)
    }

    /// Returns the format on the GPU for a format of a file and rows of this length.
    pub fn of(format: KernelFormat, length: usize) -> Result<Packed, GpuError> {
        let found = Packed::ALL.into_iter().find(|packed| packed.stored() == Some(format));
        let packed = found.ok_or_else(|| {
            let known: Vec<String> =
                Packed::ALL.iter().filter_map(|packed| Some(packed.stored()?.to_string())).collect();
            GpuError::Format { format, known: known.join(", ") }
        })?;
        packed.for_rows(length)
    }

    /// Checks the length of rows.
    pub(crate) fn for_rows(self, length: usize) -> Result<Packed, GpuError> {
        let packed = self;
        if !length.is_multiple_of(packed.granule() as usize) {
            let need = "whole texels and blocks";
            return Err(GpuError::Dimension { what: "the length of a row of weights", found: length, need });
        }
        if length > packed.max_length() {
            let what = "the length of a row of weights";
            let need = if packed.is_by_row() {
                "no more products under one scale than 32 bits can add up"
            } else {
                "no more than 32 bits can number"
            };
            return Err(GpuError::Dimension { what, found: length, need });
        }
        Ok(packed)
    }

    /// The length of a row is a multiple of this.
    fn granule(self) -> u32 {
        match self {
            Packed::F32 => 4,
            Packed::F16 | Packed::Bf16 => 8,
            _ => self.block(),
        }
    }

    /// Weights of the longest row: sums of integers are those of a block, or of the whole row where that has one scale,
    /// and bytes of a row are numbered in 32 bits.
    fn max_length(self) -> usize {
        let largest_sum = |code: usize| i32::MAX as usize / (code * LARGEST_INPUT);
        match self {
            Packed::Row8 => largest_sum(127),
            // Nibbles count from 0 to 15, and what that is too much is taken off after each unit.
            Packed::Row4 => largest_sum(15),
            // Four bytes a weight at most.
            _ => u32::MAX as usize / 4,
        }
    }

    /// Weights that are multiplied together; 0 if they are single numbers.
    pub fn block(self) -> u32 {
        match self {
            Packed::F32 | Packed::F16 | Packed::Bf16 => 0,
            Packed::Q8_0 | Packed::Q4_0 | Packed::Row8 | Packed::Row4 => UNIT,
            Packed::Q4K | Packed::Q6K => 256,
        }
    }

    /// Returns how inputs are rounded, if they are.
    pub fn inputs(self) -> Option<Scaled> {
        match self.block() {
            0 => None,
            _ if self.is_by_row() => Some(Scaled::Row),
            block => Some(Scaled::Blocks(block)),
        }
    }

    pub fn texels(self, length: u32) -> u32 {
        match self {
            Packed::F32 => length / 4,
            Packed::F16 | Packed::Bf16 => length / 8,
            Packed::Q8_0 => length / 32 * 2,
            Packed::Row8 => length / 16,
            Packed::Q4_0 | Packed::Row4 => length / 32,
            Packed::Q4K => length / 256 * 9,
            Packed::Q6K => length / 256 * 13,
        }
    }

    /// Words of scales of a row, two blocks each; 0 if they lie in the texels.
    pub fn scale_words(self, length: u32) -> u32 {
        match self {
            Packed::Q8_0 | Packed::Q4_0 => (length / 32).div_ceil(2),
            Packed::Q6K => (length / 256).div_ceil(2),
            Packed::F32 | Packed::F16 | Packed::Bf16 | Packed::Q4K | Packed::Row8 | Packed::Row4 => 0,
        }
    }

    /// Bytes of a block in the file, and where its scale is.
    fn scale_place(self) -> (u32, u32) {
        match self {
            Packed::Q8_0 => (34, 0),
            Packed::Q4_0 => (18, 0),
            Packed::Q6K => (210, 208),
            Packed::F32 | Packed::F16 | Packed::Bf16 | Packed::Q4K | Packed::Row8 | Packed::Row4 => (0, 0),
        }
    }

    /// The texel `t` of the row whose bytes begin at `row`.
    fn texel(self) -> &'static str {
        match self {
            Packed::F32 | Packed::F16 | Packed::Bf16 | Packed::Row8 | Packed::Row4 => {
                "    return bytes16(row + t * 16u);\n"
            }
            Packed::Q8_0 => "    return bytes16(row + t / 2u * 34u + 2u + t % 2u * 16u);\n",
            Packed::Q4_0 => "    return bytes16(row + t * 18u + 2u);\n",
            Packed::Q4K => {
                "    let block = row + t / 9u * 144u;\n\
                 \x20   if (t % 9u == 0u) { return bytes16(block); }\n\
                 \x20   let unit = t % 9u - 1u;\n\
                 \x20   return nibbles(block + 16u + unit / 2u * 32u, unit % 2u == 1u);\n"
            }
            Packed::Q6K => {
                "    let block = row + t / 13u * 210u;\n\
                 \x20   let k = t % 13u;\n\
                 \x20   if (k == 0u) { return bytes16(block + 192u); }\n\
                 \x20   if (k <= 8u) {\n\
                 \x20       let unit = k - 1u;\n\
                 \x20       return nibbles(block + unit / 4u * 64u + unit % 2u * 32u, unit % 4u >= 2u);\n\
                 \x20   }\n\
                 \x20   return vec4<u32>(high_bits(block, (k - 9u) * 2u), high_bits(block, (k - 9u) * 2u + 1u));\n"
            }
        }
    }
}

/// Functions that read the file's bytes.
const BYTES: &str = "\
@group(0) @binding(1) var<storage, read> raw: array<u32>;
fn byte(at: u32) -> u32 { return (raw[at / 4u] >> (8u * (at % 4u))) & 255u; }
fn half_at(at: u32) -> u32 { return byte(at) | (byte(at + 1u) << 8u); }
fn word_at(at: u32) -> u32 {
    if (at % 4u == 0u) { return raw[at / 4u]; }
    return half_at(at) | (half_at(at + 2u) << 16u);
}
fn bytes16(at: u32) -> vec4<u32> {
    return vec4<u32>(word_at(at), word_at(at + 4u), word_at(at + 8u), word_at(at + 12u));
}
fn nibbles(at: u32, high: bool) -> vec4<u32> {
    let mask = vec4<u32>(0x0f0f0f0fu);
    let first = bytes16(at);
    let second = bytes16(at + 16u);
    if (high) { return ((first >> vec4<u32>(4u)) & mask) | (second & vec4<u32>(0xf0f0f0f0u)); }
    return (first & mask) | ((second & mask) << vec4<u32>(4u));
}
fn high_bits(block: u32, unit: u32) -> vec2<u32> {
    let at = block + 128u + unit / 4u * 32u;
    let shift = unit % 4u * 2u;
    var words = vec2<u32>(0u, 0u);
    for (var k = 0u; k < 4u; k++) {
        words.x |= ((word_at(at + 4u * k) >> shift) & 0x03030303u) << (2u * k);
        words.y |= ((word_at(at + 16u + 4u * k) >> shift) & 0x03030303u) << (2u * k);
    }
    return words;
}
";

/// The WGSL index of the texel with the scales of slice `slice` and word `word`, which holds four outputs.
pub(crate) fn scale_texel(order: WeightOrder, group_slices: u32, words: u32) -> String {
    match order {
        WeightOrder::ByOutput => format!("(slice * {words}u + word)"),
        WeightOrder::Interleaved => {
            format!(
                "((slice / {group_slices}u * {words}u + word) * {group_slices}u + slice % {group_slices}u)"
            )
        }
    }
}

/// Rearranges the texels of rows `offset..end` of a part, whose bytes are at the front of `raw`.
pub fn texels_kernel(
    packed: Packed,
    length: u32,
    row_bytes: u32,
    shape: &WeightShape,
    order: WeightOrder,
) -> String {
    let texels = packed.texels(length);
    let place = shape.wgsl(order, "params.offset + row", "t");
    format!(
        "{}{BYTES}\
         @group(0) @binding(2) var<storage, read_write> out: array<vec4<u32>>;\n\
         fn texel(row: u32, t: u32) -> vec4<u32> {{\n{}}}\n\
         @compute @workgroup_size({THREADS})\n\
         fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{\n\
         \x20   let at = (group.y * {GROUPS_ALONG}u + group.x) * {THREADS}u + lane;\n\
         \x20   let row = at / {texels}u;\n\
         \x20   let t = at % {texels}u;\n\
         \x20   if (params.offset + row < params.end) {{ out[{place}] = texel(row * {row_bytes}u, t); }}\n\
         }}\n",
        Params::WGSL,
        packed.texel(),
    )
}

/// Gathers the scales of the same rows.
pub fn scales_kernel(
    packed: Packed,
    length: u32,
    row_bytes: u32,
    group_slices: u32,
    order: WeightOrder,
) -> String {
    let (words, blocks) = (packed.scale_words(length), length / packed.block());
    let (block_bytes, at) = packed.scale_place();
    let place = scale_texel(order, group_slices, words);
    format!(
        "{}{BYTES}\
         @group(0) @binding(2) var<storage, read_write> out: array<u32>;\n\
         @compute @workgroup_size({THREADS})\n\
         fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{\n\
         \x20   let at = (group.y * {GROUPS_ALONG}u + group.x) * {THREADS}u + lane;\n\
         \x20   let row = at / {words}u;\n\
         \x20   let word = at % {words}u;\n\
         \x20   let output = params.offset + row;\n\
         \x20   if (output >= params.end) {{ return; }}\n\
         \x20   let first = row * {row_bytes}u + word * 2u * {block_bytes}u + {at}u;\n\
         \x20   // The tensor of four bytes less than a word has padding behind it.\n\
         \x20   var scales = half_at(first);\n\
         \x20   if (word * 2u + 1u < {blocks}u) {{ scales |= half_at(first + {block_bytes}u) << 16u; }}\n\
         \x20   let slice = output / 4u;\n\
         \x20   out[{place} * 4u + output % 4u] = scales;\n\
         }}\n",
        Params::WGSL,
    )
}

/// Workgroups for `threads` threads.
pub fn groups(threads: u64) -> [u32; 3] {
    let groups = threads.div_ceil(u64::from(THREADS)).max(1);
    let along = u64::from(GROUPS_ALONG);
    [groups.min(along) as u32, groups.div_ceil(along) as u32, 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_whose_sums_would_overflow_are_refused() {
        // The largest number of products of the largest codes whose sum fits into an i32.
        assert!(
            133_144i64 * 127 * 127 <= i64::from(i32::MAX) && 133_145i64 * 127 * 127 > i64::from(i32::MAX)
        );
        assert_eq!(Packed::Row8.max_length(), 133_144);
        assert!(Packed::Row8.for_rows(133_120).is_ok());
        let error = Packed::Row8.for_rows(133_152).unwrap_err();
        assert!(error.to_string().contains("133152") && error.to_string().contains("32 bits"), "{error}");
        assert!(Packed::Row4.for_rows(133_152).is_ok());
        assert!(Packed::Row4.for_rows(1 << 21).is_err());
        // A block is no longer than it is, however long the row.
        assert!(Packed::Q8_0.for_rows(1 << 22).is_ok());
        assert!(Packed::F32.for_rows(1 << 31).is_err());
    }
}
