//! Quantisation of rows to `Q8_0` and `Q4_0`, for KV caches.
//!
//! The formulas are those of the reference Python package `gguf`, so that the blocks are equal byte for byte: the scale
//! is `max |x| / 127`, or the element x of the largest magnitude divided by -8; an element is rounded to the nearest
//! multiple of the scale. The scale is stored in f16, but elements are divided by the f32 scale.
//!
//! Not here: the rounding of activations, whose scale is f32 ([`super::activations`]).

use half::f16;
use hearth_profiles::Format;

/// Number of elements in a block.
const BLOCK: usize = 32;

/// Quantises `row` to blocks of `format`, `Q8_0` or `Q4_0`. An element that is not finite makes its block NaN.
///
/// # Panics
/// If the format is another one, or if the lengths do not match.
pub fn quantise_row(format: Format, row: &[f32], out: &mut [u8]) {
    let (blocks, rest) = row.as_chunks::<BLOCK>();
    assert!(rest.is_empty(), "a row of {} elements must be whole blocks", row.len());
    let block_bytes = format.block_bytes() as usize;
    assert_eq!(
        out.len(),
        blocks.len() * block_bytes,
        "the output must have a block for each block of the row"
    );
    for (block, out) in blocks.iter().zip(out.chunks_exact_mut(block_bytes)) {
        let (scale_out, quants) = out.split_at_mut(2);
        let scale = match format {
            _ if block.iter().any(|x| !x.is_finite()) => {
                quants.fill(1);
                f32::NAN
            }
            Format::Q8_0 => quantise_8_bit(block, quants),
            Format::Q4_0 => quantise_4_bit(block, quants),
            other => panic!("a KV cache in {other} is not supported"),
        };
        scale_out.copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    }
}

/// Returns the scale of a block of `Q8_0`, and writes its 32 integers.
fn quantise_8_bit(block: &[f32; BLOCK], quants: &mut [u8]) -> f32 {
    let scale = block.iter().fold(0.0f32, |max, x| max.max(x.abs())) / 127.0;
    let inverse = inverse(scale);
    for (quant, x) in quants.iter_mut().zip(block) {
        *quant = ((x * inverse).round() as i8).cast_unsigned();
    }
    scale
}

/// Returns the scale of a block of `Q4_0`, and writes its 32 integers: the first 16 in the low halves of the bytes, the
/// last 16 in the high halves.
fn quantise_4_bit(block: &[f32; BLOCK], quants: &mut [u8]) -> f32 {
    let largest = block.iter().fold(0.0f32, |largest, &x| if x.abs() > largest.abs() { x } else { largest });
    let scale = largest / -8.0;
    let inverse = inverse(scale);
    // In f64, so that the product is not rounded before the addition.
    let quant = |x: f32| (f64::from(x) * f64::from(inverse) + 8.5).clamp(0.0, 15.0) as u8;
    let (first, last) = block.split_at(BLOCK / 2);
    for (byte, (&low, &high)) in quants.iter_mut().zip(first.iter().zip(last)) {
        *byte = quant(low) | quant(high) << 4;
    }
    scale
}

/// Returns `1 / scale`, or 0 if the scale is 0 or too small for an inverse.
fn inverse(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() { inverse } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dequantise;

    /// Returns 32 elements of about unit size that a Python script can compute too.
    fn block() -> Vec<f32> {
        (0..32u32).map(|at| ((at * 37 + at * at * 11) % 64) as f32 / 32.0 - 1.0).collect()
    }

    /// Checks the blocks of `gguf.quants.quantize` for [`block`] with the elements at odd indices negated and halved.
    #[test]
    fn blocks_equal_those_of_the_gguf_package() {
        let row: Vec<f32> =
            block().iter().enumerate().map(|(at, x)| if at % 2 == 1 { -x / 2.0 } else { *x }).collect();
        for (format, expected) in [(Format::Q8_0, Q8_0_BLOCK), (Format::Q4_0, Q4_0_BLOCK)] {
            let mut bytes = vec![0; format.block_bytes() as usize];
            quantise_row(format, &row, &mut bytes);
            assert_eq!(bytes, expected, "{format}");
        }
    }

    const Q8_0_BLOCK: &[u8] = &[
        0x08, 0x20, 0x81, 0xe0, 0x57, 0x1c, 0x91, 0x28, 0x28, 0x04, 0x20, 0x30, 0x77, 0x2c, 0x30, 0xf8, 0x47,
        0x14, 0xc0, 0x00, 0x99, 0x3c, 0xd0, 0xc8, 0x67, 0x24, 0x5f, 0xd0, 0xb9, 0xcc, 0x6f, 0x18, 0x89, 0x34,
    ];
    const Q4_0_BLOCK: &[u8] = &[
        0x00, 0x30, 0x40, 0x86, 0x2e, 0xca, 0x51, 0x5b, 0xfb, 0xa8, 0xea, 0x5b, 0x4f, 0x5b, 0xfb, 0xa8, 0x1d,
        0xb9,
    ];

    #[test]
    fn error_is_at_most_half_a_step_and_extremes_are_defined() {
        for (format, step) in [(Format::Q8_0, 1.0 / 127.0), (Format::Q4_0, 1.0 / 8.0)] {
            let restored = |row: &[f32]| {
                let mut bytes = vec![0; format.block_bytes() as usize];
                quantise_row(format, row, &mut bytes);
                let mut out = vec![0.0; row.len()];
                dequantise(format, &bytes, &mut out).expect("a whole block");
                out
            };
            let row = block();
            // The f16 scale adds an error; the largest positive element of Q4_0 can be cut off by half a step more.
            for (x, y) in row.iter().zip(restored(&row)) {
                assert!((x - y).abs() <= step * 1.02, "{format}: {x} {y}");
            }
            assert_eq!(restored(&[0.0; 32]), [0.0; 32]);
            assert!(restored(&[1e-45; 32]).iter().all(|x| *x == 0.0));
            let mut broken = block();
            broken[7] = f32::INFINITY;
            assert!(restored(&broken).iter().all(|x| x.is_nan()));
        }
    }
}
