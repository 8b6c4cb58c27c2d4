//! The loop body of the matmul kernel: the dot products of one block of weights, for each block format.
//!
//! The generated code computes the integer sums of a block for each token and each of four rows, scales these sums and
//! adds them to the results. The WGSL variable `block` is the index of the block in its row, and `here` the index of
//! the block in the current chunk of inputs.

use std::fmt::Write;

use super::MatmulKernel;
use crate::kernels::packing::PackedFormat;

/// The WGSL functions that all matmul kernels need: the dot product of 16 bytes, and the nibbles of a texel.
pub(super) const DOT_FUNCTIONS: &str = "\
fn dot16(a: vec4<u32>, b: vec4<u32>) -> i32 {
    return dot4(a.x, b.x) + dot4(a.y, b.y) + dot4(a.z, b.z) + dot4(a.w, b.w);
}
fn low(w: vec4<u32>) -> vec4<u32> { return w & vec4<u32>(0x0f0f0f0fu); }
fn high(w: vec4<u32>) -> vec4<u32> { return (w >> vec4<u32>(4u)) & vec4<u32>(0x0f0f0f0fu); }
";

/// The WGSL functions that unpack the integer scales, the integer minima and the high bits of K-quants.
pub(super) const FACTOR_FUNCTIONS: &str = "\
fn factors(h: vec4<u32>, u: u32) -> vec2<i32> {
    let shift = 8u * (u % 4u);
    if (u < 4u) { return vec2<i32>(i32((h.y >> shift) & 63u), i32((h.z >> shift) & 63u)); }
    let both = (h.w >> shift) & 255u;
    let scale = (both & 15u) | (((h.y >> (shift + 6u)) & 3u) << 4u);
    let minimum = (both >> 4u) | (((h.z >> (shift + 6u)) & 3u) << 4u);
    return vec2<i32>(i32(scale), i32(minimum));
}
fn spread(bits: u32) -> vec4<u32> {
    let fields = vec4<u32>(bits, bits >> 2u, bits >> 4u, bits >> 6u);
    return (fields & vec4<u32>(0x03030303u)) << vec4<u32>(4u);
}
fn signed_byte(h: vec4<u32>, at: u32) -> i32 {
    return extractBits(i32(h[at / 4u]), 8u * (at % 4u), 8u);
}
";

/// Generates a WGSL expression for each of the rows 0 to 3 and joins the four expressions with commas.
pub(super) fn four_rows(of: impl Fn(u32) -> String) -> String {
    [0, 1, 2, 3].map(of).join(", ")
}

impl MatmulKernel {
    /// Generates the WGSL loop body for one texel of unquantised weights.
    pub(super) fn plain_texel(&self) -> String {
        let mut text = String::new();
        let wide = self.packed_format != PackedFormat::F32;
        for r in 0..4 {
            let _ = writeln!(text, "        let w{r} = weight(slice, {r}u, t);");
        }
        for t in 0..self.tokens() {
            let inputs: &[_] = if wide { &[("x", "2u * t"), ("y", "2u * t + 1u")] } else { &[("x", "t")] };
            for (name, at) in inputs {
                let _ = writeln!(text, "        let {name}{t} = x_read(0u, token{t}, 0u, {at});");
            }
            let dots = four_rows(|r| {
                let second = if wide { format!(" + dot(second(w{r}), y{t})") } else { String::new() };
                format!("dot(first(w{r}), x{t}){second}")
            });
            let _ = writeln!(text, "        acc{t} += vec4<f32>({dots});");
        }
        text
    }

    /// Generates the WGSL statement that adds `integers`, the integer sums of a block, times `scale` to the result of
    /// token `t`, or that writes the integer sums.
    fn accumulate(&self, t: u32, integers: &str, scale: &str) -> String {
        if self.writes_integer_sums {
            let blocks = self.row_length / self.packed_format.block_length();
            let slices = self.total_rows.div_ceil(4);
            return format!(
                "        if (slice < {slices}u) {{ integers[(token{t} * {blocks}u + block) * {slices}u + slice] = \
                 {integers}; }}\n"
            );
        }
        format!(
            "        acc{t} = fma({scale} * input_scale(token{t}, here), vec4<f32>({integers}), acc{t});\n"
        )
    }

    fn has_four_bits(&self) -> bool {
        matches!(self.packed_format, PackedFormat::Q4_0 | PackedFormat::Row4)
    }

    /// Generates the WGSL variables `v{r}` and `w{r}`, the 32 weights of each row r, from two texels or from nibbles.
    pub(super) fn unit_weights(&self) -> String {
        let row = |r: u32| {
            if self.has_four_bits() {
                format!(
                    "        let p{r} = weight(slice, {r}u, block);\n        let v{r} = low(p{r});\n        \
                     let w{r} = high(p{r});\n"
                )
            } else {
                format!(
                    "        let v{r} = weight(slice, {r}u, 2u * block);\n        \
                     let w{r} = weight(slice, {r}u, 2u * block + 1u);\n"
                )
            }
        };
        [0, 1, 2, 3].map(row).concat()
    }

    /// Generates the WGSL variables `a{t}` and `b{t}`, the quants of 32 inputs of token `t`.
    pub(super) fn unit_quants(t: u32) -> String {
        format!(
            "        let a{t} = quants(token{t}, 2u * here);\n        \
             let b{t} = quants(token{t}, 2u * here + 1u);\n"
        )
    }

    /// Generates the WGSL expression for the sum of the products of 32 weights and inputs of token `t`, for four rows.
    /// The quants 0 to 15 of four-bit weights represent the weights -8 to 7.
    pub(super) fn unit_sum(&self, t: u32) -> String {
        let dots = four_rows(|r| format!("dot16(v{r}, a{t}) + dot16(w{r}, b{t})"));
        let offset = if self.has_four_bits() {
            format!(
                " - vec4<i32>(8 * (input_sum(token{t}, 2u * here) + input_sum(token{t}, 2u * here + 1u)))"
            )
        } else {
            String::new()
        };
        format!("vec4<i32>({dots}){offset}")
    }

    /// Generates the WGSL loop body for a block of Q8_0 or Q4_0.
    pub(super) fn block32(&self) -> String {
        let mut text = String::from("        let d = scale(slice, block);\n") + &self.unit_weights();
        for t in 0..self.tokens() {
            text += &MatmulKernel::unit_quants(t);
            let _ = writeln!(text, "        let n{t} = {};", self.unit_sum(t));
            text += &self.accumulate(t, &format!("n{t}"), "d");
        }
        text
    }

    /// Generates the WGSL loop over the eight units of 32 weights in a block of 256.
    ///
    /// The statements `before` precede the loop, and `totals` are the names of the accumulators. The closures return
    /// the statements of the loop: `sums` those that load the input sums of a token, `row` those that load the weights
    /// of a row, and `products` those that add the products of a row and a token.
    fn block256(
        &self,
        before: &str,
        totals: &[&str],
        sums: impl Fn(u32) -> String,
        row: impl Fn(u32) -> String,
        products: impl Fn(u32, &str, u32) -> String,
    ) -> String {
        let mut text = before.to_owned();
        for t in 0..self.tokens() {
            for total in totals {
                let _ = writeln!(text, "        var {total}{t} = vec4<i32>(0);");
            }
        }
        text += "        for (var u = 0u; u < 8u; u++) {\n            let at = 2u * (8u * here + u);\n";
        for t in 0..self.tokens() {
            let _ = write!(
                text,
                "            let a{t} = quants(token{t}, at);\n            let b{t} = quants(token{t}, at + 1u);\n{}",
                sums(t)
            );
        }
        for (r, lane) in (0..).zip(["x", "y", "z", "w"]) {
            text += &row(r);
            for t in 0..self.tokens() {
                text += &products(r, lane, t);
            }
        }
        text + "        }\n"
    }

    /// Generates the WGSL loop body for a block of Q4_K.
    pub(super) fn block_q4_k(&self) -> String {
        let header = |r: u32| format!("        let h{r} = weight(slice, {r}u, 9u * block);\n");
        let mut text = self.block256(
            &[0, 1, 2, 3].map(header).concat(),
            &["n", "m"],
            |t| format!("            let s{t} = input_sum(token{t}, at) + input_sum(token{t}, at + 1u);\n"),
            |r| {
                format!(
                    "            let p{r} = weight(slice, {r}u, 9u * block + 1u + u);\n            \
                     let f{r} = factors(h{r}, u);\n"
                )
            },
            |r, lane, t| {
                format!(
                    "            n{t}.{lane} += f{r}.x * (dot16(low(p{r}), a{t}) + dot16(high(p{r}), b{t}));\n            \
                     m{t}.{lane} += f{r}.y * s{t};\n"
                )
            },
        );
        for r in 0..4 {
            let _ = writeln!(text, "        let d{r} = unpack2x16float(h{r}.x);");
        }
        text += "        let d = vec4<f32>(d0.x, d1.x, d2.x, d3.x);\n        \
                 let e = vec4<f32>(d0.y, d1.y, d2.y, d3.y);\n";
        for t in 0..self.tokens() {
            if self.writes_integer_sums {
                text += &self.accumulate(t, &format!("n{t} - m{t}"), "d");
            } else {
                text += &self.accumulate(t, &format!("n{t}"), "d");
                text += &self.accumulate(t, &format!("m{t}"), "-e");
            }
        }
        text
    }

    /// Generates the WGSL loop body for a block of Q6_K.
    pub(super) fn block_q6_k(&self) -> String {
        let header = |r: u32| format!("        let h{r} = weight(slice, {r}u, 13u * block);\n");
        let mut text = self.block256(
            &(String::from("        let d = scale(slice, block);\n") + &[0, 1, 2, 3].map(header).concat()),
            &["n"],
            |t| {
                format!(
                    "            let s{t} = 32 * input_sum(token{t}, at);\n            \
                     let q{t} = 32 * input_sum(token{t}, at + 1u);\n"
                )
            },
            |r| {
                format!(
                    "            let p{r} = weight(slice, {r}u, 13u * block + 1u + u);\n            \
                     let g{r} = weight(slice, {r}u, 13u * block + 9u + u / 2u);\n            \
                     let k{r} = select(g{r}.xy, g{r}.zw, u % 2u == 1u);\n            \
                     let v{r} = low(p{r}) | spread(k{r}.x);\n            let w{r} = high(p{r}) | spread(k{r}.y);\n            \
                     let e{r} = signed_byte(h{r}, 2u * u);\n            let f{r} = signed_byte(h{r}, 2u * u + 1u);\n"
                )
            },
            |r, lane, t| {
                format!(
                    "            n{t}.{lane} += e{r} * (dot16(v{r}, a{t}) - s{t}) + f{r} * (dot16(w{r}, b{t}) - q{t});\n"
                )
            },
        );
        for t in 0..self.tokens() {
            text += &self.accumulate(t, &format!("n{t}"), "d");
        }
        text
    }
}
