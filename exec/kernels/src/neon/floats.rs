//! Dot products of F32, F16 and BF16 weights with f32 activations, and attention over an f16 cache, in NEON.
//!
//! The 32 lanes of a sum (see [`super::super`]) are eight registers of four lanes.

use half::f16;

use super::intrinsics::vdupq_n_f32 as splat; // `attention_f16` uses this name
#[allow(clippy::wildcard_imports)] // intrinsics carry their architecture in their names
use super::intrinsics::*;
use super::per_token;
use crate::attention::attention_f16;
use crate::blocks::bf16_to_f32;

/// Converts four f16 values to f32.
#[inline(always)]
fn widen(halves: [u8; 8]) -> float32x4_t {
    vcvt_f32_f16(vreinterpret_f16_u16(cast(halves)))
}

/// Converts four BF16 values to f32. A BF16 value is the upper half of the corresponding f32.
#[inline(always)]
fn upper(halves: [u8; 8]) -> float32x4_t {
    cast(vshll_n_u16::<16>(cast(halves)))
}

#[inline(always)]
fn plain(bytes: [u8; 16]) -> float32x4_t {
    cast(bytes)
}

/// Adds the products of the last elements of a row, `rest` (fewer than 32), to the 32 lanes and returns the sum of the
/// lanes, in the order of [`crate::sum_lanes`].
#[inline]
fn finish(lanes: [float32x4_t; 8], rest: impl ExactSizeIterator<Item = (f32, f32)>) -> f32 {
    if rest.len() == 0 {
        let [a, b, c, d, e, f, g, h] = lanes;
        let low = vaddq_f32(vaddq_f32(a, c), vaddq_f32(e, g));
        let high = vaddq_f32(vaddq_f32(b, d), vaddq_f32(f, h));
        let four = vaddq_f32(low, high);
        let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
        let [first, second]: [f32; 2] = cast(two);
        return first + second;
    }
    crate::sum_lanes_with_rest(cast(lanes), rest)
}

/// Defines dot products for float weights. Arguments of each format: the number of bytes of a weight, the function that
/// converts four weights to f32, and the closure that converts a single weight to f32.
///
/// The 32 lanes of one token are eight registers. With several tokens, each pass computes half of the lanes, so that
/// the lanes of all tokens stay in registers.
macro_rules! dots {
    ($($name:ident, $one_row:ident: $bytes:literal, $four:ident, $one:expr;)+) => {$(
        #[inline]
        pub(crate) fn $name<P, const T: usize>(_: P, rows: &[&[u8]; 4], input: &[&[f32]; T]) -> [[f32; 4]; T] {
            let mut dots = [[0.0; 4]; T];
            for (r, row) in rows.iter().enumerate() {
                for (dots, dot) in dots.iter_mut().zip($one_row(row, input)) {
                    dots[r] = dot;
                }
            }
            dots
        }

        #[inline]
        fn $one_row<const T: usize>(row: &[u8], input: &[&[f32]; T]) -> [f32; T] {
            #[inline]
            fn pass<const R: usize, const T: usize>(
                chunks: &[[u8; 32 * $bytes]],
                values: &[&[[f32; 32]]; T],
                first: usize,
                all: &mut [[float32x4_t; 8]; T],
            ) {
                let mut lanes = [[vdupq_n_f32(0.0); R]; T];
                for (at, chunk) in chunks.iter().enumerate() {
                    let chunk = &chunk.as_chunks::<{ 4 * $bytes }>().0[first..first + R];
                    for part in 0..R {
                        let weights = $four(chunk[part]);
                        for t in 0..T {
                            let values = cast(values[t][at].as_chunks::<4>().0[first + part]);
                            lanes[t][part] = vfmaq_f32(lanes[t][part], weights, values);
                        }
                    }
                }
                for t in 0..T {
                    all[t][first..first + R].copy_from_slice(&lanes[t]);
                }
            }
            let (chunks, rest) = row.as_chunks::<{ 32 * $bytes }>();
            let values: [&[[f32; 32]]; T] = per_token(input, |input| &input.as_chunks().0[..chunks.len()]);
            let mut lanes = [[vdupq_n_f32(0.0); 8]; T];
            if T == 1 {
                pass::<8, T>(chunks, &values, 0, &mut lanes);
            } else {
                pass::<4, T>(chunks, &values, 0, &mut lanes);
                pass::<4, T>(chunks, &values, 4, &mut lanes);
            }
            let mut sums = [0.0; T];
            for t in 0..T {
                let rest = rest.as_chunks::<$bytes>().0.iter().map($one);
                sums[t] = finish(lanes[t], rest.zip(input[t][32 * chunks.len()..].iter().copied()));
            }
            sums
        }
    )+};
}
dots! {
    dot_f16, row_f16: 2, widen, |bytes| f16::from_le_bytes(*bytes).to_f32();
    dot_bf16, row_bf16: 2, upper, |bytes| bf16_to_f32(*bytes);
    dot_f32, row_f32: 4, plain, |bytes| f32::from_le_bytes(*bytes);
}

#[inline(always)]
fn fma(factor: float32x4_t, values: float32x4_t, sums: float32x4_t) -> float32x4_t {
    vfmaq_f32(sums, factor, values)
}

attention_f16! { 4, 16 }
