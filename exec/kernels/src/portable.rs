//! The empty list of vector instruction sets on targets without SIMD kernels: scalar code computes everything.

use half::f16;

use super::matmul::MatmulTask;

/// A vector instruction set with SIMD kernels. On this target there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NativeKernels {}

impl NativeKernels {
    pub(super) const ALL: [NativeKernels; 0] = [];

    pub(super) fn is_available(self) -> bool {
        match self {}
    }

    pub(super) fn name(self) -> &'static str {
        match self {}
    }

    /// # Safety
    /// No other thread writes the rows of the task.
    pub(super) unsafe fn multiply(self, _: MatmulTask<'_>) {
        match self {}
    }

    pub(super) fn scores_f16(self, _: &[f32], _: f32, _: &[f16], _: &mut [f32]) {
        match self {}
    }

    pub(super) fn sum_values_f16(self, _: &[f32], _: &[f16], _: &mut [f32]) {
        match self {}
    }
}
