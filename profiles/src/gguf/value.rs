//! GGUF metadata: typed values by key.
//!
//! The getters return `Ok(None)` for an absent key, because most keys are optional. A value of an unexpected type is an
//! error that names the key, because a silent default would make the model compute wrong results.

use std::collections::BTreeMap;
use std::io::Read;

use super::error::{GgufError, HeaderError};
use super::reader::HeaderReader;

/// Maximum length of a string value in bytes. Chat templates take up to a few hundred kB.
const MAX_STRING_BYTES: u64 = 16 << 20;
const MAX_NESTING: u32 = 4;
/// Maximum number of elements for which memory is reserved before they are read.
pub(super) const MAX_RESERVED_ELEMENTS: u64 = 4096;

type HeaderResult<T> = Result<T, HeaderError>;

/// A type that metadata values and array elements can have.
pub(super) trait Element: Sized {
    /// Minimum size of an encoded value, in bytes.
    const MIN_BYTES: u64;

    /// Reads a value that belongs to the key `key` and is inside `depth` nested arrays.
    fn read<R: Read>(source: &mut HeaderReader<R>, key: &str, depth: u32) -> HeaderResult<Self>;

    fn write(&self, out: &mut Vec<u8>);
}

macro_rules! number_elements {
    ($($type:ty)+) => {$(
        impl Element for $type {
            const MIN_BYTES: u64 = size_of::<$type>() as u64;

            fn read<R: Read>(source: &mut HeaderReader<R>, _: &str, _: u32) -> HeaderResult<Self> {
                Ok(Self::from_le_bytes(source.read_array("a value")?))
            }

            fn write(&self, out: &mut Vec<u8>) {
                out.extend(self.to_le_bytes());
            }
        }
    )+};
}
number_elements! { u8 i8 u16 i16 u32 i32 u64 i64 f32 f64 }

impl Element for bool {
    const MIN_BYTES: u64 = 1;

    fn read<R: Read>(source: &mut HeaderReader<R>, key: &str, depth: u32) -> HeaderResult<Self> {
        match u8::read(source, key, depth)? {
            0 => Ok(false),
            1 => Ok(true),
            found => Err(HeaderError::Boolean { key: key.to_owned(), found }),
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }
}

impl Element for String {
    // The length of an empty string.
    const MIN_BYTES: u64 = 8;

    // Some converters write tokens that are not UTF-8; losing those characters is better than rejecting the model.
    fn read<R: Read>(source: &mut HeaderReader<R>, key: &str, _: u32) -> HeaderResult<Self> {
        let bytes = source.read_string_bytes(&format!("a string of key `{key}`"), MAX_STRING_BYTES)?;
        Ok(String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
    }

    fn write(&self, out: &mut Vec<u8>) {
        (self.len() as u64).write(out);
        out.extend(self.as_bytes());
    }
}

fn elements<T: Element>(source: &mut HeaderReader<impl Read>, key: &str, depth: u32) -> HeaderResult<Vec<T>> {
    let count = source.read_u64("the length of an array")?;
    source.check_remaining(&format!("the array `{key}`"), count, T::MIN_BYTES)?;
    let mut items = Vec::with_capacity(count.min(MAX_RESERVED_ELEMENTS) as usize);
    for _ in 0..count {
        items.push(T::read(source, key, depth)?);
    }
    Ok(items)
}

/// Defines [`Value`] and [`Array`] from a list of variants: Rust type, type number in a file, name in messages.
macro_rules! value_types {
    ($($name:ident($type:ty) = $number:literal, $text:literal;)+) => {
        /// A metadata value.
        #[derive(Debug, Clone, PartialEq)]
        pub enum Value { $($name($type),)+ }

        /// An array value. Each element type has its own variant, so elements take no more memory than needed.
        #[derive(Debug, Clone, PartialEq)]
        pub enum Array { $($name(Vec<$type>),)+ }

        impl Value {
            /// Reads the type number of a value, and the value.
            pub(super) fn read<R: Read>(source: &mut HeaderReader<R>, key: &str) -> HeaderResult<Self> {
                match source.read_u32("a value type")? {
                    $($number => Element::read(source, key, 0).map(Value::$name),)+
                    type_number => Err(HeaderError::UnknownValueType { key: key.to_owned(), type_number }),
                }
            }

            /// Appends the type number and the value to `out`.
            pub(super) fn write(&self, out: &mut Vec<u8>) {
                match self {
                    $(Value::$name(value) => {
                        out.extend(u32::to_le_bytes($number));
                        value.write(out);
                    })+
                }
            }

            fn describe(&self) -> String {
                if let Value::Array(array) = self {
                    return format!("array of {}", array.element());
                }
                let name = match self { $(Value::$name(_) => $text,)+ };
                name.to_owned()
            }
        }

        impl Array {
            fn element(&self) -> &'static str {
                match self { $(Array::$name(_) => $text,)+ }
            }
        }

        impl Element for Array {
            // Element type and length.
            const MIN_BYTES: u64 = 4 + 8;

            fn read<R: Read>(source: &mut HeaderReader<R>, key: &str, depth: u32) -> HeaderResult<Self> {
                if depth == MAX_NESTING {
                    return Err(HeaderError::TooDeep { key: key.to_owned(), limit: MAX_NESTING });
                }
                match source.read_u32("an element type")? {
                    $($number => elements(source, key, depth + 1).map(Array::$name),)+
                    type_number => Err(HeaderError::UnknownValueType { key: key.to_owned(), type_number }),
                }
            }

            fn write(&self, out: &mut Vec<u8>) {
                match self {
                    $(Array::$name(items) => {
                        out.extend(u32::to_le_bytes($number));
                        (items.len() as u64).write(out);
                        for item in items {
                            item.write(out);
                        }
                    })+
                }
            }
        }
    };
}

value_types! {
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

impl Value {
    /// Returns the value if it is an integer. Any width is accepted, because converters use different widths.
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

/// Defines getters for the values of keys, each with its type and the accepted variants of [`Value`].
macro_rules! getters {
    ($($get:ident -> $type:ty: $expected:literal, $($variant:pat => $value:expr),+;)+) => {$(
        pub fn $get(&self, key: &str) -> Result<Option<$type>, GgufError> {
            self.typed(key, $expected, |value| match value {
                $($variant => Some($value),)+
                _ => None,
            })
        }
    )+};
}

/// The keys and values of a header, ordered by key.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Metadata {
    values: BTreeMap<String, Value>,
}

impl Metadata {
    /// Returns the value of a key, which may have any type.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// Adds a key with its value. Returns `false` and changes nothing if the key exists.
    pub fn insert(&mut self, key: String, value: Value) -> bool {
        let is_new = !self.values.contains_key(&key);
        if is_new {
            self.values.insert(key, value);
        }
        is_new
    }

    /// Iterates over all keys and their values, ordered by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Returns the value of an integer key of any width, or an error if the value does not fit in `u32`.
    pub fn get_u32(&self, key: &str) -> Result<Option<u32>, GgufError> {
        self.typed(key, "an integer from 0 to 4294967295", |value| u32::try_from(value.integer()?).ok())
    }

    /// Returns the value of an integer key of any width, or an error if the value is negative.
    pub fn get_u64(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.typed(key, "a non-negative integer", |value| u64::try_from(value.integer()?).ok())
    }

    // Bytes of strings that are not UTF-8 were replaced by U+FFFD when the file was read.
    getters! {
        get_f32 -> f32: "an f32", Value::F32(v) => *v, Value::F64(v) => *v as f32;
        get_bool -> bool: "a bool", Value::Bool(v) => *v;
        get_str -> &str: "a string", Value::Str(v) => v.as_str();
        get_str_array -> &[String]: "an array of strings", Value::Array(Array::Str(v)) => v.as_slice();
        get_f32_array -> &[f32]: "an array of f32", Value::Array(Array::F32(v)) => v.as_slice();
        get_i32_array -> &[i32]: "an array of i32", Value::Array(Array::I32(v)) => v.as_slice();
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        let wrong = || GgufError::WrongType { key: key.to_owned(), expected, found: value.describe() };
        convert(value).map(Some).ok_or_else(wrong)
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
            "key `deep` has type i64, not a non-negative integer; convert the model again with a current converter"
        );
        assert!(matches!(metadata.get_i32_array("names"), Err(GgufError::WrongType { .. })));
        assert_eq!(metadata.get_str_array("names").unwrap(), Some(&["a".to_owned()][..]));
    }
}
