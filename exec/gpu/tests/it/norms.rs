//! Tests of the norm kernel against a plain loop in f64, with and without subgroup operations.
//!
//! The bound of the difference is 1e-6 of the largest element, which is the rounding error of f32.

use hearth_gpu::Gpu;
use hearth_gpu::device::{GpuBuffer, KernelParams};
use hearth_gpu::kernels::norm::NormKernel;

use crate::gpu::{lock_gpu, open, random_numbers, relative_difference};
use crate::matmuls::masks;

const TOKENS: usize = 5;
const EPSILON: f32 = 1e-5;
const RESIDUAL_SCALE: f64 = 0.75;

/// Returns the sums of hidden states and normalised change, [TOKENS, width], and the norms of the sums, computed in
/// f64.
fn reference(hidden: &[f32], change: &[f32], weights: [&[f32]; 2], width: usize) -> (Vec<f32>, Vec<f32>) {
    let normalised = |row: &[f64], weight: &[f32]| -> Vec<f64> {
        let square: f64 = row.iter().map(|number| number * number).sum::<f64>() / width as f64;
        let scale = 1.0 / (square + f64::from(EPSILON)).sqrt();
        row.iter().zip(weight).map(|(number, weight)| number * scale * f64::from(*weight)).collect()
    };
    let wide = |row: &[f32]| -> Vec<f64> { row.iter().map(|&number| f64::from(number)).collect() };
    let (mut sums, mut norms) = (Vec::new(), Vec::new());
    for (hidden, change) in hidden.chunks_exact(width).zip(change.chunks_exact(width)) {
        let change = normalised(&wide(change), weights[0]);
        let sum: Vec<f64> =
            wide(hidden).iter().zip(change).map(|(one, other)| one + RESIDUAL_SCALE * other).collect();
        norms.extend(normalised(&sum, weights[1]).iter().map(|&number| number as f32));
        sums.extend(sum.iter().map(|&number| number as f32));
    }
    (sums, norms)
}

fn check(gpu: &Gpu, width: usize, what: &str) {
    let [hidden, change] = [1, 2].map(|seed| random_numbers(TOKENS * width, seed));
    let [post, weight] = [3, 4].map(|seed| random_numbers(width, seed));
    let kernel = NormKernel {
        width: width as u32,
        epsilon: EPSILON,
        adds_residual: true,
        residual_scale: Some(RESIDUAL_SCALE as f32),
        has_post_norm: true,
        normalises_hidden: true,
        capabilities: gpu.capabilities(),
    };
    let params = gpu.create_params_buffer().unwrap();
    gpu.write(&params, &[KernelParams::for_pass(TOKENS as u32, 0)]).unwrap();
    let upload = |values: &[f32]| gpu.upload("rows", values).unwrap();
    let tensors = [upload(&hidden), upload(&change), upload(&post), upload(&weight), upload(&hidden)];
    let bound: Vec<&GpuBuffer> = std::iter::once(&params).chain(&tensors).collect();
    let launch = gpu.prepare_launch("norm", &kernel.wgsl_source(), &bound, [TOKENS as u32, 1, 1]).unwrap();
    gpu.submit([&launch]).unwrap();
    let (sums, norms) = reference(&hidden, &change, [&post, &weight], width);
    for (own, expected) in [(&tensors[0], sums), (&tensors[4], norms)] {
        let own: Vec<f32> = gpu.read(own, expected.len()).unwrap();
        let off = relative_difference(&own, &expected);
        assert!(off < 1e-6, "width {width}, {what}: off by {off}");
    }
}

#[test]
fn norms_equal_the_reference_in_every_variant() {
    let _lock = lock_gpu();
    for (mask, what) in masks() {
        let Some(gpu) = open(mask) else { return };
        assert!(!(mask.no_subgroups && gpu.capabilities().subgroup_size_range.is_some()));
        // Fewer slices than threads, as many, and more.
        for width in [12, 256, 1000] {
            check(&gpu, width, what);
        }
    }
}
