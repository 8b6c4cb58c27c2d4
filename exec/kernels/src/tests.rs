//! Tests of the scalar kernels against f64 sums, and of all other kernels against the scalar ones, bit for bit.

use half::f16;
use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::blocks::ScaledBlock;
use super::matmul::{MatmulOutput, Matrix, matmul_rows, scalar_dot};
use super::*;

/// Returns rows of random bits with f16 scales and float weights of magnitude 0.001 to 0.021.
fn random_rows(format: KernelFormat, rows: usize, length: usize, seed: u64) -> Vec<u8> {
    let mut stream = ChaCha8Rng::seed_from_u64(seed);
    let mut bytes = vec![0u8; rows * format.row_bytes(length).expect("whole blocks")];
    stream.fill_bytes(&mut bytes);
    let mut number = || {
        let sign = if stream.next_u32() & 1 == 0 { 1.0 } else { -1.0 };
        sign * (0.001 + stream.next_u32() as f32 / u32::MAX as f32 * 0.02)
    };
    if format == KernelFormat::F32 {
        bytes.as_chunks_mut::<4>().0.iter_mut().for_each(|value| *value = number().to_le_bytes());
    } else if format == KernelFormat::Bf16 {
        let upper = |value: f32| ((value.to_bits() >> 16) as u16).to_le_bytes();
        bytes.as_chunks_mut::<2>().0.iter_mut().for_each(|value| *value = upper(number()));
    }
    set_f16_values(format, &mut bytes, || f16::from_f32(number()));
    bytes
}

/// Returns the byte offsets of the f16 values of a block: the scale, then the minimum.
fn f16_offsets(format: KernelFormat) -> &'static [usize] {
    match format {
        KernelFormat::F32 | KernelFormat::Bf16 => &[],
        KernelFormat::Q4_1 | KernelFormat::Q5_1 | KernelFormat::Q4K | KernelFormat::Q5K => &[0, 2],
        KernelFormat::Q2K => &[80, 82],
        KernelFormat::Q3K => &[108],
        KernelFormat::Q6K => &[208],
        _ => &[0],
    }
}

/// Overwrites the f16 values of all blocks.
fn set_f16_values(format: KernelFormat, bytes: &mut [u8], mut number: impl FnMut() -> f16) {
    for block in bytes.chunks_exact_mut(format.format().block_bytes() as usize) {
        for &at in f16_offsets(format) {
            block[at..at + 2].copy_from_slice(&number().to_le_bytes());
        }
    }
}

/// Returns random activations from -2 to 2.
fn random_activations(tokens: usize, length: usize, seed: u64) -> Activations {
    let mut stream = ChaCha8Rng::seed_from_u64(seed ^ 0x5eed);
    let mut activations = Activations::default();
    activations.resize(tokens, length);
    for value in activations.rows_mut() {
        *value = stream.next_u32() as f32 / u32::MAX as f32 * 4.0 - 2.0;
    }
    activations
}

/// Returns the bits of the matmul of `matrix` and `input`, [tokens, rows].
fn matmul_bits(instructions: InstructionSet, matrix: Matrix<'_>, input: &mut Activations) -> Vec<u32> {
    input.prepare(matrix.format.input_kind(), instructions);
    let tokens = input.tokens();
    let mut out = vec![0.0f32; tokens * matrix.rows];
    let shared = MatmulOutput::new(&mut out, tokens, matrix.rows);
    // SAFETY: no other thread writes `out`.
    unsafe { matmul_rows(instructions, matrix, 0, matrix.rows, input, shared) };
    out.iter().map(|value| value.to_bits()).collect()
}

/// Returns the input row of a token, rounded as the format requires.
fn rounded_input(format: KernelFormat, input: &Activations, token: usize) -> Vec<f64> {
    let (row, block) = match format.input_kind() {
        InputKind::Plain => return input.plain_row(token).iter().map(|&v| f64::from(v)).collect(),
        InputKind::Blocks32 => (input.row32(token), 32),
        InputKind::Blocks256 => (input.row256(token), 256),
    };
    let quants = row.quants.iter().enumerate();
    quants.map(|(at, &quant)| f64::from(quant) * f64::from(row.scales[at / block])).collect()
}

/// Returns the minimum that belongs to the weight at `at`; zero for formats without minima.
fn minimum(format: KernelFormat, row: &[u8], at: usize) -> f32 {
    fn block<B: ScaledBlock>(row: &[u8], at: usize) -> &B {
        &blocks::blocks(row)[at]
    }
    let of_eight = |block_minimum: f32, (_, minima): (u64, u64)| {
        block_minimum * f32::from(minima.to_le_bytes()[at % 256 / 32])
    };
    match format {
        KernelFormat::Q2K => {
            let block: &blocks::BlockQ2K = block(row, at / 256);
            block.minimum() * f32::from(block.packed[at % 256 / 16] >> 4)
        }
        KernelFormat::Q4K => {
            let block: &blocks::BlockQ4K = block(row, at / 256);
            of_eight(block.minimum(), block.scales_and_minima())
        }
        KernelFormat::Q5K => {
            let block: &blocks::BlockQ5K = block(row, at / 256);
            of_eight(block.minimum(), block.scales_and_minima())
        }
        KernelFormat::Q4_1 => block::<blocks::BlockQ4_1>(row, at / 32).minimum(),
        KernelFormat::Q5_1 => block::<blocks::BlockQ5_1>(row, at / 32).minimum(),
        _ => 0.0,
    }
}

/// Returns the sum of the magnitudes of all terms that a kernel adds, with products and minima counted separately.
fn magnitude(format: KernelFormat, row: &[u8], weights: &[f32], input: &[f64]) -> f64 {
    let part = |at: usize| f64::from(weights[at].abs()) + 2.0 * f64::from(minimum(format, row, at).abs());
    input.iter().enumerate().map(|(at, a)| part(at) * a.abs()).sum()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn every_instruction_set_and_every_batch_has_the_bits_of_the_oracle(
        seed: u64, blocks in 1usize..6, rows in 1usize..40, tokens in 1usize..30,
    ) {
        for format in KernelFormat::ALL {
            // Rows of floats need not be a multiple of the 32 lanes, nor rows of blocks of 32 a multiple of the
            // blocks that are summed together.
            let ragged = match format.format().block_len() {
                1 => seed as usize % 31,
                32 => 32 * (seed as usize % 8),
                _ => 0,
            };
            let length = blocks * 256 + ragged;
            let bytes = random_rows(format, rows, length, seed);
            let matrix = Matrix { format, length, rows, bytes: &bytes };
            let mut input = random_activations(tokens, length, seed);
            let scalar = matmul_bits(InstructionSet::SCALAR, matrix, &mut input);
            for instructions in InstructionSet::available() {
                let mut again = random_activations(tokens, length, seed);
                let found = matmul_bits(instructions, matrix, &mut again);
                prop_assert_eq!(&scalar, &found, "{} with {}", format, instructions.name());
            }
        }
    }

    #[test]
    fn the_oracle_is_within_rounding_of_exact_arithmetic(seed: u64, blocks in 1usize..9) {
        for format in KernelFormat::ALL {
            let length = blocks * 256;
            let row = random_rows(format, 1, length, seed);
            let mut weights = vec![0.0; length];
            dequantise(format, &row, &mut weights).unwrap();
            let mut input = random_activations(1, length, seed);
            input.prepare(format.input_kind(), InstructionSet::SCALAR);
            let found = f64::from(scalar_dot(format, &row, &input, 0));

            let rounded = rounded_input(format, &input, 0);
            let exact: f64 = weights.iter().zip(&rounded).map(|(&w, a)| f64::from(w) * a).sum();
            // There is one rounding for each addition in a lane, for each level of the tree and in each scale; with
            // quantised weights, for each integer and its addition. Blocks of 32 with a minimum add two integers.
            let additions = if matches!(format, KernelFormat::Q4_1 | KernelFormat::Q5_1) { 2 } else { 1 };
            let steps = (additions * length / 32 + 8) as f64;
            let bound = steps * f64::from(f32::EPSILON) / 2.0 * magnitude(format, &row, &weights, &rounded);
            prop_assert!((found - exact).abs() <= bound, "{format}: {found} is not {exact} within {bound:e}");

            // Rounding changes each activation by at most half a step.
            let plain: Vec<f64> = input.plain_row(0).iter().map(|&v| f64::from(v)).collect();
            let block = if format.input_kind() == InputKind::Blocks32 { 32 } else { 256 };
            let unrounded: f64 = weights.iter().zip(&plain).map(|(&w, a)| f64::from(w) * a).sum();
            let half_steps: f64 = weights.chunks(block).zip(plain.chunks(block)).map(|(w, a)| {
                let largest = a.iter().fold(0.0f64, |a, b| a.max(b.abs()));
                w.iter().map(|&w| f64::from(w.abs())).sum::<f64>() * largest / 127.0 * 0.500_01
            }).sum();
            prop_assert!((found - unrounded).abs() <= bound + half_steps, "{format}");
        }
    }
}

fn quantised() -> impl Iterator<Item = KernelFormat> {
    KernelFormat::ALL.into_iter().filter(|format| format.input_kind() != InputKind::Plain)
}

#[test]
fn extreme_values_do_not_overflow() {
    // Every byte of a block has an extreme value, which gives -128 in Q8_0, 63 in Q6_K with the scale -128, the ends
    // of the codebooks, and others. All activations are +127 or -127.
    let fills = [0x00, 0xff, 0x80, 0x7f, 0x0f, 0xf0];
    for (format, fill) in quantised().flat_map(|format| fills.map(|fill| (format, fill))) {
        let length = 256;
        let mut row = vec![fill; format.row_bytes(length).unwrap()];
        if format == KernelFormat::Q6K && fill == 0xff {
            row[192..208].fill(0x80);
        }
        set_f16_values(format, &mut row, || f16::ONE);
        // One token uses dot products, 13 use panels.
        for (tokens, sign) in [(1, 1.0), (1, -1.0), (13, 1.0), (13, -1.0)] {
            let mut input = Activations::default();
            input.resize(tokens, length);
            input.rows_mut().fill(127.0 * sign);
            let matrix = Matrix { format, length, rows: 1, bytes: &row };
            let bits = matmul_bits(InstructionSet::SCALAR, matrix, &mut input);
            for instructions in InstructionSet::available() {
                let found = matmul_bits(instructions, matrix, &mut input);
                assert_eq!(found, bits, "{format}, {fill:#x}, {tokens} tokens with {}", instructions.name());
            }
            let mut weights = vec![0.0; length];
            dequantise(format, &row, &mut weights).unwrap();
            let terms: Vec<f64> = weights.iter().map(|&w| f64::from(w) * 127.0 * f64::from(sign)).collect();
            let exact: f64 = terms.iter().sum();
            let found = f64::from(f32::from_bits(bits[0]));
            let seen = vec![127.0; length];
            let bound = 1e-6 * magnitude(format, &row, &weights, &seen);
            assert!((found - exact).abs() <= bound, "{format}, {fill:#x}: {found} is not {exact}");
        }
    }
}

#[test]
fn non_finite_scales_give_non_finite_results() {
    for format in quantised() {
        let mut row = random_rows(format, 1, 512, 3);
        for scale in [f16::NAN, f16::INFINITY, f16::NEG_INFINITY] {
            set_f16_values(format, &mut row, || scale);
            let matrix = Matrix { format, length: 512, rows: 1, bytes: &row };
            for (instructions, tokens) in
                InstructionSet::available().into_iter().flat_map(|set| [1, 13].map(|tokens| (set, tokens)))
            {
                let mut input = random_activations(tokens, 512, 5);
                let bits = matmul_bits(instructions, matrix, &mut input);
                let none = bits.iter().all(|&bits| !f32::from_bits(bits).is_finite());
                assert!(none, "{format}, {} tokens with {}", tokens, instructions.name());
            }
            let mut weights = vec![0.0; 512];
            dequantise(format, &row, &mut weights).unwrap();
            assert!(weights.iter().any(|weight| !weight.is_finite()), "{format}");
        }
    }
}
