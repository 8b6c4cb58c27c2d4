//! The empty list of vector instruction sets on targets without SIMD kernels: scalar code computes everything.

use half::f16;

use super::matmul::MatmulTask;

/// A vector instruction set with SIMD kernels. On this target there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NativeKernels {}

impl NativeKernels {
    pub(super) fn detect_all() -> impl DoubleEndedIterator<Item = NativeKernels> {
        std::iter::empty()
    }

    pub(super) fn name(self) -> &'static str {
        match self {}
    }

    pub(super) fn multiply(self, _: MatmulTask<'_, '_>) {
        match self {}
    }

    pub(super) fn scores_f16(self, _: &[f32], _: f32, _: &[f16], _: &mut [f32]) {
        match self {}
    }

    pub(super) fn sum_values_f16(self, _: &[f32], _: &[f16], _: &mut [f32]) {
        match self {}
    }
}
