//! The parts of the matmul kernel for weights with one scale per row.
//!
//! ML Drift paper, section 4.2: the formats q8 and 8/4/4 have a scale for each channel, which is a row of weights here.
//! The inputs x of a token also have a single scale, so the whole dot product is summed as an integer:
//!
//! ```text
//! out[row] = (sum over i of quant[row, i] * quant(x)[i]) * scale[row] * scale(x)
//! ```
//!
//! An i32 can hold the sum of at most 2^31 / 127^2 products of the largest quants, so rows of more than 133 144 weights
//! are rejected. In decode, the maximum of all inputs must be known before the first input is quantised. The threads of
//! a workgroup read all inputs to find the maximum, read them again from the cache, and quantise them chunk by chunk.

use std::fmt::Write;

use super::MatmulKernel;

/// The WGSL variable and the WGSL function for the scale of the inputs in decode.
pub(super) const INPUT_SCALE: &str = "\
var<private> row_input_scale: f32;
fn input_scale(token: u32, block: u32) -> f32 { return row_input_scale; }
";

/// The WGSL statements before the loop over chunks, which compute the scale of the inputs.
pub(super) const SCALE_STATEMENTS: &str =
    "    let largest = row_largest(0u, lane);\n    row_input_scale = scales_of(largest).x;\n";

/// The WGSL statements that quantise a chunk of inputs.
pub(super) const QUANTISE_STATEMENTS: &str = "    if (inside) {\n        _ = unit_load(0u, unit);\n        \
                                       unit_store(0u, unit, lane, largest);\n    }\n";

impl MatmulKernel {
    /// Generates the WGSL loop body that multiplies 32 inputs of each token by the weights of four rows.
    pub(super) fn unit(&self) -> String {
        let mut text = self.unit_weights();
        for t in 0..self.tokens() {
            text += &MatmulKernel::unit_quants(t);
            let _ = writeln!(text, "        n{t} += {};", self.unit_sum(t));
        }
        text
    }

    /// Generates the WGSL statements that scale the integer sums to results, or that write the integer sums.
    pub(super) fn scaled_results(&self) -> String {
        let mut text = String::new();
        let slices = self.total_rows.div_ceil(4);
        for t in 0..self.tokens() {
            let _ = if self.writes_integer_sums {
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
