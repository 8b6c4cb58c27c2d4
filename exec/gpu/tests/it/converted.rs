//! Products with one scale per row against a scalar oracle, and the error of models in q8 and 8/4/4.
//!
//! ML Drift paper, sections 3.7 and 4.2. The oracle rounds weights and inputs as the paper says and adds integers in a
//! plain loop: prefill, which rounds inputs in a kernel of its own, and decode, which rounds them within the product,
//! must both have its integers to the last bit. What becomes of them is one product of floats, within 1e-6.
//!
//! The bounds for whole models are no promise of quality: one scale per row is coarse. They tell a kernel that is
//! wrong, whose logits have nothing to do with the model's, from one that rounds.

use hearth_gpu::conversion::{Conversion, round_row};
use hearth_gpu::kernels::packing::Packed;
use hearth_gpu::kernels::product::{Stage, Tiling};
use hearth_gpu::layers::Upload;
use hearth_gpu::matrix::GpuMatrix;
use hearth_gpu::{CapabilityMask, Gpu};
use hearth_kernels::{KernelFormat, Matrix, dequantise};
use hearth_profiles::model::Architecture;
use hearth_runtime::{CacheFormat, CacheOptions};

use crate::gpu::{alone, numbers, open, relative_difference};
use crate::models::{Step, gpu_layers, oracle_rows, relative_rms, synthetic, teacher_forced};
use crate::products::{bytes, masks, product, tilings};

/// Codes of a row and their scale, one code a byte.
fn rounded(packed: Packed, row: &[f32]) -> (Vec<i32>, f32) {
    let mut packed_codes = Vec::new();
    let scale = round_row(packed, row, &mut packed_codes);
    let codes = if packed == Packed::Row4 {
        packed_codes
            .chunks_exact(16)
            .flat_map(|unit| {
                let low = unit.iter().map(|byte| i32::from(byte & 15) - 8);
                low.chain(unit.iter().map(|byte| i32::from(byte >> 4) - 8))
            })
            .collect()
    } else {
        packed_codes.into_iter().map(|code| i32::from(code as i8)).collect()
    };
    (codes, scale)
}

/// Integers and results of a product, one row and one token after the other: [tokens, rows].
fn oracle(packed: Packed, matrix: Matrix<'_>, input: &[f32]) -> (Vec<i32>, Vec<f32>) {
    let length = matrix.length;
    let weights: Vec<(Vec<i32>, f32)> = (0..matrix.rows)
        .map(|row| {
            let mut values = vec![0.0; length];
            dequantise(matrix.format, matrix.row(row), &mut values).unwrap();
            rounded(packed, &values)
        })
        .collect();
    let (mut integers, mut results) = (Vec::new(), Vec::new());
    for x in input.chunks_exact(length) {
        let (codes, scale) = rounded(Packed::Row8, x);
        for (row, row_scale) in &weights {
            let sum: i32 = row.iter().zip(&codes).map(|(weight, code)| weight * code).sum();
            integers.push(sum);
            results.push(sum as f32 * (row_scale * scale));
        }
    }
    (integers, results)
}

fn converted(gpu: &Gpu, matrix: Matrix<'_>, packed: Packed, tiling: Tiling) -> GpuMatrix {
    GpuMatrix::converted(gpu, matrix, Some(packed), tiling, &mut |_| ()).unwrap()
}

#[test]
fn both_stages_have_the_integers_of_the_oracle() {
    let _alone = alone();
    for (mask, what) in masks() {
        let Some(gpu) = open(mask) else { return };
        // Drivers may round a division otherwise, which moves a code that is nearly a tie; not this one.
        let moved = if gpu.facts().is_software() { 0 } else { 4 * 127 };
        // Rows that fill no group, and lengths that fill no chunk: 32 units of 128 threads, 296, and 3.
        for (format, rows, length) in
            [(KernelFormat::F16, 100, 1024), (KernelFormat::Q8_0, 36, 9472), (KernelFormat::F32, 8, 96)]
        {
            let bytes = bytes(format, rows, length, 5);
            let matrix = Matrix { format, length, rows, bytes: &bytes };
            for (packed, tokens) in
                [(Packed::Row8, 1), (Packed::Row4, 1), (Packed::Row8, 37), (Packed::Row4, 37)]
            {
                let input = numbers(tokens * length, 3);
                let (integers, results) = oracle(packed, matrix, &input);
                let mut seen: Option<Vec<i32>> = None;
                let stages: &[Stage] =
                    if tokens == 1 { &[Stage::Decode, Stage::Prefill] } else { &[Stage::Prefill] };
                for (&stage, tiling) in stages
                    .iter()
                    .flat_map(|stage| tilings(&gpu, mask).into_iter().map(move |tiling| (stage, tiling)))
                {
                    let made = converted(&gpu, matrix, packed, tiling);
                    let what =
                        format!("{packed:?} of {format} {rows} by {length}, {stage:?} {tiling:?}, {what}");
                    let found = product::<i32>(&gpu, &made, &input, stage, true);
                    assert!(*seen.get_or_insert_with(|| found.clone()) == found, "another stage's, {what}");
                    let off = found.iter().zip(&integers).map(|(own, expected)| (own - expected).abs()).max();
                    assert!(off <= Some(moved), "integers off by {off:?}, {what}");
                    let off = relative_difference(&product(&gpu, &made, &input, stage, false), &results);
                    assert!(off < 1e-6, "off by {off}, {what}");
                }
            }
        }
    }
}

#[test]
fn nan_in_a_row_changes_only_its_results() {
    let _alone = alone();
    let Some(gpu) = open(CapabilityMask::default()) else { return };
    let mut values = numbers(8 * 64, 1);
    values[3 * 64 + 5] = f32::NAN;
    let bytes: &[u8] = bytemuck::cast_slice(&values);
    let matrix = Matrix { format: KernelFormat::F32, length: 64, rows: 8, bytes };
    for packed in [Packed::Row8, Packed::Row4] {
        let made = converted(&gpu, matrix, packed, Tiling::USUAL);
        let own: Vec<f32> = product(&gpu, &made, &numbers(64, 2), Stage::Decode, false);
        let not_finite: Vec<usize> = (0..8).filter(|&row| own[row].is_nan()).collect();
        assert_eq!(not_finite, [3], "{packed:?}: {own:?}");
    }
}

#[test]
fn converted_models_stay_near_the_original() {
    let _alone = alone();
    let Some(gpu) = open(CapabilityMask::default()) else { return };
    let tokens: Vec<u32> = (0..24).map(|at| (at * 37 + 11) % 512).collect();
    let cache = CacheOptions { context: 40, format: CacheFormat::F16, sequences: 1 };
    for architecture in [Architecture::Llama, Architecture::Gemma2] {
        let weights = synthetic(architecture, "f16");
        let (hidden, expected) = oracle_rows(&weights, &tokens, cache);
        let mut off = Vec::new();
        for conversion in [Conversion::None, Conversion::Q8, Conversion::Mixed] {
            let upload = Upload { tiling: Tiling::USUAL, conversion };
            let mut layers = gpu_layers(&gpu, &weights, 0..4, false, cache, upload).unwrap();
            let mut own = hidden.clone();
            let (prompt, last) = own.split_at_mut(hidden.len() / tokens.len() * (tokens.len() - 1));
            layers.forward(0, 0..4, prompt, 0).unwrap();
            layers.forward(0, 0..4, last, tokens.len() as u32 - 1).unwrap();
            off.push(relative_rms(&own, &expected));
        }
        println!(
            "{architecture}: relative RMS of rows, none {:.1e}, q8 {:.1e}, 8/4/4 {:.1e}",
            off[0], off[1], off[2]
        );
        assert!(off[0] < 1e-4 && off[1] < 0.02 && off[2] < 0.15, "{architecture}: {off:?}");
        assert!(off[0] < off[1] && off[1] < off[2], "{architecture}: {off:?}");
    }
}

#[test]
fn converted_trained_model_mostly_chooses_the_golden_tokens() {
    let _alone = alone();
    let Some(gpu) = open(CapabilityMask::default()) else { return };
    let whole = std::slice::from_ref(&(0..8));
    for (conversion, least) in [(Conversion::Q8, 0.95), (Conversion::Mixed, 0.9)] {
        let upload = Upload { tiling: Tiling::USUAL, conversion };
        let steps = teacher_forced(&gpu, "psalm-7m-f16.gguf", whole, upload);
        let sure: Vec<bool> = steps.iter().filter(|step| step.is_sure()).map(Step::is_golden).collect();
        let same = sure.iter().filter(|&&same| same).count();
        println!("{conversion:?}: {same} of {} golden choices", sure.len());
        assert!(same as f64 > least * sure.len() as f64, "{conversion:?}: {same} of {}", sure.len());
    }
}
