//! Instruction sets of 64-bit ARM processors: detection, and dispatch of kernels.
//!
//! All of these processors have NEON. Dot products of bytes (`dotprod`, ARMv8.4) and matmuls of bytes (`i8mm`,
//! ARMv8.6) are detected at run time.
//!
//! Not here: the kernels, see [`super::neon`] and [`super::panel`].

use half::f16;

use super::matmul::{MatmulTask, dot_tiles};
use super::neon::{self, BaseNeon, ByteDot, Dotprod, I8mm};
use super::{blocks, panel};

/// A vector instruction set. A value exists only where the processor has the instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NativeKernels {
    /// NEON without extensions.
    Neon,
    /// NEON with dot products of four bytes (`dotprod`).
    Dotprod(Dotprod),
    /// NEON with dot products of four bytes and matmuls of 2x8 byte matrices (`dotprod` and `i8mm`).
    I8mm(I8mm),
}

impl NativeKernels {
    /// Returns the instruction sets of this processor, from the slowest to the fastest.
    pub(super) fn detect_all() -> impl DoubleEndedIterator<Item = NativeKernels> {
        let dotprod = Dotprod::detect().map(NativeKernels::Dotprod);
        let i8mm = I8mm::detect().map(NativeKernels::I8mm);
        [Some(NativeKernels::Neon), dotprod, i8mm].into_iter().flatten()
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            NativeKernels::Neon => "neon",
            NativeKernels::Dotprod(_) => "dotprod",
            NativeKernels::I8mm(_) => "i8mm",
        }
    }

    /// Computes a part of a matmul with panels or with dot products, whichever is faster.
    pub(super) fn multiply(self, task: MatmulTask<'_, '_>) {
        match (self, panel::is_profitable(task.matrix.format, task.input.tokens())) {
            (NativeKernels::Neon, true) => panel::neon::matmul(BaseNeon, task),
            (NativeKernels::Dotprod(dotprod), true) => panel::neon::matmul(dotprod, task),
            (NativeKernels::I8mm(i8mm), true) => panel::neon::matmul(i8mm, task),
            (NativeKernels::Neon, false) => matmul_by_dots(BaseNeon, task),
            (NativeKernels::Dotprod(dotprod), false) => matmul_by_dots(dotprod, task),
            (NativeKernels::I8mm(i8mm), false) => matmul_by_dots(i8mm.dotprod(), task),
        }
    }

    #[allow(clippy::unused_self)] // other targets need the value
    pub(super) fn scores_f16(self, query: &[f32], scale: f32, keys: &[f16], scores: &mut [f32]) {
        neon::scores_f16(query, scale, keys, scores);
    }

    #[allow(clippy::unused_self)] // other targets need the value
    pub(super) fn sum_values_f16(self, probabilities: &[f32], values: &[f16], out: &mut [f32]) {
        neon::sum_values_f16(probabilities, values, out);
    }
}

/// Computes a part of a matmul with dot products.
fn matmul_by_dots<P: ByteDot>(instructions: P, task: MatmulTask<'_, '_>) {
    macro_rules! plain {
        ($dot:ident) => {
            dot_tiles!(task, plain_row, neon::$dot, instructions)
        };
    }
    macro_rules! blocks {
        ($block:ident, row32, $dot:ident) => {
            dot_tiles!(task, row32, neon::dot32::<P, blocks::$block, _>, instructions)
        };
        ($block:ident, row256, $dot:ident) => {
            dot_tiles!(task, row256, neon::dot256::<P, blocks::$block, _>, instructions)
        };
    }
    for_format!(task.matrix.format, plain, blocks);
}
