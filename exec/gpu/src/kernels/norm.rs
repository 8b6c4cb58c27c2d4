//! The RMSNorm kernel, which can include the preceding residual addition.
//!
//! `out = h / sqrt(mean(h^2) + epsilon) * weight` for a hidden state h. ML Drift paper, section 3.6: the kernel
//! includes the residual addition `h += change` before the norm, where `change` is the output of a block. It also
//! includes the norm of the change if the architecture has one. After the last layer of a range there is an addition
//! and no norm. A workgroup processes one token; the slices of the token are distributed among the threads.

use std::fmt::Write;

use super::{Declarations, group_sum, lane_arguments};
use crate::device::Capabilities;
use crate::virtual_tensor::{AccessMode, Accessor, Storage};

const THREADS: u32 = 64;

/// A kernel with an optional residual addition and an optional RMSNorm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormKernel {
    /// Number of elements in a hidden state, a multiple of four.
    pub width: u32,
    /// Constant that is added to the mean square in RMSNorm.
    pub epsilon: f32,
    /// Whether the change, which is the output of a block, is added to the hidden states: the residual addition.
    pub adds_residual: bool,
    /// The factor of the change in the residual addition, if any.
    pub residual_scale: Option<f32>,
    /// Whether the change is normalised before the residual addition.
    pub has_post_norm: bool,
    /// Whether the hidden states are normalised after the residual addition.
    pub normalises_hidden: bool,
    pub capabilities: Capabilities,
}

impl NormKernel {
    /// Generates the WGSL source of the kernel. The bindings after the parameters are, each only if it is used: hidden
    /// rows, change, weights of the norm of the change, weights of the norm of the hidden states, output.
    pub fn wgsl_source(&self) -> String {
        let hidden = if self.adds_residual { AccessMode::ReadWrite } else { AccessMode::Read };
        let rows = |name, direction| Accessor::for_rows(name, Storage::Linear, self.width, direction);
        let hidden = rows("h", hidden);
        let (change, out) = (rows("change", AccessMode::Read), rows("out", AccessMode::Write));
        let mut kernel = Declarations::new(self.capabilities.shader_f16);
        kernel.declare_tensor(&hidden);
        if self.adds_residual {
            kernel.declare_tensor(&change);
        }
        if self.has_post_norm {
            kernel.declare_buffer("read", "post_weight", "vec4<f32>");
        }
        if self.normalises_hidden {
            kernel.declare_buffer("read", "weight", "vec4<f32>");
            kernel.declare_tensor(&out);
        }
        if self.has_post_norm || self.normalises_hidden {
            kernel.text += &group_sum(self.capabilities, THREADS);
        }
        kernel.text + &self.main()
    }

    fn main(&self) -> String {
        let (slices, width, epsilon) = (self.width / 4, self.width, self.epsilon);
        let (arguments, sublane) = lane_arguments(self.capabilities);
        let each = format!("    for (var s = lane; s < {slices}u; s += {THREADS}u) {{\n");
        let root = |sum: &str| format!("1.0 / sqrt({sum} / {width}.0 + {epsilon:e})");
        let mut text = format!(
            "@compute @workgroup_size({THREADS})\n\
             fn main(@builtin(workgroup_id) group: vec3<u32>, {arguments}) {{\n{sublane}    _ = params.tokens;\n    let token = group.x;\n    \
             var squares = 0.0;\n"
        );
        let mut factor = self.residual_scale.map_or(String::new(), |scale| format!(" * {scale:e}"));
        if self.has_post_norm {
            let _ = write!(
                text,
                "{each}        let c = change_read(0u, token, 0u, s);\n        squares += dot(c, c);\n    }}\n    \
                 let post = {};\n    squares = 0.0;\n",
                root("group_sum(squares, lane, sublane)")
            );
            factor += " * post * post_weight[s]";
        }
        text += &each;
        text += "        var h = h_read(0u, token, 0u, s);\n";
        if self.adds_residual {
            let _ = write!(
                text,
                "        h += change_read(0u, token, 0u, s){factor};\n        h_write(0u, token, 0u, s, h);\n"
            );
        }
        text += "        squares += dot(h, h);\n    }\n";
        if self.normalises_hidden {
            // No barrier: each thread reads only the slices that it wrote itself.
            let _ = write!(
                text,
                "    let scale = {};\n{each}        \
                 out_write(0u, token, 0u, s, h_read(0u, token, 0u, s) * scale * weight[s]);\n    }}\n",
                root("group_sum(squares, lane, sublane)")
            );
        }
        text + "}\n"
    }
}
