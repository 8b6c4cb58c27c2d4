//! Buffers and textures in GPU memory: allocation, upload and download.

use std::fmt::Display;
use std::sync::{Arc, mpsc};

use bytemuck::{Pod, Zeroable};
use wgpu::BufferUsages;

use super::Gpu;
use super::memory::Reservation;
use crate::error::GpuError;
use crate::virtual_tensor::Storage;

#[derive(Debug, Clone)]
pub struct GpuBuffer {
    pub(crate) buffer: wgpu::Buffer,
    bytes: u64,
    /// The bytes that are reserved for the buffer. All clones share the reservation.
    _reservation: Arc<Reservation>,
}

impl GpuBuffer {
    /// Returns the size of the buffer in bytes, a multiple of 16.
    pub fn size_bytes(&self) -> u64 {
        self.bytes
    }
}

/// The kernel parameters that change from pass to pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct KernelParams {
    /// Number of tokens in the pass.
    pub tokens: u32,
    /// Position in the sequence of the first token of the pass.
    pub first_position: u32,
    /// Start of the range that a kernel processes, such as a range of rows of a matrix.
    pub offset: u32,
    /// End (exclusive) of the range that a kernel processes.
    pub end: u32,
}

impl KernelParams {
    /// The WGSL declarations of this struct and of the uniform at binding 0.
    pub const WGSL_DECLARATION: &str = "struct Params { tokens: u32, first_position: u32, offset: u32, end: u32 }\n\
                            @group(0) @binding(0) var<uniform> params: Params;\n";

    /// Returns the parameters of a pass of `tokens` tokens, the first of which is at `first_position`.
    pub fn for_pass(tokens: u32, first_position: u32) -> KernelParams {
        KernelParams { tokens, first_position, offset: 0, end: 0 }
    }
}

impl Gpu {
    /// Allocates a texture with f16 components that kernels can read and write. The texture is 3-D for
    /// [`Storage::Texture3d`], otherwise 2-D. `what` names the texture in errors.
    pub fn create_texture(
        &self,
        what: &str,
        kind: Storage,
        size: [u32; 3],
    ) -> Result<wgpu::TextureView, GpuError> {
        let [width, height, depth_or_array_layers] = size;
        let is_volume = kind == Storage::Texture3d;
        let descriptor = wgpu::TextureDescriptor {
            label: Some(what),
            size: wgpu::Extent3d { width, height, depth_or_array_layers },
            mip_level_count: 1,
            sample_count: 1,
            dimension: if is_volume { wgpu::TextureDimension::D3 } else { wgpu::TextureDimension::D2 },
            format: wgpu::TextureFormat::Rgba16Float,
            usage: wgpu::TextureUsages::STORAGE_BINDING | wgpu::TextureUsages::TEXTURE_BINDING,
            view_formats: &[],
        };
        self.try_run(what, |device| {
            device.create_texture(&descriptor).create_view(&wgpu::TextureViewDescriptor::default())
        })
    }

    /// Allocates a buffer of `bytes` bytes, filled with zeros. `what` names the buffer in errors.
    pub fn allocate(&self, what: &str, bytes: u64) -> Result<GpuBuffer, GpuError> {
        let usage = BufferUsages::STORAGE | BufferUsages::COPY_DST | BufferUsages::COPY_SRC;
        self.allocate_for(what, bytes, usage)
    }

    /// Allocates a buffer for [`KernelParams`].
    pub fn create_params_buffer(&self) -> Result<GpuBuffer, GpuError> {
        let bytes = size_of::<KernelParams>() as u64;
        self.allocate_for("parameters of a pass", bytes, BufferUsages::UNIFORM | BufferUsages::COPY_DST)
    }

    fn allocate_for(&self, what: &str, bytes: u64, usage: BufferUsages) -> Result<GpuBuffer, GpuError> {
        // A binding must have at least one texel.
        let size = bytes.next_multiple_of(16).max(16);
        let max = self.capabilities().max_binding_bytes.min(self.capabilities().max_buffer_bytes);
        if size > max {
            let what = format!("{what}: {size} bytes are needed, but a buffer has at most {max} bytes");
            return Err(GpuError::OutOfMemory { what });
        }
        let reservation = Arc::new(self.memory_budget.reserve(what, size)?);
        let descriptor = wgpu::BufferDescriptor { label: Some(what), size, usage, mapped_at_creation: false };
        let buffer = self.try_run(what, |device| device.create_buffer(&descriptor))?;
        Ok(GpuBuffer { buffer, bytes: size, _reservation: reservation })
    }

    /// Allocates a buffer and uploads `values` to the buffer. `what` names the buffer in errors.
    pub fn upload<T: Pod>(&self, what: &str, values: &[T]) -> Result<GpuBuffer, GpuError> {
        let tensor = self.allocate(what, size_of_val(values) as u64)?;
        self.write(&tensor, values)?;
        Ok(tensor)
    }

    /// Writes `values` to the start of a buffer, before the next submission runs.
    pub fn write<T: Pod>(&self, tensor: &GpuBuffer, values: &[T]) -> Result<(), GpuError> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        // A copy must have whole words.
        let (whole, rest) = bytes.split_at(bytes.len() / 4 * 4);
        self.try_run("a copy to the GPU", |_| {
            self.queue.write_buffer(&tensor.buffer, 0, whole);
            if !rest.is_empty() {
                let mut word = [0; 4];
                word[..rest.len()].copy_from_slice(rest);
                self.queue.write_buffer(&tensor.buffer, whole.len() as u64, &word);
            }
        })
    }

    /// Waits for all submissions and reads the first `count` values of a buffer.
    pub fn read<T: Pod>(&self, tensor: &GpuBuffer, count: usize) -> Result<Vec<T>, GpuError> {
        let mut values = vec![T::zeroed(); count];
        self.read_into(tensor, &mut values)?;
        Ok(values)
    }

    /// Waits for all submissions and fills `values` with the first values of a buffer.
    pub fn read_into<T: Pod>(&self, tensor: &GpuBuffer, values: &mut [T]) -> Result<(), GpuError> {
        let what = "a copy from the GPU";
        let bytes = size_of_val(values);
        let size = (bytes as u64).next_multiple_of(16).min(tensor.bytes);
        let usage = BufferUsages::MAP_READ | BufferUsages::COPY_DST;
        let staging = self.allocate_for(what, size, usage)?;
        let (mapped_tx, mapped_rx) = mpsc::channel();
        self.try_run(what, |device| {
            let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            encoder.copy_buffer_to_buffer(&tensor.buffer, 0, &staging.buffer, 0, size);
            self.queue.submit([encoder.finish()]);
            // The receiver is dropped if waiting failed.
            staging.buffer.map_async(wgpu::MapMode::Read, .., move |mapped| drop(mapped_tx.send(mapped)));
        })?;
        self.wait(what)?;
        let failed = |why: &dyn Display| GpuError::Failed { what: what.into(), why: why.to_string() };
        let result = mapped_rx.try_recv().map_err(|error| failed(&error))?;
        result.map_err(|error| failed(&error))?;
        let mapped = staging.buffer.get_mapped_range(..).map_err(|error| failed(&error))?;
        let mapped = mapped.get(..bytes).ok_or_else(|| failed(&"the mapped buffer is too short"))?;
        bytemuck::cast_slice_mut(values).copy_from_slice(mapped);
        Ok(())
    }
}
