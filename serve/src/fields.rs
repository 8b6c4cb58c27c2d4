//! The fields of a JSON object in a request: each is parsed when it is taken, so that an error names the field.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::value::SeqAccessDeserializer;
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use crate::error::{ApiError, excerpt};

/// The fields that have not been taken yet, by name. They borrow the body of the request.
pub struct Fields<'a>(BTreeMap<Cow<'a, str>, &'a RawValue>);

impl<'a> Fields<'a> {
    pub fn from_json(bytes: &'a [u8]) -> Result<Self, ApiError> {
        #[derive(Deserialize)]
        struct Object<'a>(#[serde(borrow)] BTreeMap<Name<'a>, &'a RawValue>);
        #[derive(Deserialize, PartialEq, Eq, PartialOrd, Ord)]
        struct Name<'a>(#[serde(borrow)] Cow<'a, str>);
        let object: Object<'a> = serde_json::from_slice(bytes).map_err(|error| {
            ApiError::invalid_request(format!("the request body is not a valid JSON object: {error}"))
        })?;
        Ok(Self(object.0.into_iter().map(|(name, value)| (name.0, value)).collect()))
    }

    /// Removes and parses a field; `None` if it is missing or null.
    pub fn take<T: Deserialize<'a>>(&mut self, name: &'static str) -> Result<Option<T>, ApiError> {
        let parsed = self.get(name);
        self.0.remove(name);
        parsed
    }

    /// Parses a field, and leaves it; `None` if it is missing or null.
    pub fn get<T: Deserialize<'a>>(&self, name: &'static str) -> Result<Option<T>, ApiError> {
        let Some(value) = self.0.get(name) else { return Ok(None) };
        serde_json::from_str(value.get()).map_err(|error| {
            let text = error.to_string();
            // The position is one in the value, not in the body.
            let what = text.split(" at line ").next().unwrap_or_default();
            ApiError::invalid(name, format!("`{name}` is not valid: {what}"))
        })
    }

    /// Fails if a field is left that is set and not one of `ignored`.
    pub fn reject_others(self, ignored: &[&str]) -> Result<(), ApiError> {
        let is_unknown = |(name, value): &(Cow<'a, str>, &RawValue)| {
            value.get() != "null" && !ignored.contains(&name.as_ref())
        };
        let Some((name, _)) = self.0.into_iter().find(is_unknown) else { return Ok(()) };
        let name = excerpt(&name);
        let message = format!("`{name}` is not supported: leave it out");
        Err(ApiError::invalid(name, message))
    }
}

/// A string, or a list of other values. Unlike an untagged enum, it is parsed without storing all values twice.
#[derive(Debug, PartialEq, Eq)]
pub enum StringOr<T> {
    String(String),
    List(Vec<T>),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for StringOr<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StringOrVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for StringOrVisitor<T> {
            type Value = StringOr<T>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a string or a list")
            }

            fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
                Ok(StringOr::String(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Self::Value, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(seq)).map(StringOr::List)
            }
        }
        deserializer.deserialize_any(StringOrVisitor(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_field() {
        let body = br#"{"a": 1, "b": "x", "c": null, "d": [1], "user": "me"}"#;
        let mut fields = Fields::from_json(body).expect("an object");
        assert_eq!(fields.take::<u32>("a"), Ok(Some(1)));
        let wrong = fields.take::<u32>("b").expect_err("a string");
        assert_eq!(wrong.param.as_deref(), Some("b"));
        assert_eq!(wrong.message, "`b` is not valid: invalid type: string \"x\", expected u32");
        assert_eq!(fields.take::<u32>("missing"), Ok(None));
        let unknown = fields.reject_others(&["user"]).expect_err("an unknown field");
        assert_eq!(
            (unknown.param.as_deref(), &*unknown.message),
            (Some("d"), "`d` is not supported: leave it out")
        );
        for body in ["", "[]", "{\"a\": }", "7", "{\"a\": 1"] {
            assert!(Fields::from_json(body.as_bytes()).is_err(), "{body}");
        }
    }
}
