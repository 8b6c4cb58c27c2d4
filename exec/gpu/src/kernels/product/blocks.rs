//! The part of the product kernel for one block of each format.
//!
//! Text for the body of its loop: the integers of a block for each token and each of four rows, and what becomes of them.
//! `block` is the block in the row, `here` the block among the inputs at hand.

use std::fmt::Write;

use super::Product;
use crate::kernels::packing::Packed;

/// Shared by all products.
pub(super) const DOTS: &str = "\
fn dot16(a: vec4<u32>, b: vec4<u32>) -> i32 {
    return dot4(a.x, b.x) + dot4(a.y, b.y) + dot4(a.z, b.z) + dot4(a.w, b.w);
}
fn low(w: vec4<u32>) -> vec4<u32> { return w & vec4<u32>(0x0f0f0f0fu); }
fn high(w: vec4<u32>) -> vec4<u32> { return (w >> vec4<u32>(4u)) & vec4<u32>(0x0f0f0f0fu); }
";

/// What K-quants have beside; functions that a kernel does not call cost nothing.
pub(super) const FACTORS: &str = "\
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

impl Product {
    pub(super) fn plain_texel(&self) -> String {
        let mut text = String::new();
        let wide = self.packed != Packed::F32;
        for r in 0..4 {
            let _ = writeln!(text, "        let w{r} = weight(slice, {r}u, t);");
        }
        for t in 0..self.tokens() {
            let read = |at: &str| format!("x_read(0u, token{t}, 0u, {at})");
            if wide {
                let _ = writeln!(
                    text,
                    "        let x{t} = {};\n        let y{t} = {};",
                    read("2u * t"),
                    read("2u * t + 1u")
                );
                let dot = |r: u32| format!("dot(first(w{r}), x{t}) + dot(second(w{r}), y{t})");
                let _ = writeln!(
                    text,
                    "        acc{t} += vec4<f32>({}, {}, {}, {});",
                    dot(0),
                    dot(1),
                    dot(2),
                    dot(3)
                );
            } else {
                let _ = writeln!(text, "        let x{t} = {};", read("t"));
                let dot = |r: u32| format!("dot(first(w{r}), x{t})");
                let _ = writeln!(
                    text,
                    "        acc{t} += vec4<f32>({}, {}, {}, {});",
                    dot(0),
                    dot(1),
                    dot(2),
                    dot(3)
                );
            }
        }
        text
    }

    /// Adds the integers of a block to the sum of a token, or writes them.
    fn taken(&self, t: u32, integers: &str, scale: &str) -> String {
        if self.integers {
            let blocks = self.length / self.packed.block();
            let slices = self.all_rows.div_ceil(4);
            return format!(
                "        if (slice < {slices}u) {{ integers[(token{t} * {blocks}u + block) * {slices}u + slice] = \
                 {integers}; }}\n"
            );
        }
        format!(
            "        acc{t} = fma({scale} * input_scale(token{t}, here), vec4<f32>({integers}), acc{t});\n"
        )
    }

    pub(super) fn block32(&self) -> String {
        let mut text = String::from("        let d = scale(slice, block);\n");
        let four = self.packed == Packed::Q4_0;
        for r in 0..4 {
            if four {
                let _ = writeln!(
                    text,
                    "        let p{r} = weight(slice, {r}u, block);\n        let v{r} = low(p{r});\n        \
                     let w{r} = high(p{r});"
                );
            } else {
                let _ = writeln!(
                    text,
                    "        let v{r} = weight(slice, {r}u, 2u * block);\n        \
                     let w{r} = weight(slice, {r}u, 2u * block + 1u);"
                );
            }
        }
        for t in 0..self.tokens() {
            let _ = writeln!(
                text,
                "        let a{t} = codes(token{t}, 2u * here);\n        \
                 let b{t} = codes(token{t}, 2u * here + 1u);"
            );
            let dot = |r: u32| format!("dot16(v{r}, a{t}) + dot16(w{r}, b{t})");
            let _ = writeln!(
                text,
                "        let n{t} = vec4<i32>({}, {}, {}, {}){};",
                dot(0),
                dot(1),
                dot(2),
                dot(3),
                // The numbers 0 to 15 stand for -8 to 7.
                if four {
                    format!(
                        " - vec4<i32>(8 * (input_sum(token{t}, 2u * here) + input_sum(token{t}, 2u * here + 1u)))"
                    )
                } else {
                    String::new()
                }
            );
            text += &self.taken(t, &format!("n{t}"), "d");
        }
        text
    }

    pub(super) fn block_q4_k(&self) -> String {
        let mut text = String::new();
        for r in 0..4 {
            let _ = writeln!(text, "        let h{r} = weight(slice, {r}u, 9u * block);");
        }
        for t in 0..self.tokens() {
            let _ = writeln!(text, "        var n{t} = vec4<i32>(0);\n        var m{t} = vec4<i32>(0);");
        }
        text += "        for (var u = 0u; u < 8u; u++) {\n            let at = 2u * (8u * here + u);\n";
        for t in 0..self.tokens() {
            let _ = writeln!(
                text,
                "            let a{t} = codes(token{t}, at);\n            let b{t} = codes(token{t}, at + 1u);\n            \
                 let s{t} = input_sum(token{t}, at) + input_sum(token{t}, at + 1u);"
            );
        }
        for r in 0..4 {
            let lane = ["x", "y", "z", "w"][r as usize];
            let _ = writeln!(
                text,
                "            let p{r} = weight(slice, {r}u, 9u * block + 1u + u);\n            \
                 let f{r} = factors(h{r}, u);"
            );
            for t in 0..self.tokens() {
                let _ = writeln!(
                    text,
                    "            n{t}.{lane} += f{r}.x * (dot16(low(p{r}), a{t}) + dot16(high(p{r}), b{t}));\n            \
                     m{t}.{lane} += f{r}.y * s{t};"
                );
            }
        }
        text += "        }\n";
        for r in 0..4 {
            let _ = writeln!(text, "        let d{r} = unpack2x16float(h{r}.x);");
        }
        text += "        let d = vec4<f32>(d0.x, d1.x, d2.x, d3.x);\n        \
                 let e = vec4<f32>(d0.y, d1.y, d2.y, d3.y);\n";
        for t in 0..self.tokens() {
            if self.integers {
                text += &self.taken(t, &format!("n{t} - m{t}"), "d");
            } else {
                text += &self.taken(t, &format!("n{t}"), "d");
                text += &self.taken(t, &format!("m{t}"), "-e");
            }
        }
        text
    }

    pub(super) fn block_q6_k(&self) -> String {
        let mut text = String::from("        let d = scale(slice, block);\n");
        for r in 0..4 {
            let _ = writeln!(text, "        let h{r} = weight(slice, {r}u, 13u * block);");
        }
        for t in 0..self.tokens() {
            let _ = writeln!(text, "        var n{t} = vec4<i32>(0);");
        }
        text += "        for (var u = 0u; u < 8u; u++) {\n            let at = 2u * (8u * here + u);\n";
        for t in 0..self.tokens() {
            let _ = writeln!(
                text,
                "            let a{t} = codes(token{t}, at);\n            let b{t} = codes(token{t}, at + 1u);\n            \
                 let s{t} = 32 * input_sum(token{t}, at);\n            \
                 let q{t} = 32 * input_sum(token{t}, at + 1u);"
            );
        }
        for r in 0..4 {
            let lane = ["x", "y", "z", "w"][r as usize];
            let _ = writeln!(
                text,
                "            let p{r} = weight(slice, {r}u, 13u * block + 1u + u);\n            \
                 let g{r} = weight(slice, {r}u, 13u * block + 9u + u / 2u);\n            \
                 let k{r} = select(g{r}.xy, g{r}.zw, u % 2u == 1u);\n            \
                 let v{r} = low(p{r}) | spread(k{r}.x);\n            let w{r} = high(p{r}) | spread(k{r}.y);\n            \
                 let e{r} = signed_byte(h{r}, 2u * u);\n            let f{r} = signed_byte(h{r}, 2u * u + 1u);"
            );
            for t in 0..self.tokens() {
                let _ = writeln!(
                    text,
                    "            n{t}.{lane} += e{r} * (dot16(v{r}, a{t}) - s{t}) + f{r} * (dot16(w{r}, b{t}) - q{t});"
                );
            }
        }
        text += "        }\n";
        for t in 0..self.tokens() {
            text += &self.taken(t, &format!("n{t}"), "d");
        }
        text
    }
}
