//! Rounding of numbers such that printed columns add up.
//!
//! If each term is rounded separately, their sum can differ from the rounded total in the last digit. Here the total
//! is rounded first, then the parts by the largest remainder method: each part is rounded down, and the missing units
//! are added to the parts with the largest remainders. Differences are computed from printed numbers, so that a
//! column of errors adds up too.

/// A number with a fixed number of digits after the decimal point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FixedPoint {
    /// The value times ten to the power of `decimal_places`.
    pub mantissa: i64,
    pub decimal_places: u32,
}

impl FixedPoint {
    pub fn new(value: f64, digits: u32) -> Self {
        Self { mantissa: scaled(value, digits).round() as i64, decimal_places: digits }
    }

    /// Returns the difference of two numbers with the same number of digits after the decimal point.
    pub fn minus(self, other: Self) -> Self {
        Self { mantissa: self.mantissa.saturating_sub(other.mantissa), decimal_places: self.decimal_places }
    }

    /// Formats the number for people, with a typographic minus sign (U+2212).
    pub fn to_text(self) -> String {
        self.to_ascii_text().replace('-', "\u{2212}")
    }

    /// Formats the number for programs, with an ASCII minus sign.
    pub fn to_ascii_text(self) -> String {
        let sign = if self.mantissa < 0 { "-" } else { "" };
        let (units, scale) = (self.mantissa.unsigned_abs(), 10_u64.pow(self.decimal_places));
        match self.decimal_places {
            0 => format!("{sign}{units}"),
            digits => format!("{sign}{}.{:0width$}", units / scale, units % scale, width = digits as usize),
        }
    }

    /// Formats the number with a plus or minus sign, unless it is zero.
    pub fn to_signed_text(self) -> String {
        if self.mantissa > 0 { format!("+{}", self.to_ascii_text()) } else { self.to_text() }
    }
}

/// Rounds `parts` to `digits` digits after the decimal point, such that they sum to the rounded `total`.
pub fn round_to_total(parts: &[f64], total: f64, digits: u32) -> Vec<FixedPoint> {
    let exact: Vec<f64> = parts.iter().map(|&part| scaled(part, digits)).collect();
    let mut units: Vec<i64> = exact.iter().map(|part| part.floor() as i64).collect();
    let target = FixedPoint::new(total, digits).mantissa;
    let missing = units.iter().fold(target, |left, &unit| left.saturating_sub(unit));
    // Floating-point errors can make `missing` negative, or larger than the number of parts if huge terms have
    // opposite signs. So every part gets an equal share, and the rest is distributed by the remainders.
    let count = parts.len().max(1) as i64;
    let (each, rest) = (missing.div_euclid(count), missing.rem_euclid(count) as usize);
    let remainder = |index: usize| exact[index] - exact[index].floor();
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_by(|&a, &b| remainder(b).total_cmp(&remainder(a)));
    for (rank, index) in order.into_iter().enumerate() {
        units[index] = units[index].saturating_add(each + i64::from(rank < rest));
    }
    units.into_iter().map(|units| FixedPoint { mantissa: units, decimal_places: digits }).collect()
}

/// Returns the number of digits after the decimal point that show `value` with four significant digits: 1 to 6, or 2
/// for zero.
pub fn decimal_places_for(value: f64) -> u32 {
    let magnitude = value.abs();
    if !magnitude.is_finite() || magnitude < 1e-9 {
        return 2;
    }
    (3.0 - magnitude.log10().floor()).clamp(1.0, 6.0) as u32
}

/// Formats a value with three significant digits, or with all digits before the decimal point if those are more.
pub fn format_three_digits(value: f64) -> String {
    FixedPoint::new(value, decimal_places_for(value).saturating_sub(1)).to_text()
}

/// Formats a time given in milliseconds with [`format_three_digits`], in seconds from 10 s on.
pub fn format_milliseconds(value: f64) -> String {
    if value.abs() >= 1e4 {
        return format!("{} s", format_three_digits(value * 1e-3));
    }
    format!("{} ms", format_three_digits(value))
}

/// Formats a share as a percentage with one digit after the decimal point.
pub fn format_percent(share: f64) -> String {
    format!("{} %", FixedPoint::new(share * 100.0, 1).to_text())
}

/// Formats a value with `digits` digits after the decimal point; zero is always `0`.
pub fn format_decimal(value: f64, digits: u32) -> String {
    if value == 0.0 { "0".into() } else { FixedPoint::new(value, digits).to_text() }
}

/// Formats a number of bytes in B, KiB, MiB, GiB or TiB.
pub fn format_bytes(value: f64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = if value.is_finite() { value } else { 0.0 };
    let mut unit = 0;
    while value.abs() >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let number = if unit == 0 { FixedPoint::new(value, 0).to_text() } else { format_three_digits(value) };
    format!("{number} {}", UNITS[unit])
}

fn scaled(value: f64, digits: u32) -> f64 {
    let scaled = value * 10_f64.powi(digits as i32);
    if scaled.is_finite() { scaled } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_column_sums_to_total() {
        // Rounded separately, these are three times 33.3, which sum to 99.9 and not to 100.0.
        let third = 100.0 / 3.0;
        let parts = round_to_total(&[third, third, third], 100.0, 1);
        assert_eq!(parts.iter().map(|part| part.mantissa).sum::<i64>(), 1000);
        assert_eq!(parts.iter().map(|part| part.to_text()).collect::<Vec<_>>(), ["33.4", "33.3", "33.3"]);
    }

    #[test]
    fn negative_parts_sum_to_total() {
        for total in [10.05, 9.0, 12.34] {
            let parts = round_to_total(&[10.06, -0.03, 0.02], total, 1);
            let sum: i64 = parts.iter().map(|part| part.mantissa).sum();
            assert_eq!(sum, FixedPoint::new(total, 1).mantissa);
        }
        assert_eq!(round_to_total(&[], 1.0, 1), []);
        assert_eq!(FixedPoint::new(-0.04, 1).to_text(), "0.0");
        assert_eq!(FixedPoint::new(-1.25, 2).to_text(), "\u{2212}1.25");
        assert_eq!(FixedPoint::new(-1.25, 2).to_ascii_text(), "-1.25");
    }

    #[test]
    fn digits_follow_the_magnitude() {
        let times = [74.24, 812.4, 9_999.0, 16_473.0].map(format_milliseconds);
        assert_eq!(times, ["74.2 ms", "812 ms", "9999 ms", "16.5 s"]);
        assert_eq!([1536.0, 0.0].map(format_bytes), ["1.50 KiB", "0 B"]);
        assert_eq!(FixedPoint::new(f64::NAN, 2).to_text(), "0.00");
        assert_eq!(decimal_places_for(0.0), 2);
    }
}
