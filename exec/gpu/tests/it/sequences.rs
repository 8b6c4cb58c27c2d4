//! Caches of several sequences on the GPU, reused, and with activations in f16.
//!
//! Rows go through a stage on the GPU and through the plain oracle, in the same passes. The weights are f16, so that no
//! activation is rounded to eight bits. Stated bound: a relative RMS of 1e-4, which another order of additions makes;
//! of 2e-3 where rows are rounded to f16 after every layer, since one near a tie can be rounded the other way.

use std::ops::Range;
use std::sync::Arc;

use hearth_gpu::kernels::product::Tiling;
use hearth_gpu::{CapabilityMask, Gpu};
use hearth_profiles::model::Architecture;
use hearth_ring::wire::activations::round;
use hearth_runtime::{AcceleratedPlace, Backend, CacheFormat, CacheOptions, Head, Oracle, Stage, Weights};

use crate::gpu::{alone, open};
use crate::models::{accelerated, cpu, place, relative_rms, synthetic};

const CACHE: CacheOptions = CacheOptions { context: 40, format: CacheFormat::F16, sequences: 3 };
const BOUND: f64 = 1e-4;
const ROUNDED_BOUND: f64 = 2e-3;

/// The windows of the model, all of whose four layers are on the GPU.
fn windows() -> [Range<u32>; 2] {
    [0..1, 1..4]
}

/// The same stage on the GPU and by the oracle.
struct Pair {
    weights: Arc<Weights>,
    gpu: Stage,
    oracle: Stage,
}

impl Pair {
    fn new(gpu: &Arc<Gpu>, cache: CacheOptions, after_layer: Option<fn(&mut [f32])>) -> Pair {
        let weights = synthetic(Architecture::Qwen3, "f16");
        let part = AcceleratedPlace { after_layer, ..place(&weights, &windows(), &windows(), cache) };
        let (backend, _) = accelerated(gpu, part, Tiling::USUAL.into());
        let oracle = Oracle::new(weights.clone(), 0..4, cache).unwrap();
        let stage = |backend: Box<dyn Backend>| {
            let stage = Stage::new(weights.clone(), &windows(), cache, backend).unwrap();
            match after_layer {
                Some(rounding) => stage.after_layer(rounding),
                None => stage,
            }
        };
        let (gpu, oracle) = (stage(Box::new(backend)), stage(Box::new(oracle)));
        Pair { weights, gpu, oracle }
    }

    /// Rows of these tokens before the first layer.
    fn rows(&self, tokens: &[u32]) -> Vec<f32> {
        Head::new(self.weights.clone(), cpu()).embed(tokens).unwrap()
    }

    /// Forgets positions from `length` on in both.
    fn roll_back(&mut self, sequence: u32, length: u32) {
        for stage in [&mut self.gpu, &mut self.oracle] {
            stage.roll_back(sequence, length);
        }
    }

    /// A pass of rows through both; how far they are apart.
    fn pass(&mut self, sequence: u32, rows: &[f32], first: u32) -> f64 {
        let tokens = (rows.len() / self.weights.shape().embedding as usize) as u32;
        let positions: Vec<u32> = (first..first + tokens).collect();
        let [own, expected] = [&mut self.gpu, &mut self.oracle].map(|stage| {
            let mut rows = rows.to_vec();
            for window in windows() {
                stage.forward_of(sequence, window, &mut rows, &positions).unwrap();
            }
            rows
        });
        assert!(expected.iter().all(|number| number.is_finite()));
        relative_rms(&own, &expected)
    }
}

/// So many tokens, others for each seed.
fn tokens(count: u32, seed: u32) -> Vec<u32> {
    (0..count).map(|at| (at * 37 + 11 + seed * 101) % 512).collect()
}

#[test]
fn sequences_have_caches_of_their_own() {
    let _alone = alone();
    let Some(gpu) = open(CapabilityMask::default()) else { return };
    let mut pair = Pair::new(&gpu, CACHE, None);
    let (kernels, taken) = (gpu.kernels(), gpu.memory_used());
    assert!(kernels > 0);
    // Of different lengths, one after the other and in angles.
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
        let rows = pair.rows(&tokens(count, sequence + first));
        let off = pair.pass(sequence, &rows, first);
        assert!(off < BOUND, "sequence {sequence} from {first}: {off}");
    }
    assert_eq!((gpu.kernels(), gpu.memory_used()), (kernels, taken), "a pass finds all that it needs");
}

#[test]
fn rolled_back_positions_leave_no_trace() {
    let _alone = alone();
    let Some(gpu) = open(CapabilityMask::default()) else { return };
    let mut pair = Pair::new(&gpu, CACHE, None);
    for (number, (back_to, count)) in
        [(0, 33), (9, 1), (10, 20), (3, 2), (0, 6), (6, 1)].into_iter().enumerate()
    {
        // In the last round all sequences are forgotten at once, as for another request.
        if back_to == 0 {
            for stage in [&mut pair.gpu, &mut pair.oracle] {
                stage.truncate(0);
            }
        } else {
            pair.roll_back(1, back_to);
        }
        let rows = pair.rows(&tokens(count, number as u32));
        let off = pair.pass(1, &rows, back_to);
        assert!(off < BOUND, "{count} tokens after going back to {back_to}: {off}");
    }
}

#[test]
fn rolled_back_nan_leaves_no_trace() {
    let _alone = alone();
    let Some(gpu) = open(CapabilityMask::default()) else { return };
    let mut pair = Pair::new(&gpu, CACHE, None);
    let rows = pair.rows(&tokens(9, 1));
    pair.pass(0, &rows, 0);
    // Positions 9 to 17 become NaN: 9 to 11 share their values' texels with 8.
    let mut not_finite = vec![f32::NAN; rows.len()];
    let positions: Vec<u32> = (9..18).collect();
    for window in windows() {
        pair.gpu.forward_of(0, window, &mut not_finite, &positions).unwrap();
    }
    assert!(not_finite.iter().all(|number| number.is_nan()));
    for (first, count) in [(9, 1), (10, 3), (8, 1), (9, 2)] {
        pair.roll_back(0, first);
        let rows = pair.rows(&tokens(count, first));
        let off = pair.pass(0, &rows, first);
        assert!(off < BOUND, "{count} tokens from {first}: {off}");
    }
}

#[test]
fn rows_rounded_after_every_layer_equal_the_oracle() {
    let _alone = alone();
    let Some(gpu) = open(CapabilityMask::default()) else { return };
    let mut pair = Pair::new(&gpu, CACHE, Some(round));
    let (bytes, kernels, taken) = (pair.gpu.cache_bytes(), gpu.kernels(), gpu.memory_used());
    for (first, count) in [(0, 12), (12, 1), (13, 1), (14, 20)] {
        let rows = pair.rows(&tokens(count, first));
        let off = pair.pass(0, &rows, first);
        println!("{count} tokens in f16 from {first}: relative RMS {off:.1e}");
        assert!(off < ROUNDED_BOUND, "{count} tokens from {first}: {off}");
        assert_eq!(pair.gpu.cache_bytes(), bytes, "memory is taken at the beginning");
        assert_eq!((gpu.kernels(), gpu.memory_used()), (kernels, taken), "so are kernels made");
    }
    // What is kept for the case of a loss is kept once per window, whether rows are rounded between layers or not.
    let plain = Pair::new(&gpu, CACHE, None).gpu.cache_bytes();
    let kept = AcceleratedPlace::kept_bytes(windows().len(), CACHE, pair.weights.shape().embedding);
    assert_eq!(bytes, plain);
    assert!(kept > 0 && bytes > kept, "{kept} of {bytes}");
}

#[test]
fn gpu_lost_within_a_window_of_rounded_rows_is_replaced() {
    let _alone = alone();
    for lost_at in [0, 1, 2, 3] {
        let Some(gpu) = open(CapabilityMask::default()) else { return };
        let weights = synthetic(Architecture::Llama, "f16");
        let part =
            AcceleratedPlace { after_layer: Some(round), ..place(&weights, &windows(), &windows(), CACHE) };
        let (mut backend, warnings) = accelerated(&gpu, part, Tiling::USUAL.into());
        let mut oracle = Oracle::new(weights.clone(), 0..4, CACHE).unwrap();
        for (first, count) in [(0, 9), (9, 1), (10, 3), (13, 1)] {
            let rows = Head::new(weights.clone(), cpu()).embed(&tokens(count, first)).unwrap();
            let (mut own, mut expected) = (rows.clone(), rows);
            for layer in 0..4 {
                if (first, layer) == (10, lost_at) {
                    gpu.destroy();
                }
                for (backend, rows) in [
                    (&mut backend as &mut dyn Backend, &mut own),
                    (&mut oracle as &mut dyn Backend, &mut expected),
                ] {
                    backend.forward(2, layer..layer + 1, rows, first);
                    round(rows);
                }
            }
            let off = relative_rms(&own, &expected);
            assert!(off < ROUNDED_BOUND, "lost at layer {lost_at}, {count} tokens from {first}: {off}");
        }
        assert_eq!((backend.is_on_gpu(), warnings.lock().unwrap().len()), (false, 1));
    }
}
