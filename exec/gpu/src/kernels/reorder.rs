//! The kernel that copies a tensor from one layout to another.

use super::packing::{self, MAX_WORKGROUPS_X, WORKGROUP_SIZE};
use crate::kernels::Declarations;
use crate::virtual_tensor::{AccessMode, Accessor, Shape, Storage};

/// Generates the WGSL source of the kernel that copies a tensor of `shape` from the layout `from` to the layout `to`.
/// The bindings after the parameters are: source, target.
pub fn wgsl_source(shape: &Shape, from: Storage, to: Storage) -> String {
    let [batch, height, width] = shape.extents();
    let (slices, texels) = (shape.slice_count(), shape.texel_count());
    let mut kernel = Declarations::new(false);
    kernel.declare_tensor(&Accessor::for_shape("src", from, shape, AccessMode::Read));
    kernel.declare_tensor(&Accessor::for_shape("dst", to, shape, AccessMode::Write));
    format!(
        "{}@compute @workgroup_size({WORKGROUP_SIZE})\n\
         fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{\n    \
         _ = params.tokens;\n    let at = (group.y * {MAX_WORKGROUPS_X}u + group.x) * {WORKGROUP_SIZE}u + lane;\n    \
         if (at >= {texels}u) {{ return; }}\n    \
         let s = at % {slices}u;\n    let x = at / {slices}u % {width}u;\n    \
         let y = at / {slices}u / {width}u % {height}u;\n    \
         let b = at / {slices}u / {width}u / {height}u % {batch}u;\n    \
         dst_write(b, x, y, s, src_read(b, x, y, s));\n}}\n",
        kernel.text
    )
}

/// Returns the number of workgroups in the directions x, y and z for a tensor of `shape`.
pub fn workgroup_count(shape: &Shape) -> [u32; 3] {
    packing::workgroup_count(u64::from(shape.texel_count()))
}
