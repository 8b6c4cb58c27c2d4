//! What can a name from a trace do to the document it is printed in?
//!
//! Nothing: every text that a trace brings along (devices, model, scenario, kernel) goes through one of
//! these before it is written. Control characters and the marks that reverse the direction of writing
//! become U+FFFD in every format, because none of them can show them honestly.
//!
//! Not here: JSON, which `serde_json` escapes.

/// The longest name printed, in characters.
const MAX_NAME_CHARS: usize = 60;
/// The longest sentence of a trace printed, in characters.
const MAX_PHRASE_CHARS: usize = 240;
/// The longest paragraph of a document printed, in characters.
const MAX_PARAGRAPH_CHARS: usize = 2000;

/// A name short enough to print, without characters that cannot be shown.
pub fn name(text: &str) -> String {
    let kept = cut(text, MAX_NAME_CHARS);
    if kept.trim().is_empty() { "(no name)".into() } else { kept }
}

/// A sentence short enough to print, without characters that cannot be shown.
pub fn phrase(text: &str) -> String {
    cut(text, MAX_PHRASE_CHARS)
}

/// A paragraph of a document short enough to print, without characters that cannot be shown.
pub fn paragraph(text: &str) -> String {
    cut(text, MAX_PARAGRAPH_CHARS)
}

fn cut(text: &str, most: usize) -> String {
    let mut kept: String = text.chars().take(most).map(shown).collect();
    if text.chars().nth(most).is_some() {
        kept.push('…');
    }
    kept
}

/// The text for HTML and SVG, as an element's content or between double quotes.
pub fn markup(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars().map(shown) {
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

/// The text for Markdown, in a paragraph or a table's cell.
pub fn markdown(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().map(shown).peekable();
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

/// The text set as code in Markdown, unless it would end the code early.
pub fn markdown_code(text: &str) -> String {
    if text.contains(['`', '|', '\\', '<', '&'])
        || text.chars().any(|c| shown(c) != c)
        || text.trim().is_empty()
    {
        markdown(text)
    } else {
        format!("`{text}`")
    }
}

/// The text as one field of a CSV file. Spreadsheets run fields that begin like a formula, so those get
/// an apostrophe in front.
pub fn csv(text: &str) -> String {
    let mut text: String = text.chars().map(shown).collect();
    if text.starts_with(['=', '+', '-', '@']) {
        text.insert(0, '\'');
    }
    if text.contains([',', '"', ';', ' ']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text }
}

fn shown(c: char) -> char {
    let reverses = matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let noncharacter = matches!(c, '\u{fffe}' | '\u{ffff}' | '\u{2028}' | '\u{2029}');
    if c.is_control() || reverses || noncharacter { '\u{fffd}' } else { c }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_text_stays_text() {
        let text = "</title><script>alert(\"1\")</script>\u{202e}\n";
        assert_eq!(
            markup(text),
            "&lt;/title&gt;&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;\u{fffd}\u{fffd}"
        );
        assert_eq!(markdown("a|b [x](y) `c`"), "a\\|b \\[x\\](y) \\`c\\`");
        assert_eq!(markdown("https://x"), "https&#58;//x");
        assert_eq!(csv("=1+1"), "'=1+1");
        assert_eq!(csv("a\",b"), "\"a\"\",b\"");
    }

    #[test]
    fn names_are_cut() {
        assert_eq!(name(&"x".repeat(1000)).chars().count(), MAX_NAME_CHARS + 1);
        assert_eq!(name("\n").as_str(), "\u{fffd}");
        assert_eq!(name(""), "(no name)");
    }
}
