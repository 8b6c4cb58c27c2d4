//! Compilation of kernels into pipelines, and kernel launches.
//!
//! Each WGSL source is compiled once: kernels with the same source share a pipeline. Bindings are numbered from 0 in
//! the order in which they are passed; the kernel parameters are binding 0.

use std::sync::Arc;

use super::{Gpu, GpuBuffer, lock};
use crate::error::GpuError;

/// A buffer or a texture that is bound to a kernel.
#[derive(Debug, Clone, Copy)]
pub enum Binding<'a> {
    Buffer(&'a GpuBuffer),
    Texture(&'a wgpu::TextureView),
}

/// A compiled kernel with its bindings and its number of workgroups, ready to be submitted.
#[derive(Debug, Clone)]
pub struct Launch {
    pipeline: Arc<wgpu::ComputePipeline>,
    bindings: wgpu::BindGroup,
    /// Number of workgroups in the directions x, y and z.
    pub workgroups: [u32; 3],
}

impl Launch {
    /// Returns this launch with a different number of workgroups.
    #[must_use]
    pub fn with_workgroups(&self, workgroups: [u32; 3]) -> Launch {
        Launch { workgroups, ..self.clone() }
    }
}

impl Gpu {
    fn pipeline(&self, name: &str, text: &str) -> Result<Arc<wgpu::ComputePipeline>, GpuError> {
        if let Some(known) = lock(&self.pipelines).get(text) {
            return Ok(Arc::clone(known));
        }
        let pipeline = self.try_run(&format!("the kernel `{name}`"), |device| {
            let source = wgpu::ShaderSource::Wgsl(text.into());
            let module =
                device.create_shader_module(wgpu::ShaderModuleDescriptor { label: Some(name), source });
            device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(name),
                layout: None,
                module: &module,
                entry_point: None,
                compilation_options: wgpu::PipelineCompilationOptions {
                    // Every kernel writes its workgroup memory before it reads it.
                    zero_initialize_workgroup_memory: false,
                    ..wgpu::PipelineCompilationOptions::default()
                },
                cache: None,
            })
        })?;
        let pipeline = Arc::new(pipeline);
        lock(&self.pipelines).insert(text.to_owned(), Arc::clone(&pipeline));
        Ok(pipeline)
    }

    /// Returns the number of kernels that have been compiled for this GPU.
    pub fn compiled_kernel_count(&self) -> usize {
        lock(&self.pipelines).len()
    }

    /// Compiles the kernel `name` from the WGSL source `text` and binds buffers to the kernel.
    pub fn prepare_launch(
        &self,
        name: &str,
        text: &str,
        tensors: &[&GpuBuffer],
        workgroups: [u32; 3],
    ) -> Result<Launch, GpuError> {
        let bindings: Vec<Binding<'_>> = tensors.iter().map(|tensor| Binding::Buffer(tensor)).collect();
        self.prepare_launch_with_bindings(name, text, &bindings, workgroups)
    }

    /// Compiles the kernel `name` from the WGSL source `text` and binds buffers and textures to the kernel.
    pub fn prepare_launch_with_bindings(
        &self,
        name: &str,
        text: &str,
        bindings: &[Binding<'_>],
        workgroups: [u32; 3],
    ) -> Result<Launch, GpuError> {
        let pipeline = self.pipeline(name, text)?;
        let entries: Vec<wgpu::BindGroupEntry<'_>> = (0..)
            .zip(bindings)
            .map(|(binding, bound)| wgpu::BindGroupEntry {
                binding,
                resource: match bound {
                    Binding::Buffer(tensor) => tensor.buffer.as_entire_binding(),
                    Binding::Texture(view) => wgpu::BindingResource::TextureView(view),
                },
            })
            .collect();
        let bindings = self.try_run(&format!("the bindings of `{name}`"), |device| {
            device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some(name),
                layout: &pipeline.get_bind_group_layout(0),
                entries: &entries,
            })
        })?;
        Ok(Launch { pipeline, bindings, workgroups })
    }

    /// Submits launches to the queue. Each launch sees the results of all earlier launches.
    pub fn submit<'a>(&self, launches: impl IntoIterator<Item = &'a Launch>) -> Result<(), GpuError> {
        self.try_run("a pass", |device| {
            let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            {
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
                for launch in launches {
                    let [x, y, z] = launch.workgroups;
                    pass.set_pipeline(&launch.pipeline);
                    pass.set_bind_group(0, &launch.bindings, &[]);
                    pass.dispatch_workgroups(x, y, z);
                }
            }
            self.queue.submit([encoder.finish()]);
        })
    }
}
