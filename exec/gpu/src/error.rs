//! Errors of the GPU backend.
//!
//! Each variant says what, where, and what to do. A device that was lost or is out of memory in mid-run is no end of
//! the run: `crate::backend` continues without it.

use hearth_kernels::KernelFormat;

use crate::virtual_tensor::ShapeError;

/// An error of the GPU backend.
#[derive(Debug, Clone, thiserror::Error)]
pub enum GpuError {
    #[error(
        "this machine has no GPU that Vulkan, Metal or DX12 can reach; plan with `gpu_layers: 0`, or install a driver"
    )]
    NoAdapter,
    #[error("the GPU `{adapter}` cannot be opened: {why}; update its driver, or plan with `gpu_layers: 0`")]
    Open { adapter: String, why: String },
    #[error("the GPU was lost: {why}; what it computed is computed on the CPU from here on")]
    Lost { why: String },
    #[error("the GPU has not enough memory for {what}; give it fewer layers, or shorten `context`")]
    OutOfMemory { what: String },
    #[error(
        "the GPU did not finish {what} in {seconds} s; it hangs, or is far too slow: plan with `gpu_layers: 0`"
    )]
    Timeout { what: String, seconds: f64 },
    #[error("the GPU refuses {what}: {why}; plan with `gpu_layers: 0`, and report this")]
    Refused { what: String, why: String },
    #[error(
        "there is no GPU kernel for weights of type {format}; plan with `gpu_layers: 0`, or use a file with {known}"
    )]
    Format { format: KernelFormat, known: String },
    #[error("{what} is {found}, and GPU kernels need {need}; plan with `gpu_layers: 0`")]
    Dimension { what: &'static str, found: usize, need: &'static str },
    #[error(transparent)]
    Shape(#[from] ShapeError),
}
