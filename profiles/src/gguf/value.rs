//! GGUF metadata: typed values by key.
//!
//! [`Metadata`] is ordered by key. The value of an absent key is `Ok(None)`, because most keys are optional. A value
//! of an unexpected type is an error that names the key, because with a silent default the model would compute wrong
//! results.

use std::collections::BTreeMap;

use super::error::GgufError;

/// Calls a macro with all types of values: variant, Rust type, type number in a file, and name in a message.
macro_rules! each_type {
    ($with:ident) => {
        $with! {
            U8(u8) = 0, "u8";
            I8(i8) = 1, "i8";
            U16(u16) = 2, "u16";
            I16(i16) = 3, "i16";
            U32(u32) = 4, "u32";
            I32(i32) = 5, "i32";
            F32(f32) = 6, "f32";
            Bool(bool) = 7, "bool";
            Str(String) = 8, "string";
            Array(Array) = 9, "array";
            U64(u64) = 10, "u64";
            I64(i64) = 11, "i64";
            F64(f64) = 12, "f64";
        }
    };
}
pub(super) use each_type;

macro_rules! value_types {
    ($($name:ident($type:ty) = $number:literal, $text:literal;)+) => {
        /// A metadata value.
        #[derive(Debug, Clone, PartialEq)]
        pub enum Value { $($name($type),)+ }

        /// An array, stored by element type, so that elements take no more memory than needed.
        #[derive(Debug, Clone, PartialEq)]
        pub enum Array { $($name(Vec<$type>),)+ }

        impl Value {
            pub fn type_number(&self) -> u32 {
                match self { $(Value::$name(_) => $number,)+ }
            }

            fn describe(&self) -> String {
                if let Value::Array(array) = self {
                    return format!("an array of {}", array.element());
                }
                let name = match self { $(Value::$name(_) => $text,)+ };
                name.to_owned()
            }
        }

        impl Array {
            /// Returns the GGUF type number of the elements.
            pub fn element_type_number(&self) -> u32 {
                match self { $(Array::$name(_) => $number,)+ }
            }

            pub fn len(&self) -> usize {
                match self { $(Array::$name(items) => items.len(),)+ }
            }

            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }

            fn element(&self) -> &'static str {
                match self { $(Array::$name(_) => $text,)+ }
            }
        }
    };
}

each_type!(value_types);

impl Value {
    /// Returns the value of an integer of any width, because converters use different widths.
    fn integer(&self) -> Option<i128> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::I8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::I16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::I32(v) => Some(v.into()),
            Value::U64(v) => Some(v.into()),
            Value::I64(v) => Some(v.into()),
            _ => None,
        }
    }
}

/// The keys and values of a header, ordered by key.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Metadata {
    values: BTreeMap<String, Value>,
}

impl Metadata {
    /// Returns the value of a key, of any type.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// Adds a key; returns `false` and changes nothing if it exists.
    pub fn insert(&mut self, key: String, value: Value) -> bool {
        if self.values.contains_key(&key) {
            return false;
        }
        self.values.insert(key, value);
        true
    }

    /// Iterates over keys and values, ordered by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value))
    }

    pub fn len(&self) -> usize {
        self.values.len()
    }

    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Returns the value of an integer of any width. It must fit in `u32`.
    pub fn get_u32(&self, key: &str) -> Result<Option<u32>, GgufError> {
        self.typed(key, "an integer from 0 to 4294967295", |value| {
            value.integer().and_then(|v| u32::try_from(v).ok())
        })
    }

    /// Returns the value of an integer of any width. It must not be negative.
    pub fn get_u64(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.typed(key, "a non-negative integer", |value| value.integer().and_then(|v| u64::try_from(v).ok()))
    }

    /// Returns the value of a floating-point number, rounded to single precision.
    pub fn get_f32(&self, key: &str) -> Result<Option<f32>, GgufError> {
        self.typed(key, "an f32", |value| match *value {
            Value::F32(v) => Some(v),
            Value::F64(v) => Some(v as f32),
            _ => None,
        })
    }

    pub fn get_bool(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.typed(key, "a bool", |value| if let Value::Bool(v) = *value { Some(v) } else { None })
    }

    /// Returns a string. Bytes that are not UTF-8 were replaced by U+FFFD when the file was read.
    pub fn get_str(&self, key: &str) -> Result<Option<&str>, GgufError> {
        self.typed(key, "a string", |value| if let Value::Str(v) = value { Some(v.as_str()) } else { None })
    }

    /// Returns an array of strings. Bytes that are not UTF-8 were replaced by U+FFFD when the file was read.
    pub fn get_str_array(&self, key: &str) -> Result<Option<&[String]>, GgufError> {
        self.typed(key, "an array of strings", |value| match value {
            Value::Array(Array::Str(items)) => Some(items.as_slice()),
            _ => None,
        })
    }

    pub fn get_f32_array(&self, key: &str) -> Result<Option<&[f32]>, GgufError> {
        self.typed(key, "an array of f32", |value| match value {
            Value::Array(Array::F32(items)) => Some(items.as_slice()),
            _ => None,
        })
    }

    pub fn get_i32_array(&self, key: &str) -> Result<Option<&[i32]>, GgufError> {
        self.typed(key, "an array of i32", |value| match value {
            Value::Array(Array::I32(items)) => Some(items.as_slice()),
            _ => None,
        })
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        match convert(value) {
            Some(converted) => Ok(Some(converted)),
            None => Err(GgufError::WrongType { key: key.to_owned(), expected, found: value.describe() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_key_is_none_and_wrong_type_is_an_error() {
        let mut metadata = Metadata::default();
        assert!(metadata.insert("split.no".into(), Value::U16(3)));
        assert!(!metadata.insert("split.no".into(), Value::U16(4)), "the first value remains");
        assert!(metadata.insert("deep".into(), Value::I64(-1)));
        assert!(metadata.insert("names".into(), Value::Array(Array::Str(vec!["a".into()]))));
        assert_eq!(metadata.get_u32("split.no").unwrap(), Some(3));
        assert_eq!(metadata.get_u32("nothing").unwrap(), None);
        let error = metadata.get_u64("deep").unwrap_err();
        assert_eq!(
            error.to_string(),
            "key `deep` is i64, not a non-negative integer: convert the model again with a current converter"
        );
        assert!(matches!(metadata.get_i32_array("names"), Err(GgufError::WrongType { .. })));
        assert_eq!(metadata.get_str_array("names").unwrap(), Some(&["a".to_owned()][..]));
    }
}
