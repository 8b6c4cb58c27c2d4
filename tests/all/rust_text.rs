//! Which parts of a Rust file are code, and where do its functions begin and end?
//!
//! Comments and the contents of literals are blanked, so that a brace in a string does not count. Then a
//! function runs from its `fn` to the brace that closes its body. This knows tokens, not grammar, which is
//! enough for rules about length and words.

use std::ops::RangeInclusive;

/// The text with comments and literals blanked; lines keep their numbers and lengths in characters.
pub fn code(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut code = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        let end = skipped(&chars, at);
        if end == at {
            code.push(chars[at]);
            at += 1;
        } else {
            code.extend(chars[at..end].iter().map(|&c| if c == '\n' { c } else { ' ' }));
            at = end;
        }
    }
    code
}

/// Where the comment or literal that begins at `at` ends; `at` itself if none begins there.
fn skipped(chars: &[char], at: usize) -> usize {
    let next = |offset: usize| chars.get(at + offset).copied().unwrap_or('\0');
    match chars[at] {
        '/' if next(1) == '/' => chars[at..].iter().position(|&c| c == '\n').map_or(chars.len(), |n| at + n),
        '/' if next(1) == '*' => block_comment(chars, at),
        '"' => string(chars, at),
        'r' if !is_word_before(chars, at, true) => raw_string(chars, at).unwrap_or(at),
        // A character, not a lifetime: it closes after one character or holds an escape.
        '\'' if next(1) == '\\' => {
            chars[at + 3..].iter().position(|&c| c == '\'').map_or(at, |n| at + 3 + n + 1)
        }
        '\'' if next(2) == '\'' => at + 3,
        _ => at,
    }
}

fn block_comment(chars: &[char], at: usize) -> usize {
    let (mut depth, mut at) = (0, at);
    while at + 1 < chars.len() {
        match (chars[at], chars[at + 1]) {
            ('/', '*') => (depth, at) = (depth + 1, at + 2),
            ('*', '/') => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    chars.len()
}

fn string(chars: &[char], at: usize) -> usize {
    let mut at = at + 1;
    while at < chars.len() {
        match chars[at] {
            '\\' => at += 2,
            '"' => return at + 1,
            _ => at += 1,
        }
    }
    chars.len()
}

/// The end of `r"…"` or `r#"…"#`, if one begins at `at`.
fn raw_string(chars: &[char], at: usize) -> Option<usize> {
    let hashes = chars[at + 1..].iter().take_while(|&&c| c == '#').count();
    let open = at + 1 + hashes;
    if chars.get(open) != Some(&'"') {
        return None;
    }
    let closes = |end: usize| chars[end] == '"' && (1..=hashes).all(|n| chars.get(end + n) == Some(&'#'));
    Some((open + 1..chars.len()).find(|&end| closes(end)).map_or(chars.len(), |end| end + 1 + hashes))
}

/// Whether the character before `at` belongs to the same word. A `b` or `c` before a raw string's `r` does not.
fn is_word_before(chars: &[char], at: usize, prefixes: bool) -> bool {
    let Some(before) = at.checked_sub(1) else { return false };
    if prefixes && matches!(chars[before], 'b' | 'c') {
        return is_word_before(chars, before, false);
    }
    is_word(chars[before])
}

/// Whether a character can be part of an identifier.
pub fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The identifiers, keywords and numbers of blanked code.
pub fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c| !is_word(c)).filter(|word| !word.is_empty())
}

/// A function with a body.
#[derive(Debug, PartialEq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// From the line of `fn` to the line of the closing brace, from 1.
    pub lines: RangeInclusive<usize>,
}

/// Every function with a body in blanked code, nested ones too.
pub fn functions(code: &str) -> Vec<Function> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("fn") {
        let whole = !code[..at].ends_with(is_word) && code[at + 2..].starts_with(char::is_whitespace);
        let name: String = code[at + 2..].trim_start().chars().take_while(|&c| is_word(c)).collect();
        if !whole || name.is_empty() {
            continue;
        }
        if let Some(end) = body_end(&code[at..]) {
            let line = |offset: usize| code[..offset].matches('\n').count() + 1;
            found.push(Function { name, lines: line(at)..=line(at + end) });
        }
    }
    found
}

/// The offset of the brace that closes the body of the function at the start of `code`.
fn body_end(code: &str) -> Option<usize> {
    let (mut braces, mut others) = (0usize, 0usize);
    for (at, c) in code.char_indices() {
        match c {
            '(' | '[' => others += 1,
            ')' | ']' => others = others.saturating_sub(1),
            ';' if braces == 0 && others == 0 => return None,
            '{' => braces += 1,
            '}' => {
                braces = braces.checked_sub(1)?;
                if braces == 0 {
                    return Some(at);
                }
            }
            _ => {}
        }
    }
    None
}

#[test]
fn comments_and_literals_are_blanked() {
    let text = "let a = \"fn {\\\" \"; // fn {\nlet b = r#\"}\"#; /* { /* { */ */ let c = '{'; x::<'a>();";
    let code = code(text);
    assert_eq!(code.matches(['{', '}']).count(), 0, "{code}");
    assert_eq!(code.chars().count(), text.chars().count());
    assert_eq!(words(&code).filter(|word| *word == "let").count(), 3);
    assert!(code.contains("<'a>"), "a lifetime is code");
}

#[test]
fn functions_run_to_their_closing_brace() {
    let text =
        "trait T {\n    fn none(&self, x: [u8; 4]);\n    fn some() -> [u8; 2] {\n        [0; 2]\n    }\n}\n";
    let expected = [Function { name: "some".into(), lines: 3..=5 }];
    assert_eq!(functions(&code(text)), expected);
}
