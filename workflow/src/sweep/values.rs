//! Parses the values of a varied field in a sweep.
//!
//! - `2GiB..8GiB/7`: a range of seven values at equal distances, with both ends;
//! - `1ms..100ms/5/log`: a range of five values at equal ratios;
//! - `0.5,1,2` or `os,managed` or `64MiB`: a list of values.
//!
//! Units are written as in documents. A bare number is a count. Counts and sizes in a range are rounded to integers,
//! and duplicate values are rejected.

use std::collections::BTreeSet;
use std::str::FromStr;

use hearth_profiles::{
    Bytes, BytesPerSecond, Flops, FlopsPerSecond, Fraction, Layers, PerSecond, Seconds, Watts,
};
use serde_json::{Value, to_value};

use crate::Error;

/// Maximum number of rows of a sweep, and of values of a field. source: assumed; a row takes at least 10 ms
pub const MAX_ROWS: usize = 100_000;

/// Maximum count in a range: larger integers are not exact in `f64`.
const MAX_RANGE_COUNT: f64 = (1u64 << 53) as f64;

/// One value of a varied field.
#[derive(Debug, Clone, PartialEq)]
pub struct FieldValue {
    /// The value as text, written as in a document.
    pub text: String,
    pub json: Value,
}

/// Parses the values of a field, which are the part after the `=`. Returns at least one value, in the order of the
/// sweep and without duplicates. `field` is the path of the field for error messages.
pub fn parse_values(field: &str, text: &str) -> Result<Vec<FieldValue>, Error> {
    let values = if text.contains("..") { range(text) } else { list(text) };
    let values = values.map_err(|why| {
        Error::invalid(format!("invalid values of `{field}`: {why}"))
            .with_location(format!("--vary {field}={text}"))
            .with_hint("write `2GiB..8GiB/7`, `1ms..100ms/5/log` or `2GiB,4GiB`")
    })?;
    let mut seen = BTreeSet::new();
    let twice = values.iter().find(|setting| !seen.insert(setting.json.to_string()));
    let Some(twice) = twice else { return Ok(values) };
    Err(Error::invalid(format!("`{field}` has the value {} twice", twice.text))
        .with_location(format!("--vary {field}={text}"))
        .with_hint("give each value once; in ranges of integers, values are rounded, so give fewer of them"))
}

/// The kind of a quantity, such as a time or a size, as an index of `KINDS`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantityKind(usize);

/// A function that parses a quantity into a number of base units, and a function that writes it as in a document.
type Conversions = (fn(&str) -> Option<f64>, fn(f64) -> serde_json::Result<Value>);

const KINDS: [Conversions; 10] = [
    (|text| in_base(text, |count: u64| count as f64), |number| to_value(number.round() as u64)),
    (|text| in_base(text, Bytes::as_f64), |number| to_value(Bytes(number.round() as u64))),
    (|text| in_base(text, |Seconds(time)| time), |number| to_value(Seconds(number))),
    (|text| in_base(text, |BytesPerSecond(rate)| rate), |number| to_value(BytesPerSecond(number))),
    (|text| in_base(text, |Flops(work)| work), |number| to_value(Flops(number))),
    (|text| in_base(text, |FlopsPerSecond(speed)| speed), |number| to_value(FlopsPerSecond(number))),
    (|text| in_base(text, |Fraction(share)| share), |number| to_value(Fraction(number))),
    (|text| in_base(text, |Layers(count)| count.into()), |number| to_value(Layers(number.round() as u32))),
    (|text| in_base(text, |PerSecond(rate)| rate), |number| to_value(PerSecond(number))),
    (|text| in_base(text, |Watts(power)| power), |number| to_value(Watts(number))),
];

/// The kind of numbers without a unit, which is the first of `KINDS`.
const COUNT: QuantityKind = QuantityKind(0);

fn in_base<Q: FromStr>(text: &str, number: impl FnOnce(Q) -> f64) -> Option<f64> {
    text.parse().ok().map(number)
}

impl QuantityKind {
    /// Returns the value of a field for a number of base units.
    fn parse_value(self, number: f64) -> Result<FieldValue, String> {
        let json = KINDS[self.0].1(number).map_err(|error| error.to_string())?;
        let text = json.as_str().map_or_else(|| json.to_string(), str::to_owned);
        Ok(FieldValue { text, json })
    }
}

/// Parses a quantity and returns its kind and its number of base units; `None` if the text is not a quantity.
pub fn parse_quantity(text: &str) -> Option<(QuantityKind, f64)> {
    let mut kinds = KINDS.iter().enumerate();
    kinds.find_map(|(kind, (parse, _))| Some((QuantityKind(kind), parse(text)?)))
}

fn list(text: &str) -> Result<Vec<FieldValue>, String> {
    let words: Vec<&str> = text.split(',').map(str::trim).collect();
    if words.len() > MAX_ROWS {
        return Err(format!("there are {} values, but a sweep has at most {MAX_ROWS} rows", words.len()));
    }
    if words.iter().any(|word| word.is_empty()) {
        return Err("a value is empty".into());
    }
    words.into_iter().map(parse_value).collect()
}

/// Parses one value of a list. A value that is not a quantity is kept as a word, a number or a boolean; the type of the
/// field determines whether the value is valid.
fn parse_value(word: &str) -> Result<FieldValue, String> {
    match parse_quantity(word) {
        // Seeds use all their bits.
        Some((COUNT, _)) => {
            let json = word.parse::<u64>().map_or(Value::Null, Value::from);
            Ok(FieldValue { text: json.to_string(), json })
        }
        // Keeps the text, because documents print 9.7 GiB as an integer number of bytes.
        Some((kind, number)) => {
            let (digits, unit) = split(word);
            let text = format!("{digits} {unit}");
            Ok(FieldValue { text, ..kind.parse_value(number)? })
        }
        None => {
            let whole = word.parse::<i64>().ok().map(Value::from);
            let fraction = || word.parse::<f64>().ok().filter(|number| number.is_finite()).map(Value::from);
            let json = match word {
                "true" => Value::Bool(true),
                "false" => Value::Bool(false),
                _ => whole.or_else(fraction).unwrap_or_else(|| Value::from(word)),
            };
            Ok(FieldValue { text: word.to_owned(), json })
        }
    }
}

fn range(text: &str) -> Result<Vec<FieldValue>, String> {
    let (rest, by_ratio) = text.strip_suffix("/log").map_or((text, false), |rest| (rest, true));
    let missing = || "give the number of values at the end of the range, such as `/7`".to_owned();
    let (ends, count) = rest.rsplit_once('/').ok_or_else(missing)?;
    let count: usize = count.trim().parse().map_err(|_| missing())?;
    if count < 2 {
        return Err(format!("the number of values is {count}, but a range needs at least 2 (its ends)"));
    }
    if count > MAX_ROWS {
        return Err(format!("there are {count} values, but a sweep has at most {MAX_ROWS} rows"));
    }
    let (first, last) = ends.split_once("..").ok_or_else(missing)?;
    let end = |text: &str| {
        let none = || format!("`{}` is neither a count nor a quantity with its unit", text.trim());
        parse_quantity(text.trim()).ok_or_else(none)
    };
    let ((kind, from), (other, to)) = (end(first)?, end(last)?);
    if kind != other {
        return Err(format!("`{}` and `{}` are quantities of different kinds", first.trim(), last.trim()));
    }
    if kind == COUNT && from.max(to) > MAX_RANGE_COUNT {
        return Err(format!("counts in a range must be at most {MAX_RANGE_COUNT}"));
    }
    if by_ratio && from.min(to) <= 0.0 {
        return Err("both ends of a range with `/log` must be above zero".into());
    }
    let between = |index: usize| {
        let share = index as f64 / (count - 1) as f64;
        match index {
            0 => from,
            index if index == count - 1 => to,
            _ if by_ratio => rounded(from * (to / from).powf(share)),
            _ => rounded(from + (to - from) * share),
        }
    };
    let unit = split(first).1;
    (0..count).map(|index| Ok(kind.parse_value(between(index))?.in_unit(kind, unit))).collect()
}

impl FieldValue {
    /// Returns the value written in the unit `unit` if that is exact; otherwise the unchanged value.
    fn in_unit(self, kind: QuantityKind, unit: &str) -> FieldValue {
        let base = parse_quantity(&self.text).map(|(_, base)| base);
        let one = parse_quantity(&format!("1 {unit}")).map(|(_, one)| one);
        let Some((base, one)) = base.zip(one).filter(|_| !unit.is_empty()) else { return self };
        let text = format!("{} {unit}", rounded(base / one));
        if parse_quantity(&text) == Some((kind, base)) { FieldValue { text, ..self } } else { self }
    }
}

/// Splits a quantity into its number and its unit, which begins after the last digit.
fn split(text: &str) -> (&str, &str) {
    let ends = text.rfind(|letter: char| letter.is_ascii_digit()).map_or(0, |at| at + 1);
    let (digits, unit) = text.split_at(ends);
    (digits.trim(), unit.trim())
}

/// Rounds a number to twelve significant digits, because the last digits of powers may differ between machines.
fn rounded(number: f64) -> f64 {
    format!("{number:.11e}").parse().unwrap_or(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spelled(text: &str) -> Vec<String> {
        let values = parse_values("field", text).expect("values");
        values.into_iter().map(|setting| setting.text).collect()
    }

    #[test]
    fn ranges_include_both_ends() {
        assert_eq!(spelled("2GiB..8GiB/4"), ["2 GiB", "4 GiB", "6 GiB", "8 GiB"]);
        assert_eq!(spelled("8 GiB .. 2 GiB/3"), ["8 GiB", "5 GiB", "2 GiB"]);
        assert_eq!(spelled("100Mbit/s..10Gbit/s/3/log"), ["100 Mbit/s", "1000 Mbit/s", "10000 Mbit/s"]);
        assert_eq!(spelled("1ms..0.1s/3/log"), ["1 ms", "10 ms", "100 ms"]);
        assert_eq!(spelled("1GB..2GB/4")[1], "1.333333333 GB");
        assert_eq!(spelled("1..7/4"), ["1", "3", "5", "7"]);
    }

    #[test]
    fn lists_are_parsed() {
        assert_eq!(spelled("os, managed"), ["os", "managed"]);
        assert_eq!(spelled("18446744073709551615"), ["18446744073709551615"]);
        assert_eq!(spelled("5ms,off,9.7GiB,1e3B"), ["5 ms", "off", "9.7 GiB", "1e3 B"]);
        assert_eq!(parse_values("field", "true").expect("values")[0].json, Value::Bool(true));
    }

    #[test]
    fn wrong_ranges_are_rejected() {
        for (text, expected) in [
            ("1GiB..2GiB/0", "at least 2"),
            ("1GiB..2GiB/1", "at least 2"),
            ("1GiB..2GiB", "number of values"),
            ("1GiB..2s/3", "different kinds"),
            ("1..2GiB/3", "different kinds"),
            ("NaN GiB..2GiB/3", "`NaN GiB` is neither"),
            ("nan..2/3", "`nan` is neither"),
            ("-1s..1s/3", "`-1s` is neither"),
            ("0s..1s/3/log", "above zero"),
            ("1..4/10", "twice"),
            ("1..1000000/1000000", "at most 100000"),
            ("1..2/99999999999999999999", "number of values"),
            ("1,,2", "empty"),
            ("", "empty"),
            ("1GiB,1024MiB", "twice"),
        ] {
            let error = parse_values("field", text).expect_err(text).one_line_message();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
