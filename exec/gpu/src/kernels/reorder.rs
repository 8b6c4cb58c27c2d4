//! The kernel that copies a tensor from one layout to another.
//!
//! The plainest kernel there is: read a texel, write it. It is written once; from which object to which is spliced in.

use super::packing::{self, GROUPS_ALONG, THREADS};
use crate::device::Params;
use crate::virtual_tensor::{Accessor, Direction, Extent, Shape, Storage};

fn accessor(name: &'static str, shape: &Shape, storage: Storage, direction: Direction) -> Accessor {
    let [batch, height, width, _] = shape.places();
    let places = [batch, height, width].map(Extent::Fixed);
    Accessor { name, storage, places, slices: Extent::Fixed(shape.slices()), direction }
}

/// The kernel, for a tensor of depth 1. Bindings after the parameters: where it lies, where it goes.
pub fn kernel(shape: &Shape, from: Storage, to: Storage) -> String {
    let [batch, height, width, _] = shape.places();
    let (slices, texels) = (shape.slices(), shape.texels());
    let source = accessor("src", shape, from, Direction::Read);
    let target = accessor("dst", shape, to, Direction::Write);
    format!(
        "{}{}{}{}{}\
         @compute @workgroup_size({THREADS})\n\
         fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{\n    \
         _ = params.tokens;\n    let at = (group.y * {GROUPS_ALONG}u + group.x) * {THREADS}u + lane;\n    \
         if (at >= {texels}u) {{ return; }}\n    \
         let s = at % {slices}u;\n    let x = at / {slices}u % {width}u;\n    \
         let y = at / {slices}u / {width}u % {height}u;\n    \
         let b = at / {slices}u / {width}u / {height}u % {batch}u;\n    \
         dst_write(b, x, y, s, src_read(b, x, y, s));\n}}\n",
        Params::WGSL,
        source.declaration(1),
        target.declaration(2),
        source.functions(),
        target.functions(),
    )
}

/// Groups for a tensor.
pub fn groups(shape: &Shape) -> [u32; 3] {
    packing::groups(u64::from(shape.texels()))
}
