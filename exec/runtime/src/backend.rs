//! The trait of backends, which compute the layers of a stage.
//!
//! A backend owns the KV caches of its layers and runs layers over rows of activations. There are two here:
//! [`crate::oracle`], plain and slow, and [`crate::cpu`], threads and SIMD; they give the same bits. A GPU
//! backend is a crate of its own, see [`crate::accelerator`]; its bits differ within a stated bound.
//!
//! Not here: checks. [`crate::stage::Stage`] has made them before it calls a backend.

use std::ops::Range;

use hearth_profiles::model::ModelShape;

use crate::cache::{CacheFormat, CacheShape};
use crate::cost::ComputeCost;

/// The size of the caches of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheOptions {
    pub context: u32,
    pub format: CacheFormat,
    /// Number of sequences, each with `context` positions of its own; at least 1.
    pub sequences: u32,
}

impl CacheOptions {
    pub(crate) fn shape(self, model: &ModelShape) -> CacheShape {
        CacheShape {
            kv_heads: model.kv_heads as usize,
            context: self.context as usize,
            key_length: model.key_length as usize,
            value_length: model.value_length as usize,
            format: self.format,
        }
    }
}

pub trait Backend: Send {
    fn name(&self) -> &'static str;

    /// Whether a GPU computes the layers that the plan gave to one; false after it was lost.
    fn has_gpu(&self) -> bool {
        false
    }

    /// Runs `layers` over `hidden` [tokens, embedding], the tokens of a sequence at positions `first`, `first + 1`, ..
    /// Their keys and values are cached; all earlier positions are. The layers are this backend's, the sequence is one
    /// of those it has caches for, and the positions are inside the context.
    fn forward(&mut self, sequence: u32, layers: Range<u32>, hidden: &mut [f32], first: u32) -> ComputeCost;

    /// Returns the logits [tokens, vocabulary] of `hidden` [tokens, embedding], if the backend holds the output matrix.
    fn logits(&mut self, hidden: &[f32]) -> Option<(Vec<f32>, ComputeCost)> {
        let _ = hidden;
        None
    }

    fn cache_bytes(&self) -> u64;
}
