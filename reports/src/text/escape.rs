//! Escaping of names for HTML, SVG, Markdown and CSV.
//!
//! All text from a trace (names of devices, model, scenario and kernel) passes through one of these functions before it
//! is written, so that a name cannot become markup. In every format, control characters and characters that
//! change the text direction are replaced with U+FFFD.
//!
//! Not here: escaping of JSON, which `serde_json` does, and quoting in CSV, which the `csv` crate does.

/// Maximum length of a printed name, in characters.
const MAX_NAME_LEN: usize = 60;
/// Maximum length of a printed sentence from a trace, in characters.
const MAX_SENTENCE_LEN: usize = 240;
/// Maximum length of a printed paragraph from a document, in characters.
const MAX_PARAGRAPH_LEN: usize = 2000;

/// Shortens a name and replaces characters that cannot be printed. An empty name becomes `(no name)`.
pub fn sanitize_name(text: &str) -> String {
    let kept = truncated(text, MAX_NAME_LEN);
    if kept.trim().is_empty() { "(no name)".into() } else { kept }
}

/// Shortens a sentence and replaces characters that cannot be printed.
pub fn sanitize_sentence(text: &str) -> String {
    truncated(text, MAX_SENTENCE_LEN)
}

/// Shortens a paragraph and replaces characters that cannot be printed.
pub fn sanitize_paragraph(text: &str) -> String {
    truncated(text, MAX_PARAGRAPH_LEN)
}

fn truncated(text: &str, max: usize) -> String {
    let mut kept: String = text.chars().take(max).map(printable).collect();
    if text.chars().nth(max).is_some() {
        kept.push('…');
    }
    kept
}

/// Escapes text for HTML and SVG, for use as the content of an element or as an attribute in double quotes.
pub fn html(text: &str) -> String {
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

/// Escapes text for a paragraph or a table cell in Markdown.
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
            // Some renderers turn bare addresses into links.
            ':' if chars.peek() == Some(&'/') => out.push_str("&#58;"),
            '@' => out.push_str("&#64;"),
            c => out.push(c),
        }
    }
    out
}

/// Formats text as inline code in Markdown, or escapes it if it has characters that inline code cannot contain.
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

/// Escapes text for a field of a CSV file, without quoting it. Text that a spreadsheet would evaluate as a formula gets
/// an apostrophe at its beginning.
pub fn csv_field(text: &str) -> String {
    let text: String = text.chars().map(printable).collect();
    if text.starts_with(['=', '+', '-', '@']) { format!("'{text}") } else { text }
}

fn printable(c: char) -> char {
    let bidi = matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let noncharacter = matches!(c, '\u{fffe}' | '\u{ffff}' | '\u{2028}' | '\u{2029}');
    if c.is_control() || bidi || noncharacter { '\u{fffd}' } else { c }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_in_text_is_escaped() {
        let text = "</title><script>alert(\"1\")</script>\u{202e}\n";
        assert_eq!(
            html(text),
            "&lt;/title&gt;&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;\u{fffd}\u{fffd}"
        );
        assert_eq!(markdown("a|b [x](y) `c`"), "a\\|b \\[x\\](y) \\`c\\`");
        assert_eq!(markdown("https://x"), "https&#58;//x");
        assert_eq!(csv_field("=1+1"), "'=1+1");
    }

    #[test]
    fn long_names_are_shortened() {
        assert_eq!(sanitize_name(&"x".repeat(1000)).chars().count(), MAX_NAME_LEN + 1);
        assert_eq!(sanitize_name("\n").as_str(), "\u{fffd}");
        assert_eq!(sanitize_name(""), "(no name)");
    }
}
