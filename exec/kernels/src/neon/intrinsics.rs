//! The NEON intrinsics that the kernels use, as safe functions.
//!
//! The intrinsics of [`std::arch`] can be called without `unsafe` only in functions with the attribute
//! `#[target_feature(enable = "neon")]`, which methods of safe traits cannot have. The functions here have the same
//! names and need no attribute, because every supported target enables NEON for all code.
//!
//! [`cast`] replaces the intrinsics that load, store, create, combine or reinterpret registers: it converts between
//! registers, arrays of registers and arrays of numbers of the same size, without changing bytes.

use std::arch::aarch64;
pub(crate) use std::arch::aarch64::{
    float16x4_t, float32x2_t, float32x4_t, int8x8_t, int8x16_t, int16x4_t, int16x8_t, int32x2_t, int32x4_t,
    int64x2_t, uint8x8_t, uint8x16_t, uint16x4_t, uint32x4_t,
};

pub(crate) use bytemuck::must_cast as cast;

const _: () = assert!(cfg!(target_feature = "neon"), "the target must enable NEON");
const _: () =
    assert!(cfg!(target_endian = "little"), "registers must have the byte order of weights in files");

/// Defines functions, each with the name of the intrinsic that it calls. An intrinsic may have one constant argument.
macro_rules! intrinsics {
    ($($arguments:tt -> $result:ty { $($name:ident $(<$constant:ident>)?),+ })+) => {
        $($(intrinsics! { $name $(<$constant>)?, $arguments -> $result })+)+
    };
    ($name:ident $(<$constant:ident>)?, ($($argument:ident: $type:ty),*) -> $result:ty) => {
        #[inline(always)]
        pub(crate) fn $name $(<const $constant: i32>)? ($($argument: $type),*) -> $result {
            // SAFETY: the target enables NEON, see above.
            unsafe { aarch64::$name $(::<$constant>)? ($($argument),*) }
        }
    };
}
intrinsics! {
    // Copies of one number, or of lane N, to all lanes.
    (number: u8) -> uint8x8_t { vdup_n_u8 }
    (number: i8) -> int8x16_t { vdupq_n_s8 }
    (number: u8) -> uint8x16_t { vdupq_n_u8 }
    (number: i16) -> int16x8_t { vdupq_n_s16 }
    (number: i32) -> int32x4_t { vdupq_n_s32 }
    (number: f32) -> float32x4_t { vdupq_n_f32 }
    (lanes: int32x4_t) -> int32x2_t { vdup_laneq_s32<N> }

    // Halves of a register.
    (a: int8x16_t) -> int8x8_t { vget_low_s8, vget_high_s8 }
    (a: int16x8_t) -> int16x4_t { vget_low_s16 }
    (a: float32x4_t) -> float32x2_t { vget_low_f32, vget_high_f32 }

    // Conversions.
    (bits: uint16x4_t) -> float16x4_t { vreinterpret_f16_u16 }
    (a: float16x4_t) -> float32x4_t { vcvt_f32_f16 }
    (a: int32x4_t) -> float32x4_t { vcvtq_f32_s32 }
    (a: int8x8_t) -> int16x8_t { vmovl_s8 }
    (a: int8x16_t) -> int16x8_t { vmovl_high_s8 }
    (a: int16x4_t) -> int32x4_t { vmovl_s16 }
    (a: int16x8_t) -> int32x4_t { vmovl_high_s16 }

    // Bits and bytes.
    (a: uint8x16_t, b: uint8x16_t) -> uint8x16_t { vandq_u8, vorrq_u8, veorq_u8, vtstq_u8, vqtbl1q_u8 }
    (table: int8x16_t, indices: uint8x16_t) -> int8x16_t { vqtbl1q_s8 }
    (a: uint8x16_t, places: int8x16_t) -> uint8x16_t { vshlq_u8 }
    (a: uint8x16_t) -> uint8x16_t { vshrq_n_u8<N> }
    (a: int32x4_t) -> int32x4_t { vshlq_n_s32<N>, vshrq_n_s32<N> }
    (a: uint16x4_t) -> uint32x4_t { vshll_n_u16<N> }

    // Permutations of lanes.
    (a: int16x8_t, b: int16x8_t) -> int16x8_t { vzip1q_s16, vzip2q_s16 }
    (a: int32x4_t, b: int32x4_t) -> int32x4_t {
        vtrn1q_s32, vtrn2q_s32, vuzp1q_s32, vuzp2q_s32, vzip1q_s32, vzip2q_s32
    }
    (a: int64x2_t, b: int64x2_t) -> int64x2_t { vtrn1q_s64, vtrn2q_s64, vzip1q_s64, vzip2q_s64 }

    // Arithmetic of integers.
    (a: int8x16_t, b: int8x16_t) -> int8x16_t { vsubq_s8 }
    (a: uint8x16_t, b: uint8x16_t) -> uint8x16_t { vsubq_u8 }
    (a: int8x8_t, b: int8x8_t) -> int16x8_t { vmull_s8 }
    (sum: int16x8_t, a: int8x8_t, b: int8x8_t) -> int16x8_t { vmlal_s8 }
    (sum: int16x8_t, a: int8x16_t, b: int8x16_t) -> int16x8_t { vmlal_high_s8 }
    (a: int16x4_t, b: int16x4_t) -> int32x4_t { vmull_s16 }
    (sum: int32x4_t, a: int16x4_t, b: int16x4_t) -> int32x4_t { vmlal_s16 }
    (sum: int32x4_t, a: int16x8_t, b: int16x8_t) -> int32x4_t { vmlal_high_s16 }
    (sum: int32x4_t, a: int32x4_t, b: int32x4_t) -> int32x4_t { vmlaq_s32 }
    (sum: int32x4_t, a: int32x4_t, b: i32) -> int32x4_t { vmlaq_n_s32 }
    (a: int16x8_t, b: int16x8_t) -> int16x8_t { vpaddq_s16 }
    (a: int16x8_t) -> int32x4_t { vpaddlq_s16 }
    (sum: int32x4_t, a: int16x8_t) -> int32x4_t { vpadalq_s16 }
    (a: int32x4_t, b: int32x4_t) -> int32x4_t { vpaddq_s32 }

    // Arithmetic of floats.
    (a: float32x2_t, b: float32x2_t) -> float32x2_t { vadd_f32 }
    (a: float32x4_t, b: float32x4_t) -> float32x4_t { vaddq_f32 }
    (a: float32x4_t, b: f32) -> float32x4_t { vmulq_n_f32 }
    (sum: float32x4_t, a: float32x4_t, b: float32x4_t) -> float32x4_t { vfmaq_f32, vfmsq_f32 }
}
