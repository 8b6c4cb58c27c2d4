//! Escaping of names for HTML, SVG, Markdown and CSV.
//!
//! Every text that comes with a trace (devices, model, scenario, kernel) passes through one of these functions before
//! it is written, so that a name cannot become markup. Control characters and marks that reverse the direction of
//! writing become U+FFFD in every format.
//!
//! Not here: JSON, which `serde_json` escapes, and the quotes of CSV, which the `csv` crate writes.

/// The maximum length of a printed name, in characters.
const MAX_NAME_LEN: usize = 60;
/// The maximum length of a printed sentence of a trace, in characters.
const MAX_PHRASE_LEN: usize = 240;
/// The maximum length of a printed paragraph of a document, in characters.
const MAX_PARAGRAPH_LEN: usize = 2000;

/// Shortens a name and replaces characters that cannot be printed.
pub fn name(text: &str) -> String {
    let kept = cut(text, MAX_NAME_LEN);
    if kept.trim().is_empty() { "(no name)".into() } else { kept }
}

/// Shortens a sentence and replaces characters that cannot be printed.
pub fn phrase(text: &str) -> String {
    cut(text, MAX_PHRASE_LEN)
}

/// Shortens a paragraph and replaces characters that cannot be printed.
pub fn paragraph(text: &str) -> String {
    cut(text, MAX_PARAGRAPH_LEN)
}

fn cut(text: &str, max: usize) -> String {
    let mut kept: String = text.chars().take(max).map(printable).collect();
    if text.chars().nth(max).is_some() {
        kept.push('…');
    }
    kept
}

/// Escapes for HTML and SVG, as an element's content or between double quotes.
pub fn markup(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars().map(printable) {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// Escapes for Markdown, in a paragraph or a table's cell.
pub fn markdown(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().map(printable).peekable();
    while let Some(c) = chars.next() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\\' | '`' | '*' | '_' | '[' | ']' | '|' | '~' | '#' | '!' | '$' => {
                out.push('\\');
                out.push(c);
            }
            // Some renderers make links of bare addresses.
            ':' if chars.peek() == Some(&'/') => out.push_str("&#58;"),
            '@' => out.push_str("&#64;"),
            c => out.push(c),
        }
    }
    out
}

/// Sets the text as code in Markdown, unless it would end the code early.
pub fn markdown_code(text: &str) -> String {
    if text.contains(['`', '|', '\\', '<', '&'])
        || text.chars().any(|c| printable(c) != c)
        || text.trim().is_empty()
    {
        markdown(text)
    } else {
        format!("`{text}`")
    }
}

/// The text as a field of a CSV file, before it is quoted. Spreadsheets evaluate fields that begin like a formula, so
/// those get an apostrophe in front.
pub fn csv_field(text: &str) -> String {
    let text: String = text.chars().map(printable).collect();
    if text.starts_with(['=', '+', '-', '@']) { format!("'{text}") } else { text }
}

fn printable(c: char) -> char {
    let reverses = matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let noncharacter = matches!(c, '\u{fffe}' | '\u{ffff}' | '\u{2028}' | '\u{2029}');
    if c.is_control() || reverses || noncharacter { '\u{fffd}' } else { c }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_in_text_is_escaped() {
        let text = "</title><script>alert(\"1\")</script>\u{202e}\n";
        assert_eq!(
            markup(text),
            "&lt;/title&gt;&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;\u{fffd}\u{fffd}"
        );
        assert_eq!(markdown("a|b [x](y) `c`"), "a\\|b \\[x\\](y) \\`c\\`");
        assert_eq!(markdown("https://x"), "https&#58;//x");
        assert_eq!(csv_field("=1+1"), "'=1+1");
    }

    #[test]
    fn long_names_are_shortened() {
        assert_eq!(name(&"x".repeat(1000)).chars().count(), MAX_NAME_LEN + 1);
        assert_eq!(name("\n").as_str(), "\u{fffd}");
        assert_eq!(name(""), "(no name)");
    }
}
