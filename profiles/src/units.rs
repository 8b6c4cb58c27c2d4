//! Quantities with units: one newtype for each kind of quantity, with parsing, formatting and arithmetic.
//!
//! Only arithmetic with a meaningful unit is defined: bytes divided by a transfer rate are seconds. Documents write a
//! quantity with its unit (`2.98 GB/s`, `4.1 GiB`, `5 ms`); a number without a unit is an error, because the number is
//! ambiguous.

use std::borrow::Cow;
use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Sub, SubAssign};
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::ser::{Serialize, Serializer};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes(pub u64);

#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default)]
pub struct Seconds(pub f64);

#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default)]
pub struct BytesPerSecond(pub f64);

/// An amount of work in floating-point operations (a multiply-add is two).
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default)]
pub struct Flops(pub f64);

/// A speed in floating-point operations per second.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default)]
pub struct FlopsPerSecond(pub f64);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Layers(pub u32);

/// A rate in occurrences per second, such as tokens per second.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default)]
pub struct PerSecond(pub f64);

#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default)]
pub struct Watts(pub f64);

/// A fraction of a whole (0.5 is one half). Documents write fractions in percent.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default)]
pub struct Fraction(pub f64);

/// An error in the text of a quantity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    #[error("`{text}` has no unit: write for example `{example}`")]
    MissingUnit { text: String, example: &'static str },
    /// An unknown unit, or the unit of a different kind of quantity. `known` suggests the unit that was probably meant,
    /// or lists all units of the expected kind.
    #[error("`{unit}` is not a unit of {kind}: {known}")]
    UnknownUnit { unit: String, kind: &'static str, known: String },
    /// The number cannot be parsed, is not finite, or is negative.
    #[error("`{text}` is not {kind}: write a finite number, not below zero, and its unit, as in `{example}`")]
    Number { text: String, kind: &'static str, example: &'static str },
}

/// Minimum number that is written with a unit other than the base unit of the quantity.
const MIN_NUMBER: f64 = 1e-3;

/// A quantity that can be rounded for display.
pub trait RoundForDisplay {
    /// Rounds to at most four significant digits, so that the text is short. Measurements are less precise than that.
    #[must_use]
    fn rounded(self) -> Self;
}

impl<Q: Unit> RoundForDisplay for Q {
    fn rounded(self) -> Self {
        let base = self.to_base();
        // Excludes KiB, Mbit and min.
        let decimal = Self::UNITS.iter().filter(|(name, _)| !name.contains('i'));
        let texts =
            decimal.map(|(name, factor)| format!("{} {name}", significant(quotient(base, *factor), 4)));
        texts.min_by_key(|text| length(text)).and_then(|text| Self::parse(&text).ok()).unwrap_or(self)
    }
}

/// A quantity that can be parsed from text with a unit, and formatted as such text.
trait Unit: Sized {
    const KIND: &'static str;
    const EXAMPLE: &'static str;
    /// Names of the units of this quantity, each with its factor to the base unit. The base unit is first.
    const UNITS: &'static [(&'static str, f64)];
    fn from_base(value: f64) -> Option<Self>;
    fn to_base(&self) -> f64;

    fn parse(text: &str) -> Result<Self, UnitError> {
        let trimmed = text.trim();
        let split = trimmed
            .char_indices()
            .find(|&(at, c)| {
                let exponent = (c == 'e' || c == 'E')
                    && trimmed[at + 1..].starts_with(|n: char| n.is_ascii_digit() || n == '-' || n == '+');
                !(c.is_ascii_digit() || matches!(c, '.' | '-' | '+' | '_') || exponent)
            })
            .map_or(trimmed.len(), |(at, _)| at);
        let (number, unit) = (trimmed[..split].replace('_', ""), trimmed[split..].trim());
        let bad = || UnitError::Number { text: text.into(), kind: Self::KIND, example: Self::EXAMPLE };
        let number: f64 = number.parse().map_err(|_| bad())?;
        if unit.is_empty() {
            return Err(UnitError::MissingUnit { text: text.into(), example: Self::EXAMPLE });
        }
        let Some((_, factor)) = Self::UNITS.iter().find(|(name, _)| *name == unit) else {
            let names = || Self::UNITS.iter().map(|(name, _)| *name);
            let known = match names().find(|name| is_likely(name, unit)) {
                Some(name) => format!("did you mean `{name}`?"),
                None => format!("use one of {}", names().collect::<Vec<_>>().join(", ")),
            };
            return Err(UnitError::UnknownUnit { unit: unit.into(), kind: Self::KIND, known });
        };
        let base = times(number, *factor);
        if !base.is_finite() || base < 0.0 {
            return Err(bad());
        }
        Self::from_base(base).ok_or_else(bad)
    }

    /// Returns a regular expression that matches the accepted text of this quantity.
    fn pattern() -> String {
        let units = Self::UNITS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join("|");
        format!(r"^\s*\+?[0-9._]+([eE][+-]?[0-9]+)?\s*({units})\s*$")
    }

    /// Returns the shortest text with a unit that parses to exactly this value.
    fn spell(&self) -> String {
        let base = self.to_base();
        let spell = |name: &str, factor: f64| format!("{} {name}", quotient(base, factor));
        // The division may leave a spurious last digit: 0.0322 / 0.01 is 3.2199999999999998.
        let short = |name: &str, factor: f64| format!("{} {name}", significant(quotient(base, factor), 12));
        // Microseconds are not written as millionths of a minute, however short that is.
        let apt = |&&(name, factor): &&(&str, f64)| {
            name == Self::UNITS[0].0 || base == 0.0 || quotient(base, factor) >= MIN_NUMBER
        };
        Self::UNITS
            .iter()
            .filter(apt)
            .flat_map(|&(name, factor)| [spell(name, factor), short(name, factor)])
            .filter(|text| Self::parse(text).is_ok_and(|back| back.to_base() == base))
            .min_by_key(|text| length(text))
            // A few fractions have no exact text in percent; this is the nearest one.
            .unwrap_or_else(|| spell(Self::UNITS[0].0, Self::UNITS[0].1))
    }
}

/// Returns whether `written` probably means the unit `name`: both differ only in upper and lower case, or `written` is
/// a rate with `ps` for `/s` and `b` for bits, such as `Mbps`.
fn is_likely(name: &str, written: &str) -> bool {
    let rate =
        written.strip_suffix("ps").or(written.strip_suffix("/s")).map(|of| match of.strip_suffix('b') {
            Some(prefix) => format!("{prefix}bit/s"),
            None => format!("{of}/s"),
        });
    name.eq_ignore_ascii_case(rate.as_deref().unwrap_or(written))
}

/// Returns `number * factor`. A factor below one is the inverse of an integer, and dividing by that integer is more
/// exact: 3.1 / 100 is the nearest number to 3.1 %, and 3.1 * 0.01 is not.
fn times(number: f64, factor: f64) -> f64 {
    if factor < 1.0 { number / (1.0 / factor).round() } else { number * factor }
}

/// Returns `number / factor`. A factor below one is treated as in [`times`].
fn quotient(number: f64, factor: f64) -> f64 {
    if factor < 1.0 { number * (1.0 / factor).round() } else { number / factor }
}

/// Returns the sort key for the shortest text: the length, then the number of digits before the decimal point.
fn length(text: &str) -> (usize, Option<usize>) {
    (text.len(), text.find(['.', ' ']))
}

fn significant(value: f64, digits: usize) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let text = format!("{value:.*e}", digits - 1);
    text.parse().unwrap_or(value)
}

macro_rules! quantity {
    ($($name:ident, $kind:literal, $example:literal, $convert:expr, [$(($unit:literal, $factor:expr)),+ $(,)?];)+) => {$(
        impl Unit for $name {
            const KIND: &'static str = $kind;
            const EXAMPLE: &'static str = $example;
            const UNITS: &'static [(&'static str, f64)] = &[$(($unit, $factor)),+];
            fn from_base(value: f64) -> Option<Self> {
                #[allow(clippy::redundant_closure_call)]
                ($convert)(value).map($name)
            }
            #[allow(clippy::cast_lossless)] // `f64::from` exists for some of the types only
            fn to_base(&self) -> f64 {
                self.0 as f64
            }
        }
        impl FromStr for $name {
            type Err = UnitError;
            fn from_str(text: &str) -> Result<Self, UnitError> {
                Self::parse(text)
            }
        }
        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }
            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({
                    "type": "string",
                    "description": concat!($kind, ", such as `", $example, "`"),
                    "pattern": <$name as Unit>::pattern(),
                })
            }
        }
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.spell())
            }
        }
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Text;
                impl Visitor<'_> for Text {
                    type Value = $name;
                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        write!(f, "{} with its unit, as in `{}`", $kind, $example)
                    }
                    fn visit_str<E: de::Error>(self, text: &str) -> Result<$name, E> {
                        $name::parse(text).map_err(E::custom)
                    }
                }
                deserializer.deserialize_any(Text)
            }
        }
    )+};
}

const KIB: f64 = 1024.0;
const MIB: f64 = KIB * 1024.0;
const GIB: f64 = MIB * 1024.0;
const TIB: f64 = GIB * 1024.0;

fn whole(value: f64, limit: f64) -> Option<f64> {
    let rounded = value.round();
    // `4.1 GiB` is not a whole number of bytes; rounding to the nearest byte is intended.
    (rounded < limit).then_some(rounded)
}

quantity! {
    Bytes, "a size in bytes", "4.1 GiB", |v| whole(v, 1.8e19).map(|v| v as u64), [
        ("B", 1.0), ("KiB", KIB), ("MiB", MIB), ("GiB", GIB), ("TiB", TIB),
        ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12),
    ];
    Seconds, "a time", "5 ms", Some, [("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9), ("min", 60.0)];
    BytesPerSecond, "a rate in bytes per second", "2.98 GB/s", Some, [
        ("B/s", 1.0), ("kB/s", 1e3), ("MB/s", 1e6), ("GB/s", 1e9), ("TB/s", 1e12),
        ("KiB/s", KIB), ("MiB/s", MIB), ("GiB/s", GIB),
        ("kbit/s", 1e3 / 8.0), ("Mbit/s", 1e6 / 8.0), ("Gbit/s", 1e9 / 8.0),
    ];
    Flops, "an amount of work", "2.4 GFLOP", Some, [
        ("FLOP", 1.0), ("MFLOP", 1e6), ("GFLOP", 1e9), ("TFLOP", 1e12),
    ];
    FlopsPerSecond, "a speed in operations per second", "40 GFLOP/s", Some, [
        ("FLOP/s", 1.0), ("MFLOP/s", 1e6), ("GFLOP/s", 1e9), ("TFLOP/s", 1e12),
    ];
    Layers, "a whole number of layers", "80 layers",
        |v| whole(v, 4.0e9).filter(|&whole| whole == v).map(|v| v as u32),
        [("layers", 1.0), ("layer", 1.0)];
    PerSecond, "a number of times per second", "0.15 /s", Some, [("/s", 1.0), ("/min", 1.0 / 60.0)];
    Watts, "a power", "2.7 W", Some, [("W", 1.0), ("mW", 1e-3)];
    Fraction, "a share", "90 %", Some, [("%", 0.01)];
}

macro_rules! additive {
    ($($name:ident),+) => {$(
        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0 + other.0)
            }
        }
        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                self.0 += other.0;
            }
        }
        impl Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0 - other.0)
            }
        }
        impl SubAssign for $name {
            fn sub_assign(&mut self, other: Self) {
                self.0 -= other.0;
            }
        }
        impl Sum for $name {
            fn sum<I: Iterator<Item = Self>>(items: I) -> Self {
                items.fold(Self::default(), Add::add)
            }
        }
    )+};
}
additive!(Bytes, Seconds, BytesPerSecond, Flops, FlopsPerSecond, Layers);

macro_rules! scaled {
    ($($name:ident),+) => {$(
        impl Mul<f64> for $name {
            type Output = Self;
            fn mul(self, factor: f64) -> Self {
                Self(self.0 * factor)
            }
        }
        impl Div<f64> for $name {
            type Output = Self;
            fn div(self, factor: f64) -> Self {
                Self(self.0 / factor)
            }
        }
        impl Div for $name {
            type Output = f64;
            fn div(self, other: Self) -> f64 {
                self.0 / other.0
            }
        }
    )+};
}
scaled!(Seconds, BytesPerSecond, Flops, FlopsPerSecond);

impl Mul<u64> for Bytes {
    type Output = Bytes;
    fn mul(self, count: u64) -> Bytes {
        Bytes(self.0 * count)
    }
}

impl Mul<Layers> for Bytes {
    type Output = Bytes;
    fn mul(self, layers: Layers) -> Bytes {
        self * u64::from(layers.0)
    }
}

impl Bytes {
    pub const ZERO: Bytes = Bytes(0);

    /// Serializes the number of bytes without a unit, for output whose keys end in `_bytes`.
    ///
    /// # Errors
    ///
    /// Those of the serializer.
    pub fn serialize_number<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }

    pub const fn from_mib(count: u64) -> Bytes {
        Bytes(count << 20)
    }

    pub fn as_f64(self) -> f64 {
        self.0 as f64
    }

    #[must_use]
    pub fn saturating_sub(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_sub(other.0))
    }
}

impl Seconds {
    pub fn as_millis(self) -> f64 {
        self.0 * 1e3
    }

    pub fn from_nanos(nanos: u64) -> Seconds {
        Seconds(nanos as f64 * 1e-9)
    }

    pub fn to_nanos(self) -> u64 {
        // The same as `round`, which would be a function call for every event of the simulator.
        let nanos = self.0 * 1e9;
        let whole = nanos as u64;
        whole.saturating_add(u64::from(nanos - whole as f64 >= 0.5))
    }
}

macro_rules! quotients {
    ($($dividend:ident / $divisor:ident = $result:ident;)+) => {$(
        impl Div<$divisor> for $dividend {
            type Output = $result;
            fn div(self, divisor: $divisor) -> $result {
                $result(self.0 as f64 / divisor.0)
            }
        }
    )+};
}
quotients! {
    Bytes / BytesPerSecond = Seconds;
    Bytes / Seconds = BytesPerSecond;
    Flops / FlopsPerSecond = Seconds;
    Flops / Seconds = FlopsPerSecond;
}

/// Writes a value with three significant digits, in the largest unit in which the value is at least 1.
fn human(f: &mut fmt::Formatter<'_>, value: f64, steps: &[(&str, f64)]) -> fmt::Result {
    let (name, factor) =
        steps.iter().find(|(_, factor)| value.abs() >= *factor).or(steps.last()).expect("a unit to print in");
    let scaled = value / factor;
    let digits =
        if scaled.abs() >= 100.0 || scaled == 0.0 { 0 } else { usize::from(scaled.abs() < 10.0) + 1 };
    write!(f, "{scaled:.digits$} {name}")
}

macro_rules! displayed {
    ($($name:ident: $units:expr;)+) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                human(f, self.0 as f64, &$units)
            }
        }
    )+};
}
displayed! {
    Bytes: [("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB), ("B", 1.0)];
    Seconds: [("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)];
    BytesPerSecond: [("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3), ("B/s", 1.0)];
    FlopsPerSecond: [("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6), ("FLOP/s", 1.0)];
}

impl Seconds {
    /// Formats a duration in the units that people use: `538 ms`, `10.8 s`, `14 min 56 s` or `2 h 5 min`.
    pub fn in_words(self) -> String {
        let whole = self.0.round() as u64;
        match whole {
            0..60 => self.to_string(),
            60..3600 => format!("{} min {} s", whole / 60, whole % 60),
            _ => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
        }
    }
}

impl fmt::Display for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.0, if self.0 == 1 { "layer" } else { "layers" })
    }
}

#[cfg(test)]
mod tests;
