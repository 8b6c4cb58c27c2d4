//! Generators of kernel texts in WGSL.
//!
//! Each file makes the text of one kind of kernel, in WGSL, from what is known when the shader is generated: shapes,
//! layouts, the format of weights, and what the device has ([`Variant`]). What changes from pass to pass is in
//! `crate::device::Params`.
//!
//! Not here: where a tensor lies (`crate::virtual_tensor`), and which kernels a pass runs (`crate::layers`).

pub mod attention;
pub mod norm;
pub mod packing;
pub mod product;
pub mod quantise;
pub mod reorder;
pub mod rotate;

use std::fmt::Write;

use crate::device::Capabilities;

/// The capabilities of a device that a kernel uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Variant {
    /// Whether one instruction multiplies four packed bytes.
    pub packed_dot: bool,
    /// Sums over the lanes of a subgroup, whose size no kernel relies on; here its smallest.
    pub lanes: Option<u32>,
    /// Whether half precision is converted by type instead of by unpacking.
    pub half: bool,
}

impl Variant {
    /// Uses all that the device has.
    pub fn of(capabilities: Capabilities) -> Variant {
        let Capabilities { packed_dot, subgroups, half, .. } = capabilities;
        Variant { packed_dot, lanes: subgroups.map(|(smallest, _)| smallest), half }
    }

    /// Returns the directives at the begin of the shader.
    pub(crate) fn enables(self) -> &'static str {
        // Subgroups need no word here: naga 30 does not know one.
        if self.half { "enable f16;\n" } else { "" }
    }
}

/// The sum of `value` over the threads of a group, all of which ask for it: through subgroups first where there are
/// some, then through shared memory. `threads` is a power of two.
pub(crate) fn group_sum(variant: Variant, threads: u32) -> String {
    let shared = format!("var<workgroup> sums_shared: array<f32, {threads}>;\n");
    let tree = |from: u32| {
        let mut text = String::new();
        let mut step = from / 2;
        while step > 0 {
            let _ = write!(
                text,
                "    if (lane < {step}u) {{ sums_shared[lane] += sums_shared[lane + {step}u]; }}\n    \
                 workgroupBarrier();\n"
            );
            step /= 2;
        }
        text
    };
    let all = if variant.lanes.is_some() {
        // How many lanes a subgroup has is not known before, nor which threads they are, nor whether all are there. Its
        // sum is the same in all of them: the first that is there leaves it, the others leave nothing.
        format!(
            "    let own = subgroupAdd(value);\n    let first = subgroupMin(sublane);\n    \
             sums_shared[lane] = select(0.0, own, sublane == first);\n    \
             workgroupBarrier();\n{}",
            tree(threads)
        )
    } else {
        format!("    sums_shared[lane] = value;\n    workgroupBarrier();\n{}", tree(threads))
    };
    format!(
        "{shared}fn group_sum(value: f32, lane: u32, sublane: u32) -> f32 {{\n{all}    \
         let sum = sums_shared[0];\n    workgroupBarrier();\n    return sum;\n}}\n"
    )
}

/// The entry point's arguments, beside the group: a lane's number in its group, and in its subgroup where there are
/// some.
pub(crate) fn lane_arguments(variant: Variant) -> (&'static str, &'static str) {
    if variant.lanes.is_some() {
        ("@builtin(local_invocation_index) lane: u32, @builtin(subgroup_invocation_id) sublane: u32", "")
    } else {
        ("@builtin(local_invocation_index) lane: u32", "    let sublane = 0u;\n")
    }
}
