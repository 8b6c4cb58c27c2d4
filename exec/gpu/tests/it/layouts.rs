//! Tests of the tensor layouts: copies a tensor to every layout and back.

use hearth_gpu::device::{Binding, KernelParams};
use hearth_gpu::kernels::reorder;
use hearth_gpu::virtual_tensor::{Shape, Storage};
use hearth_gpu::{CapabilityMask, Gpu};

use crate::gpu::open_and_lock;

/// Returns one value for each element of a tensor: integers, which f16 represents exactly.
fn values(shape: &Shape) -> Vec<f32> {
    (0..shape.texel_count() * 4).map(|at| (at % 1000) as f32 - 500.0).collect()
}

/// Copies the values of a tensor to a layout and back. Returns the values before and after the copies.
fn round_trip(gpu: &Gpu, shape: &Shape, storage: Storage) -> (Vec<f32>, Vec<f32>) {
    let params = gpu.create_params_buffer().unwrap();
    gpu.write(&params, &[KernelParams::for_pass(0, 0)]).unwrap();
    let sent = values(shape);
    let (from, to) = (gpu.upload("from", &sent).unwrap(), gpu.allocate("to", sent.len() as u64 * 4).unwrap());
    let there = reorder::wgsl_source(shape, Storage::Linear, storage);
    let back = reorder::wgsl_source(shape, storage, Storage::Linear);
    let groups = reorder::workgroup_count(shape);
    let extent = storage.object_extent(shape);
    let buffer = gpu.allocate("between", u64::from(shape.texel_count()) * 16).unwrap();
    let view;
    let between = match storage {
        Storage::Buffer | Storage::Linear => Binding::Buffer(&buffer),
        Storage::Texture2d | Storage::Texture3d => {
            view = gpu.create_texture("between", storage, extent).unwrap();
            Binding::Texture(&view)
        }
    };
    let first = [Binding::Buffer(&params), Binding::Buffer(&from), between];
    let second = [Binding::Buffer(&params), between, Binding::Buffer(&to)];
    let launches = [
        gpu.prepare_launch_with_bindings("there", &there, &first, groups).unwrap(),
        gpu.prepare_launch_with_bindings("back", &back, &second, groups).unwrap(),
    ];
    gpu.submit(&launches).unwrap();
    (sent.clone(), gpu.read(&to, sent.len()).unwrap())
}

#[test]
fn tensors_survive_a_copy_through_every_layout() {
    let Some((_lock, gpu)) = open_and_lock(CapabilityMask::default()) else { return };
    for shape in [Shape::new(1, 2, 3, 5), Shape::new(2, 3, 4, 9), Shape::new(3, 1, 70, 64)] {
        let shape = shape.unwrap();
        for storage in Storage::ALL {
            let (sent, back) = round_trip(&gpu, &shape, storage);
            assert!(sent == back, "{storage:?} {shape:?}");
        }
    }
}
