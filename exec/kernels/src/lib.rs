//! CPU kernels for quantised weights, scalar and SIMD, which all sum in the same order.
//!
//! The order of summation does not depend on the instruction set, the number of threads, the rows that a thread
//! computes, or the batch size. So a model generates the same tokens on every device
//! (`docs/decisions/0002-one-reduction-order.md`):
//!
//! - **Quantised weights.** The input of a matmul is rounded once to eight bits, in blocks as long as those of the
//!   weights (32 or 256 elements), each with an f32 scale. The products of a block, times the format's integer scales,
//!   are added as integers: this sum is exact, so its order does not matter. Then `sum = fma(weight_scale *
//!   activation_scale, total as f32, sum)`, block after block in one f32. The minima of a block are a second integer
//!   sum, which a second fma subtracts (`Q4_K`) or adds (`Q4_1`), see `scalar`.
//! - **F32, F16 and BF16 weights.** The sum has 32 lanes, and an fma adds the product of element j to lane j % 32. At
//!   the end, lanes i, i+8, i+16 and i+24 are added as (a + b) + (c + d), and the eight results as
//!   `((l0 + l4) + (l2 + l6)) + ((l1 + l5) + (l3 + l7))`.
//!
//! Rust neither reorders nor contracts float operations, so code without intrinsics (`elementwise`) gives the same
//! bits on every target. Dot products, and attention over an f16 cache, use intrinsics.
//!
//! Not here: the distribution of rows among threads. That is `hearth_runtime::cpu`.

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr, clippy::exit))]
// Generic code must be inlined into the function that enables an instruction set.
#![allow(clippy::inline_always)]

/// Matches on a weight [`Format`](hearth_profiles::Format): expands to `$plain!(dot)` for float weights and to
/// `$blocks!(block, row, dot)` for quantised weights. `block` is the block type, `row` the method of
/// [`Activations`](crate::Activations) that returns the input of one token, and `dot` the name of the dot product.
macro_rules! for_format {
    ($format:expr, $plain:ident, $blocks:ident) => {
        match $format {
            hearth_profiles::Format::F32 => $plain!(dot_f32),
            hearth_profiles::Format::F16 => $plain!(dot_f16),
            hearth_profiles::Format::Bf16 => $plain!(dot_bf16),
            hearth_profiles::Format::Q4_0 => $blocks!(BlockQ4_0, row32, dot_q4_0),
            hearth_profiles::Format::Q4_1 => $blocks!(BlockQ4_1, row32, dot_q4_1),
            hearth_profiles::Format::Q5_0 => $blocks!(BlockQ5_0, row32, dot_q5_0),
            hearth_profiles::Format::Q5_1 => $blocks!(BlockQ5_1, row32, dot_q5_1),
            hearth_profiles::Format::Q8_0 => $blocks!(BlockQ8_0, row32, dot_q8_0),
            hearth_profiles::Format::Iq4Nl => $blocks!(BlockIq4Nl, row32, dot_iq4_nl),
            hearth_profiles::Format::Mxfp4 => $blocks!(BlockMxfp4, row32, dot_mxfp4),
            hearth_profiles::Format::Q2K => $blocks!(BlockQ2K, row256, dot_q2_k),
            hearth_profiles::Format::Q3K => $blocks!(BlockQ3K, row256, dot_q3_k),
            hearth_profiles::Format::Q4K => $blocks!(BlockQ4K, row256, dot_q4_k),
            hearth_profiles::Format::Q5K => $blocks!(BlockQ5K, row256, dot_q5_k),
            hearth_profiles::Format::Q6K => $blocks!(BlockQ6K, row256, dot_q6_k),
            hearth_profiles::Format::Iq2Xxs => $blocks!(BlockIq2Xxs, row256, dot_iq2_xxs),
            hearth_profiles::Format::Iq2Xs => $blocks!(BlockIq2Xs, row256, dot_iq2_xs),
            hearth_profiles::Format::Iq2S => $blocks!(BlockIq2S, row256, dot_iq2_s),
            hearth_profiles::Format::Iq3Xxs => $blocks!(BlockIq3Xxs, row256, dot_iq3_xxs),
            hearth_profiles::Format::Iq3S => $blocks!(BlockIq3S, row256, dot_iq3_s),
            hearth_profiles::Format::Iq1S => $blocks!(BlockIq1S, row256, dot_iq1_s),
            hearth_profiles::Format::Iq1M => $blocks!(BlockIq1M, row256, dot_iq1_m),
            hearth_profiles::Format::Iq4Xs => $blocks!(BlockIq4Xs, row256, dot_iq4_xs),
        }
    };
}

/// Defines functions that are compiled twice: with and without the vector instructions of the target. Each function
/// gets an additional first argument `instructions`, which selects the version to run.
macro_rules! multiversion {
    ($($(#[$doc:meta])* $visibility:vis fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)+) => {$(
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        $visibility fn $name(instructions: $crate::InstructionSet, $($argument: $type),*) {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn generic($($argument: $type),*) $body

            // On other targets the vector instructions are enabled by default.
            #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
            #[allow(clippy::too_many_arguments)]
            fn native($($argument: $type),*) {
                generic($($argument),*);
            }
            match instructions.0 {
                None => generic($($argument),*),
                // SAFETY: these values exist only where the processor has the instructions.
                #[allow(unused_unsafe)]
                Some(_) => unsafe { native($($argument),*) },
            }
        }
    )+};
}
pub(crate) use multiversion;

pub(crate) mod activations;
pub mod attention;
pub(crate) mod blocks;
pub mod delta_net;
pub mod elementwise;
mod exponential;
pub mod interleaved;
pub mod matmul;
pub mod panel;
mod quantise;
pub(crate) mod scalar;

// Instruction sets by architecture. Only this list and the one in `panel` depend on the target.
#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(not(any(target_arch = "aarch64", target_arch = "x86_64")))]
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
use aarch64 as native;
#[cfg(not(any(target_arch = "aarch64", target_arch = "x86_64")))]
use portable as native;
#[cfg(target_arch = "x86_64")]
use x86_64 as native;

use hearth_profiles::Format;

pub use activations::Activations;
pub use blocks::dequantise;
pub use exponential::exponential;
pub use matmul::{Layout, Matrix};
pub(crate) use native::NativeKernels;
pub use quantise::quantise_row;

/// The instruction set with which a kernel runs. All instruction sets give the same results, bit for bit.
///
/// Except for [`InstructionSet::SCALAR`], values are created only by [`InstructionSet::detect`] and
/// [`InstructionSet::detect_all`], so a value proves that the processor has the instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InstructionSet(Option<NativeKernels>);

impl InstructionSet {
    /// Plain Rust without intrinsics: the reference with which tests compare the SIMD kernels.
    pub const SCALAR: InstructionSet = InstructionSet(None);

    /// Returns the fastest instruction set that this processor supports.
    pub fn detect() -> InstructionSet {
        InstructionSet(NativeKernels::detect_all().next_back())
    }

    /// Returns all instruction sets that this processor supports, from the scalar one to the fastest.
    pub fn detect_all() -> Vec<InstructionSet> {
        std::iter::once(None).chain(NativeKernels::detect_all().map(Some)).map(InstructionSet).collect()
    }

    /// Returns the name of the instruction set in traces, such as `avx2`.
    pub fn name(self) -> &'static str {
        self.0.map_or("scalar", NativeKernels::name)
    }
}

/// An error caused by invalid arguments of a kernel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// The number of bytes of a row does not match its format and its number of weights.
    #[error("a row of {length} {format} weights cannot have {found} bytes")]
    RowBytes { format: Format, length: usize, found: usize },
}

/// Returns the sum of eight lanes, added as a tree: first lanes at distance 4, then at distance 2, then at distance 1.
#[inline(always)]
pub(crate) fn tree_sum(lanes: [f32; 8]) -> f32 {
    let [l0, l1, l2, l3, l4, l5, l6, l7] = lanes;
    ((l0 + l4) + (l2 + l6)) + ((l1 + l5) + (l3 + l7))
}

/// Returns the sum of 32 lanes: adds lanes i, i + 8, i + 16 and i + 24, then the eight sums as [`tree_sum`] does.
#[inline(always)]
pub(crate) fn sum_lanes(lanes: [f32; 32]) -> f32 {
    tree_sum(std::array::from_fn(|i| (lanes[i] + lanes[i + 8]) + (lanes[i + 16] + lanes[i + 24])))
}

/// Returns the sum of 32 lanes after the products of the pairs in `rest` (fewer than 32) are added, one to each lane.
#[inline(always)]
pub(crate) fn sum_lanes_with_rest(mut lanes: [f32; 32], rest: impl Iterator<Item = (f32, f32)>) -> f32 {
    for (lane, (weight, value)) in lanes.iter_mut().zip(rest) {
        *lane = weight.mul_add(value, *lane);
    }
    sum_lanes(lanes)
}

/// Returns the dot product of two f32 rows of the same length, summed in 32 lanes.
#[inline(always)]
pub(crate) fn dot(row: &[f32], other: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 32];
    let ((chunks, rest), (other_chunks, other_rest)) = (row.as_chunks::<32>(), other.as_chunks::<32>());
    for (chunk, other) in chunks.iter().zip(other_chunks) {
        for ((lane, value), other) in lanes.iter_mut().zip(chunk).zip(other) {
            *lane = value.mul_add(*other, *lane);
        }
    }
    sum_lanes_with_rest(lanes, rest.iter().copied().zip(other_rest.iter().copied()))
}

#[cfg(test)]
mod tests;
