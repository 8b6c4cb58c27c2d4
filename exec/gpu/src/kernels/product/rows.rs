//! The part of the product kernel for weights with one scale per row.
//!
//! ML Drift paper, section 4.2: q8 and 8/4/4 have a scale for each channel, which is a row here. Inputs have one scale
//! for the whole row too, so that a product is an integer until its end:
//!
//! ```text
//! out[row] = (sum over i of code[row, i] * code(x)[i]) * scale[row] * scale(x)
//! ```
//!
//! An integer holds 2^31 / 127^2 products of the largest codes: longer rows than 133 144 weights are refused. In decode
//! the largest value of the row must be known before the first is rounded: the threads of a group read it all, which it
//! is in the cache for, and round a chunk at a time after that.

use std::fmt::Write;

use super::Product;
use super::blocks::four_rows;
use crate::kernels::packing::Packed;

/// The scale of x in decode; `scales_of` is of the rounding, `largest` what a group found.
pub(super) const INPUT_SCALE: &str = "\
var<private> row_input_scale: f32;
fn input_scale(token: u32, block: u32) -> f32 { return row_input_scale; }
";

/// WGSL text before the loop over chunks.
pub(super) const BEFORE: &str =
    "    let largest = row_largest(0u, lane);\n    row_input_scale = scales_of(largest).x;\n";

/// Rounding a chunk.
pub(super) const ROUNDING: &str = "    if (inside) {\n        _ = unit_load(0u, unit);\n        \
                                   unit_store(0u, unit, lane, largest);\n    }\n";

impl Product {
    /// Generates the WGSL loop body, which multiplies 32 inputs of each token by four rows.
    pub(super) fn unit(&self) -> String {
        let mut text = self.unit_weights();
        for t in 0..self.tokens() {
            text += &Product::unit_codes(t);
            let dots = four_rows(|r| format!("dot16(v{r}, a{t}) + dot16(w{r}, b{t})"));
            let _ = writeln!(text, "        n{t} += vec4<i32>({dots});");
            if self.packed == Packed::Row4 {
                // The numbers 0 to 15 stand for -8 to 7.
                let _ = writeln!(
                    text,
                    "        n{t} -= vec4<i32>(8 * (input_sum(token{t}, 2u * here) + \
                     input_sum(token{t}, 2u * here + 1u)));"
                );
            }
        }
        text
    }

    /// Makes results of the integers, or writes these.
    pub(super) fn scaled(&self) -> String {
        let mut text = String::new();
        let slices = self.all_rows.div_ceil(4);
        for t in 0..self.tokens() {
            let _ = if self.integers {
                writeln!(
                    text,
                    "    if (slice < {slices}u) {{ integers[token{t} * {slices}u + slice] = n{t}; }}"
                )
            } else {
                writeln!(
                    text,
                    "    acc{t} = vec4<f32>(n{t}) * (row_scales[slice] * input_scale(token{t}, 0u));"
                )
            };
        }
        text
    }
}
