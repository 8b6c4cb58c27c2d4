//! Instruction sets of x86-64 processors: detection, and dispatch of kernels.
//!
//! The values of [`Avx2`] and [`Avx512`] prove that the processor has the instructions, because only detection creates
//! them. [`methods_with`] defines the methods in which these instructions are enabled.
//!
//! Not here: the kernels, see [`super::avx2`] and [`super::panel`].

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

use half::f16;

use super::matmul::{MatmulTask, dot_tiles};
use super::{avx2, avx512, panel};

/// AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Avx2(());

/// AVX2, FMA, F16C and AVX-VNNI, the instructions of VNNI for processors without AVX-512.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AvxVnni {
    avx2: Avx2,
}

/// AVX2, FMA, F16C, AVX-512 (F, BW, VL) and VNNI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Avx512 {
    avx2: Avx2,
}

impl Avx2 {
    fn detect() -> Option<Avx2> {
        let available = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        available.then_some(Avx2(()))
    }
}

impl AvxVnni {
    fn detect() -> Option<AvxVnni> {
        let avx2 = Avx2::detect()?;
        is_x86_feature_detected!("avxvnni").then_some(AvxVnni { avx2 })
    }
}

impl Avx512 {
    fn detect() -> Option<Avx512> {
        let avx2 = Avx2::detect()?;
        let available = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
        available.then_some(Avx512 { avx2 })
    }
}

/// A vector instruction set that not every x86-64 processor has. A value exists only where the processor has the
/// instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NativeKernels {
    Avx2(Avx2),
    AvxVnni(AvxVnni),
    Avx512(Avx512),
}

impl From<NativeKernels> for Avx2 {
    fn from(native: NativeKernels) -> Avx2 {
        match native {
            NativeKernels::Avx2(avx2)
            | NativeKernels::AvxVnni(AvxVnni { avx2 })
            | NativeKernels::Avx512(Avx512 { avx2 }) => avx2,
        }
    }
}

/// Prefetches the cache line with the first byte into the L2 cache.
#[inline(always)]
pub(super) fn prefetch(bytes: &[u8]) {
    // SAFETY: a prefetch of any address is harmless: it cannot fault.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(bytes.as_ptr().cast()) };
}

/// Defines methods without results that are compiled with the instructions of `Avx2`, `AvxVnni` or `Avx512`. The type of
/// `self` must be convertible to this type, which proves that the processor has the instructions.
macro_rules! methods_with {
    (Avx2: $($methods:tt)+) => {
        $crate::x86_64::methods_with! { @Avx2, "avx2,fma,f16c": $($methods)+ }
    };
    (AvxVnni: $($methods:tt)+) => {
        $crate::x86_64::methods_with! { @AvxVnni, "avx2,fma,f16c,avxvnni": $($methods)+ }
    };
    (Avx512: $($methods:tt)+) => {
        $crate::x86_64::methods_with! { @Avx512, "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni": $($methods)+ }
    };
    (@$proof:ident, $features:literal: $(
        $(#[$attribute:meta])*
        $visibility:vis fn $name:ident $(<$block:ident: $bound:ident $(, const $tokens:ident: usize)?>)?
        ($($argument:ident: $type:ty),*) $body:block
    )+) => {$(
        $(#[$attribute])*
        $visibility fn $name $(<$block: $bound $(, const $tokens: usize)?>)? (self, $($argument: $type),*) {
            #[target_feature(enable = $features)]
            fn with_features $(<$block: $bound $(, const $tokens: usize)?>)? ($($argument: $type),*) $body

            let _: $crate::x86_64::$proof = self.into();
            // SAFETY: values of the type in the line above exist only where the processor has the instructions.
            unsafe { with_features $(::<$block $(, $tokens)?>)? ($($argument),*) }
        }
    )+};
}
pub(crate) use methods_with;

impl NativeKernels {
    /// Returns the instruction sets of this processor, from the slowest to the fastest.
    pub(super) fn detect_all() -> impl DoubleEndedIterator<Item = NativeKernels> {
        let avx2 = Avx2::detect().map(NativeKernels::Avx2);
        let avx_vnni = AvxVnni::detect().map(NativeKernels::AvxVnni);
        let avx512 = Avx512::detect().map(NativeKernels::Avx512);
        [avx2, avx_vnni, avx512].into_iter().flatten()
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            NativeKernels::Avx2(_) => "avx2",
            NativeKernels::AvxVnni(_) => "avx-vnni",
            NativeKernels::Avx512(_) => "avx512",
        }
    }

    /// Computes a part of a matmul with panels or with dot products, whichever is faster.
    pub(super) fn multiply(self, task: MatmulTask<'_, '_>) {
        match (self, panel::is_profitable(task.matrix.format, task.input.tokens())) {
            (NativeKernels::Avx512(avx512), true) => panel::avx512::matmul(avx512, task),
            (NativeKernels::Avx2(avx2) | NativeKernels::AvxVnni(AvxVnni { avx2 }), true) => {
                panel::avx2::matmul(avx2, task);
            }
            (NativeKernels::Avx2(avx2), false) => avx2.multiply_by_dots(avx2, task),
            (NativeKernels::AvxVnni(avx_vnni), false) => avx_vnni.multiply_by_dots(avx_vnni, task),
            (NativeKernels::Avx512(avx512), false) => avx512.multiply_by_dots(avx512, task),
        }
    }

    methods_with! { Avx2:
        pub(super) fn scores_f16(query: &[f32], scale: f32, keys: &[f16], scores: &mut [f32]) {
            avx2::scores_f16(query, scale, keys, scores);
        }

        pub(super) fn sum_values_f16(probabilities: &[f32], values: &[f16], out: &mut [f32]) {
            avx2::sum_values_f16(probabilities, values, out);
        }
    }
}

/// Implements `multiply_by_dots`, which computes a part of a matmul with dot products, given the module that has them.
macro_rules! multiply_by_dots {
    ($($instructions:ident: $module:ident)+) => {$(
        impl $instructions {
            methods_with! { $instructions:
                fn multiply_by_dots(instructions: $instructions, task: MatmulTask<'_, '_>) {
                    macro_rules! plain {
                        ($dot:ident) => {
                            dot_tiles!(task, plain_row, $module::$dot, instructions)
                        };
                    }
                    macro_rules! blocks {
                        ($block:ident, $row:ident, $dot:ident) => {
                            dot_tiles!(task, $row, $module::$dot, instructions)
                        };
                    }
                    for_format!(task.matrix.format, plain, blocks);
                }
            }
        }
    )+};
}
multiply_by_dots! { Avx2: avx2 AvxVnni: avx2 Avx512: avx512 }
