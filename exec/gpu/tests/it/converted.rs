//! Tests of matmuls with one scale per row against a scalar oracle, and of the error of models in q8 and 8/4/4.
//!
//! ML Drift paper, sections 3.7 and 4.2. The oracle quantises weights and inputs as in the paper and sums the
//! products as integers in a plain loop. Prefill, which quantises inputs in a separate kernel, and decode, which
//! quantises them in the matmul kernel, must have exactly the same integers. The results, which are scaled to floats,
//! must be within 1e-6 of the largest result of the oracle.
//!
//! The bounds for whole models do not promise a quality, because one scale per row is coarse. They only distinguish
//! rounding errors from a wrong kernel, whose logits would be unrelated to those of the model.

use hearth_gpu::conversion::{WeightConversion, quantise_row};
use hearth_gpu::kernels::matmul::{Phase, Tiling};
use hearth_gpu::kernels::packing::PackedFormat;
use hearth_gpu::layers::UploadOptions;
use hearth_gpu::matrix::GpuMatrix;
use hearth_gpu::{CapabilityMask, Gpu};
use hearth_kernels::{Layout, Matrix, dequantise};
use hearth_profiles::Format;
use hearth_profiles::model::Architecture;

use crate::gpu::{lock_gpu, open, open_and_lock, random_numbers, relative_difference};
use crate::matmuls::{masks, random_weight_bytes, run_matmul, tilings};
use crate::models::{
    CACHE, arbitrary_tokens, gpu_layers, oracle_rows, relative_rms, synthetic, teacher_forced,
};

/// Quantises a row to `packed`. Returns the quants, one per element, and the scale of the row.
fn quantised(packed: PackedFormat, row: &[f32]) -> (Vec<i32>, f32) {
    let mut packed_quants = Vec::new();
    let scale = quantise_row(packed, row, &mut packed_quants);
    let quants = if packed == PackedFormat::Row4 {
        packed_quants
            .chunks_exact(16)
            .flat_map(|unit| {
                let low = unit.iter().map(|byte| i32::from(byte & 15) - 8);
                low.chain(unit.iter().map(|byte| i32::from(byte >> 4) - 8))
            })
            .collect()
    } else {
        packed_quants.into_iter().map(|quant| i32::from(quant as i8)).collect()
    };
    (quants, scale)
}

/// Returns the integer sums and the results of a matmul, each [tokens, rows], computed in a plain loop.
fn oracle(packed: PackedFormat, matrix: Matrix<'_>, input: &[f32]) -> (Vec<i32>, Vec<f32>) {
    let length = matrix.row_length;
    let weights: Vec<(Vec<i32>, f32)> = (0..matrix.rows)
        .map(|row| {
            let mut values = vec![0.0; length];
            dequantise(matrix.format, matrix.row(row), &mut values).unwrap();
            quantised(packed, &values)
        })
        .collect();
    let (mut integers, mut results) = (Vec::new(), Vec::new());
    for x in input.chunks_exact(length) {
        let (quants, scale) = quantised(PackedFormat::Row8, x);
        for (row, row_scale) in &weights {
            let sum: i32 = row.iter().zip(&quants).map(|(weight, quant)| weight * quant).sum();
            integers.push(sum);
            results.push(sum as f32 * (row_scale * scale));
        }
    }
    (integers, results)
}

fn converted(gpu: &Gpu, matrix: Matrix<'_>, packed: PackedFormat, tiling: Tiling) -> GpuMatrix {
    GpuMatrix::upload_converted(gpu, matrix, Some(packed), tiling, &mut |_| ()).unwrap()
}

#[test]
fn both_phases_equal_the_integers_of_the_oracle() {
    let _lock = lock_gpu();
    for (mask, what) in masks() {
        let Some(gpu) = open(mask) else { return };
        // Other drivers may round a division differently, which changes a quant near a tie.
        let tolerance = if gpu.info().is_software() { 0 } else { 4 * 127 };
        // Rows that do not fill a workgroup, and lengths that do not fill a chunk of 128 units: 32, 296 and 3 units.
        // The kernels do not depend on the format of the file, so one matrix is enough for most tilings.
        let (all, few) = (tilings(&gpu, mask), vec![Tiling::DEFAULT, Tiling::BY_OUTPUT]);
        let matrices =
            [(Format::F16, 100, 1024, &all), (Format::Q8_0, 36, 9472, &few), (Format::F32, 8, 96, &few)];
        for (format, rows, length, tilings) in matrices {
            let bytes = random_weight_bytes(format, rows, length, 5);
            let matrix = Matrix { format, row_length: length, rows, layout: Layout::Rows, bytes: &bytes };
            let [row8, row4] = [PackedFormat::Row8, PackedFormat::Row4];
            for (packed, tokens) in [(row8, 1), (row4, 1), (row8, 37), (row4, 37)] {
                let input = random_numbers(tokens * length, 3);
                let (integers, results) = oracle(packed, matrix, &input);
                let mut seen: Option<Vec<i32>> = None;
                let phases = [Phase::Decode, Phase::Prefill];
                let phases = phases.into_iter().filter(|&phase| tokens == 1 || phase == Phase::Prefill);
                let with_tilings = |phase| tilings.iter().map(move |&tiling| (phase, tiling));
                for (phase, tiling) in phases.flat_map(with_tilings) {
                    let made = converted(&gpu, matrix, packed, tiling);
                    let what =
                        format!("{packed:?} {format} {rows} by {length}, {phase:?} {tiling:?}, {what}");
                    let found = run_matmul::<i32>(&gpu, &made, &input, phase, true);
                    let first = seen.get_or_insert_with(|| found.clone());
                    assert!(*first == found, "differs from another phase or tiling, {what}");
                    let off = found.iter().zip(&integers).map(|(own, expected)| (own - expected).abs()).max();
                    assert!(off <= Some(tolerance), "integers off by {off:?}, {what}");
                    let off = relative_difference(&run_matmul(&gpu, &made, &input, phase, false), &results);
                    assert!(off < 1e-6, "off by {off}, {what}");
                }
            }
        }
    }
}

#[test]
fn nan_in_a_row_only_affects_its_result() {
    let Some((_lock, gpu)) = open_and_lock(CapabilityMask::default()) else { return };
    let mut values = random_numbers(8 * 64, 1);
    values[3 * 64 + 5] = f32::NAN;
    let bytes: &[u8] = bytemuck::cast_slice(&values);
    let matrix = Matrix { format: Format::F32, row_length: 64, rows: 8, layout: Layout::Rows, bytes };
    for packed in [PackedFormat::Row8, PackedFormat::Row4] {
        let made = converted(&gpu, matrix, packed, Tiling::DEFAULT);
        let own: Vec<f32> = run_matmul(&gpu, &made, &random_numbers(64, 2), Phase::Decode, false);
        let not_finite: Vec<usize> = (0..8).filter(|&row| own[row].is_nan()).collect();
        assert_eq!(not_finite, [3], "{packed:?}: {own:?}");
    }
}

#[test]
fn converted_models_stay_near_the_original() {
    let Some((_lock, gpu)) = open_and_lock(CapabilityMask::default()) else { return };
    let tokens = arbitrary_tokens(24, 0);
    for architecture in [Architecture::Llama, Architecture::Gemma2] {
        let weights = synthetic(architecture, "f16");
        let (hidden, expected) = oracle_rows(&weights, &tokens, CACHE);
        let mut off = Vec::new();
        for conversion in [WeightConversion::None, WeightConversion::Q8, WeightConversion::Mixed] {
            let upload = UploadOptions { tiling: Tiling::DEFAULT, conversion };
            let mut layers = gpu_layers(&gpu, &weights, 0..4, false, CACHE, upload).unwrap();
            let mut own = hidden.clone();
            let (prompt, last) = own.split_at_mut(hidden.len() / 24 * 23);
            layers.forward(0, 0..4, prompt, 0).unwrap();
            layers.forward(0, 0..4, last, 23).unwrap();
            off.push(relative_rms(&own, &expected));
        }
        let (none, q8, mixed) = (off[0], off[1], off[2]);
        println!("{architecture}: relative RMS of rows, none {none:.1e}, q8 {q8:.1e}, 8/4/4 {mixed:.1e}");
        assert!(none < 1e-4 && q8 < 0.02 && mixed < 0.15, "{architecture}: {off:?}");
        assert!(none < q8 && q8 < mixed, "{architecture}: {off:?}");
    }
}

#[test]
fn converted_trained_model_mostly_chooses_the_golden_tokens() {
    let Some((_lock, gpu)) = open_and_lock(CapabilityMask::default()) else { return };
    let whole = std::slice::from_ref(&(0..8));
    for (conversion, min_share) in [(WeightConversion::Q8, 0.95), (WeightConversion::Mixed, 0.9)] {
        let upload = UploadOptions { tiling: Tiling::DEFAULT, conversion };
        let steps = teacher_forced(&gpu, "psalm-7m-f16.gguf", whole, upload);
        let sure: Vec<_> = steps.iter().filter(|step| step.is_clear()).collect();
        let same = sure.iter().filter(|step| step.is_golden).count();
        println!("{conversion:?}: {same} of {} golden tokens", sure.len());
        assert!(same as f64 > min_share * sure.len() as f64, "{conversion:?}: {same} of {}", sure.len());
    }
}
