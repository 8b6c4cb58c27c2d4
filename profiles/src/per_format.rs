//! A map from weight formats to values, in a document.
//!
//! A duplicate key is an error; a plain map would silently keep the second one.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde::ser::{Serialize, Serializer};

use crate::format::Format;

/// A value for some of the weight formats.
#[derive(Debug, Clone, PartialEq)]
pub struct PerFormat<T>(pub BTreeMap<Format, T>);

impl<T> Default for PerFormat<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T> PerFormat<T> {
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

impl<T> FromIterator<(Format, T)> for PerFormat<T> {
    fn from_iter<I: IntoIterator<Item = (Format, T)>>(items: I) -> Self {
        Self(items.into_iter().collect())
    }
}

impl<T: JsonSchema> JsonSchema for PerFormat<T> {
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

impl<T: Serialize> Serialize for PerFormat<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(&self.0)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for PerFormat<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Entries<T> {
            type Value = PerFormat<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    "weight formats and their values, as `q4_k: {value: 200 GFLOP/s, source: \"measured\"}`",
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
                Ok(PerFormat(values))
            }
        }
        deserializer.deserialize_map(Entries(PhantomData))
    }
}
