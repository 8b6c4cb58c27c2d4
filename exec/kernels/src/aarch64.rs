//! Instruction sets of 64-bit ARM processors, and the kernels that use them.
//!
//! All of them have NEON. Dot products of bytes (`dotprod`, of ARMv8.4) and products of matrices of bytes (`i8mm`, of
//! ARMv8.6) are asked for when the program runs.
//!
//! Not here: the kernels; see [`super::neon`] and [`super::panel`].

use std::arch::is_aarch64_feature_detected;

use half::f16;

use super::neon::{self, Dotprod, Plain, Products};
use super::panel;
use super::product::{Tile, walk};

/// An instruction set that not every compiler target has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Native {
    /// What every processor has.
    Neon,
    /// Dot products of four bytes.
    Dotprod,
    /// Also has products of 2x8 byte matrices (I8MM).
    I8mm,
}

impl Native {
    /// The best last.
    pub(super) const ALL: [Native; 3] = [Native::Neon, Native::Dotprod, Native::I8mm];

    pub(super) fn present(self) -> bool {
        let dotprod = is_aarch64_feature_detected!("dotprod");
        is_aarch64_feature_detected!("neon")
            && match self {
                Native::Neon => true,
                Native::Dotprod => dotprod,
                Native::I8mm => dotprod && is_aarch64_feature_detected!("i8mm"),
            }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Native::Neon => "neon",
            Native::Dotprod => "dotprod",
            Native::I8mm => "i8mm",
        }
    }

    /// # Safety
    /// The processor has the instructions, and no other thread writes the tile's rows of the output.
    pub(super) unsafe fn multiply(self, tile: Tile<'_>) {
        // SAFETY: the caller's promise; products of matrices are present only beside dot products.
        unsafe {
            match (self, panel::is_profitable(tile.matrix.format, tile.input.tokens())) {
                (Native::Neon, true) => panel::neon::all_rows_plain(tile),
                (Native::Dotprod, true) => panel::neon::all_rows_dotprod(tile),
                (Native::I8mm, true) => panel::neon::all_rows_i8mm(tile),
                (Native::Neon, false) => multiply_by_dots::<Plain>(tile),
                (Native::Dotprod | Native::I8mm, false) => multiply_by_dots::<Dotprod>(tile),
            }
        }
    }

    #[allow(clippy::unused_self)] // the value proves that the processor has the instructions
    pub(super) fn scores_f16(self, query: &[f32], scale: f32, keys: &[f16], scores: &mut [f32]) {
        // SAFETY: this value exists only where the processor has NEON.
        unsafe { neon::scores_f16(query, scale, keys, scores) };
    }

    #[allow(clippy::unused_self)] // the value proves that the processor has the instructions
    pub(super) fn mix_f16(self, probabilities: &[f32], values: &[f16], out: &mut [f32]) {
        // SAFETY: this value exists only where the processor has NEON.
        unsafe { neon::mix_f16(probabilities, values, out) };
    }
}

/// Computes all rows and tokens of a tile by dot products.
///
/// # Safety
/// The processor has the instructions of `P`, and no other thread writes the tile's rows of the output.
#[target_feature(enable = "neon")]
#[allow(unused_unsafe)] // the walk has blocks of its own
unsafe fn multiply_by_dots<P: Products>(tile: Tile<'_>) {
    macro_rules! plain {
        ($dot:ident) => {
            walk!(tile, plain_row, neon::$dot)
        };
    }
    macro_rules! blocks {
        ($block:ident, $row:ident, $dot:ident) => {
            walk!(tile, $row, neon::$dot::<P, _>)
        };
    }
    // SAFETY: the caller's promise.
    unsafe { for_format!(tile.matrix.format, plain, blocks) };
}
