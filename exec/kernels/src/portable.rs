//! The empty set of native kernels, for processors that have none.
//!
//! None: plain Rust computes everything there.

use half::f16;

use super::product::Tile;

/// An instruction set beyond plain Rust; there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Native {}

impl Native {
    pub(super) const ALL: [Native; 0] = [];

    pub(super) fn present(self) -> bool {
        match self {}
    }

    pub(super) fn name(self) -> &'static str {
        match self {}
    }

    /// # Safety
    /// No other thread writes the tile's rows of the output.
    pub(super) unsafe fn multiply(self, _: Tile<'_>) {
        match self {}
    }

    pub(super) fn scores_f16(self, _: &[f32], _: f32, _: &[f16], _: &mut [f32]) {
        match self {}
    }

    pub(super) fn mix_f16(self, _: &[f32], _: &[f16], _: &mut [f32]) {
        match self {}
    }
}
