//! Generators of the WGSL source of the kernels.
//!
//! Each file generates the source of one kind of kernel for given shapes, layouts, weight formats and device
//! capabilities ([`Variant`]). Values that change from pass to pass are in `crate::device::Params`.
//!
//! Not here: the layouts of tensors (`crate::virtual_tensor`), and which kernels a pass runs (`crate::layers`).

pub mod attention;
pub mod matmul;
pub mod norm;
pub mod packing;
pub mod quantise;
pub mod reorder;
pub mod rotate;

use std::fmt::Write;

use crate::device::Capabilities;

/// The optional device capabilities that a generated kernel uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Variant {
    /// Whether the kernel uses the dot product of four packed bytes.
    pub packed_dot: bool,
    /// The smallest subgroup size if the kernel uses subgroup operations. No kernel relies on the size.
    pub min_subgroup_size: Option<u32>,
    /// Whether the kernel uses the type `f16`; otherwise it unpacks f16 values from words.
    pub shader_f16: bool,
}

impl Variant {
    /// Returns the variant that uses all capabilities of the device.
    pub fn of(capabilities: Capabilities) -> Variant {
        let Capabilities { packed_dot, subgroups, shader_f16, .. } = capabilities;
        Variant { packed_dot, min_subgroup_size: subgroups.map(|(smallest, _)| smallest), shader_f16 }
    }

    /// Returns the `enable` directives at the start of the shader.
    pub(crate) fn enables(self) -> &'static str {
        // Subgroups need no directive: naga 30 does not know one for them.
        if self.shader_f16 { "enable f16;\n" } else { "" }
    }
}

/// Generates the WGSL function `group_sum`, which sums a value over all threads of a workgroup: first within
/// subgroups if the variant has them, then through workgroup memory. All threads must call it; `threads` must be a
/// power of two.
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
    let all = if variant.min_subgroup_size.is_some() {
        // The size of a subgroup, its threads, and which of them are active are unknown. All of its active lanes have
        // the same sum, so the first active lane stores it and the others store zero.
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

/// Returns the arguments of the entry point for the index of a thread in its workgroup (`lane`) and in its subgroup
/// (`sublane`), and the statement that defines `sublane` without subgroups.
pub(crate) fn lane_arguments(variant: Variant) -> (&'static str, &'static str) {
    if variant.min_subgroup_size.is_some() {
        ("@builtin(local_invocation_index) lane: u32, @builtin(subgroup_invocation_id) sublane: u32", "")
    } else {
        ("@builtin(local_invocation_index) lane: u32", "    let sublane = 0u;\n")
    }
}
