//! Instruction sets of 64-bit ARM processors: detection, and dispatch of kernels.
//!
//! All of these processors have NEON. Dot products of bytes (`dotprod`, ARMv8.4) and matmuls of bytes (`i8mm`,
//! ARMv8.6) are detected at run time.
//!
//! Not here: the kernels, see [`super::neon`] and [`super::panel`].

use std::arch::is_aarch64_feature_detected;

use half::f16;

use super::matmul::{MatmulTask, dot_tiles};
use super::neon::{self, BaseNeon, ByteDot, Dotprod};
use super::{blocks, panel};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NativeKernels {
    /// NEON without extensions.
    Neon,
    /// NEON with dot products of four bytes (`dotprod`).
    Dotprod,
    /// NEON with dot products of four bytes and matmuls of 2x8 byte matrices (`dotprod` and `i8mm`).
    I8mm,
}

impl NativeKernels {
    /// All instruction sets, from the slowest to the fastest.
    pub(super) const ALL: [NativeKernels; 3] =
        [NativeKernels::Neon, NativeKernels::Dotprod, NativeKernels::I8mm];

    pub(super) fn is_available(self) -> bool {
        let dotprod = is_aarch64_feature_detected!("dotprod");
        is_aarch64_feature_detected!("neon")
            && match self {
                NativeKernels::Neon => true,
                NativeKernels::Dotprod => dotprod,
                NativeKernels::I8mm => dotprod && is_aarch64_feature_detected!("i8mm"),
            }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            NativeKernels::Neon => "neon",
            NativeKernels::Dotprod => "dotprod",
            NativeKernels::I8mm => "i8mm",
        }
    }

    /// Computes a part of a matmul with panels or with dot products, whichever is faster.
    ///
    /// # Safety
    /// The processor has the instructions of `self`, and no other thread writes the rows of the task.
    pub(super) unsafe fn multiply(self, task: MatmulTask<'_>) {
        // SAFETY: the caller's promise; `I8mm` implies `dotprod`.
        unsafe {
            match (self, panel::is_profitable(task.matrix.format, task.input.tokens())) {
                (NativeKernels::Neon, true) => panel::neon::matmul::<BaseNeon>(task),
                (NativeKernels::Dotprod, true) => panel::neon::matmul::<Dotprod>(task),
                (NativeKernels::I8mm, true) => panel::neon::matmul::<panel::neon::I8mm>(task),
                (NativeKernels::Neon, false) => matmul_by_dots::<BaseNeon>(task),
                (NativeKernels::Dotprod | NativeKernels::I8mm, false) => matmul_by_dots::<Dotprod>(task),
            }
        }
    }

    #[allow(clippy::unused_self)] // the value proves that the processor has the instructions
    pub(super) fn scores_f16(self, query: &[f32], scale: f32, keys: &[f16], scores: &mut [f32]) {
        // SAFETY: this value exists only where the processor has NEON.
        unsafe { neon::scores_f16(query, scale, keys, scores) };
    }

    #[allow(clippy::unused_self)] // the value proves that the processor has the instructions
    pub(super) fn sum_values_f16(self, probabilities: &[f32], values: &[f16], out: &mut [f32]) {
        // SAFETY: this value exists only where the processor has NEON.
        unsafe { neon::sum_values_f16(probabilities, values, out) };
    }
}

/// Computes a part of a matmul with dot products.
///
/// # Safety
/// The processor has the instructions of `P`, and no other thread writes the rows of the task.
#[target_feature(enable = "neon")]
#[allow(unused_unsafe)] // the loops have `unsafe` blocks of their own
unsafe fn matmul_by_dots<P: ByteDot>(task: MatmulTask<'_>) {
    macro_rules! plain {
        ($dot:ident) => {
            dot_tiles!(task, plain_row, neon::$dot)
        };
    }
    macro_rules! blocks {
        ($block:ident, row32, $dot:ident) => {
            dot_tiles!(task, row32, neon::dot32::<P, blocks::$block, _>)
        };
        ($block:ident, row256, $dot:ident) => {
            dot_tiles!(task, row256, neon::dot256::<P, blocks::$block, _>)
        };
    }
    // SAFETY: the caller's promise.
    unsafe { for_format!(task.matrix.format, plain, blocks) };
}
