//! What exactly is the dot product of a stored row and an activation row?
//!
//! The oracle: one function a format, written for reading. The SIMD kernels must give the same bits. The
//! order of summation is that of [`super`]; each function states what is special to its format.

// Indices are the definition here: lane i, element j.
#![allow(clippy::needless_range_loop)]

mod blocks32;
mod floats;
mod k_quants;

pub(crate) use blocks32::dot_q8_0;
pub(crate) use floats::{dot_f16, dot_f32};
pub(crate) use k_quants::{dot_q4_k, dot_q6_k};
