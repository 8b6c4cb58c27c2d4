//! The trait of backends, which compute the layers of a stage.
//!
//! A backend owns the KV caches of its layers and runs layers over rows of activations. This crate has two backends,
//! which give the same bits: the simple [`crate::oracle`], and [`crate::cpu`] with threads and SIMD. The GPU backend
//! is a crate of its own, see [`crate::backend_factory`]; its results differ within a documented bound.
//!
//! Not here: checks of arguments. [`crate::stage::Stage`] makes them before it calls a backend.

use std::ops::Range;

use crate::cost::CriticalPathCost;

/// An implementation of the forward pass of decoder layers.
pub trait Backend: Send {
    /// Returns the name of this backend in traces.
    fn name(&self) -> &'static str;

    /// Whether a GPU computes the layers that the plan assigns to it; false after the GPU is lost.
    fn has_gpu(&self) -> bool {
        false
    }

    /// Runs `layers` in place over `hidden` [tokens, embedding], the tokens of a sequence at positions `first`,
    /// `first + 1`, .. , and caches their keys and values.
    ///
    /// The caller ensures that the layers belong to this backend, that the sequence has a cache, that all earlier
    /// positions are cached, and that the positions are inside the context.
    fn forward(
        &mut self,
        sequence: u32,
        layers: Range<u32>,
        hidden: &mut [f32],
        first: u32,
    ) -> CriticalPathCost;

    /// Returns the logits [tokens, vocabulary] of `hidden` [tokens, embedding], or `None` if this backend does not
    /// compute the output matrix.
    fn logits(&mut self, hidden: &[f32]) -> Option<(Vec<f32>, CriticalPathCost)> {
        let _ = hidden;
        None
    }

    /// Returns the bytes of all KV caches.
    fn kv_cache_bytes(&self) -> u64;
}
