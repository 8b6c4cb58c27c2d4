//! The kernel that quantises the inputs of a matmul to eight bits.
//!
//! As on the CPU, inputs are quantised in blocks of 32 or 256: `scale = max |x| / 127`,
//! `quant = round_ties_even(x * (127 / max |x|))`. The sum of every 16 quants is stored too, because matmuls with
//! weights that have a minimum or an offset subtract a multiple of this sum. If weights have one scale per row, a row
//! of inputs also has one scale. ML Drift paper, section 3.7: in prefill the inputs are quantised by a separate kernel,
//! in decode the same functions are part of the matmul kernel.
//!
//! Each thread quantises a unit of 32 values; the threads of units with a common scale compare the maxima through
//! workgroup memory. A block with a value that is not finite gets the scale NaN, so that the logits become NaN too.

use super::Declarations;
use crate::virtual_tensor::{AccessMode, Accessor, Storage};

/// Number of values that one thread quantises.
pub const VALUES_PER_THREAD: u32 = 32;

const THREADS: u32 = 64;

/// The granularity of quantisation: the values that have a common scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Granularity {
    /// Each block of this number of consecutive inputs has one scale.
    Blocks(u32),
    /// All inputs of a token have one scale.
    Row,
}

impl Granularity {
    /// Returns the number of values with a common scale in rows of `length` values.
    pub fn block_length(self, length: u32) -> u32 {
        match self {
            Granularity::Blocks(block) => block,
            Granularity::Row => length,
        }
    }
}

/// Generates the WGSL functions that quantise inputs. With one scale per block, a shader calls `quantise_load`, a
/// barrier, and `quantise_finish`. With one scale per row, a shader calls `row_largest`, which contains a barrier, and
/// then `unit_load` and `unit_store` for each unit. The shader must define `x_read`. `stored` are the WGSL statements
/// that store the quants, the sums and the scale of a unit.
pub(crate) fn wgsl_functions(granularity: Granularity, length: u32, threads: u32, stored: &str) -> String {
    let own = match granularity {
        Granularity::Blocks(block) => {
            let units = block / VALUES_PER_THREAD;
            format!(
                "fn quantise_load(token: u32, unit: u32, lane: u32, inside: bool) {{\n\
                 \x20   var largest = 0u;\n\
                 \x20   if (inside) {{ largest = unit_load(token, unit); }}\n\
                 \x20   largest_shared[lane] = largest;\n\
                 }}\n\
                 fn quantise_finish(token: u32, unit: u32, lane: u32) {{\n\
                 \x20   var largest = 0u;\n\
                 \x20   let first = lane / {units}u * {units}u;\n\
                 \x20   for (var i = 0u; i < {units}u; i++) {{ largest = max(largest, largest_shared[first + i]); }}\n\
                 \x20   unit_store(token, unit, lane, largest);\n\
                 }}\n"
            )
        }
        Granularity::Row => format!(
            "fn row_largest(token: u32, lane: u32) -> u32 {{\n\
             \x20   var largest = 0u;\n\
             \x20   for (var unit = lane; unit < {}u; unit += {threads}u) {{\n\
             \x20       largest = max(largest, unit_load(token, unit));\n\
             \x20   }}\n\
             \x20   largest_shared[lane] = largest;\n\
             \x20   workgroupBarrier();\n\
             \x20   for (var i = 0u; i < {threads}u; i++) {{ largest = max(largest, largest_shared[i]); }}\n\
             \x20   return largest;\n\
             }}\n",
            length / VALUES_PER_THREAD
        ),
    };
    // A unit is loaded, and quantised and stored once the maximum of its block is known.
    format!(
        "var<workgroup> largest_shared: array<u32, {threads}>;\n\
         var<private> unit_values: array<vec4<f32>, 8>;\n\
         fn unit_load(token: u32, unit: u32) -> u32 {{\n\
         \x20   var largest = 0u;\n\
         \x20   for (var i = 0u; i < 8u; i++) {{\n\
         \x20       let value = x_read(0u, token, 0u, unit * 8u + i);\n\
         \x20       unit_values[i] = value;\n\
         \x20       // Without the sign, floats are ordered like their bits; infinity and NaN are the largest.\n\
         \x20       let bits = bitcast<vec4<u32>>(value) & vec4<u32>(0x7fffffffu);\n\
         \x20       largest = max(largest, max(max(bits.x, bits.y), max(bits.z, bits.w)));\n\
         \x20   }}\n\
         \x20   return largest;\n\
         }}\n\
         fn scales_of(largest: u32) -> vec2<f32> {{\n\
         \x20   let magnitude = bitcast<f32>(min(largest, 0x7f7fffffu));\n\
         \x20   var scale = magnitude / 127.0;\n\
         \x20   var inverse = 127.0 / magnitude;\n\
         \x20   // Below 127 / f32::MAX, the inverse would not be finite.\n\
         \x20   if (magnitude < 3.7323e-37) {{ scale = 0.0; inverse = 0.0; }}\n\
         \x20   if (largest >= 0x7f800000u) {{ scale = bitcast<f32>(largest | 0x00400000u); }}\n\
         \x20   return vec2<f32>(scale, inverse);\n\
         }}\n\
         fn unit_store(token: u32, unit: u32, lane: u32, largest: u32) {{\n\
         \x20   let scales = scales_of(largest);\n\
         \x20   let scale = scales.x;\n\
         \x20   let not_finite = largest >= 0x7f800000u;\n\
         \x20   var quants: array<u32, 8>;\n\
         \x20   var sums = vec2<i32>(0, 0);\n\
         \x20   for (var i = 0u; i < 8u; i++) {{\n\
         \x20       var quant = vec4<i32>(round(unit_values[i] * scales.y));\n\
         \x20       if (not_finite) {{ quant = vec4<i32>(1); }}\n\
         \x20       quants[i] = pack4xI8(quant);\n\
         \x20       let sum = quant.x + quant.y + quant.z + quant.w;\n\
         \x20       if (i < 4u) {{ sums.x += sum; }} else {{ sums.y += sum; }}\n\
         \x20   }}\n\
         \x20   let low = vec4<u32>(quants[0], quants[1], quants[2], quants[3]);\n\
         \x20   let high = vec4<u32>(quants[4], quants[5], quants[6], quants[7]);\n\
         {stored}\
         }}\n\
         {own}"
    )
}

/// Generates the WGSL source of the kernel that quantises rows of `length` inputs in units of 32. The bindings are:
/// parameters, inputs, quants [tokens, units * 2] of 16 bytes, scales [tokens, blocks] and sums [tokens, units * 2].
pub fn wgsl_source(length: u32, granularity: Granularity) -> String {
    let (units, block) = (length / VALUES_PER_THREAD, granularity.block_length(length));
    let blocks = length / block;
    let in_block = block / VALUES_PER_THREAD;
    let stored = format!(
        "    let at = (token * {units}u + unit) * 2u;\n    \
         quants_object[at] = low;\n    quants_object[at + 1u] = high;\n    \
         sums_object[at] = sums.x;\n    sums_object[at + 1u] = sums.y;\n    \
         if (unit % {in_block}u == 0u) {{ scales_object[token * {blocks}u + unit / {in_block}u] = scale; }}\n"
    );
    let main = match granularity {
        Granularity::Blocks(_) => format!(
            "    let unit = group.x * {THREADS}u + lane;\n\
             \x20   let inside = unit < {units}u;\n\
             \x20   quantise_load(group.y, unit, lane, inside);\n\
             \x20   workgroupBarrier();\n\
             \x20   if (inside) {{ quantise_finish(group.y, unit, lane); }}\n"
        ),
        Granularity::Row => format!(
            "    let largest = row_largest(group.y, lane);\n\
             \x20   for (var unit = lane; unit < {units}u; unit += {THREADS}u) {{\n\
             \x20       _ = unit_load(group.y, unit);\n\
             \x20       unit_store(group.y, unit, lane, largest);\n\
             \x20   }}\n"
        ),
    };
    let mut kernel = Declarations::new(false);
    kernel.declare_tensor(&Accessor::for_rows("x", Storage::Linear, length, AccessMode::Read));
    for (name, kind) in [("quants_object", "vec4<u32>"), ("scales_object", "f32"), ("sums_object", "i32")] {
        kernel.declare_buffer("read_write", name, kind);
    }
    format!(
        "{}{}\
         @compute @workgroup_size({THREADS})\n\
         fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{\n\
         \x20   _ = params.tokens;\n\
         {main}\
         }}\n",
        kernel.text,
        wgsl_functions(granularity, length, THREADS, &stored),
    )
}

/// Returns the number of workgroups in the directions x, y and z for `tokens` rows of `length` inputs.
pub fn workgroup_count(length: u32, granularity: Granularity, tokens: u32) -> [u32; 3] {
    let groups = match granularity {
        Granularity::Blocks(_) => (length / VALUES_PER_THREAD).div_ceil(THREADS),
        Granularity::Row => 1,
    };
    [groups, tokens, 1]
}
