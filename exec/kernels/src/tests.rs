//! Tests of the scalar kernels against f64 sums, and of the SIMD kernels against the scalar kernels, bit for bit.

use half::f16;
use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::matmul::{MatmulOutput, Matrix, matmul_rows, scalar_dot};
use super::*;

fn row_bytes(format: Format, length: usize) -> usize {
    format.row_bytes(length as u64).expect("whole blocks").0 as usize
}

/// Returns rows of random bits, in which scales and float weights have magnitudes from 0.0009 to 0.021.
fn random_rows(format: Format, rows: usize, length: usize, seed: u64) -> Vec<u8> {
    let mut stream = ChaCha8Rng::seed_from_u64(seed);
    let mut bytes = vec![0u8; rows * row_bytes(format, length)];
    stream.fill_bytes(&mut bytes);
    let mut number = || {
        let sign = if stream.next_u32() & 1 == 0 { 1.0 } else { -1.0 };
        sign * (0.001 + stream.next_u32() as f32 / u32::MAX as f32 * 0.02)
    };
    if format == Format::F32 {
        bytes.as_chunks_mut::<4>().0.iter_mut().for_each(|value| *value = number().to_le_bytes());
    } else if format == Format::Bf16 {
        let upper = |value: f32| ((value.to_bits() >> 16) as u16).to_le_bytes();
        bytes.as_chunks_mut::<2>().0.iter_mut().for_each(|value| *value = upper(number()));
    }
    set_scales(format, &mut bytes, || f16::from_f32(number()));
    bytes
}

/// Returns the byte offsets of the f16 values in a block of `format`: the scale, then the minimum if there is one.
fn f16_offsets(format: Format) -> &'static [usize] {
    match format {
        Format::F32 | Format::Bf16 | Format::Iq1M | Format::Mxfp4 => &[],
        Format::Q4_1 | Format::Q5_1 | Format::Q4K | Format::Q5K => &[0, 2],
        Format::Q2K => &[80, 82],
        Format::Q3K => &[108],
        Format::Q6K => &[208],
        _ => &[0],
    }
}

/// Returns the exponent of an `MXFP4` block with the largest scale up to `value`. Its scale is `2^(exponent - 128)`,
/// because the codebook is doubled.
fn power_of_two(value: f32) -> u8 {
    (value.abs().to_bits() >> 23) as u8 + 1
}

/// Sets the scales and the minima of all blocks.
fn set_scales(format: Format, bytes: &mut [u8], mut number: impl FnMut() -> f16) {
    for block in bytes.chunks_exact_mut(format.block_bytes() as usize) {
        for &at in f16_offsets(format) {
            block[at..at + 2].copy_from_slice(&number().to_le_bytes());
        }
        if format == Format::Mxfp4 {
            block[0] = power_of_two(number().to_f32());
        } else if format == Format::Iq1M {
            // The scale is in the upper four bits of four 16-bit integers.
            let scale = number().to_bits();
            for (at, [_, byte]) in block[48..].as_chunks_mut::<2>().0.iter_mut().enumerate() {
                *byte = *byte & 15 | ((scale >> (4 * at) & 15) as u8) << 4;
            }
        }
    }
}

fn random_activations(tokens: usize, length: usize, seed: u64) -> Activations {
    let mut stream = ChaCha8Rng::seed_from_u64(seed ^ 0x5eed);
    let mut activations = Activations::default();
    activations.resize(tokens, length);
    for value in activations.rows_mut() {
        *value = stream.next_u32() as f32 / u32::MAX as f32 * 4.0 - 2.0;
    }
    activations
}

/// Returns the bits of the result of the matmul `matrix * input`, [tokens, rows].
fn matmul_bits(instructions: InstructionSet, matrix: Matrix<'_>, input: &mut Activations) -> Vec<u32> {
    input.quantise_for_format(matrix.format, instructions);
    let tokens = input.tokens();
    let mut out = vec![0.0f32; tokens * matrix.rows];
    matmul_rows(instructions, matrix, input, &mut MatmulOutput::new(&mut out, tokens, matrix.rows));
    out.iter().map(|value| value.to_bits()).collect()
}

/// Returns the input row of a token, rounded as weights in `format` require.
fn rounded_input(format: Format, input: &Activations, token: usize) -> Vec<f64> {
    let block = format.block_len() as usize;
    let row = match block {
        1 => return input.plain_row(token).iter().map(|&v| f64::from(v)).collect(),
        32 => input.row32(token),
        _ => input.row256(token),
    };
    let quants = row.quants.iter().enumerate();
    quants.map(|(at, &quant)| f64::from(quant) * f64::from(row.scales[at / block])).collect()
}

/// Returns the part of each weight that comes from the minimum of its block: the weights if all quants were zero.
fn minima(format: Format, row: &[u8], length: usize) -> Vec<f32> {
    let quants = match format {
        Format::Q4_1 => 4..20,
        Format::Q5_1 => 4..24,
        Format::Q2K => 16..80,
        Format::Q4K => 16..144,
        Format::Q5K => 16..176,
        _ => return vec![0.0; length],
    };
    let mut zeroed = row.to_vec();
    for block in zeroed.chunks_exact_mut(format.block_bytes() as usize) {
        block[quants.clone()].fill(0);
    }
    dequantised(format, &zeroed, length)
}

/// Returns the sum of the magnitudes of all terms that a kernel adds. Products and minima are separate terms.
fn magnitude(format: Format, row: &[u8], weights: &[f32], input: &[f64]) -> f64 {
    let minima = minima(format, row, weights.len());
    let part = |at: usize| f64::from(weights[at].abs()) + 2.0 * f64::from(minima[at].abs());
    input.iter().enumerate().map(|(at, a)| part(at) * a.abs()).sum()
}

/// Returns rows of a matrix, of which there are a multiple of sixteen, in the interleaved layout.
fn interleaved_rows(matrix: Matrix<'_>) -> Vec<u8> {
    let mut out = vec![0; matrix.bytes.len()];
    interleaved::interleave(matrix.format, matrix.row_bytes(), matrix.bytes, &mut out);
    out
}

fn dequantised(format: Format, row: &[u8], length: usize) -> Vec<f32> {
    let mut weights = vec![0.0; length];
    dequantise(format, row, &mut weights).unwrap();
    weights
}

/// Compares a matmul of random numbers with each instruction set to the one without.
fn check_bits(
    format: Format,
    length: usize,
    rows: usize,
    tokens: usize,
    seed: u64,
) -> Result<(), TestCaseError> {
    let bytes = random_rows(format, rows, length, seed);
    let matrix = Matrix { format, row_length: length, rows, layout: Layout::Rows, bytes: &bytes };
    let mut input = random_activations(tokens, length, seed);
    let scalar = matmul_bits(InstructionSet::SCALAR, matrix, &mut input);
    for instructions in InstructionSet::detect_all() {
        let mut again = random_activations(tokens, length, seed);
        let found = matmul_bits(instructions, matrix, &mut again);
        prop_assert_eq!(&scalar, &found, "{} with {}", format, instructions.name());
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn every_instruction_set_and_every_batch_has_the_bits_of_the_oracle(
        seed: u64, blocks in 1usize..6, rows in 1usize..40, tokens in 1usize..30,
    ) {
        for &format in Format::ALL {
            // Rows of floats need not be a multiple of the 32 lanes, nor rows of blocks of 32 a multiple of the
            // blocks that are summed together.
            let ragged = match format.block_len() {
                1 => seed as usize % 31,
                32 => 32 * (seed as usize % 8),
                _ => 0,
            };
            let length = blocks * 256 + ragged;
            check_bits(format, length, rows, tokens, seed)?;
        }
    }

    #[test]
    fn one_token_has_the_bits_of_the_oracle(seed: u64, blocks in 1usize..72, rows in 1usize..7) {
        for &format in Format::ALL {
            let length = match format.block_len() {
                1 => 29 * blocks,
                block => block as usize * blocks,
            };
            check_bits(format, length, rows, 1, seed)?;
        }
    }

    #[test]
    fn interleaved_weights_have_the_bits_of_the_oracle(
        seed: u64, blocks in 1usize..12, groups in 1usize..4, tokens in prop_oneof![1usize..20, 60usize..80], more: bool,
    ) {
        for &format in Format::ALL.iter().filter(|&&format| interleaved::can_interleave(format, 16)) {
            // Panels have 32 blocks of 32 weights, and the rest of a row.
            let blocks = if more && format.block_len() == 32 { blocks + 30 } else { blocks };
            let (length, rows) = (format.block_len() as usize * blocks, 16 * groups);
            let bytes = random_rows(format, rows, length, seed);
            let matrix = Matrix { format, row_length: length, rows, layout: Layout::Rows, bytes: &bytes };
            let mut input = random_activations(tokens, length, seed);
            let scalar = matmul_bits(InstructionSet::SCALAR, matrix, &mut input);
            let out = interleaved_rows(matrix);
            for instructions in InstructionSet::detect_all() {
                let found = matmul_bits(instructions, Matrix { layout: Layout::Interleaved, bytes: &out, ..matrix }, &mut input);
                prop_assert_eq!(&scalar, &found, "{} with {}", format, instructions.name());
            }
            let mut row = vec![0; matrix.row_bytes()];
            interleaved::copy_row(format, &out[..16 * row.len()], seed as usize % 16, &mut row);
            prop_assert_eq!(&row[..], matrix.row(seed as usize % 16));
        }
    }

    #[test]
    fn the_oracle_is_within_rounding_of_exact_arithmetic(seed: u64, blocks in 1usize..9) {
        for &format in Format::ALL {
            let length = blocks * 256;
            let row = random_rows(format, 1, length, seed);
            let weights = dequantised(format, &row, length);
            let mut input = random_activations(1, length, seed);
            input.quantise_for_format(format, InstructionSet::SCALAR);
            let found = f64::from(scalar_dot(format, &row, &input, 0));

            let rounded = rounded_input(format, &input, 0);
            let exact: f64 = weights.iter().zip(&rounded).map(|(&w, a)| f64::from(w) * a).sum();
            // There is one rounding for each addition in a lane, for each level of the tree and in each scale; with
            // quantised weights, for each integer and its addition. Blocks of 32 with a minimum add two integers.
            let additions = if matches!(format, Format::Q4_1 | Format::Q5_1) { 2 } else { 1 };
            let steps = (additions * length / 32 + 8) as f64;
            let bound = steps * f64::from(f32::EPSILON) / 2.0 * magnitude(format, &row, &weights, &rounded);
            prop_assert!((found - exact).abs() <= bound, "{format}: {found} is not {exact} within {bound:e}");

            // Rounding changes each activation by at most half a step.
            let plain: Vec<f64> = input.plain_row(0).iter().map(|&v| f64::from(v)).collect();
            let block = if format.block_len() == 32 { 32 } else { 256 };
            let unrounded: f64 = weights.iter().zip(&plain).map(|(&w, a)| f64::from(w) * a).sum();
            let half_steps: f64 = weights.chunks(block).zip(plain.chunks(block)).map(|(w, a)| {
                let largest = a.iter().fold(0.0f64, |a, b| a.max(b.abs()));
                w.iter().map(|&w| f64::from(w.abs())).sum::<f64>() * largest / 127.0 * 0.500_01
            }).sum();
            prop_assert!((found - unrounded).abs() <= bound + half_steps, "{format}");
        }
    }
}

fn quantised() -> impl Iterator<Item = Format> {
    Format::ALL.iter().copied().filter(|format| format.block_len() > 1)
}

#[test]
fn extreme_values_do_not_overflow() {
    // Every byte of a block has an extreme value, which gives -128 in Q8_0, 63 in Q6_K with the scale -128, the ends
    // of the codebooks, and others. All activations are +127 or -127.
    let fills = [0x00, 0xff, 0x80, 0x7f, 0x0f, 0xf0];
    for (format, fill) in quantised().flat_map(|format| fills.map(|fill| (format, fill))) {
        let length = 1024; // some kernels multiply four blocks together
        let mut row = vec![fill; row_bytes(format, length)];
        if format == Format::Q6K && fill == 0xff {
            for block in row.chunks_mut(row_bytes(format, 256)) {
                block[192..208].fill(0x80);
            }
        }
        set_scales(format, &mut row, || f16::ONE);
        // One token uses dot products, 13 and 70 use panels, 70 also of packed weights.
        for (tokens, sign) in [(1, 1.0), (1, -1.0), (13, 1.0), (13, -1.0), (70, -1.0)] {
            let mut input = Activations::default();
            input.resize(tokens, length);
            input.rows_mut().fill(127.0 * sign);
            let matrix = Matrix { format, row_length: length, rows: 1, layout: Layout::Rows, bytes: &row };
            let bits = matmul_bits(InstructionSet::SCALAR, matrix, &mut input);
            for instructions in InstructionSet::detect_all() {
                let found = matmul_bits(instructions, matrix, &mut input);
                assert_eq!(found, bits, "{format}, {fill:#x}, {tokens} tokens with {}", instructions.name());
            }
            if interleaved::can_interleave(format, 16) {
                let rows = row.repeat(16);
                let rows = Matrix { rows: 16, bytes: &rows, ..matrix };
                let packed = interleaved_rows(rows);
                let packed = Matrix { layout: Layout::Interleaved, bytes: &packed, ..rows };
                let found = matmul_bits(InstructionSet::detect(), packed, &mut input);
                assert!(
                    found.iter().all(|&found| found == bits[0]),
                    "{format}, {fill:#x}, {tokens} tokens, packed"
                );
            }
            let weights = dequantised(format, &row, length);
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
    let length = 1280; // some kernels multiply four blocks together
    // A scale of MXFP4 is always finite.
    for format in quantised().filter(|&format| format != Format::Mxfp4) {
        let mut row = random_rows(format, 1, length, 3);
        for scale in [f16::NAN, f16::INFINITY, f16::NEG_INFINITY] {
            set_scales(format, &mut row, || scale);
            let matrix = Matrix { format, row_length: length, rows: 1, layout: Layout::Rows, bytes: &row };
            let sets = InstructionSet::detect_all().into_iter();
            for (instructions, tokens) in sets.flat_map(|set| [1, 13].map(|tokens| (set, tokens))) {
                let mut input = random_activations(tokens, length, 5);
                let bits = matmul_bits(instructions, matrix, &mut input);
                let none = bits.iter().all(|&bits| !f32::from_bits(bits).is_finite());
                assert!(none, "{format}, {} tokens with {}", tokens, instructions.name());
            }
            let weights = dequantised(format, &row, length);
            assert!(weights.iter().any(|weight| !weight.is_finite()), "{format}");
        }
    }
}

#[test]
fn every_exponent_of_mxfp4_gives_the_same_bits() {
    // Dot products sum four blocks together and then the fifth one. Row n has exponent n in one block, and small
    // exponents in the others, so that no row adds infinities of both signs.
    let length = 5 * 32;
    let mut rows = random_rows(Format::Mxfp4, 256, length, 11);
    for (row, blocks) in rows.as_chunks_mut::<17>().0.as_chunks_mut::<5>().0.iter_mut().enumerate() {
        for (at, block) in blocks.iter_mut().enumerate() {
            block[0] = if at == row % 5 { row as u8 } else { at as u8 };
        }
    }
    let matrix =
        Matrix { format: Format::Mxfp4, row_length: length, rows: 256, layout: Layout::Rows, bytes: &rows };
    // One token uses dot products, 13 and 70 use panels, 70 also of packed weights.
    for tokens in [1, 13, 70] {
        let mut input = random_activations(tokens, length, 5);
        let scalar = matmul_bits(InstructionSet::SCALAR, matrix, &mut input);
        assert!(scalar.iter().all(|&bits| !f32::from_bits(bits).is_nan()));
        let packed = interleaved_rows(matrix);
        let packed = Matrix { layout: Layout::Interleaved, bytes: &packed, ..matrix };
        for instructions in InstructionSet::detect_all() {
            for matrix in [matrix, packed] {
                let found = matmul_bits(instructions, matrix, &mut input);
                assert_eq!(found, scalar, "{tokens} tokens with {}", instructions.name());
            }
        }
    }
}
