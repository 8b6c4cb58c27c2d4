//! The scalar dot products, which define the result of every other kernel.
//!
//! There is one simple function for each format: the oracle whose results the SIMD kernels must reproduce bit for
//! bit. The order of summation is that of [`super`]; each function documents what is special to its format.

mod blocks32;
mod floats;
mod i_quants;
mod k_quants;

pub(crate) use blocks32::{dot_iq4_nl, dot_q4_0, dot_q4_1, dot_q5_0, dot_q5_1, dot_q8_0};
pub(crate) use floats::{dot_bf16, dot_f16, dot_f32};
pub(crate) use i_quants::{dot_iq1_s, dot_iq4_xs};
pub(crate) use k_quants::{dot_q2_k, dot_q3_k, dot_q4_k, dot_q5_k, dot_q6_k};

/// Returns the integer dot product of a block: the sum of `weight(j)` times activation j.
#[inline(always)]
fn total(quants: &[i8], weight: impl Fn(usize) -> i32) -> i32 {
    quants.iter().enumerate().map(|(j, &activation)| weight(j) * i32::from(activation)).sum()
}
