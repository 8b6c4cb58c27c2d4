//! Packed weight formats of the GPU, and the kernels that rearrange the weights of a model file to these formats.
//!
//! A row of weights becomes texels of 16 bytes, whose order is defined by the weight layout
//! (`crate::virtual_tensor::weights`). Nothing is dequantised: the quantised values stay the same. The file formats
//! with one f16 scale per block have blocks of 18, 34 or 210 bytes, which are not aligned to words. Their scales are
//! stored in a separate array, two blocks per word and four outputs per texel.
//!
//! ```text
//! F32         4 weights per texel        F16, BF16   8 weights per texel
//! Q8_0        2 texels for 32 weights    Q4_0        1 texel for 32: byte j has weights j and j + 16
//! Q4_K        9 texels for 256: scale, minimum and their 6-bit factors; then 8 as in Q4_0
//! Q6_K        13 texels for 256: factors; 8 of low bits as in Q4_0; 4 of high bits, two bits for each weight
//! Row8        16 weights per texel       Row4        1 texel for 32, as Q4_0
//! ```
//!
//! Row8 and Row4 have one scale per row. They are not file formats: weights are converted to them
//! (`crate::conversion`).
//!
//! The rearranging kernels run once, when the raw bytes of the file are uploaded.

use hearth_profiles::Format;

use super::quantise::{Granularity, VALUES_PER_THREAD};
use crate::device::KernelParams;
use crate::error::GpuError;
use crate::virtual_tensor::{WeightOrder, WeightShape};

/// Number of threads in a workgroup of the rearranging kernels.
pub const WORKGROUP_SIZE: u32 = 64;

/// Maximum number of workgroups in the x direction of a launch; additional workgroups are in the y direction.
pub const MAX_WORKGROUPS_X: u32 = 32_768;

/// The maximum magnitude of a quantised input of a matmul.
const MAX_INPUT_QUANT: usize = 127;

/// A format of weights in GPU memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PackedFormat {
    F32,
    F16,
    /// The format bfloat16: the upper 16 bits of an f32.
    Bf16,
    Q8_0,
    Q4_0,
    Q4K,
    Q6K,
    /// Eight-bit weights with one scale per row.
    Row8,
    /// Four-bit weights with one scale per row.
    Row4,
}

impl PackedFormat {
    /// The GPU formats for weights that are not converted, each with the corresponding format in model files.
    pub const FILE_FORMATS: [(PackedFormat, Format); 7] = [
        (PackedFormat::F32, Format::F32),
        (PackedFormat::F16, Format::F16),
        (PackedFormat::Bf16, Format::Bf16),
        (PackedFormat::Q8_0, Format::Q8_0),
        (PackedFormat::Q4_0, Format::Q4_0),
        (PackedFormat::Q4K, Format::Q4K),
        (PackedFormat::Q6K, Format::Q6K),
    ];

    /// Whether the format has one scale per row.
    pub fn has_row_scales(self) -> bool {
        matches!(self, PackedFormat::Row8 | PackedFormat::Row4)
    }

    /// Returns the GPU format for weights in the file format `format`: f16 if there is no kernel for this format.
    /// Returns an error if the kernel does not support rows of `length` weights.
    pub fn from_file_format(format: Format, length: usize) -> Result<PackedFormat, GpuError> {
        let found = PackedFormat::FILE_FORMATS.into_iter().find(|&(_, stored)| stored == format);
        found.map_or(PackedFormat::F16, |(packed, _)| packed).for_row_length(length)
    }

    /// Whether weights in the file format `format` are stored in this format without conversion.
    pub(crate) fn stores(self, format: Format) -> bool {
        PackedFormat::FILE_FORMATS.contains(&(self, format))
    }

    /// Returns this format if its kernels support rows of `length` weights, otherwise an error.
    pub(crate) fn for_row_length(self, length: usize) -> Result<PackedFormat, GpuError> {
        let need = if !length.is_multiple_of(self.unit().0 as usize) {
            "a multiple of the block size"
        } else if length <= self.max_length() {
            return Ok(self);
        } else if self.has_row_scales() {
            "a length whose sums of products fit into 32 bits"
        } else {
            "a length whose bytes can be indexed with 32 bits"
        };
        Err(GpuError::UnsupportedDimension { what: "the length of a row of weights", found: length, need })
    }

    /// Returns the smallest number of weights that fill whole texels, and the number of these texels. The length of a
    /// row must be a multiple of this number of weights.
    fn unit(self) -> (u32, u32) {
        match self {
            PackedFormat::F32 => (4, 1),
            PackedFormat::F16 | PackedFormat::Bf16 => (8, 1),
            PackedFormat::Q8_0 | PackedFormat::Row8 => (VALUES_PER_THREAD, 2),
            PackedFormat::Q4_0 | PackedFormat::Row4 => (VALUES_PER_THREAD, 1),
            PackedFormat::Q4K => (256, 9),
            PackedFormat::Q6K => (256, 13),
        }
    }

    /// Returns the maximum number of weights in a row. With one scale per row, the integer sum of the products of a
    /// whole row must fit into an i32; in the other formats, the bytes of a row are indexed with 32 bits.
    fn max_length(self) -> usize {
        let largest_sum = |quant: usize| i32::MAX as usize / (quant * MAX_INPUT_QUANT);
        match self {
            PackedFormat::Row8 => largest_sum(127),
            // The quants are 0 to 15; their offset of 8 is subtracted after each unit.
            PackedFormat::Row4 => largest_sum(15),
            // A weight has at most four bytes.
            _ => u32::MAX as usize / 4,
        }
    }

    /// Returns the number of weights in a block, whose products are summed as integers; 0 for unquantised formats.
    pub fn block_length(self) -> u32 {
        match self {
            PackedFormat::F32 | PackedFormat::F16 | PackedFormat::Bf16 => 0,
            _ => self.unit().0,
        }
    }

    /// Returns the granularity at which matmuls with these weights quantise inputs; `None` if inputs stay floats.
    pub fn input_granularity(self) -> Option<Granularity> {
        match self.block_length() {
            0 => None,
            _ if self.has_row_scales() => Some(Granularity::Row),
            block => Some(Granularity::Blocks(block)),
        }
    }

    /// Returns the number of texels of 16 bytes in a row of `length` weights.
    pub fn texels_per_row(self, length: u32) -> u32 {
        let (weights, texels) = self.unit();
        length / weights * texels
    }

    /// Returns the number of 32-bit words for the scales of a row of `length` weights, with two scales per word; 0 if
    /// the scales are not stored separately.
    pub fn scale_words_per_row(self, length: u32) -> u32 {
        let is_separate = matches!(self, PackedFormat::Q8_0 | PackedFormat::Q4_0 | PackedFormat::Q6K);
        if is_separate { (length / self.block_length()).div_ceil(2) } else { 0 }
    }

    /// Returns the size of a block in the model file and the offset of the scale in the block, in bytes. Only for
    /// formats whose scales are stored separately.
    fn scale_offset(self) -> (u32, u32) {
        match self {
            PackedFormat::Q8_0 => (34, 0),
            PackedFormat::Q4_0 => (18, 0),
            PackedFormat::Q6K => (210, 208),
            _ => (0, 0),
        }
    }

    /// Returns the WGSL function body that reads texel `t` of a row. `row` is the offset of the row in the raw bytes.
    fn texel(self) -> &'static str {
        match self {
            PackedFormat::Q8_0 => "    return bytes16(row + t / 2u * 34u + 2u + t % 2u * 16u);\n",
            PackedFormat::Q4_0 => "    return bytes16(row + t * 18u + 2u);\n",
            PackedFormat::Q4K => {
                "    let block = row + t / 9u * 144u;\n\
                 \x20   if (t % 9u == 0u) { return bytes16(block); }\n\
                 \x20   let unit = t % 9u - 1u;\n\
                 \x20   return nibbles(block + 16u + unit / 2u * 32u, unit % 2u == 1u);\n"
            }
            PackedFormat::Q6K => {
                "    let block = row + t / 13u * 210u;\n\
                 \x20   let k = t % 13u;\n\
                 \x20   if (k == 0u) { return bytes16(block + 192u); }\n\
                 \x20   if (k <= 8u) {\n\
                 \x20       let unit = k - 1u;\n\
                 \x20       return nibbles(block + unit / 4u * 64u + unit % 2u * 32u, unit % 4u >= 2u);\n\
                 \x20   }\n\
                 \x20   return vec4<u32>(high_bits(block, (k - 9u) * 2u), high_bits(block, (k - 9u) * 2u + 1u));\n"
            }
            _ => "    return bytes16(row + t * 16u);\n",
        }
    }
}

/// The WGSL functions that read the raw bytes of the weights in a model file.
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

/// Returns the WGSL expression for the index of a texel of scales. For each of the four outputs in output slice `slice`
/// the texel has word `word` of the scales; both are WGSL variables. `slices` is the number of slices in a group of the
/// layout, and `words` the number of words for the scales of a row.
pub(crate) fn scale_texel_index(order: WeightOrder, slices: u32, words: u32) -> String {
    match order {
        WeightOrder::ByOutput => format!("(slice * {words}u + word)"),
        WeightOrder::Interleaved => {
            format!("((slice / {slices}u * {words}u + word) * {slices}u + slice % {slices}u)")
        }
    }
}

/// Generates the WGSL source of the kernel that rearranges the weights of the rows `params.offset..params.end` into
/// texels. The bytes of these rows are at the start of the binding `raw`.
pub fn texel_packing_kernel(
    packed: PackedFormat,
    length: u32,
    row_bytes: u32,
    shape: &WeightShape,
    order: WeightOrder,
) -> String {
    let index = shape.texel_index_wgsl(order, "params.offset + row", "t");
    let function = format!("fn texel(row: u32, t: u32) -> vec4<u32> {{\n{}}}\n", packed.texel());
    let body = format!(
        "    if (params.offset + row < params.end) {{ out[{index}] = texel(row * {row_bytes}u, t); }}\n"
    );
    rearranging_kernel("vec4<u32>", &function, ("t", packed.texels_per_row(length)), &body)
}

/// Generates the WGSL source of the kernel that copies the scales of rows `params.offset..params.end` to an array.
pub fn scale_packing_kernel(
    packed: PackedFormat,
    length: u32,
    row_bytes: u32,
    group_slices: u32,
    order: WeightOrder,
) -> String {
    let (words, blocks) = (packed.scale_words_per_row(length), length / packed.block_length());
    let (block_bytes, at) = packed.scale_offset();
    let index = scale_texel_index(order, group_slices, words);
    let body = format!(
        "    let output = params.offset + row;\n\
         \x20   if (output >= params.end) {{ return; }}\n\
         \x20   let first = row * {row_bytes}u + word * 2u * {block_bytes}u + {at}u;\n\
         \x20   // With an odd number of blocks, the upper half of the last word stays zero.\n\
         \x20   var scales = half_at(first);\n\
         \x20   if (word * 2u + 1u < {blocks}u) {{ scales |= half_at(first + {block_bytes}u) << 16u; }}\n\
         \x20   let slice = output / 4u;\n\
         \x20   out[{index} * 4u + output % 4u] = scales;\n"
    );
    rearranging_kernel("u32", "", ("word", words), &body)
}

/// Generates the WGSL source of a kernel whose threads each write one element of the WGSL type `kind` with the
/// statements `body`. A row has `count` elements; the WGSL variable `name` is the index of the element in its row.
fn rearranging_kernel(kind: &str, function: &str, (name, count): (&str, u32), body: &str) -> String {
    format!(
        "{}{BYTES}\
         @group(0) @binding(2) var<storage, read_write> out: array<{kind}>;\n\
         {function}\
         @compute @workgroup_size({WORKGROUP_SIZE})\n\
         fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{\n\
         \x20   let at = (group.y * {MAX_WORKGROUPS_X}u + group.x) * {WORKGROUP_SIZE}u + lane;\n\
         \x20   let row = at / {count}u;\n\
         \x20   let {name} = at % {count}u;\n\
         {body}\
         }}\n",
        KernelParams::WGSL_DECLARATION,
    )
}

/// Returns the number of workgroups in the directions x, y and z for `threads` threads.
pub fn workgroup_count(threads: u64) -> [u32; 3] {
    let groups = threads.div_ceil(u64::from(WORKGROUP_SIZE)).max(1);
    let along = u64::from(MAX_WORKGROUPS_X);
    [groups.min(along) as u32, groups.div_ceil(along) as u32, 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_whose_sums_would_overflow_are_rejected() {
        // The maximum number of products of the largest quants whose sum fits into an i32.
        let fits = |products: i64| products * 127 * 127 <= i64::from(i32::MAX);
        assert!(fits(133_144) && !fits(133_145));
        assert_eq!(PackedFormat::Row8.max_length(), 133_144);
        assert!(PackedFormat::Row8.for_row_length(133_120).is_ok());
        let error = PackedFormat::Row8.for_row_length(133_152).unwrap_err();
        assert!(error.to_string().contains("133152") && error.to_string().contains("32 bits"), "{error}");
        assert!(PackedFormat::Row4.for_row_length(133_152).is_ok());
        assert!(PackedFormat::Row4.for_row_length(1 << 21).is_err());
        // The sums of other formats are those of a block, so longer rows are accepted.
        assert!(PackedFormat::Q8_0.for_row_length(1 << 22).is_ok());
        assert!(PackedFormat::F32.for_row_length(1 << 31).is_err());
    }
}
