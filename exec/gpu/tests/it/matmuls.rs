//! Tests of GPU matmuls against scalar matmuls on the CPU (the oracle), in every format, layout, phase and variant.
//!
//! The oracle quantises its input like the GPU, so the integers are the same. Only the order in which floats are
//! added differs, and occasionally the rounding of a value at a tie. The bound is 1e-4 of the largest result.

use half::{bf16, f16};
use hearth_gpu::device::Gpu;
use hearth_gpu::kernels::matmul::{Phase, Tiling};
use hearth_gpu::kernels::packing::PackedFormat;
use hearth_gpu::matrix::GpuMatrix;
use hearth_gpu::tuning::candidate_tilings;
use hearth_gpu::{CapabilityMask, GpuError};
use hearth_kernels::{Layout, Matrix};
use hearth_profiles::Format;
use hearth_runtime::oracle;

use crate::gpu::{lock_gpu, open, open_and_lock, random_numbers, relative_difference};

/// Returns the bytes of a matrix of pseudo-random weights. In quantised formats any bytes are valid weights, but the
/// f16 scales and minima are set to small numbers.
pub fn random_weight_bytes(format: Format, rows: usize, length: usize, seed: u32) -> Vec<u8> {
    let row = format.row_bytes(length as u64).unwrap().0 as usize;
    let values = random_numbers(rows * length, seed).into_iter();
    // The bytes of a block, and the offsets of its scale and its minimum.
    let (block, offsets): (usize, &[usize]) = match format {
        Format::F32 => return values.flat_map(f32::to_le_bytes).collect(),
        Format::F16 => return values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect(),
        Format::Bf16 => return values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect(),
        Format::Q8_0 => (34, &[0]),
        Format::Q4_0 => (18, &[0]),
        Format::Q4K => (144, &[0, 2]),
        _ => (210, &[208]),
    };
    let mut state = seed;
    let mut bytes: Vec<u8> = (0..rows * row)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        })
        .collect();
    for (at, block) in bytes.chunks_exact_mut(block).enumerate() {
        for offset in offsets {
            let scale = f16::from_f32(0.01 + 0.001 * (at % 7) as f32);
            block[*offset..offset + 2].copy_from_slice(&scale.to_le_bytes());
        }
    }
    bytes
}

/// A matmul to test: a weight matrix, the inputs, and the results of the oracle.
struct Case {
    bytes: Vec<u8>,
    format: Format,
    rows: usize,
    length: usize,
    input: Vec<f32>,
    expected: Vec<f32>,
}

impl Case {
    fn new(format: Format, rows: usize, length: usize, tokens: usize) -> Case {
        let bytes = random_weight_bytes(format, rows, length, 7);
        let input = random_numbers(tokens * length, 3);
        let mut case = Case { bytes, format, rows, length, input, expected: Vec::new() };
        case.expected =
            case.input.chunks_exact(length).flat_map(|row| oracle::matvec(case.matrix(), row)).collect();
        case
    }

    fn matrix(&self) -> Matrix<'_> {
        Matrix {
            format: self.format,
            row_length: self.length,
            rows: self.rows,
            layout: Layout::Rows,
            bytes: &self.bytes,
        }
    }

    fn run<T: bytemuck::Pod>(&self, gpu: &Gpu, phase: Phase, tiling: Tiling, integers: bool) -> Vec<T> {
        let matrix = GpuMatrix::upload(gpu, self.matrix(), tiling).unwrap();
        run_matmul(gpu, &matrix, &self.input, phase, integers)
    }

    /// Compares the results of the GPU with those of the oracle. Returns the largest difference relative to the largest
    /// result. `what` describes the variant in failures.
    fn check(&self, gpu: &Gpu, phase: Phase, tiling: Tiling, what: &str) -> f32 {
        let off = relative_difference(&self.run(gpu, phase, tiling, false), &self.expected);
        assert!(off < 1e-4, "{} {phase:?} {tiling:?} {what}: off by {off}", self.format);
        off
    }
}

/// Runs a matmul on the GPU. Returns the results [tokens, rows], or the integer sums of blocks if `integers` is set.
pub fn run_matmul<T: bytemuck::Pod>(
    gpu: &Gpu,
    matrix: &GpuMatrix,
    input: &[f32],
    phase: Phase,
    integers: bool,
) -> Vec<T> {
    let (launches, out) = matrix.matmul_launches(gpu, input, phase, integers).unwrap();
    gpu.submit(&launches).unwrap();
    gpu.read(&out, (out.size_bytes() / 4) as usize).unwrap()
}

/// Returns the mask that disables all optional capabilities of a device.
pub fn plain_mask() -> CapabilityMask {
    let mask = CapabilityMask::default();
    CapabilityMask { no_packed_dot: true, no_subgroups: true, no_shader_f16: true, ..mask }
}

/// Returns the capability masks with which kernels are tested, with descriptions.
pub fn masks() -> [(CapabilityMask, &'static str); 5] {
    let all = CapabilityMask::default();
    [
        (all, "all capabilities"),
        (CapabilityMask { no_packed_dot: true, ..all }, "no packed dot products"),
        (CapabilityMask { no_shader_f16: true, ..all }, "no half precision"),
        (CapabilityMask { no_subgroups: true, ..all }, "no subgroups"),
        (plain_mask(), "no optional capabilities"),
    ]
}

/// Returns the tilings to test: all candidates of tuning if the mask is empty, otherwise one for each weight layout.
pub fn tilings(gpu: &Gpu, mask: CapabilityMask) -> Vec<Tiling> {
    let all = candidate_tilings(gpu.capabilities());
    assert!(all.contains(&Tiling::DEFAULT) && all.contains(&Tiling::BY_OUTPUT));
    if mask == CapabilityMask::default() { all } else { vec![Tiling::DEFAULT, Tiling::BY_OUTPUT] }
}

#[test]
fn matmuls_equal_the_oracle_in_every_variant() {
    let _lock = lock_gpu();
    for (mask, what) in masks() {
        let Some(gpu) = open(mask) else { return };
        for (packed, format) in PackedFormat::FILE_FORMATS {
            // Rows and tokens that do not fill a tile.
            let [one, many] = [1, 37].map(|tokens| Case::new(format, 100, 768, tokens));
            let mut worst = [0.0f32; 2];
            for tiling in tilings(&gpu, mask) {
                worst[0] = worst[0].max(one.check(&gpu, Phase::Decode, tiling, what));
                worst[1] = worst[1].max(many.check(&gpu, Phase::Prefill, tiling, what));
            }
            println!("{packed:?}, {what}: decode off by {:.1e}, prefill {:.1e}", worst[0], worst[1]);
        }
    }
}

#[test]
fn batches_of_every_size_and_long_rows_equal_the_oracle() {
    let Some((_lock, gpu)) = open_and_lock(CapabilityMask::default()) else { return };
    for format in [Format::Q8_0, Format::Q4K, Format::F16] {
        for tokens in [2, 7, 8, 9, 16, 17, 31, 33] {
            let case = Case::new(format, 100, 512, tokens);
            for tiling in Tiling::DEFAULT.batch_size_variants() {
                case.check(&gpu, Phase::Prefill, tiling, "a batch");
            }
        }
        // 128 threads quantise a chunk of 4096 inputs at once; the last chunk is not full.
        let case = Case::new(format, 8, 4096 * 2 + 512, 1);
        case.check(&gpu, Phase::Decode, Tiling::DEFAULT, "long rows");
    }
}

#[test]
fn matrix_larger_than_a_binding_is_split() {
    let mask = CapabilityMask { max_binding_bytes: Some(128 << 10), ..CapabilityMask::default() };
    let Some((_lock, gpu)) = open_and_lock(mask) else { return };
    for format in [Format::Q8_0, Format::Q6K] {
        let [one, many] = [1, 5].map(|tokens| Case::new(format, 1000, 512, tokens));
        let parts = GpuMatrix::upload(&gpu, one.matrix(), Tiling::DEFAULT).unwrap().parts.len();
        assert!(parts > 1, "{parts} parts");
        one.check(&gpu, Phase::Decode, Tiling::DEFAULT, "split");
        many.check(&gpu, Phase::Prefill, Tiling::DEFAULT, "split");
    }
    // Not even the rows of one workgroup fit.
    let wide = Case::new(Format::F32, 64, 4096, 1);
    let error = GpuMatrix::upload(&gpu, wide.matrix(), Tiling::DEFAULT).unwrap_err();
    assert!(matches!(error, GpuError::SmallBuffers { .. }), "{error}");
}

#[test]
fn both_phases_have_the_same_integers() {
    let _lock = lock_gpu();
    for (mask, what) in masks() {
        let Some(gpu) = open(mask) else { return };
        let quantised =
            PackedFormat::FILE_FORMATS.into_iter().filter(|(packed, _)| packed.block_length() > 0);
        for (_, format) in quantised {
            let case = Case::new(format, 64, 1024, 1);
            let mut seen: Option<Vec<i32>> = None;
            for phase in [Phase::Decode, Phase::Prefill] {
                for tiling in [Tiling::DEFAULT, Tiling::BY_OUTPUT] {
                    let integers = case.run::<i32>(&gpu, phase, tiling, true);
                    assert!(integers.iter().any(|&integer| integer != 0), "{what}");
                    let first = seen.get_or_insert_with(|| integers.clone());
                    assert!(*first == integers, "{} {phase:?} {tiling:?}, {what}", case.format);
                }
            }
        }
    }
}

#[test]
fn dimensions_without_a_kernel_are_rejected() {
    let Some((_lock, gpu)) = open_and_lock(CapabilityMask::default()) else { return };
    let upload = |format: Format, rows: usize, length: usize| {
        let bytes = vec![0; rows * format.row_bytes(length as u64).unwrap().0 as usize];
        GpuMatrix::upload(
            &gpu,
            Matrix { format, row_length: length, rows, layout: Layout::Rows, bytes: &bytes },
            Tiling::DEFAULT,
        )
        .unwrap_err()
    };
    assert!(matches!(upload(Format::F32, 4, 6), GpuError::UnsupportedDimension { found: 6, .. }));
    assert!(matches!(upload(Format::F32, 3, 8), GpuError::UnsupportedDimension { found: 3, .. }));
}
