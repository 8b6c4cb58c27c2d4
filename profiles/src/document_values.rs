//! Types of values in documents: a value with its source, and a map from weight formats to values.
//!
//! The source of a value is a citation, the description of a measurement, or the word `assumed` with a reason.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use crate::format::Format;
use crate::units::Fraction;

/// A value and its source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[serde(expecting = "a value and where it comes from, such as `{value: 5 ms, source: \"measured\"}`")]
pub struct Sourced<T> {
    /// The value, with its unit.
    pub value: T,
    /// Source of the value: a citation, the description of a measurement, or `assumed` with a reason.
    #[serde(deserialize_with = "non_empty")]
    pub source: String,
    /// Relative spread of repeated measurements of the value: half the interquartile range divided by the median.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spread: Option<Fraction>,
}

impl<T> Sourced<T> {
    /// Creates a value from its source, without a spread.
    pub fn new(value: T, source: impl Into<String>) -> Self {
        Self { value, source: source.into(), spread: None }
    }

    /// Returns the converted value with the same source and spread.
    pub fn map<U>(&self, derive: impl FnOnce(&T) -> U) -> Sourced<U> {
        Sourced { value: derive(&self.value), source: self.source.clone(), spread: self.spread }
    }
}

/// Deserializes the source of a value, which must not be empty.
fn non_empty<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let source = String::deserialize(deserializer)?;
    if source.trim().is_empty() {
        return Err(de::Error::custom(
            "`source` is empty: write a citation, how the value was measured, or `assumed` and why",
        ));
    }
    Ok(source)
}

/// A map from weight formats to values. Not every format has a value.
///
/// Duplicate keys in a document are errors; a plain map would silently keep the second value.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(transparent)]
pub struct FormatMap<T>(pub BTreeMap<Format, T>);

impl<T> Default for FormatMap<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T> FormatMap<T> {
    pub fn get(&self, format: Format) -> Option<&T> {
        self.0.get(&format)
    }

    pub fn iter(&self) -> impl Iterator<Item = (Format, &T)> {
        self.0.iter().map(|(&format, value)| (format, value))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<T> FromIterator<(Format, T)> for FormatMap<T> {
    fn from_iter<I: IntoIterator<Item = (Format, T)>>(items: I) -> Self {
        Self(items.into_iter().collect())
    }
}

impl<T: JsonSchema> JsonSchema for FormatMap<T> {
    fn schema_name() -> Cow<'static, str> {
        format!("PerFormat_{}", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "object",
            "propertyNames": generator.subschema_for::<Format>(),
            "additionalProperties": generator.subschema_for::<T>(),
        })
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for FormatMap<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Entries<T> {
            type Value = FormatMap<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    "weight formats and their values, such as `q4_k: {value: 200 GFLOP/s, source: \"measured\"}`",
                )
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut values = BTreeMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    let format: Format = name.parse().map_err(de::Error::custom)?;
                    if values.insert(format, map.next_value()?).is_some() {
                        return Err(de::Error::custom(format!("duplicate entry `{name}`")));
                    }
                }
                Ok(FormatMap(values))
            }
        }
        deserializer.deserialize_map(Entries(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantity_without_a_source_is_refused() {
        for (text, is_valid) in [
            ("{value: 3, source: measured}", true),
            ("{value: 3, source: ' '}", false),
            ("{value: 3}", false),
            ("3", false),
        ] {
            assert_eq!(serde_yaml::from_str::<Sourced<u32>>(text).is_ok(), is_valid, "{text}");
        }
    }
}
