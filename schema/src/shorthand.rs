//! Maps in documents that may be written as a string, such as `load: 4 threads` instead of `load: {threads: 4}`.

/// Implements `Serialize` and `Deserialize` for a type that has `#[serde(remote = "Self")]`. A value is written as a
/// map, and read from a map or a string. The type's function `from_text` converts the string. `$expected` describes
/// both forms in error messages.
macro_rules! map_or_string {
    ($type:ident, $expected:literal) => {
        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                $type::serialize(self, serializer)
            }
        }

        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct MapOrString;
                impl<'de> serde::de::Visitor<'de> for MapOrString {
                    type Value = $type;

                    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                        f.write_str($expected)
                    }

                    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<$type, E> {
                        $type::from_text(text).map_err(E::custom)
                    }

                    fn visit_map<M: serde::de::MapAccess<'de>>(self, map: M) -> Result<$type, M::Error> {
                        $type::deserialize(serde::de::value::MapAccessDeserializer::new(map))
                    }
                }
                deserializer.deserialize_any(MapOrString)
            }
        }
    };
}

pub(crate) use map_or_string;
