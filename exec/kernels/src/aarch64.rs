//! Instruction sets of 64-bit ARM processors, and the kernels that use them.
//!
//! All of them have NEON. Dot products of bytes (`dotprod`, of ARMv8.4) and products of matrices of bytes (`i8mm`, of
//! ARMv8.6) are asked for when the program runs.
//!
//! Not here: the kernels; see [`super::neon`] and [`super::panel`].

use std::arch::is_aarch64_feature_detected;

use half::f16;

use super::neon::{self, Dotprod, Plain, Products};
use super::product::{Tile, walk};
use super::{KernelFormat, panel};

/// An instruction set that not every compiler target has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Native {
    /// What every processor has.
    Neon,
    /// Dot products of four bytes.
    Dotprod,
    /// Products of matrices of two by eight bytes besides.
    I8mm,
}

impl Native {
    /// Every one of them, the best last.
    pub(super) const ALL: [Native; 3] = [Native::Neon, Native::Dotprod, Native::I8mm];

    /// Whether this processor has it.
    pub(super) fn present(self) -> bool {
        let dotprod = is_aarch64_feature_detected!("dotprod");
        is_aarch64_feature_detected!("neon")
            && match self {
                Native::Neon => true,
                Native::Dotprod => dotprod,
                Native::I8mm => dotprod && is_aarch64_feature_detected!("i8mm"),
            }
    }

    /// Its name in traces.
    pub(super) fn name(self) -> &'static str {
        match self {
            Native::Neon => "neon",
            Native::Dotprod => "dotprod",
            Native::I8mm => "i8mm",
        }
    }

    /// Computes a tile.
    ///
    /// # Safety
    /// The processor has the instructions, and no other thread writes the tile's rows of the output.
    pub(super) unsafe fn multiply(self, tile: Tile<'_>) {
        // SAFETY: the caller's promise; products of matrices are present only beside dot products.
        unsafe {
            match (self, panel::pays(tile.matrix.format, tile.input.tokens())) {
                (Native::Neon, true) => panel::neon::all_rows_plain(tile),
                (Native::Dotprod, true) => panel::neon::all_rows_dotprod(tile),
                (Native::I8mm, true) => panel::neon::all_rows_i8mm(tile),
                (Native::Neon, false) => dots::<Plain>(tile),
                (Native::Dotprod | Native::I8mm, false) => dots::<Dotprod>(tile),
            }
        }
    }

    /// `scores[t] = scale * dot(query, keys[t])` over f16 keys, `[positions, key_length]`.
    #[allow(clippy::unused_self)] // the value proves that the processor has the instructions
    pub(super) fn scores_f16(self, query: &[f32], scale: f32, keys: &[f16], scores: &mut [f32]) {
        // SAFETY: this value exists only where the processor has NEON.
        unsafe { neon::scores_f16(query, scale, keys, scores) };
    }

    /// `out = sum of probabilities[t] * values[t]` over f16 values, `[positions, value_length]`, t ascending.
    #[allow(clippy::unused_self)] // the value proves that the processor has the instructions
    pub(super) fn mix_f16(self, probabilities: &[f32], values: &[f16], out: &mut [f32]) {
        // SAFETY: this value exists only where the processor has NEON.
        unsafe { neon::mix_f16(probabilities, values, out) };
    }
}

/// All rows and tokens of a tile, by dot products.
///
/// # Safety
/// The processor has the instructions of `P`, and no other thread writes the tile's rows of the output.
#[target_feature(enable = "neon")]
#[allow(unused_unsafe)] // the walk has blocks of its own
unsafe fn dots<P: Products>(tile: Tile<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        match tile.matrix.format {
            KernelFormat::F32 => walk!(tile, plain_row, neon::dot_f32),
            KernelFormat::F16 => walk!(tile, plain_row, neon::dot_f16),
            KernelFormat::Bf16 => walk!(tile, plain_row, neon::dot_bf16),
            KernelFormat::Q4_0 => walk!(tile, row32, neon::dot_q4_0::<P, _>),
            KernelFormat::Q4_1 => walk!(tile, row32, neon::dot_q4_1::<P, _>),
            KernelFormat::Q5_0 => walk!(tile, row32, neon::dot_q5_0::<P, _>),
            KernelFormat::Q5_1 => walk!(tile, row32, neon::dot_q5_1::<P, _>),
            KernelFormat::Q8_0 => walk!(tile, row32, neon::dot_q8_0::<P, _>),
            KernelFormat::Iq4Nl => walk!(tile, row32, neon::dot_iq4_nl::<P, _>),
            KernelFormat::Q2K => walk!(tile, row256, neon::dot_q2_k::<P, _>),
            KernelFormat::Q3K => walk!(tile, row256, neon::dot_q3_k::<P, _>),
            KernelFormat::Q4K => walk!(tile, row256, neon::dot_q4_k::<P, _>),
            KernelFormat::Q5K => walk!(tile, row256, neon::dot_q5_k::<P, _>),
            KernelFormat::Q6K => walk!(tile, row256, neon::dot_q6_k::<P, _>),
            KernelFormat::Iq1S => walk!(tile, row256, neon::dot_iq1_s::<P, _>),
            KernelFormat::Iq4Xs => walk!(tile, row256, neon::dot_iq4_xs::<P, _>),
        }
    }
}
