//! Byte instructions that not every 64-bit ARM processor has: `sdot` and `smmla`.
//!
//! The instructions are methods of types whose values exist only where the processor has the instructions. They are
//! inline assembly, because their intrinsics are not stable. The assembly enables its extension itself, so that the
//! rest of a kernel is one generic function for all processors.

use std::arch::asm;
use std::arch::is_aarch64_feature_detected;

use super::intrinsics::{int8x16_t, int32x4_t};

/// NEON with `sdot`, the dot product of four bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Dotprod(());

/// NEON with the byte instructions `sdot` (dot product) and `smmla` (matrix multiplication).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct I8mm {
    dotprod: Dotprod,
}

#[allow(clippy::unused_self)] // the value proves that the processor has the instructions
impl Dotprod {
    /// Returns a value if the processor has `dotprod`.
    pub(crate) fn detect() -> Option<Dotprod> {
        is_aarch64_feature_detected!("dotprod").then_some(Dotprod(()))
    }

    /// Adds to each 32-bit lane of `total` the dot product of the four bytes of this lane in `a` and in `b`.
    #[inline(always)]
    pub(crate) fn sdot(self, mut total: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        // SAFETY: `self` proves that the processor has the instruction, which changes only the register `total`.
        unsafe {
            asm!(
                ".arch_extension dotprod",
                "sdot {total:v}.4s, {a:v}.16b, {b:v}.16b",
                total = inout(vreg) total, a = in(vreg) a, b = in(vreg) b,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        total
    }

    /// Adds to each 32-bit lane of `total` the dot product of the four bytes of this lane in `a` and the four bytes of
    /// lane `LANE` in `b`.
    #[inline(always)]
    pub(crate) fn sdot_lane<const LANE: usize>(
        self,
        mut total: int32x4_t,
        a: int8x16_t,
        b: int8x16_t,
    ) -> int32x4_t {
        // SAFETY: `self` proves that the processor has the instruction, which changes only the register `total`.
        unsafe {
            asm!(
                ".arch_extension dotprod",
                "sdot {total:v}.4s, {a:v}.16b, {b:v}.4b[{lane}]",
                total = inout(vreg) total, a = in(vreg) a, b = in(vreg) b, lane = const LANE,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        total
    }
}

#[allow(clippy::unused_self)] // the value proves that the processor has the instructions
impl I8mm {
    /// Returns a value if the processor has `dotprod` and `i8mm`.
    pub(crate) fn detect() -> Option<I8mm> {
        let dotprod = Dotprod::detect()?;
        is_aarch64_feature_detected!("i8mm").then_some(I8mm { dotprod })
    }

    pub(crate) fn dotprod(self) -> Dotprod {
        self.dotprod
    }

    /// Multiplies two matrices of two rows of eight bytes, `a` and `b`: adds the dot products of the rows
    /// `[a0 b0, a0 b1, a1 b0, a1 b1]` to the four lanes of `total`.
    #[inline(always)]
    pub(crate) fn smmla(self, mut total: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        // SAFETY: `self` proves that the processor has the instruction, which changes only the register `total`.
        unsafe {
            asm!(
                ".arch_extension i8mm",
                "smmla {total:v}.4s, {a:v}.16b, {b:v}.16b",
                total = inout(vreg) total, a = in(vreg) a, b = in(vreg) b,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        total
    }
}
