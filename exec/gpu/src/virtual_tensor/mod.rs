//! Virtual tensors: maps the elements of a logical tensor to places in GPU objects.
//!
//! ML Drift paper, sections 3.1 to 3.3. A logical tensor has the axes batch, height, width, depth and channel; a
//! physical object is a buffer or a texture of texels, four channels (a slice) each. What maps the one to the other is
//! arithmetic that a layout states once, here for the CPU and in [`access`] as text in the shader, so that a kernel is
//! written against logical coordinates and never asks at run time where something lies.
//!
//! Not here: which layout a kernel gets, which is the device's choice (`crate::tuning`).

pub mod access;
pub mod layout;
pub mod weights;

pub use access::{Accessor, Direction, Extent};
pub use layout::{Shape, Storage, Texel};
pub use weights::{WeightOrder, WeightShape, WeightTexel};

/// Channels of a texel, and rows or inputs of a slice of weights.
pub const SLICE: u32 = 4;

/// A tensor that cannot be addressed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    #[error("a tensor has an empty axis: {shape}; every axis has at least one element")]
    Empty { shape: String },
    #[error("a tensor of {shape} has more texels than 32 bits can number; split it over several objects")]
    Large { shape: String },
}

/// The product of all, if 32 bits hold it and none is zero.
fn product(extents: &[u32], shape: impl Fn() -> String) -> Result<u32, ShapeError> {
    if extents.contains(&0) {
        return Err(ShapeError::Empty { shape: shape() });
    }
    let all = extents.iter().try_fold(1u32, |all, &extent| all.checked_mul(extent));
    all.ok_or_else(|| ShapeError::Large { shape: shape() })
}
