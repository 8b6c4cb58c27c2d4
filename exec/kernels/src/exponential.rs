//! The functions e^x and tanh x with the same bits on every processor.
//!
//! The exponential functions of C libraries differ between platforms in the last bit. [`exponential`] is a fixed
//! sequence of multiplications, additions and fused multiply-adds, which the compiler can also vectorise: it writes x
//! as n ln 2 + r with |r| <= ln 2 / 2, evaluates the Taylor polynomial of degree seven for e^r (error below 6e-9), and
//! multiplies by 2^n, whose bits are set directly. The result is within 2 units in the last place of the exact value.

/// The number whose addition to a small f32 x rounds x to the nearest integer and moves it to the low bits.
const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
/// ln 2 with the nine low bits cleared, so that the product with an exponent n is exact.
const LN2_HIGH: f32 = 0.693_145_75;
/// The difference between ln 2 and [`LN2_HIGH`].
const LN2_LOW: f32 = 1.428_606_8e-6;
/// The minimum argument of e^x: for smaller x, the result would soon be subnormal.
const MIN_X: f32 = -87.0;
/// The maximum argument of e^x: for larger x, the result would soon overflow.
const MAX_X: f32 = 88.0;

/// Returns e^x, with x clamped to the range from -87 to 88.
#[inline(always)]
pub fn exponential(x: f32) -> f32 {
    let x = if x < MIN_X { MIN_X } else { x };
    let x = if x > MAX_X { MAX_X } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_HIGH, x);
    let r = n.mul_add(-LN2_LOW, r);
    let mut sum = 1.0f32 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        sum = sum.mul_add(r, coefficient);
    }
    // The bits of `shifted` are 0x4b400000 + n. The shift moves n to the exponent: the constant has no bit below
    // 2^22.
    sum * f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23))
}

/// The bound of |x| below which tanh x is computed by a polynomial. For such x the quotient of exponentials would
/// lose digits, while the error of the polynomial of five terms is below 6e-8.
const SMALL: f32 = 0.3;

/// Returns tanh x, computed from e^(2|x|), or near zero by the Taylor polynomial of degree nine.
#[inline(always)]
pub(crate) fn hyperbolic_tangent(x: f32) -> f32 {
    let power = exponential(2.0 * x.abs());
    let quotient = (power - 1.0) / (power + 1.0);
    let square = x * x;
    let mut sum = 62.0f32 / 2835.0;
    for coefficient in [-17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0, 1.0] {
        sum = sum.mul_add(square, coefficient);
    }
    if x.abs() < SMALL { x * sum } else { quotient.copysign(x) }
}

#[cfg(test)]
mod tests {
    use std::ops::RangeInclusive;

    use super::*;

    /// Checks that the relative error of `function` is below `bound` at x = step / 1000 for each of the `steps`.
    fn check(steps: RangeInclusive<i32>, function: fn(f32) -> f32, exact: fn(f64) -> f64, bound: f64) {
        for x in steps.map(|step| step as f32 * 1e-3) {
            let exact = exact(f64::from(x));
            let error = (f64::from(function(x)) - exact).abs() / exact;
            assert!(error < bound, "relative error {error:e} at {x}");
        }
    }

    #[test]
    fn exponential_is_close_to_the_exact_value_and_bounded() {
        // Two units in the last place are at most 2^-22 = 2.4e-7.
        check(-86_000..=87_000, exponential, f64::exp, 2.4e-7);
        assert_eq!(exponential(0.0), 1.0);
        assert!(exponential(f32::NEG_INFINITY) < 2e-38);
        assert!(exponential(f32::INFINITY).is_finite());
        assert!(exponential(f32::NAN).is_nan());
    }

    #[test]
    fn tanh_is_close_to_the_exact_value() {
        check(1..=20_000, hyperbolic_tangent, f64::tanh, 1e-6);
        for x in (1..=20_000).map(|step| step as f32 * 1e-3) {
            assert_eq!(hyperbolic_tangent(-x), -hyperbolic_tangent(x));
        }
        assert_eq!((hyperbolic_tangent(f32::INFINITY), hyperbolic_tangent(0.0)), (1.0, 0.0));
        assert!(hyperbolic_tangent(f32::NAN).is_nan());
    }
}
