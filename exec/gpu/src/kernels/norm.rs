//! The RMSNorm kernel.
//!
//! `x = h / sqrt(mean(h^2) + epsilon) * weight`. ML Drift paper, section 3.6: the residual addition before the norm is
//! part of the kernel, `h += change`, and so is the norm of the change where an architecture has one. After the last
//! layer there is an addition and no norm.
//!
//! A group has a token; its threads share the slices.

use std::fmt::Write;

use super::{Variant, group_sum, lane_arguments};
use crate::device::Params;
use crate::virtual_tensor::{Accessor, Direction, Storage};

const THREADS: u32 = 64;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormKernel {
    pub width: u32,
    /// Added to the mean square.
    pub epsilon: f32,
    /// Whether a residual is added first.
    pub adds: bool,
    /// Whether that residual is normalised.
    pub post: bool,
    /// Whether a norm follows.
    pub normalises: bool,
    /// Where hidden rows lie.
    pub hidden: Storage,
    /// Where the change and the result lie.
    pub storage: Storage,
    pub variant: Variant,
}

impl NormKernel {
    /// The kernel. Bindings after the parameters: hidden rows; the change; its norm's weights; the norm's weights; the
    /// result; each if there is one.
    pub fn kernel(&self) -> String {
        let hidden = if self.adds { Direction::ReadWrite } else { Direction::Read };
        let hidden = Accessor::rows("h", self.hidden, self.width, hidden);
        let change = Accessor::rows("change", self.storage, self.width, Direction::Read);
        let out = Accessor::rows("out", self.storage, self.width, Direction::Write);
        let weights = |name: &str, at: u32| {
            format!("@group(0) @binding({at}) var<storage, read> {name}: array<vec4<f32>>;\n")
        };
        let mut text = format!(
            "{}{}{}{}",
            self.variant.enables(),
            Params::WGSL,
            hidden.declaration(1),
            hidden.functions()
        );
        let mut binding = 2;
        if self.adds {
            text += &change.declaration(binding);
            text += &change.functions();
            binding += 1;
        }
        if self.post {
            text += &weights("post_weight", binding);
            binding += 1;
        }
        if self.normalises {
            text += &weights("weight", binding);
            text += &out.declaration(binding + 1);
            text += &out.functions();
        }
        if self.post || self.normalises {
            text += &group_sum(self.variant, THREADS);
        }
        text += &self.main();
        text
    }

    fn main(&self) -> String {
        let (slices, width, epsilon) = (self.width / 4, self.width, self.epsilon);
        let (arguments, sublane) = lane_arguments(self.variant);
        let each = format!("    for (var s = lane; s < {slices}u; s += {THREADS}u) {{\n");
        let root = |sum: &str| format!("1.0 / sqrt({sum} / {width}.0 + {epsilon:e})");
        let mut text = format!(
            "@compute @workgroup_size({THREADS})\n\
             fn main(@builtin(workgroup_id) group: vec3<u32>, {arguments}) {{\n{sublane}    _ = params.tokens;\n    let token = group.x;\n    \
             var squares = 0.0;\n"
        );
        let mut factor = "";
        if self.post {
            let _ = write!(
                text,
                "{each}        let c = change_read(0u, token, 0u, s);\n        squares += dot(c, c);\n    }}\n    \
                 let post = {};\n    squares = 0.0;\n",
                root("group_sum(squares, lane, sublane)")
            );
            factor = " * post * post_weight[s]";
        }
        text += &each;
        text += "        var h = h_read(0u, token, 0u, s);\n";
        if self.adds {
            let _ = write!(
                text,
                "        h += change_read(0u, token, 0u, s){factor};\n        h_write(0u, token, 0u, s, h);\n"
            );
        }
        text += "        squares += dot(h, h);\n    }\n";
        if self.normalises {
            // A thread reads again only what it wrote itself.
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
