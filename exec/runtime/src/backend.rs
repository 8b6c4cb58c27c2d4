//! The trait [`Backend`], which computes the decoder layers of a stage on a CPU or GPU.
//!
//! A backend owns the KV caches of its layers. This crate has two backends whose results are equal bit for bit: the
//! simple [`crate::oracle`], and [`crate::cpu`] with threads and SIMD. The GPU backend is a separate crate (see
//! [`crate::backend_factory`]); its results differ within a documented bound.
//!
//! Not here: checks of arguments. [`crate::stage::Stage`] checks them before it calls a backend.

use std::ops::Range;

use hearth_schema::pass::Pass;

use crate::cost::CriticalPathCost;

/// Computes decoder layers and owns their KV caches.
pub trait Backend: Send {
    /// Returns the name by which traces refer to this backend.
    fn name(&self) -> &'static str;

    /// Returns whether a GPU computes the layers that the plan assigns to the GPU; false after the GPU is lost.
    fn has_gpu(&self) -> bool {
        false
    }

    /// Runs `layers` in place over `hidden`, `[tokens, embedding]`, followed in some models by per-layer inputs, keys
    /// and values, and writes the keys and values of these tokens to the KV caches. The tokens are those of `passes`,
    /// one pass after the other. The result of a token does not depend on the other passes.
    ///
    /// The caller ensures that the layers belong to this backend, that each pass is of another sequence with a KV
    /// cache, that all positions before a pass are cached, and that all positions are inside the context.
    fn forward(&mut self, layers: Range<u32>, hidden: &mut [f32], passes: &[Pass]) -> CriticalPathCost;

    /// Returns the logits `[tokens, vocabulary]` of the final hidden states `hidden`, `[tokens, embedding]`, or `None`
    /// if this backend does not compute the output matrix.
    fn logits(&mut self, hidden: &[f32]) -> Option<(Vec<f32>, CriticalPathCost)> {
        let _ = hidden;
        None
    }

    /// Gives the memory of the KV caches of a sequence back to the system, if this backend can. The keys and values of
    /// `layers` are lost.
    fn release(&mut self, sequence: u32, layers: Range<u32>) {
        let _ = (sequence, layers);
    }

    /// Copies the keys and values of the first `positions` positions of `layers` from one sequence to another. Returns
    /// false if this backend cannot.
    fn copy_positions(&mut self, from: u32, to: u32, positions: u32, layers: Range<u32>) -> bool {
        let _ = (from, to, positions, layers);
        false
    }

    /// Returns the total size of all KV caches in bytes.
    fn kv_cache_bytes(&self) -> u64;
}
