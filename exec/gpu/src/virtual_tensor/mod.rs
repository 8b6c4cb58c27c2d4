//! Virtual tensors: maps the elements of logical tensors to positions in GPU buffers and textures.
//!
//! ML Drift paper, sections 3.1 to 3.3. A logical tensor has the axes batch, height, width and channel; the depth is
//! always 1. A GPU object is a buffer or a texture of texels; a texel has four channels (a slice). A layout maps the
//! elements of the tensor to the texels of the object. [`layout`] and [`weights`] compute this mapping on the CPU, and
//! [`access`] generates it as WGSL, so that kernels use logical coordinates and nothing is looked up at run time.
//!
//! Not here: the selection of the weight layout of a matmul (`crate::tuning`).

pub mod access;
pub mod layout;
pub mod weights;

pub use access::{AccessMode, Accessor, AxisExtent};
pub use layout::{Shape, Storage, TexelCoordinates};
pub use weights::{WeightOrder, WeightShape};

/// Number of channels in a texel, and number of outputs or inputs in a slice of weights.
pub const SLICE_SIZE: u32 = 4;

/// An error for a tensor shape whose elements the GPU kernels cannot index.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    #[error("a tensor on the GPU has an empty axis: {shape}; plan with `gpu_layers: 0`")]
    EmptyAxis { shape: String },
    #[error(
        "a tensor on the GPU is too large for 32-bit indices: {shape}; reduce `context`, or plan with \
         `gpu_layers: 0`"
    )]
    TooLarge { shape: String },
}

/// Returns the product of `extents`. Returns an error if an extent is zero or the product exceeds 32 bits; `shape`
/// returns the text that describes the tensor in this error.
fn checked_product(extents: &[u32], shape: impl Fn() -> String) -> Result<u32, ShapeError> {
    if extents.contains(&0) {
        return Err(ShapeError::EmptyAxis { shape: shape() });
    }
    let all = extents.iter().try_fold(1u32, |all, &extent| all.checked_mul(extent));
    all.ok_or_else(|| ShapeError::TooLarge { shape: shape() })
}
