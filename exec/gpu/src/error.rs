//! Errors of the GPU backend.
//!
//! A run does not end when its GPU is lost or out of memory: `crate::backend` continues on the CPU.

use hearth_profiles::Format;
use hearth_profiles::model::Architecture;

use crate::virtual_tensor::ShapeError;

#[derive(Debug, Clone, thiserror::Error)]
pub enum GpuError {
    #[error(
        "no GPU with a Vulkan, Metal or DX12 driver was found; install a driver, or plan with `gpu_layers: 0`"
    )]
    NoAdapter,
    #[error("the GPU `{adapter}` cannot be opened: {why}; update its driver, or plan with `gpu_layers: 0`")]
    OpenFailed { adapter: String, why: String },
    #[error("the GPU was lost: {why}")]
    Lost { why: String },
    #[error(
        "the GPU backend has too little memory for {what}; give the GPU fewer layers, or reduce `context`"
    )]
    OutOfMemory { what: String },
    #[error(
        "a buffer of this GPU has at most {max_bytes} bytes, too few for {group_rows} rows of weights with {row_bytes} \
         bytes each; plan with `gpu_layers: 0`"
    )]
    SmallBuffers { group_rows: u32, row_bytes: u64, max_bytes: u64 },
    #[error(
        "the GPU did not finish {what} within {seconds} s: it hangs or is too slow; plan with `gpu_layers: 0`"
    )]
    Timeout { what: String, seconds: f64 },
    #[error("the GPU backend failed at {what}: {why}; plan with `gpu_layers: 0`, and report this as a bug")]
    Failed { what: String, why: String },
    #[error("a device document cannot describe a GPU with the API `{api}`; use Vulkan, Metal or DX12")]
    UnknownApi { api: String },
    #[error(
        "there is no GPU kernel for a KV cache in {format}; plan with `kv_cache: f16`, or with `gpu_layers: 0`"
    )]
    UnsupportedKvFormat { format: Format },
    #[error("there are no GPU kernels for {architecture} models; plan with `gpu_layers: 0`")]
    UnsupportedArchitecture { architecture: Architecture },
    #[error("{what} is {found}, but GPU kernels need {need}; plan with `gpu_layers: 0`")]
    UnsupportedDimension { what: &'static str, found: usize, need: &'static str },
    #[error(transparent)]
    Shape(#[from] ShapeError),
}
