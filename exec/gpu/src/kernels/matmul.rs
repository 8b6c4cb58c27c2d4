//! The matmul kernel, which multiplies a weight matrix by the activations of tokens.
//!
//! `out[token, row] = dot(weights[row], x[token])`. A thread computes a slice of four rows. ML Drift paper, section
//! 3.7: the two phases have different kernels.
//!
//! - [`Phase::Decode`], one token: the threads of a workgroup share the blocks of a row, and their partial sums are
//!   added at the end. The kernel quantises the inputs of quantised weights itself, chunk by chunk, into workgroup
//!   memory.
//! - [`Phase::Prefill`]: a thread computes several tokens, so that each weight is read once for all of them. A
//!   separate kernel has quantised the inputs (`super::quantise`).
//!
//! Weights are dequantised only here. The products of a block, multiplied by its integer factors, are summed as
//! integers, so that both phases and the CPU have the same integers; only the order in which the resulting floats are
//! added differs. With one scale per row, the whole dot product is one integer (see `rows`). The kernel also adds the
//! bias, applies the activation function, and multiplies by the gate, if the model has them.

mod blocks;
mod rows;

use std::fmt::Write;

use hearth_profiles::model::GateActivation;

use super::Declarations;
use super::packing::{PackedFormat, scale_texel_index};
use super::quantise::{self, Granularity, VALUES_PER_THREAD};
use crate::device::Capabilities;
use crate::virtual_tensor::{AccessMode, Accessor, ShapeError, Storage, WeightOrder, WeightShape};
use blocks::{DOT_FUNCTIONS, FACTOR_FUNCTIONS};

/// The phase of inference: decode processes one token, prefill a batch of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    Decode,
    Prefill,
}

/// The layout of the weights, and the distribution of a matmul over the threads of a workgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tiling {
    pub weight_order: WeightOrder,
    /// Number of slices of four rows that a workgroup computes.
    pub slices_per_workgroup: u32,
    /// Number of threads that share the blocks of a row in decode (split-K).
    pub split_k: u32,
    /// Number of threads that compute a slice of rows in prefill, each for different tokens.
    pub threads_per_slice: u32,
    /// Number of tokens that each thread computes in prefill.
    pub tokens_per_thread: u32,
}

impl Tiling {
    /// The tiling on a device for which no tiling has been tuned. source: assumed, 128 threads per workgroup
    pub const DEFAULT: Tiling = Tiling {
        weight_order: WeightOrder::Interleaved,
        slices_per_workgroup: 16,
        split_k: 8,
        threads_per_slice: 8,
        tokens_per_thread: 4,
    };
    /// The default tiling, but with the naive layout, in which the weights of a row are contiguous.
    pub const BY_OUTPUT: Tiling = Tiling { weight_order: WeightOrder::ByOutput, ..Tiling::DEFAULT };

    /// Returns the number of tokens that a workgroup computes in prefill.
    pub fn tokens_per_tile(&self) -> u32 {
        self.threads_per_slice * self.tokens_per_thread
    }

    /// Returns variants of this tiling with fewer tokens per thread, and this tiling itself, in ascending order of
    /// tokens per thread. A workgroup always computes a whole tile, so a small batch needs a small tile.
    pub fn batch_size_variants(self) -> Vec<Tiling> {
        let fewer = [1, 2, 4, 8, 16].into_iter().filter(|&tokens| tokens < self.tokens_per_thread);
        let all = fewer.chain([self.tokens_per_thread]);
        all.map(|tokens_per_thread| Tiling { tokens_per_thread, ..self }).collect()
    }
}

/// The matmul kernel of a weight matrix, or of a part of its rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MatmulKernel {
    pub packed_format: PackedFormat,
    /// Number of weights in a row, which is the number of inputs.
    pub row_length: u32,
    /// Number of rows that this kernel computes.
    pub rows: u32,
    /// Index in the matrix of the first row that this kernel computes.
    pub first_row: u32,
    /// Number of rows of the whole matrix.
    pub total_rows: u32,
    pub phase: Phase,
    pub tiling: Tiling,
    pub capabilities: Capabilities,
    pub has_bias: bool,
    pub activation: Option<GateActivation>,
    /// Whether the result is multiplied by the gate, which is an additional input tensor.
    pub multiplies_by_gate: bool,
    /// Whether the kernel writes the integer sums of each block, [tokens, blocks, rows], instead of the results. Used
    /// by tests. With one scale per row, a row is one block.
    pub writes_integer_sums: bool,
}

impl MatmulKernel {
    fn is_decode(&self) -> bool {
        self.phase == Phase::Decode
    }

    fn is_quantised(&self) -> bool {
        self.packed_format.input_granularity().is_some()
    }

    /// Whether the inputs are quantised by a separate kernel before this kernel.
    fn reads_quants(&self) -> bool {
        self.is_quantised() && !self.is_decode()
    }

    fn texel_type(&self) -> &'static str {
        // naga 30 cannot cast two words to four f16 values, so the texels are declared as f16.
        let halves = self.capabilities.shader_f16 && self.packed_format == PackedFormat::F16;
        if halves { "Halves" } else { "vec4<u32>" }
    }

    /// Returns the shape of the packed weights of this kernel. The inputs of this shape are 32-bit words.
    pub fn packed_weight_shape(&self) -> Result<WeightShape, ShapeError> {
        let words = self.packed_format.texels_per_row(self.row_length) * 4;
        WeightShape::new(self.rows, words, self.tiling.slices_per_workgroup)
    }

    /// Returns the number of tokens that each thread computes.
    fn tokens(&self) -> u32 {
        if self.is_decode() { 1 } else { self.tiling.tokens_per_thread }
    }

    /// Returns the number of workgroups in the directions x, y and z for `tokens` tokens.
    pub fn workgroup_count(&self, tokens: u32) -> [u32; 3] {
        let slices = self.rows.div_ceil(4).div_ceil(self.tiling.slices_per_workgroup);
        let tiles = if self.is_decode() { 1 } else { tokens.div_ceil(self.tiling.tokens_per_tile()) };
        [slices, tiles, 1]
    }

    /// Generates the WGSL source of the kernel. The bindings after the parameters are: weights; scales of the weights
    /// if the format stores them separately; inputs, or their quants, scales and sums if a separate kernel quantises
    /// the inputs; output; bias and gate if they are used.
    pub fn wgsl_source(&self) -> Result<String, ShapeError> {
        let rows = |name, width, direction| Accessor::for_rows(name, Storage::Linear, width, direction);
        let mut kernel = Declarations::new(self.capabilities.shader_f16);
        if self.texel_type() == "Halves" {
            kernel.text += "struct Halves { first: vec4<f16>, second: vec4<f16> }\n";
        }
        kernel.declare_buffer("read", "weights", self.texel_type());
        if self.packed_format.scale_words_per_row(self.row_length) > 0 {
            kernel.declare_buffer("read", "scales", "vec4<u32>");
        } else if self.packed_format.has_row_scales() {
            kernel.declare_buffer("read", "row_scales", "vec4<f32>");
        }
        if self.reads_quants() {
            kernel.declare_buffer("read", "quants_object", "vec4<u32>");
            kernel.declare_buffer("read", "scales_object", "f32");
            kernel.declare_buffer("read", "sums_object", "i32");
        } else {
            kernel.declare_tensor(&rows("x", self.row_length, AccessMode::Read));
        }
        if self.writes_integer_sums {
            kernel.declare_buffer("read_write", "integers", "vec4<i32>");
        } else {
            kernel.declare_tensor(&rows("out", self.total_rows, AccessMode::Write));
        }
        if self.has_bias {
            kernel.declare_buffer("read", "bias", "vec4<f32>");
        }
        if self.multiplies_by_gate {
            kernel.declare_tensor(&rows("gate", self.total_rows, AccessMode::Read));
        }
        Ok(kernel.text + &self.functions()? + &self.main())
    }

    fn functions(&self) -> Result<String, ShapeError> {
        let mut text = format!("{DOT_FUNCTIONS}{FACTOR_FUNCTIONS}");
        text += if self.capabilities.packed_dot {
            "fn dot4(a: u32, b: u32) -> i32 { return dot4I8Packed(a, b); }\n"
        } else {
            "fn dot4(a: u32, b: u32) -> i32 { return dot(unpack4xI8(a), unpack4xI8(b)); }\n"
        };
        let (kind, texel) = (
            self.texel_type(),
            self.packed_weight_shape()?.texel_index_wgsl(self.tiling.weight_order, "slice * 4u + r", "t"),
        );
        let _ =
            writeln!(text, "fn weight(slice: u32, r: u32, t: u32) -> {kind} {{ return weights[{texel}]; }}");
        let words = self.packed_format.scale_words_per_row(self.row_length);
        if words > 0 {
            let texel = scale_texel_index(self.tiling.weight_order, self.tiling.slices_per_workgroup, words);
            let _ = writeln!(
                text,
                "fn scale(slice: u32, block: u32) -> vec4<f32> {{\n    let word = block / 2u;\n    \
                 let pairs = scales[{texel}];\n    let a = unpack2x16float(pairs.x);\n    \
                 let b = unpack2x16float(pairs.y);\n    let c = unpack2x16float(pairs.z);\n    \
                 let d = unpack2x16float(pairs.w);\n    \
                 return select(vec4<f32>(a.x, b.x, c.x, d.x), vec4<f32>(a.y, b.y, c.y, d.y), block % 2u == 1u);\n}}"
            );
        }
        if self.is_quantised() {
            text += &self.inputs();
        } else {
            text += self.widening();
        }
        if let Some(gating) = self.activation {
            text += match gating {
                GateActivation::Silu => SILU,
                GateActivation::Gelu => GELU,
                GateActivation::ClampedSwiglu => unreachable!("only mixtures have it, which CPUs compute"),
            };
        }
        Ok(text)
    }

    /// Generates the WGSL functions `quants`, `input_scale` and `input_sum`, which return quantised inputs. In decode
    /// the inputs are those of the current chunk, in prefill those of all tokens.
    fn inputs(&self) -> String {
        let granularity = self.packed_format.input_granularity().unwrap_or(Granularity::Row);
        let block = granularity.block_length(self.row_length);
        if !self.is_decode() {
            let (halves, blocks) = (self.row_length / VALUES_PER_THREAD * 2, self.row_length / block);
            return format!(
                "fn quants(token: u32, texel: u32) -> vec4<u32> {{ return quants_object[token * {halves}u + texel]; }}\n\
                 fn input_scale(token: u32, block: u32) -> f32 {{ return scales_object[token * {blocks}u + block]; }}\n\
                 fn input_sum(token: u32, at: u32) -> i32 {{ return sums_object[token * {halves}u + at]; }}\n"
            );
        }
        let threads = self.tiling.slices_per_workgroup * self.tiling.split_k;
        let mut stored = String::from(
            "    quants_shared[2u * lane] = low;\n    quants_shared[2u * lane + 1u] = high;\n    \
             quant_sums_shared[2u * lane] = sums.x;\n    quant_sums_shared[2u * lane + 1u] = sums.y;\n",
        );
        let scale = match granularity {
            Granularity::Row => rows::INPUT_SCALE.to_owned(),
            Granularity::Blocks(block) => {
                let in_block = block / VALUES_PER_THREAD;
                let _ = writeln!(
                    stored,
                    "    if (lane % {in_block}u == 0u) {{ scale_shared[lane / {in_block}u] = scale; }}"
                );
                format!(
                    "var<workgroup> scale_shared: array<f32, {threads}>;\n\
                     fn input_scale(token: u32, block: u32) -> f32 {{ return scale_shared[block]; }}\n"
                )
            }
        };
        let halves = 2 * threads;
        format!(
            "var<workgroup> quants_shared: array<vec4<u32>, {halves}>;\n\
             var<workgroup> quant_sums_shared: array<i32, {halves}>;\n{scale}\
             fn quants(token: u32, texel: u32) -> vec4<u32> {{ return quants_shared[texel]; }}\n\
             fn input_sum(token: u32, at: u32) -> i32 {{ return quant_sums_shared[at]; }}\n{}",
            quantise::wgsl_functions(granularity, self.row_length, threads, &stored),
        )
    }

    /// Generates the WGSL functions that convert a texel of unquantised weights to floats.
    fn widening(&self) -> &'static str {
        match (self.packed_format, self.capabilities.shader_f16) {
            (PackedFormat::F16, true) => {
                "fn first(w: Halves) -> vec4<f32> { return vec4<f32>(w.first); }\n\
                 fn second(w: Halves) -> vec4<f32> { return vec4<f32>(w.second); }\n"
            }
            (PackedFormat::F16, false) => {
                "fn first(w: vec4<u32>) -> vec4<f32> \
                 { return vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y)); }\n\
                 fn second(w: vec4<u32>) -> vec4<f32> \
                 { return vec4<f32>(unpack2x16float(w.z), unpack2x16float(w.w)); }\n"
            }
            (PackedFormat::Bf16, _) => {
                "fn pair(w: u32) -> vec2<f32> \
                 { return vec2<f32>(bitcast<f32>(w << 16u), bitcast<f32>(w & 0xffff0000u)); }\n\
                 fn first(w: vec4<u32>) -> vec4<f32> { return vec4<f32>(pair(w.x), pair(w.y)); }\n\
                 fn second(w: vec4<u32>) -> vec4<f32> { return vec4<f32>(pair(w.z), pair(w.w)); }\n"
            }
            _ => "fn first(w: vec4<u32>) -> vec4<f32> { return bitcast<vec4<f32>>(w); }\n",
        }
    }

    fn main(&self) -> String {
        let (tiling, tokens) = (&self.tiling, self.tokens());
        let is_decode = self.is_decode();
        let depth = if is_decode { tiling.split_k } else { tiling.threads_per_slice };
        // Neighbouring threads read neighbouring texels: of different slices, or of the same slice along its row.
        let along = tiling.weight_order == WeightOrder::ByOutput && is_decode;
        let (x, y) =
            if along { (depth, tiling.slices_per_workgroup) } else { (tiling.slices_per_workgroup, depth) };
        let (slice, part) = if along { ("local.y", "local.x") } else { ("local.x", "local.y") };
        let mut text = String::new();
        if is_decode {
            let kind = if self.packed_format.has_row_scales() { "i32" } else { "f32" };
            let _ = writeln!(text, "var<workgroup> parts_shared: array<vec4<{kind}>, {}>;", x * y);
        }
        let _ = write!(
            text,
            "@compute @workgroup_size({x}, {y})\n\
             fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>, \
             @builtin(local_invocation_index) lane: u32) {{\n    \
             let slice = group.x * {}u + {slice};\n    let part = {part};\n",
            tiling.slices_per_workgroup
        );
        // The automatic layout contains only the bindings that the kernel uses.
        text += "    _ = params.tokens;\n";
        let (integers, is_by_row) = (self.writes_integer_sums, self.packed_format.has_row_scales());
        for (is_used, value) in [
            (self.reads_quants(), "sums_object[0]"),
            (integers && self.packed_format.scale_words_per_row(self.row_length) > 0, "scale(0u, 0u)"),
            (integers && is_by_row, "row_scales[0]"),
            (integers && !(is_by_row && is_decode), "input_scale(0u, 0u)"),
        ] {
            if is_used {
                let _ = writeln!(text, "    _ = {value};");
            }
        }
        for t in 0..tokens {
            if is_decode {
                text += "    let token0 = 0u;\n";
            } else {
                let _ = writeln!(
                    text,
                    "    let token{t} = min((group.y * {depth}u + part) * {tokens}u + {t}u, params.tokens - 1u);"
                );
            }
            let _ = writeln!(text, "    var acc{t} = vec4<f32>(0.0);");
            if self.packed_format.has_row_scales() {
                let _ = writeln!(text, "    var n{t} = vec4<i32>(0);");
            }
        }
        text += &self.block_loop();
        text += &self.epilogue(slice);
        text += "}\n";
        text
    }

    /// Generates the WGSL loop over the blocks of a row, or over the texels of a row of unquantised weights.
    fn block_loop(&self) -> String {
        let block = self.packed_format.block_length();
        let (first, step) = if self.is_decode() { ("part", self.tiling.split_k) } else { ("0u", 1) };
        if block == 0 {
            let texels = self.packed_format.texels_per_row(self.row_length);
            return format!(
                "    for (var t = {first}; t < {texels}u; t += {step}u) {{\n{}    }}\n",
                self.plain_texel()
            );
        }
        let blocks = self.row_length / block;
        let body = match self.packed_format {
            PackedFormat::Q8_0 | PackedFormat::Q4_0 => self.block32(),
            PackedFormat::Row8 | PackedFormat::Row4 => self.unit(),
            PackedFormat::Q4K => self.block_q4_k(),
            _ => self.block_q6_k(),
        };
        if !self.is_decode() {
            return format!(
                "    for (var block = {first}; block < {blocks}u; block += {step}u) {{\n        \
                 let here = block;\n{body}    }}\n"
            );
        }
        let threads = self.tiling.slices_per_workgroup * self.tiling.split_k;
        let (units, in_chunk) = (self.row_length / VALUES_PER_THREAD, threads * VALUES_PER_THREAD / block);
        let chunks = units.div_ceil(threads);
        let (before, quantisation) = if self.packed_format.has_row_scales() {
            (rows::SCALE_STATEMENTS, rows::QUANTISE_STATEMENTS)
        } else {
            (
                "",
                "    quantise_load(0u, unit, lane, inside);\n    workgroupBarrier();\n    \
                 if (inside) { quantise_finish(0u, unit, lane); }\n",
            )
        };
        format!(
            "{before}    for (var chunk = 0u; chunk < {chunks}u; chunk++) {{\n    \
             let unit = chunk * {threads}u + lane;\n    let inside = unit < {units}u;\n{quantisation}    \
             workgroupBarrier();\n    let end = min({in_chunk}u, {blocks}u - chunk * {in_chunk}u);\n    \
             for (var here = {first}; here < end; here += {step}u) {{\n        \
             let block = chunk * {in_chunk}u + here;\n{body}    }}\n    workgroupBarrier();\n    }}\n"
        )
    }

    /// Generates the end of the kernel, which sums the partial results of a workgroup, applies bias, activation
    /// function and gate, and writes the results. `slice` is the WGSL expression for the slice index in the workgroup.
    fn epilogue(&self, slice: &str) -> String {
        if self.writes_integer_sums && !self.packed_format.has_row_scales() {
            return String::new();
        }
        let (splits, slices) = (self.tiling.split_k, self.tiling.slices_per_workgroup);
        let mut text = String::new();
        if self.is_decode() {
            let sum = if self.packed_format.has_row_scales() { "n0" } else { "acc0" };
            let _ = write!(
                text,
                "    parts_shared[part * {slices}u + {slice}] = {sum};\n    workgroupBarrier();\n    \
                 if (part > 0u) {{ return; }}\n    \
                 for (var i = 1u; i < {splits}u; i++) {{ {sum} += parts_shared[i * {slices}u + {slice}]; }}\n"
            );
        }
        if self.packed_format.has_row_scales() {
            text += &self.scaled_results();
            if self.writes_integer_sums {
                return text;
            }
        }
        let (own, first) = (self.rows.div_ceil(4), self.first_row / 4);
        let _ = writeln!(text, "    if (slice >= {own}u) {{ return; }}\n    let s = slice + {first}u;");
        for t in 0..self.tokens() {
            if self.has_bias {
                let _ = writeln!(text, "    acc{t} += bias[s];");
            }
            if self.activation.is_some() {
                let _ = writeln!(text, "    acc{t} = activate(acc{t});");
            }
            if self.multiplies_by_gate {
                let _ = writeln!(text, "    acc{t} *= gate_read(0u, token{t}, 0u, s);");
            }
            if self.is_decode() {
                text += "    out_write(0u, 0u, 0u, s, acc0);\n";
            } else {
                let (depth, tokens) = (self.tiling.threads_per_slice, self.tokens());
                let _ = writeln!(
                    text,
                    "    if ((group.y * {depth}u + part) * {tokens}u + {t}u < params.tokens) \
                     {{ out_write(0u, token{t}, 0u, s, acc{t}); }}"
                );
            }
        }
        text
    }
}

/// The WGSL function for SiLU: `x * sigmoid(x)`. The exponent is clamped so that `exp` stays finite.
const SILU: &str = "\
fn activate(x: vec4<f32>) -> vec4<f32> { return x / (1.0 + exp(min(-x, vec4<f32>(80.0)))); }
";

/// The WGSL function for the tanh approximation of GELU: `x/2 (1 + tanh z) = x / (1 + e^(-2z))` with
/// `z = sqrt(2/pi) (x + 0.044715 x^3)`. source: Hendrycks and Gimpel 2016, section 2
const GELU: &str = "\
fn activate(x: vec4<f32>) -> vec4<f32> {
    let z = 0.7978846 * x * (0.044715 * x * x + 1.0);
    return x / (1.0 + exp(min(-2.0 * z, vec4<f32>(80.0))));
}
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_batches_get_small_tiles() {
        let all = Tiling::DEFAULT.batch_size_variants();
        assert_eq!(all.iter().map(Tiling::tokens_per_tile).collect::<Vec<_>>(), [8, 16, 32]);
        assert_eq!(all.last(), Some(&Tiling::DEFAULT));
        for tokens in 2..=64u32 {
            let tiling = all.iter().find(|one| one.tokens_per_tile() >= tokens).unwrap_or(&Tiling::DEFAULT);
            let computed = tokens.next_multiple_of(tiling.tokens_per_tile());
            assert!(computed < tokens + 32 && (tokens > 8 || computed == 8), "{tokens}: {computed}");
            assert!(tokens > 32 || computed < 2 * tokens.max(8), "{tokens}: {computed}");
        }
        let odd = Tiling { tokens_per_thread: 6, ..Tiling::DEFAULT };
        let tokens: Vec<u32> =
            odd.batch_size_variants().iter().map(|tiling| tiling.tokens_per_thread).collect();
        assert_eq!(tokens, [1, 2, 4, 6]);
    }
}
