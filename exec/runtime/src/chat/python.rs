//! Values as Python writes them, because chat templates are made for Jinja2 in Python.
//!
//! `to_json` is transformers' filter `tojson`: `json.dumps` without escaping of characters outside ASCII. `write_text`
//! is `str`, which `{{ value }}` uses: `True`, `None`, and lists and dictionaries with the `repr` of their items.

use std::fmt::{self, Write};

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use crate::tokenizer::ESCAPE;

/// The layout of JSON text.
struct JsonStyle {
    /// The indentation of a level; `None` writes one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
    /// Whether other characters than those of ASCII are escaped.
    ascii_only: bool,
}

/// The filter `tojson`, with the arguments of `json.dumps` that templates use.
#[allow(clippy::needless_pass_by_value)] // the signature of a filter
pub(super) fn to_json(
    value: &Value,
    ensure_ascii: Option<Value>,
    indent: Option<Value>,
    arguments: Kwargs,
) -> Result<Value, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => arguments.get::<Option<Value>>("indent")?,
    };
    let indent = indent.filter(|indent| !indent.is_none());
    let indent = indent.map(|indent| match (indent.as_str(), indent.as_usize()) {
        (Some(text), _) => Ok(text.to_owned()),
        (None, Some(spaces)) if spaces <= MAX_INDENT => Ok(" ".repeat(spaces)),
        _ => Err(Error::new(ErrorKind::InvalidOperation, "`indent` must be a small number or a string")),
    });
    let separators: Option<Vec<String>> = arguments.get("separators")?;
    let ensure_ascii = ensure_ascii.or(arguments.get::<Option<Value>>("ensure_ascii")?);
    let ascii_only = ensure_ascii.is_some_and(|value| value.is_true());
    let sort_keys = arguments.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    arguments.assert_all_used()?;
    let indent = indent.transpose()?;
    // source: the defaults of json.dumps
    let item_separator = if indent.is_some() { "," } else { ", " };
    let (item_separator, key_separator) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        _ => (item_separator.to_owned(), ": ".to_owned()),
    };
    let style = JsonStyle { indent, item_separator, key_separator, sort_keys, ascii_only };
    let mut out = BoundedString(String::new());
    write_json(&mut out, value, &style, 1).map_err(|_| {
        let what = format!("a value is too deep, longer than {MAX_BYTES} bytes, or no JSON value");
        Error::new(ErrorKind::InvalidOperation, what)
    })?;
    Ok(Value::from_safe_string(out.0))
}

/// Maximum indentation of a level, in spaces. source: assumed; templates use 4
const MAX_INDENT: usize = 16;
/// Maximum nesting of values. source: assumed; tools have a few levels
const MAX_DEPTH: usize = 64;
/// Maximum length of JSON text. A value can contain another one many times, so a small template can make long text.
/// source: assumed, far beyond the tools of an agent
const MAX_BYTES: usize = 1 << 20;

/// Text of at most [`MAX_BYTES`].
struct BoundedString(String);

impl Write for BoundedString {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.0.len() + text.len() > MAX_BYTES {
            return Err(fmt::Error);
        }
        self.0.push_str(text);
        Ok(())
    }
}

fn write_json(out: &mut BoundedString, value: &Value, style: &JsonStyle, depth: usize) -> fmt::Result {
    if depth > MAX_DEPTH {
        return Err(fmt::Error);
    }
    let new_line = |out: &mut BoundedString, depth: usize| match &style.indent {
        Some(indent) => write!(out, "\n{}", indent.repeat(depth)),
        None => Ok(()),
    };
    let items = || value.try_iter().map_err(|_| fmt::Error);
    match value.kind() {
        ValueKind::None => out.write_str("null"),
        ValueKind::Bool => out.write_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => write_number(out, value),
        ValueKind::String => write_json_string(out, value.as_str().unwrap_or_default(), style.ascii_only),
        ValueKind::Map => {
            let mut keys: Vec<Value> = items()?.collect();
            if style.sort_keys {
                keys.sort();
            }
            out.write_char('{')?;
            for (index, key) in keys.iter().enumerate() {
                out.write_str(if index > 0 { &style.item_separator } else { "" })?;
                new_line(out, depth)?;
                write_json_string(out, &key.to_string(), style.ascii_only)?;
                out.write_str(&style.key_separator)?;
                write_json(out, &value.get_item(key).map_err(|_| fmt::Error)?, style, depth + 1)?;
            }
            if !keys.is_empty() {
                new_line(out, depth - 1)?;
            }
            out.write_char('}')
        }
        ValueKind::Seq | ValueKind::Iterable => {
            out.write_char('[')?;
            let mut count = 0;
            for item in items()? {
                out.write_str(if count > 0 { &style.item_separator } else { "" })?;
                new_line(out, depth)?;
                write_json(out, &item, style, depth + 1)?;
                count += 1;
            }
            if count > 0 {
                new_line(out, depth - 1)?;
            }
            out.write_char(']')
        }
        _ => Err(fmt::Error),
    }
}

fn write_json_string(out: &mut BoundedString, text: &str, ascii_only: bool) -> fmt::Result {
    out.write_char('"')?;
    for c in text.chars() {
        match c {
            '"' => out.write_str("\\\"")?,
            '\\' => out.write_str("\\\\")?,
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            '\u{8}' => out.write_str("\\b")?,
            '\u{c}' => out.write_str("\\f")?,
            c if c < ' ' => write!(out, "\\u{:04x}", u32::from(c))?,
            // The escape character of messages must stay one character, so that it is found and removed.
            c if ascii_only && !c.is_ascii() && c != ESCAPE => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    write!(out, "\\u{unit:04x}")?;
                }
            }
            c => out.write_char(c)?,
        }
    }
    out.write_char('"')
}

/// Writes a number as Python does: floats have a decimal point.
fn write_number(out: &mut impl Write, value: &Value) -> fmt::Result {
    match f64::try_from(value.clone()) {
        Ok(number) if !value.is_integer() => {
            let text = format!("{number:?}");
            match text.split_once('e') {
                // Python writes at least two digits and always a sign.
                Some((digits, exponent)) => {
                    let (sign, exponent) =
                        exponent.strip_prefix('-').map_or(('+', exponent), |rest| ('-', rest));
                    write!(out, "{digits}e{sign}{exponent:0>2}")
                }
                None => out.write_str(&text),
            }
        }
        _ => write!(out, "{value}"),
    }
}

/// Writes `str(value)`.
pub(super) fn write_text(out: &mut impl Write, value: &Value) -> fmt::Result {
    match value.kind() {
        ValueKind::String => out.write_str(value.as_str().unwrap_or_default()),
        _ => write_repr(out, value, 0),
    }
}

/// Writes `repr(value)`.
fn write_repr(out: &mut impl Write, value: &Value, depth: usize) -> fmt::Result {
    if depth > MAX_DEPTH {
        return out.write_str("...");
    }
    let items = || value.try_iter().into_iter().flatten().enumerate();
    match value.kind() {
        ValueKind::None => out.write_str("None"),
        ValueKind::Bool => out.write_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => write_number(out, value),
        ValueKind::String => write_string_repr(out, value.as_str().unwrap_or_default()),
        ValueKind::Map => {
            out.write_char('{')?;
            for (index, key) in items() {
                out.write_str(if index > 0 { ", " } else { "" })?;
                write_repr(out, &key, depth + 1)?;
                out.write_str(": ")?;
                write_repr(out, &value.get_item(&key).unwrap_or_default(), depth + 1)?;
            }
            out.write_char('}')
        }
        ValueKind::Seq => {
            out.write_char('[')?;
            for (index, item) in items() {
                out.write_str(if index > 0 { ", " } else { "" })?;
                write_repr(out, &item, depth + 1)?;
            }
            out.write_char(']')
        }
        _ => write!(out, "{value}"),
    }
}

/// Writes a string in single quotes, or in double quotes if it contains only single ones.
fn write_string_repr(out: &mut impl Write, text: &str) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.write_char(quote)?;
    for c in text.chars() {
        match c {
            '\\' => out.write_str("\\\\")?,
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            c if c == quote => write!(out, "\\{c}")?,
            c if c < ' ' || c == '\u{7f}' => write!(out, "\\x{:02x}", u32::from(c))?,
            c => out.write_char(c)?,
        }
    }
    out.write_char(quote)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(json: &str) -> Value {
        serde_json::from_str(json).expect("JSON")
    }

    fn dumped(json: &str, arguments: &[(&str, Value)]) -> String {
        let arguments: Kwargs = arguments.iter().cloned().collect();
        to_json(&value(json), None, None, arguments).expect("JSON").to_string()
    }

    #[test]
    fn json_is_that_of_python() {
        let tool = r#"{"name":"f<>&'é","b":[1,2.0,true,null],"a":{},"c":[]}"#;
        assert_eq!(dumped(tool, &[]), r#"{"name": "f<>&'é", "b": [1, 2.0, true, null], "a": {}, "c": []}"#);
        assert_eq!(
            dumped(tool, &[("indent", Value::from(2))]),
            "{\n  \"name\": \"f<>&'é\",\n  \"b\": [\n    1,\n    2.0,\n    true,\n    null\n  ],\n  \"a\": {},\n  \"c\": []\n}"
        );
        assert_eq!(
            dumped(r#"{"b":1,"a":"x\n\u0001"}"#, &[("sort_keys", Value::from(true))]),
            r#"{"a": "x\n\u0001", "b": 1}"#
        );
        assert_eq!(dumped(r#""°😀""#, &[("ensure_ascii", Value::from(true))]), r#""\u00b0\ud83d\ude00""#);
        assert_eq!(dumped("[1,2]", &[("separators", value(r#"[",",":"]"#))]), "[1,2]");
    }

    #[test]
    fn json_of_a_value_that_contains_itself_many_times_is_refused() {
        let doubled = (0..40).fold(Value::from("x"), |value, _| Value::from(vec![value.clone(), value]));
        assert!(to_json(&doubled, None, None, Kwargs::from_iter([("indent", Value::from(()))])).is_err());
    }

    #[test]
    fn text_is_that_of_python() {
        for (json, expected) in [
            ("true", "True"),
            ("null", "None"),
            ("1.0", "1.0"),
            ("1e-7", "1e-07"),
            ("1e300", "1e+300"),
            (r#""it's""#, "it's"),
            (r#"{"a":"it's","b":[true,null,"x\n"]}"#, r#"{'a': "it's", 'b': [True, None, 'x\n']}"#),
        ] {
            let mut text = String::new();
            write_text(&mut text, &value(json)).expect("text");
            assert_eq!(text, expected);
        }
    }
}
