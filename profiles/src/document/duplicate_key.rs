//! Finds the location of duplicate keys in YAML text.
//!
//! The YAML parser reports only the location of the map that contains a duplicate key.

use std::collections::BTreeSet;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// Returns the first duplicate key or syntax error in YAML text, as an error with its location.
pub(super) fn find_duplicate_key(text: &str) -> Option<serde_yaml::Error> {
    UniqueKeys.deserialize(serde_yaml::Deserializer::from_str(text)).err()
}

/// Defines methods of a visitor that accept every value of a scalar type.
macro_rules! accept_scalars {
    ($($visit:ident: $scalar:ty),+) => {$(
        fn $visit<E>(self, _: $scalar) -> Result<(), E> {
            Ok(())
        }
    )+};
}

/// A visitor that accepts any value whose maps have no duplicate keys.
struct UniqueKeys;

impl<'de> DeserializeSeed<'de> for UniqueKeys {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for UniqueKeys {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while items.next_element_seed(UniqueKeys)?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut keys = BTreeSet::new();
        while map.next_key_seed(NewKey(&mut keys))?.is_some() {
            map.next_value_seed(UniqueKeys)?;
        }
        Ok(())
    }

    accept_scalars!(visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_f64: f64, visit_str: &str);

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

/// A visitor that accepts a key that is not in the set yet, and adds the key to the set.
struct NewKey<'k>(&'k mut BTreeSet<String>);

impl<'de> DeserializeSeed<'de> for NewKey<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for NewKey<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<(), E> {
        if self.0.insert(key.to_owned()) { Ok(()) } else { Err(E::custom(format!("duplicate key `{key}`"))) }
    }
}
