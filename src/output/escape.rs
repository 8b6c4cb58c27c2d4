//! Escaping of control characters in everything that hearth prints.
//!
//! Names, reasons and generated text come from documents, models and other devices. A terminal would obey control
//! characters in them, for example move its cursor or change its title. The escapes are those of JSON strings, so that
//! escaped JSON stays the same JSON.
//!
//! Not here: escaping in the files of a report (`hearth_reports`).

use std::borrow::Cow;
use std::fmt::Write;

/// Escapes control characters, except for line feeds and tabs, and characters that change the direction of text.
pub fn escape(text: &str) -> Cow<'_, str> {
    escape_if(text, |c| is_unsafe_for_terminal(c) && !matches!(c, '\n' | '\t'))
}

/// Escapes the same characters as [`escape`], and line feeds and tabs, for text that must stay on its line.
pub fn escape_line(text: &str) -> Cow<'_, str> {
    escape_if(text, is_unsafe_for_terminal)
}

/// Returns whether terminals obey the character: C0, DEL, C1, or a bidirectional override, embedding or isolate.
fn is_unsafe_for_terminal(c: char) -> bool {
    c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn escape_if(text: &str, is_escaped: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.chars().any(&is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if is_escaped(c) {
            let _ = write!(out, "\\u{:04x}", u32::from(c));
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_terminals_obey_are_escaped() {
        for plain in ["", "ring of 3\n\tdevices: grün 日本 🔥", "\u{200d}\u{a0}\u{fffd}"] {
            assert!(matches!(escape(plain), Cow::Borrowed(text) if text == plain), "{plain:?}");
        }
        assert_eq!(escape("a\u{1b}[31m\r\n\u{7f}\u{9b}2J"), "a\\u001b[31m\\u000d\n\\u007f\\u009b2J");
        assert_eq!(escape("\u{202e}\u{2066}"), "\\u202e\\u2066");
        assert_eq!(escape_line("a\nerror: b"), "a\\u000aerror: b");
    }

    #[test]
    fn escaped_json_is_the_same_json() {
        let value = serde_json::json!({ "name\u{85}": "\u{1b}\u{7f}\u{9b}\u{202e}\n\t\\" });
        let text = serde_json::to_string_pretty(&value).unwrap();
        let escaped = escape(&text);
        assert!(escaped.chars().all(|c| c == '\n' || !is_unsafe_for_terminal(c)), "{escaped}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&escaped).unwrap(), value);
    }
}
