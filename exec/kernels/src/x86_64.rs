//! Instruction sets of x86-64 processors, and the kernels that use them.
//!
//! Not here: the kernels; see [`super::avx2`] and [`super::panel`].

use half::f16;

use super::product::{Tile, walk};
use super::{avx2, panel};

/// An instruction set beyond that of every x86-64 processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Native {
    /// AVX2, FMA and F16C.
    Avx2,
    /// Also has AVX-512 (F, BW, VL) and VNNI.
    Avx512,
}

impl Native {
    /// The best last.
    pub(super) const ALL: [Native; 2] = [Native::Avx2, Native::Avx512];

    pub(super) fn present(self) -> bool {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        match self {
            Native::Avx2 => avx2,
            Native::Avx512 => {
                avx2 && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Native::Avx2 => "avx2",
            Native::Avx512 => "avx512",
        }
    }

    /// # Safety
    /// The processor has the instructions, and no other thread writes the tile's rows of the output.
    pub(super) unsafe fn multiply(self, tile: Tile<'_>) {
        // SAFETY: the caller's promise; AVX-512 is present only beside AVX2.
        unsafe {
            match (self, panel::is_profitable(tile.matrix.format, tile.input.tokens())) {
                (Native::Avx512, true) => panel::avx512::all_rows(tile),
                (Native::Avx2, true) => panel::avx2::all_rows(tile),
                (_, false) => multiply_by_dots(tile),
            }
        }
    }

    #[allow(clippy::unused_self)] // the value proves that the processor has the instructions
    pub(super) fn scores_f16(self, query: &[f32], scale: f32, keys: &[f16], scores: &mut [f32]) {
        // SAFETY: this value exists only where the processor has AVX2, FMA and F16C.
        unsafe { avx2::scores_f16(query, scale, keys, scores) };
    }

    #[allow(clippy::unused_self)] // the value proves that the processor has the instructions
    pub(super) fn mix_f16(self, probabilities: &[f32], values: &[f16], out: &mut [f32]) {
        // SAFETY: this value exists only where the processor has AVX2, FMA and F16C.
        unsafe { avx2::mix_f16(probabilities, values, out) };
    }
}

/// All rows and tokens of a tile, by dot products.
#[target_feature(enable = "avx2,fma,f16c")]
fn multiply_by_dots(tile: Tile<'_>) {
    macro_rules! plain {
        ($dot:ident) => {
            walk!(tile, plain_row, avx2::$dot)
        };
    }
    macro_rules! blocks {
        ($block:ident, $row:ident, $dot:ident) => {
            walk!(tile, $row, avx2::$dot)
        };
    }
    for_format!(tile.matrix.format, plain, blocks);
}
