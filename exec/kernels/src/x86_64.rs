//! Instruction sets of x86-64 processors: detection, and dispatch of kernels.
//!
//! Not here: the kernels, see [`super::avx2`] and [`super::panel`].

use half::f16;

use super::matmul::{MatmulTask, dot_tiles};
use super::{avx2, panel};

/// A vector instruction set that not every x86-64 processor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NativeKernels {
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX2, FMA, F16C, AVX-512 (F, BW, VL) and VNNI.
    Avx512,
}

impl NativeKernels {
    /// All instruction sets, from the slowest to the fastest.
    pub(super) const ALL: [NativeKernels; 2] = [NativeKernels::Avx2, NativeKernels::Avx512];

    pub(super) fn is_available(self) -> bool {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        match self {
            NativeKernels::Avx2 => avx2,
            NativeKernels::Avx512 => {
                avx2 && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            NativeKernels::Avx2 => "avx2",
            NativeKernels::Avx512 => "avx512",
        }
    }

    /// Computes a part of a matmul with panels or with dot products, whichever is faster.
    ///
    /// # Safety
    /// The processor has the instructions of `self`, and no other thread writes the rows of the task.
    pub(super) unsafe fn multiply(self, task: MatmulTask<'_>) {
        // SAFETY: the caller's promise; `Avx512` implies AVX2.
        unsafe {
            match (self, panel::is_profitable(task.matrix.format, task.input.tokens())) {
                (NativeKernels::Avx512, true) => panel::avx512::matmul(task),
                (NativeKernels::Avx2, true) => panel::avx2::matmul(task),
                (_, false) => matmul_by_dots(task),
            }
        }
    }

    #[allow(clippy::unused_self)] // the value proves that the processor has the instructions
    pub(super) fn scores_f16(self, query: &[f32], scale: f32, keys: &[f16], scores: &mut [f32]) {
        // SAFETY: this value exists only where the processor has AVX2, FMA and F16C.
        unsafe { avx2::scores_f16(query, scale, keys, scores) };
    }

    #[allow(clippy::unused_self)] // the value proves that the processor has the instructions
    pub(super) fn sum_values_f16(self, probabilities: &[f32], values: &[f16], out: &mut [f32]) {
        // SAFETY: this value exists only where the processor has AVX2, FMA and F16C.
        unsafe { avx2::sum_values_f16(probabilities, values, out) };
    }
}

/// Computes a part of a matmul with dot products.
#[target_feature(enable = "avx2,fma,f16c")]
fn matmul_by_dots(task: MatmulTask<'_>) {
    macro_rules! plain {
        ($dot:ident) => {
            dot_tiles!(task, plain_row, avx2::$dot)
        };
    }
    macro_rules! blocks {
        ($block:ident, $row:ident, $dot:ident) => {
            dot_tiles!(task, $row, avx2::$dot)
        };
    }
    for_format!(task.matrix.format, plain, blocks);
}
