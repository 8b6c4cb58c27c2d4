//! Generators of the WGSL source of the GPU kernels.
//!
//! Each file generates the source of one kind of kernel for given shapes, layouts, weight formats and device
//! capabilities ([`Capabilities`]). Values that change from pass to pass are in [`KernelParams`].
//!
//! Not here: the layouts of tensors (`crate::virtual_tensor`), and the kernels of a pass (`crate::layers`).

pub mod attention;
pub mod matmul;
pub mod norm;
pub mod packing;
pub mod quantise;
pub mod reorder;
pub mod rope;

use std::fmt::Write;

use crate::device::{Capabilities, KernelParams};
use crate::virtual_tensor::Accessor;

/// The WGSL declarations at the start of a kernel. Binding 0 has the parameters; the others follow in order.
pub(crate) struct Declarations {
    pub(crate) text: String,
    bindings: u32,
}

impl Declarations {
    /// Creates the declarations of a kernel, which can use the WGSL type `f16` if `uses_f16` is set.
    pub(crate) fn new(uses_f16: bool) -> Declarations {
        // Subgroups need no directive: naga 30 does not know one for them.
        let enables = if uses_f16 { "enable f16;\n" } else { "" };
        Declarations { text: format!("{enables}{}", KernelParams::WGSL_DECLARATION), bindings: 0 }
    }

    /// Declares a buffer `name` with elements of the WGSL type `kind` and the WGSL access mode `access`.
    pub(crate) fn declare_buffer(&mut self, access: &str, name: &str, kind: &str) {
        self.bindings += 1;
        let at = self.bindings;
        let _ = writeln!(self.text, "@group(0) @binding({at}) var<storage, {access}> {name}: array<{kind}>;");
    }

    /// Declares the buffer or texture of a tensor, and the functions that access its elements.
    pub(crate) fn declare_tensor(&mut self, accessor: &Accessor) {
        self.bindings += 1;
        self.text += &accessor.wgsl_declaration(self.bindings);
        self.text += &accessor.wgsl_functions();
    }
}

/// Generates the WGSL function `group_sum`, which sums a value over all threads of a workgroup: first within
/// subgroups if the device supports subgroups, then through workgroup memory. All threads of the workgroup must call
/// `group_sum`. `threads` is the size of the workgroup, a power of two.
pub(crate) fn group_sum(capabilities: Capabilities, threads: u32) -> String {
    let store = if capabilities.subgroup_size_range.is_some() {
        // The size of a subgroup, its threads, and which of them are active are unknown. All of its active lanes have
        // the same sum, so the first active lane stores it and the others store zero.
        "    let own = subgroupAdd(value);\n    let first = subgroupMin(sublane);\n    \
         sums_shared[lane] = select(0.0, own, sublane == first);\n"
    } else {
        "    sums_shared[lane] = value;\n"
    };
    let mut text = format!(
        "var<workgroup> sums_shared: array<f32, {threads}>;\n\
         fn group_sum(value: f32, lane: u32, sublane: u32) -> f32 {{\n{store}    workgroupBarrier();\n"
    );
    let mut step = threads / 2;
    while step > 0 {
        let _ = write!(
            text,
            "    if (lane < {step}u) {{ sums_shared[lane] += sums_shared[lane + {step}u]; }}\n    \
             workgroupBarrier();\n"
        );
        step /= 2;
    }
    text + "    let sum = sums_shared[0];\n    workgroupBarrier();\n    return sum;\n}\n"
}

/// Returns the WGSL arguments of an entry point for the index of a thread in its workgroup (`lane`) and in its subgroup
/// (`sublane`), and the statement that defines `sublane` if the device does not support subgroups.
pub(crate) fn lane_arguments(capabilities: Capabilities) -> (&'static str, &'static str) {
    if capabilities.subgroup_size_range.is_some() {
        ("@builtin(local_invocation_index) lane: u32, @builtin(subgroup_invocation_id) sublane: u32", "")
    } else {
        ("@builtin(local_invocation_index) lane: u32", "    let sublane = 0u;\n")
    }
}
