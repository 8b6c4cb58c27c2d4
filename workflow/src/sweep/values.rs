//! The values that a field takes in a sweep.
//!
//! - `2GiB..8GiB/7`: seven values from one end to the other, at equal distances;
//! - `1ms..100ms/5/log`: at equal ratios;
//! - `0.5,1,2` or `os,managed` or `64MiB`: the values themselves.
//!
//! Units are written as in documents. A bare number is a count. Values between two counts or sizes are rounded to
//! whole ones, and a value that occurs twice is refused.

use std::collections::BTreeSet;

use hearth_profiles::{
    Bytes, BytesPerSecond, Flops, FlopsPerSecond, Fraction, Layers, PerSecond, Seconds, Watts,
};
use serde_json::Value;

use crate::Error;

/// The most rows of a sweep, and so the most values of a field.
/// source: assumed; a row takes a hundredth of a second and more
pub const MAX_ROWS: usize = 100_000;

/// Larger counts are not exact between the ends of a range.
const LARGEST_COUNT: f64 = (1u64 << 53) as f64;

#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// The spelling in a document.
    pub spelled: String,
    /// What stands in the document's tree.
    pub json: Value,
}

/// The values of a field, in the order of the sweep; never none, and each once.
#[derive(Debug, Clone, PartialEq)]
pub struct Values(pub Vec<Setting>);

impl Values {
    /// Parses the part behind the `=`; errors name the field.
    pub fn parse(field: &str, text: &str) -> Result<Values, Error> {
        let values = if text.contains("..") { range(text) } else { list(text) };
        let values = values.map_err(|why| {
            Error::invalid(format!("wrong values of `{field}`: {why}"))
                .at(format!("--vary {field}={text}"))
                .hint("write `2GiB..8GiB/7`, `1ms..100ms/5/log` or `2GiB,4GiB`")
        })?;
        let mut seen = BTreeSet::new();
        match values.iter().find(|setting| !seen.insert(setting.json.to_string())) {
            None => Ok(Values(values)),
            Some(twice) => Err(Error::invalid(format!("`{field}` has the value {} twice", twice.spelled))
                .at(format!("--vary {field}={text}"))
                .hint("give each value once; whole numbers are rounded, so give fewer of them")),
        }
    }
}

/// The quantity that a number stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A number of things.
    Count,
    Bytes,
    Seconds,
    /// Bytes per second.
    Rate,
    Work,
    /// Operations per second.
    Speed,
    Share,
    Layers,
    /// Events per second.
    Frequency,
    Power,
}

impl Kind {
    /// The setting of a number in the base unit.
    fn setting(self, number: f64) -> Result<Setting, String> {
        let json = match self {
            Kind::Count => Ok(Value::from(number.round() as u64)),
            Kind::Bytes => serde_json::to_value(Bytes(number.round() as u64)),
            Kind::Seconds => serde_json::to_value(Seconds(number)),
            Kind::Rate => serde_json::to_value(BytesPerSecond(number)),
            Kind::Work => serde_json::to_value(Flops(number)),
            Kind::Speed => serde_json::to_value(FlopsPerSecond(number)),
            Kind::Share => serde_json::to_value(Fraction(number)),
            Kind::Layers => serde_json::to_value(Layers(number.round() as u32)),
            Kind::Frequency => serde_json::to_value(PerSecond(number)),
            Kind::Power => serde_json::to_value(Watts(number)),
        };
        let json = json.map_err(|error| error.to_string())?;
        let spelled = json.as_str().map_or_else(|| json.to_string(), str::to_owned);
        Ok(Setting { spelled, json })
    }
}

/// A number in the base unit, and what it is a number of.
pub fn quantity(text: &str) -> Option<(Kind, f64)> {
    let count = || text.parse::<u64>().ok().map(|count| (Kind::Count, count as f64));
    let share = || text.parse().ok().map(|Fraction(share)| (Kind::Share, share));
    count()
        .or_else(|| text.parse().ok().map(|bytes: Bytes| (Kind::Bytes, bytes.as_f64())))
        .or_else(|| text.parse().ok().map(|Seconds(time)| (Kind::Seconds, time)))
        .or_else(|| text.parse().ok().map(|BytesPerSecond(rate)| (Kind::Rate, rate)))
        .or_else(|| text.parse().ok().map(|Flops(work)| (Kind::Work, work)))
        .or_else(|| text.parse().ok().map(|FlopsPerSecond(speed)| (Kind::Speed, speed)))
        .or_else(share)
        .or_else(|| text.parse().ok().map(|Layers(layers)| (Kind::Layers, f64::from(layers))))
        .or_else(|| text.parse().ok().map(|PerSecond(often)| (Kind::Frequency, often)))
        .or_else(|| text.parse().ok().map(|Watts(power)| (Kind::Power, power)))
}

fn list(text: &str) -> Result<Vec<Setting>, String> {
    let words: Vec<&str> = text.split(',').map(str::trim).collect();
    if words.len() > MAX_ROWS {
        return Err(format!("{} values; a sweep has at most {MAX_ROWS} rows", words.len()));
    }
    if words.iter().any(|word| word.is_empty()) {
        return Err("a value is empty".into());
    }
    words.into_iter().map(setting).collect()
}

/// A value of a list. What is not a quantity is a word, and the field's type decides whether it is valid.
fn setting(word: &str) -> Result<Setting, String> {
    match quantity(word) {
        // Seeds use all their bits.
        Some((Kind::Count, _)) => {
            let json = word.parse::<u64>().map_or(Value::Null, Value::from);
            Ok(Setting { spelled: json.to_string(), json })
        }
        // As it was written: documents print 9.7 GiB as a whole number of bytes.
        Some((kind, number)) => {
            let (digits, unit) = split(word);
            let spelled = format!("{digits} {unit}");
            Ok(Setting { spelled, ..kind.setting(number)? })
        }
        None => {
            let whole = word.parse::<i64>().ok().map(Value::from);
            let broken = || word.parse::<f64>().ok().filter(|number| number.is_finite()).map(Value::from);
            let json = match word {
                "true" => Value::Bool(true),
                "false" => Value::Bool(false),
                _ => whole.or_else(broken).unwrap_or_else(|| Value::from(word)),
            };
            Ok(Setting { spelled: word.to_owned(), json })
        }
    }
}

fn range(text: &str) -> Result<Vec<Setting>, String> {
    let (rest, by_ratio) = text.strip_suffix("/log").map_or((text, false), |rest| (rest, true));
    let missing = || "give the number of values at the end of the range, as `/7`".to_owned();
    let (ends, count) = rest.rsplit_once('/').ok_or_else(missing)?;
    let count: usize = count.trim().parse().map_err(|_| missing())?;
    if count < 2 {
        return Err(format!("{count} values; a range has at least 2, its ends"));
    }
    if count > MAX_ROWS {
        return Err(format!("{count} values; a sweep has at most {MAX_ROWS} rows"));
    }
    let (first, last) = ends.split_once("..").ok_or_else(missing)?;
    let end = |text: &str| {
        let none = || format!("`{}` is neither a count nor a quantity with its unit", text.trim());
        quantity(text.trim()).ok_or_else(none)
    };
    let ((kind, from), (other, to)) = (end(first)?, end(last)?);
    if kind != other {
        return Err(format!("`{}` and `{}` are of different kinds", first.trim(), last.trim()));
    }
    if kind == Kind::Count && from.max(to) > LARGEST_COUNT {
        return Err(format!("counts of a range are at most {LARGEST_COUNT}"));
    }
    if by_ratio && from.min(to) <= 0.0 {
        return Err("a range with `/log` begins and ends above zero".into());
    }
    let between = |index: usize| {
        let share = index as f64 / (count - 1) as f64;
        match index {
            0 => from,
            index if index == count - 1 => to,
            _ if by_ratio => short(from * (to / from).powf(share)),
            _ => short(from + (to - from) * share),
        }
    };
    let unit = split(first).1;
    (0..count).map(|index| Ok(kind.setting(between(index))?.in_unit(kind, unit))).collect()
}

impl Setting {
    /// The same value in another unit, if that is exact.
    fn in_unit(self, kind: Kind, unit: &str) -> Setting {
        let base = quantity(&self.spelled).map(|(_, base)| base);
        let one = quantity(&format!("1 {unit}")).map(|(_, one)| one);
        let Some((base, one)) = base.zip(one).filter(|_| !unit.is_empty()) else { return self };
        let spelled = format!("{} {unit}", short(base / one));
        if quantity(&spelled) == Some((kind, base)) { Setting { spelled, ..self } } else { self }
    }
}

/// The number and the unit of a quantity; units have no digits.
fn split(text: &str) -> (&str, &str) {
    let ends = text.rfind(|letter: char| letter.is_ascii_digit()).map_or(0, |at| at + 1);
    let (digits, unit) = text.split_at(ends);
    (digits.trim(), unit.trim())
}

/// Rounds to twelve digits, because powers may differ in the last ones from machine to machine.
fn short(number: f64) -> f64 {
    format!("{number:.11e}").parse().unwrap_or(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spelled(text: &str) -> Vec<String> {
        let values = Values::parse("field", text).expect("values");
        values.0.into_iter().map(|setting| setting.spelled).collect()
    }

    fn refused(text: &str) -> String {
        Values::parse("field", text).expect_err("no values").what()
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
        assert_eq!(Values::parse("field", "true").expect("values").0[0].json, Value::Bool(true));
    }

    #[test]
    fn wrong_ranges_are_refused() {
        assert!(refused("1GiB..2GiB/0").contains("at least 2"));
        assert!(refused("1GiB..2GiB/1").contains("at least 2"));
        assert!(refused("1GiB..2GiB").contains("number of values"));
        assert!(refused("1GiB..2s/3").contains("different kinds"));
        assert!(refused("1..2GiB/3").contains("different kinds"));
        assert!(refused("NaN GiB..2GiB/3").contains("`NaN GiB` is neither"));
        assert!(refused("nan..2/3").contains("`nan` is neither"));
        assert!(refused("-1s..1s/3").contains("`-1s` is neither"));
        assert!(refused("0s..1s/3/log").contains("above zero"));
        assert!(refused("1..4/10").contains("twice"));
        assert!(refused("1..1000000/1000000").contains("at most 100000"));
        assert!(refused("1..2/99999999999999999999").contains("number of values"));
        assert!(refused("1,,2").contains("empty") && refused("").contains("empty"));
        assert!(refused("1GiB,1024MiB").contains("twice"));
    }
}
