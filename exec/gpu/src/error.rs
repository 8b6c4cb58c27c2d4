//! Errors of the GPU backend.
//!
//! Each variant says what, where, and what to do. A device that was lost or is out of memory in mid-run is no end of the
//! run: `crate::backend` goes on without it.

use hearth_kernels::KernelFormat;

use crate::virtual_tensor::ShapeError;

/// Why a GPU cannot do what it was asked to.
#[derive(Debug, Clone, thiserror::Error)]
pub enum GpuError {
    /// There is none.
    #[error(
        "this machine has no GPU that Vulkan, Metal or DX12 can reach; plan with `gpu_layers: 0`, or install a driver"
    )]
    NoAdapter,
    /// It cannot be opened.
    #[error("the GPU `{adapter}` cannot be opened: {why}; update its driver, or plan with `gpu_layers: 0`")]
    Open {
        /// Its name.
        adapter: String,
        /// What the driver said.
        why: String,
    },
    /// The driver gave it up.
    #[error("the GPU was lost: {why}; what it computed is computed on the CPU from here on")]
    Lost {
        /// What the driver said.
        why: String,
    },
    /// There is not enough memory.
    #[error("the GPU has not enough memory for {what}; give it fewer layers, or shorten `context`")]
    OutOfMemory {
        /// What was to be held.
        what: String,
    },
    /// It did not answer in time.
    #[error(
        "the GPU did not finish {what} in {seconds} s; it hangs, or is far too slow: plan with `gpu_layers: 0`"
    )]
    Timeout {
        /// What it was to do.
        what: String,
        /// How long it was given.
        seconds: f64,
    },
    /// A generated kernel or a call that the device refuses.
    #[error("the GPU refuses {what}: {why}; plan with `gpu_layers: 0`, and report this")]
    Refused {
        /// What it was to do.
        what: String,
        /// What was said.
        why: String,
    },
    /// A format that there is no kernel for.
    #[error(
        "there is no GPU kernel for weights of type {format}; plan with `gpu_layers: 0`, or use a file with {known}"
    )]
    Format {
        /// The type.
        format: KernelFormat,
        /// Those that there are kernels for.
        known: String,
    },
    /// Dimensions that kernels cannot work with.
    #[error("{what} is {found}, and GPU kernels need {need}; plan with `gpu_layers: 0`")]
    Dimension {
        /// Which.
        what: &'static str,
        /// Its value.
        found: usize,
        /// What would do.
        need: &'static str,
    },
    /// A tensor that is too large to address.
    #[error(transparent)]
    Shape(#[from] ShapeError),
}
