//! Kernels over quantised weights, scalar and SIMD, in one reduction order.
//!
//! One order for every instruction set, thread count, split and batch size, so that a token is the same
//! token wherever it was computed (`docs/decisions/0002-one-reduction-order.md`):
//!
//! - **Quantised weights.** Activations are rounded once per matmul input to eight bits in blocks of 32
//!   (weights in blocks of 32) or 256 (of 256) under an f32 scale. All products of a block, times the format's integer
//!   scales, are added up as integers: that sum is exact, so that its order is free. Then `sum =
//!   fma(weight_scale * activation_scale, total as f32, sum)`, block after block in one f32. Minima are a
//!   second integer of the block, taken off (`Q4_K`) or added (`Q4_1`) by a second fma; `scalar` states it for each
//!   format.
//! - **F32, F16 and BF16 weights.** 32 lanes; element j is fma'd into lane j % 32; then lanes i, i+8, i+16, i+24
//!   are added as (a + b) + (c + d), and the eight that are left as
//!   `((l0 + l4) + (l2 + l6)) + ((l1 + l5) + (l3 + l7))`.
//!
//! Rust neither reorders nor contracts float operations, so code written once without intrinsics
//! (`elementwise`) has the same bits wherever it is compiled; dot products, and attention over f16, have intrinsics.
//!
//! Not here: which rows go to which thread. That is `hearth_runtime::cpu`.

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr, clippy::exit))]
// Code that is compiled once for every instruction set must become part of the function that has it enabled.
#![allow(clippy::inline_always)]

/// Compiles generic code once more for the instructions that [`native`] has, and dispatches to it:
/// `fn name(instructions, ..)`.
macro_rules! compiled_for_each {
    ($($(#[$doc:meta])* $visibility:vis fn $name:ident($($argument:ident: $type:ty),* $(,)?) = $generic:ident;)+) => {$(
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        $visibility fn $name(instructions: $crate::InstructionSet, $($argument: $type),*) {
            // Elsewhere the compiler has the vector instructions anyway.
            #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
            #[allow(clippy::too_many_arguments)]
            fn native($($argument: $type),*) {
                $generic($($argument),*);
            }
            match instructions.set() {
                $crate::Set::Scalar => $generic($($argument),*),
                // SAFETY: these values exist only where the processor has the instructions.
                #[allow(unused_unsafe)]
                $crate::Set::Native(_) => unsafe { native($($argument),*) },
            }
        }
    )+};
}
pub(crate) use compiled_for_each;

pub(crate) mod activations;
pub mod attention;
pub(crate) mod blocks;
pub mod elementwise;
mod exponential;
pub mod panel;
pub mod product;
pub(crate) mod scalar;

// What this processor may have beside plain Rust: the only place that asks for whom this is compiled, but for
// the files of a panel.
#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(not(any(target_arch = "aarch64", target_arch = "x86_64")))]
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
use aarch64 as native;
#[cfg(not(any(target_arch = "aarch64", target_arch = "x86_64")))]
use portable as native;
#[cfg(target_arch = "x86_64")]
use x86_64 as native;

use std::fmt;

use hearth_profiles::Format;

pub use activations::{Activations, InputKind};
pub use blocks::dequantise;
pub use exponential::exponential;
pub(crate) use native::Native;
pub use product::Matrix;

/// The formats there are kernels for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KernelFormat {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of single precision.
    Bf16,
    /// Four bits, blocks of 32.
    Q4_0,
    /// Four bits and a minimum, blocks of 32.
    Q4_1,
    /// Five bits, blocks of 32.
    Q5_0,
    /// Five bits and a minimum, blocks of 32.
    Q5_1,
    /// Eight bits, blocks of 32.
    Q8_0,
    /// Two bits, blocks of 256.
    Q2K,
    /// Three bits, blocks of 256.
    Q3K,
    /// Four bits, blocks of 256.
    Q4K,
    /// Five bits, blocks of 256.
    Q5K,
    /// Six bits, blocks of 256.
    Q6K,
    /// Rows of eight weights from a book, blocks of 256.
    Iq1S,
    /// Four bits that choose from 16 values, blocks of 32.
    Iq4Nl,
    /// The same in blocks of 256.
    Iq4Xs,
}

impl KernelFormat {
    /// Every one of them.
    pub const ALL: [KernelFormat; 16] = [
        KernelFormat::F32,
        KernelFormat::F16,
        KernelFormat::Bf16,
        KernelFormat::Q4_0,
        KernelFormat::Q4_1,
        KernelFormat::Q5_0,
        KernelFormat::Q5_1,
        KernelFormat::Q8_0,
        KernelFormat::Q2K,
        KernelFormat::Q3K,
        KernelFormat::Q4K,
        KernelFormat::Q5K,
        KernelFormat::Q6K,
        KernelFormat::Iq1S,
        KernelFormat::Iq4Nl,
        KernelFormat::Iq4Xs,
    ];

    /// The kernels for a format of a file, if there are any.
    pub fn of(format: Format) -> Option<KernelFormat> {
        KernelFormat::ALL.into_iter().find(|supported| supported.format() == format)
    }

    /// The format in the file.
    pub fn format(self) -> Format {
        match self {
            KernelFormat::F32 => Format::F32,
            KernelFormat::F16 => Format::F16,
            KernelFormat::Bf16 => Format::Bf16,
            KernelFormat::Q4_0 => Format::Q4_0,
            KernelFormat::Q4_1 => Format::Q4_1,
            KernelFormat::Q5_0 => Format::Q5_0,
            KernelFormat::Q5_1 => Format::Q5_1,
            KernelFormat::Q8_0 => Format::Q8_0,
            KernelFormat::Q2K => Format::Q2K,
            KernelFormat::Q3K => Format::Q3K,
            KernelFormat::Q4K => Format::Q4K,
            KernelFormat::Q5K => Format::Q5K,
            KernelFormat::Q6K => Format::Q6K,
            KernelFormat::Iq1S => Format::Iq1S,
            KernelFormat::Iq4Nl => Format::Iq4Nl,
            KernelFormat::Iq4Xs => Format::Iq4Xs,
        }
    }

    /// Bytes of a row of `length` weights, if it is a whole number of blocks.
    pub fn row_bytes(self, length: usize) -> Option<usize> {
        usize::try_from(self.format().row_bytes(length as u64)?.0).ok()
    }

    /// How the activations that meet these weights are stored.
    pub fn input_kind(self) -> InputKind {
        match self {
            KernelFormat::F32 | KernelFormat::F16 | KernelFormat::Bf16 => InputKind::Plain,
            KernelFormat::Q4_0
            | KernelFormat::Q4_1
            | KernelFormat::Q5_0
            | KernelFormat::Q5_1
            | KernelFormat::Q8_0
            | KernelFormat::Iq4Nl => InputKind::Blocks32,
            KernelFormat::Q2K
            | KernelFormat::Q3K
            | KernelFormat::Q4K
            | KernelFormat::Q5K
            | KernelFormat::Q6K
            | KernelFormat::Iq1S
            | KernelFormat::Iq4Xs => InputKind::Blocks256,
        }
    }
}

impl fmt::Display for KernelFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.format().fmt(f)
    }
}

/// The instruction set that kernels are dispatched to. Results do not depend on it.
///
/// A set other than the scalar one can only be had from [`InstructionSet::detect`], so that a value of it is a
/// proof that the processor has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InstructionSet(Set);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Set {
    /// Plain Rust: the oracle the others are compared with.
    Scalar,
    /// One that this kind of processor may have.
    Native(Native),
}

impl InstructionSet {
    /// Plain Rust.
    pub const SCALAR: InstructionSet = InstructionSet(Set::Scalar);

    /// The best that this processor has.
    pub fn detect() -> InstructionSet {
        let best = Native::ALL.into_iter().rev().find(|native| native.present());
        best.map_or(InstructionSet::SCALAR, |native| InstructionSet(Set::Native(native)))
    }

    /// All that this processor has, the best last.
    pub fn available() -> Vec<InstructionSet> {
        let native = Native::ALL.into_iter().filter(|native| native.present());
        let native = native.map(|native| InstructionSet(Set::Native(native)));
        std::iter::once(InstructionSet::SCALAR).chain(native).collect()
    }

    /// Its name in traces.
    pub fn name(self) -> &'static str {
        match self.0 {
            Set::Scalar => "scalar",
            Set::Native(native) => native.name(),
        }
    }

    pub(crate) fn set(self) -> Set {
        self.0
    }
}

/// Why a kernel cannot run on what it was given.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// The bytes are not the row they are said to be.
    #[error("a {format} row of {length} weights cannot lie in {found} bytes")]
    RowBytes {
        /// How the row is stored.
        format: KernelFormat,
        /// Weights in the row.
        length: usize,
        /// Bytes given.
        found: usize,
    },
}

/// The fixed tree over eight lanes.
#[inline(always)]
pub(crate) fn tree(lanes: [f32; 8]) -> f32 {
    let [l0, l1, l2, l3, l4, l5, l6, l7] = lanes;
    ((l0 + l4) + (l2 + l6)) + ((l1 + l5) + (l3 + l7))
}

/// 32 lanes to eight.
#[inline(always)]
pub(crate) fn fold(lanes: [f32; 32]) -> [f32; 8] {
    std::array::from_fn(|i| (lanes[i] + lanes[i + 8]) + (lanes[i + 16] + lanes[i + 24]))
}

#[cfg(test)]
mod tests;
