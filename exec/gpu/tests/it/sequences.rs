//! Tests of the GPU caches of several sequences: separate caches, roll-backs, and activations rounded to f16.
//!
//! A stage on the GPU and one with the oracle run the same passes. The weights are f16, so no activation is
//! quantised to eight bits. The bound is a relative RMS of 1e-4, because floats are added in a different order. It is
//! 2e-3 where rows are rounded to f16 after every layer, because a value near a tie can be rounded differently.

use std::ops::Range;
use std::sync::Arc;

use hearth_gpu::kernels::matmul::Tiling;
use hearth_gpu::{CapabilityMask, Gpu};
use hearth_profiles::model::Architecture;
use hearth_ring::wire::activations::round_to_f16;
use hearth_runtime::{
    Backend, BackendOptions, InputOutputLayers, KvCacheOptions, KvFormat, Oracle, Stage, Weights,
};
use hearth_schema::pass::{Batch, Pass};

use crate::gpu::{lock_gpu, open, open_and_lock};
use crate::models::{arbitrary_tokens, backend_options, cpu, gpu_backend, relative_rms, synthetic};

const CACHE: KvCacheOptions = KvCacheOptions { context: 40, format: KvFormat::F16, sequences: 3 };
const BOUND: f64 = 1e-4;
const ROUNDED_BOUND: f64 = 2e-3;

/// Returns the layer windows of the model. All four layers of the model are on the GPU.
fn windows() -> [Range<u32>; 2] {
    [0..1, 1..4]
}

/// Two stages of the same model, one on the GPU and one with the oracle.
struct Pair {
    weights: Arc<Weights>,
    bound: f64,
    gpu: Stage,
    oracle: Stage,
}

impl Pair {
    fn new(gpu: &Arc<Gpu>, rounding: Option<fn(&mut [f32])>) -> Pair {
        let weights = synthetic(Architecture::Qwen3, "f16");
        let part = BackendOptions { rounding, ..backend_options(&weights, &windows(), &windows(), CACHE) };
        let (backend, _) = gpu_backend(gpu, part, Tiling::DEFAULT.into());
        let oracle = Oracle::new(weights.clone(), 0..4, CACHE).unwrap();
        let stage = |backend: Box<dyn Backend>| {
            let stage = Stage::new(weights.clone(), &windows(), CACHE, backend).unwrap();
            match rounding {
                Some(rounding) => stage.with_rounding(rounding),
                None => stage,
            }
        };
        let (gpu, oracle) = (stage(Box::new(backend)), stage(Box::new(oracle)));
        let bound = if rounding.is_some() { ROUNDED_BOUND } else { BOUND };
        Pair { weights, bound, gpu, oracle }
    }

    /// Removes position `length` and all later positions of a sequence from the caches of both stages.
    fn roll_back(&mut self, sequence: u32, length: u32) {
        for stage in [&mut self.gpu, &mut self.oracle] {
            stage.roll_back(sequence, length);
        }
    }

    /// Runs a pass of `count` tokens, which depend on the seed, on both stages and compares the resulting hidden
    /// states.
    fn check(&mut self, sequence: u32, first: u32, count: u32, seed: u32) {
        let rows = embeddings(&self.weights, count, seed);
        let [own, expected] = [&mut self.gpu, &mut self.oracle].map(|stage| {
            let mut rows = rows.clone();
            for window in windows() {
                stage.forward(sequence, window, &mut rows, first).unwrap();
            }
            rows
        });
        assert!(expected.iter().all(|number| number.is_finite()));
        let off = relative_rms(&own, &expected);
        println!("sequence {sequence}, {count} tokens from {first}: relative RMS {off:.1e}");
        assert!(off < self.bound, "sequence {sequence}, {count} tokens from {first}: {off}");
    }
}

fn embeddings(weights: &Arc<Weights>, count: u32, seed: u32) -> Vec<f32> {
    InputOutputLayers::new(weights.clone(), cpu()).embed(&arbitrary_tokens(count, seed)).unwrap()
}

#[test]
fn sequences_have_caches_of_their_own() {
    let Some((_lock, gpu)) = open_and_lock(CapabilityMask::default()) else { return };
    let mut pair = Pair::new(&gpu, None);
    let (kernels, taken) = (gpu.compiled_kernel_count(), gpu.reserved_bytes());
    assert!(kernels > 0);
    // Passes of different lengths, in which the sequences take turns.
    for (sequence, first, count) in [
        (0, 0, 7),
        (2, 0, 1),
        (1, 0, 12),
        (2, 1, 5),
        (0, 7, 1),
        (1, 12, 1),
        (2, 6, 30),
        (0, 8, 2),
        (1, 13, 3),
    ] {
        pair.check(sequence, first, count, sequence + first);
    }
    let after = (gpu.compiled_kernel_count(), gpu.reserved_bytes());
    assert_eq!(after, (kernels, taken), "a pass compiles and allocates nothing");
}

#[test]
fn sequences_of_a_batch_are_computed_one_after_the_other() {
    let Some((_lock, gpu)) = open_and_lock(CapabilityMask::default()) else { return };
    let mut pair = Pair::new(&gpu, None);
    pair.check(0, 0, 7, 3);
    let pass = |index, sequence_index, first, tokens| Pass {
        sequence_index,
        ..Pass::new(index, first, tokens, true)
    };
    let batch = Batch::new(vec![pass(1, 2, 0, 5), pass(2, 0, 7, 1), pass(3, 1, 0, 12)]).unwrap();
    let rows = embeddings(&pair.weights, batch.tokens(), 5);
    let [own, expected] = [&mut pair.gpu, &mut pair.oracle].map(|stage| {
        let mut rows = rows.clone();
        for window in windows() {
            stage.forward_batch(window, &mut rows, &batch).unwrap();
        }
        rows
    });
    let off = relative_rms(&own, &expected);
    assert!(off < BOUND, "{off}");
    pair.check(2, 5, 2, 8);
}

#[test]
fn rolled_back_positions_do_not_affect_later_passes() {
    let Some((_lock, gpu)) = open_and_lock(CapabilityMask::default()) else { return };
    let mut pair = Pair::new(&gpu, None);
    for (seed, (back_to, count)) in (0..).zip([(0, 33), (9, 1), (10, 20), (3, 2), (0, 6), (6, 1)]) {
        // Going back to 0 clears all sequences at once, as for a new request.
        if back_to == 0 {
            for stage in [&mut pair.gpu, &mut pair.oracle] {
                stage.truncate_kv_caches(0);
            }
        } else {
            pair.roll_back(1, back_to);
        }
        pair.check(1, back_to, count, seed);
    }
}

#[test]
fn rolled_back_nan_does_not_affect_later_passes() {
    let Some((_lock, gpu)) = open_and_lock(CapabilityMask::default()) else { return };
    let mut pair = Pair::new(&gpu, None);
    pair.check(0, 0, 9, 1);
    // Positions 9 to 17 become NaN: 9 to 11 share their values' texels with 8.
    let mut not_finite = vec![f32::NAN; 9 * pair.weights.shape().embedding_length as usize];
    for window in windows() {
        pair.gpu.forward(0, window, &mut not_finite, 9).unwrap();
    }
    assert!(not_finite.iter().all(|number| number.is_nan()));
    for (first, count) in [(9, 1), (10, 3), (8, 1), (9, 2)] {
        pair.roll_back(0, first);
        pair.check(0, first, count, first);
    }
}

#[test]
fn rows_rounded_after_every_layer_equal_the_oracle() {
    let Some((_lock, gpu)) = open_and_lock(CapabilityMask::default()) else { return };
    let mut pair = Pair::new(&gpu, Some(round_to_f16));
    let (bytes, kernels, taken) =
        (pair.gpu.kv_cache_bytes(), gpu.compiled_kernel_count(), gpu.reserved_bytes());
    for (first, count) in [(0, 12), (12, 1), (13, 1), (14, 20)] {
        pair.check(0, first, count, first);
        assert_eq!(pair.gpu.kv_cache_bytes(), bytes, "memory is allocated at the start");
        let after = (gpu.compiled_kernel_count(), gpu.reserved_bytes());
        assert_eq!(after, (kernels, taken), "a pass compiles and allocates nothing");
    }
    // Rows are saved once per window, whether they are rounded between layers or not.
    let plain = Pair::new(&gpu, None).gpu.kv_cache_bytes();
    let kept =
        BackendOptions::max_saved_hidden_bytes(windows().len(), CACHE, pair.weights.shape().embedding_length);
    assert_eq!(bytes, plain);
    assert!(kept > 0 && bytes > kept, "{kept} of {bytes}");
}

#[test]
fn gpu_lost_within_a_window_of_rounded_rows_is_replaced() {
    let _lock = lock_gpu();
    for lost_at in [0, 1, 2, 3] {
        let Some(gpu) = open(CapabilityMask::default()) else { return };
        let weights = synthetic(Architecture::Llama, "f16");
        let part = BackendOptions {
            rounding: Some(round_to_f16),
            ..backend_options(&weights, &windows(), &windows(), CACHE)
        };
        let (mut backend, warnings) = gpu_backend(&gpu, part, Tiling::DEFAULT.into());
        let mut oracle = Oracle::new(weights.clone(), 0..4, CACHE).unwrap();
        for (first, count) in [(0, 9), (9, 1), (10, 3), (13, 1)] {
            let rows = embeddings(&weights, count, first);
            let (mut own, mut expected) = (rows.clone(), rows);
            let pass = Pass { sequence_index: 2, ..Pass::new(0, first, count, false) };
            for layer in 0..4 {
                if (first, layer) == (10, lost_at) {
                    gpu.destroy();
                }
                for (backend, rows) in [
                    (&mut backend as &mut dyn Backend, &mut own),
                    (&mut oracle as &mut dyn Backend, &mut expected),
                ] {
                    backend.forward(layer..layer + 1, rows, &[pass]);
                    round_to_f16(rows);
                }
            }
            let off = relative_rms(&own, &expected);
            assert!(off < ROUNDED_BOUND, "lost at layer {lost_at}, {count} tokens from {first}: {off}");
        }
        assert_eq!((backend.has_gpu(), warnings.lock().unwrap().len()), (false, 1));
    }
}
