//! YAML documents: parsing, validation, and errors with line and column.
//!
//! The first key of every document names its schema and major version (`schema: device/1`). Size, nesting depth and
//! schema are checked before parsing. Unknown keys, duplicate keys and numbers without a unit are errors.

mod duplicate_key;
mod key_place;
mod wording;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Maximum size of a document in bytes. A plan for a hundred devices takes a few tens of KiB.
pub const MAX_DOCUMENT_BYTES: usize = 4 << 20;

/// Maximum nesting depth of a document. No schema has more than eight levels.
const MAX_DEPTH: usize = 32;

const KINDS: [&str; 6] = ["device", "model", "plan", "published", "scenario", "trace"];

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DocumentError {
    /// Text that is not YAML, or YAML that does not match the schema. Line and column count from 1; 0 means unknown.
    #[error("{what}{}", place(*.line, *.column))]
    Content { what: String, line: usize, column: usize },
    /// The first key does not name the schema `expected`, such as `plan/1`. `other_kind` tells whether the key names
    /// the schema of a different kind of document. The line counts from 1; 0 means that the document is empty.
    #[error(
        "this is not a {expected} document: {found}; {}{}",
        if *.other_kind {
            "check that this is the right file".to_owned()
        } else {
            format!("the first line must be `schema: {expected}`")
        },
        place(*.line, 1)
    )]
    Schema { expected: &'static str, found: String, other_kind: bool, line: usize },
    #[error("the document has {bytes} bytes, more than {MAX_DOCUMENT_BYTES}: check the path of the file")]
    TooLarge { bytes: usize },
    /// Valid YAML with values that are not allowed. `key` is the path of the key, such as `cpu.matvec.q4_k`; it is
    /// empty if the error is not about a single key. Parsing a document replaces this error by
    /// [`DocumentError::Content`] with the line and column of the key.
    #[error("{what}")]
    Invalid { what: String, key: String },
}

fn place(line: usize, column: usize) -> String {
    if line == 0 { String::new() } else { format!(" (line {line}, column {column})") }
}

impl DocumentError {
    /// Creates an error that is not about a single key, such as values that contradict each other.
    pub fn invalid_document(what: impl Into<String>) -> Self {
        DocumentError::Invalid { what: what.into(), key: String::new() }
    }

    /// Creates an error about the value of one key. `key` is the path of the key, such as `cpu.matvec.q4_k`.
    pub fn invalid_value(key: impl Into<String>, what: impl Into<String>) -> Self {
        DocumentError::Invalid { what: what.into(), key: key.into() }
    }

    /// Returns the line and column of the error, or `None` if they are unknown.
    pub fn location(&self) -> Option<(usize, usize)> {
        match self {
            DocumentError::Content { line, column, .. } if *line > 0 => Some((*line, *column)),
            DocumentError::Schema { line, .. } if *line > 0 => Some((*line, 1)),
            _ => None,
        }
    }

    /// Returns the error message without the line and column.
    pub fn message(&self) -> String {
        let text = self.to_string();
        let (line, column) = self.location().unwrap_or((0, 0));
        text.strip_suffix(&place(line, column)).unwrap_or(&text).to_owned()
    }

    /// Replaces the path of the key in the error by the line and column of the key in the text.
    fn located(self, text: &str) -> Self {
        match self {
            DocumentError::Invalid { what, key } if !key.is_empty() => {
                let (line, column) = key_place::locate(text, &key).unwrap_or((0, 0));
                DocumentError::Content { what, line, column }
            }
            other => other,
        }
    }
}

/// A document key that was renamed since the last release. The old name is accepted until the next release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RenamedKey {
    /// The path of the old key, for example `links.air`.
    pub old_key: &'static str,
    pub new_key: &'static str,
}

/// A warning that a document has a key with an old name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{}` was renamed to `{}`; the next release does not accept the old name{}", .key.old_key, .key.new_key, place(*.line, *.column))]
pub struct DeprecationWarning {
    pub key: RenamedKey,
    /// Line number of the key, from 1; 0 if unknown.
    pub line: usize,
    /// Column number of the key, from 1; 0 if unknown.
    pub column: usize,
}

/// A document with a `schema:` key.
pub trait Document: Serialize + DeserializeOwned {
    /// Schema and major version of the document, for example `plan/1`.
    const SCHEMA: &'static str;

    /// Keys renamed since the last release. The serde types accept the old names as aliases.
    const RENAMED_KEYS: &'static [RenamedKey] = &[];

    /// Checks what the types cannot ensure: that values are in range and do not contradict each other.
    fn validate(&self) -> Result<(), DocumentError>;

    /// Parses and validates a document.
    fn from_yaml(text: &str) -> Result<Self, DocumentError> {
        if text.len() > MAX_DOCUMENT_BYTES {
            return Err(DocumentError::TooLarge { bytes: text.len() });
        }
        check_depth(text)?;
        check_schema(text, Self::SCHEMA)?;
        let document: Self = serde_yaml::from_str(text).map_err(|error| content(&error, text))?;
        document.validate().map_err(|error| error.located(text))?;
        Ok(document)
    }

    /// Returns a warning for each key with an old name in the text of a valid document.
    fn deprecations(text: &str) -> Vec<DeprecationWarning> {
        let parsed: Option<serde_yaml::Value> = serde_yaml::from_str(text).ok();
        let has = |key: &&RenamedKey| {
            let mut segments = key.old_key.split('.');
            segments.try_fold(parsed.as_ref()?, |value, segment| value.get(segment)).map(|_| ())
        };
        let used = Self::RENAMED_KEYS.iter().filter(|key| has(key).is_some());
        used.map(|&key| {
            let (line, column) = key_place::locate(text, key.old_key).unwrap_or((0, 0));
            DeprecationWarning { key, line, column }
        })
        .collect()
    }

    fn to_yaml(&self) -> String {
        serde_yaml::to_string(self).expect("a document of plain values is always YAML")
    }
}

fn content(error: &serde_yaml::Error, document: &str) -> DocumentError {
    let duplicate = duplicate_key::find_duplicate_key(document);
    let error = duplicate.as_ref().unwrap_or(error);
    let at = error.location().map_or((0, 0), |at| (at.line(), at.column()));
    // The parser's message contains the location, which `DocumentError` prints, too.
    let what = error.to_string().replacen(&format!(" at line {} column {}", at.0, at.1), "", 1);
    let what = match char_at(document, at) {
        Some('\t') => format!("{what}: there is a tab; indent with spaces"),
        _ => wording::reword(what),
    };
    DocumentError::Content { what, line: at.0, column: at.1 }
}

/// Returns the character at a line and column, which both count from 1.
fn char_at(text: &str, (line, column): (usize, usize)) -> Option<char> {
    text.lines().nth(line.checked_sub(1)?)?.chars().nth(column.checked_sub(1)?)
}

/// Checks that the first key is `schema:` and that its value is `expected`.
fn check_schema(text: &str, expected: &'static str) -> Result<(), DocumentError> {
    let mut lines = text.lines().map(str::trim_end).zip(1..);
    let first = lines.find(|(line, _)| !(line.is_empty() || line.starts_with('#') || *line == "---"));
    let line = first.map_or(0, |(_, number)| number);
    let Some(value) = first.and_then(|(line, _)| line.strip_prefix("schema:")) else {
        let found = first.map_or("it is empty".into(), |(line, _)| {
            format!("it begins with `{}`", line.chars().take(40).collect::<String>())
        });
        return Err(DocumentError::Schema { expected, found, other_kind: false, line });
    };
    let value = value.split('#').next().unwrap_or_default().trim().trim_matches(['"', '\'']);
    if value == expected {
        return Ok(());
    }
    let kind = |text: &str| text.split('/').next().unwrap_or_default().to_string();
    let own = kind(value) == kind(expected);
    let unread = if own { ", which this release does not read" } else { "" };
    let other_kind = !own && KINDS.contains(&kind(value).as_str());
    let found = format!("it has schema `{value}`{unread}");
    Err(DocumentError::Schema { expected, found, other_kind, line })
}

/// Checks the nesting depth of a document before the recursive parser reads the document.
fn check_depth(text: &str) -> Result<(), DocumentError> {
    let mut flow = 0usize;
    for (number, line) in text.lines().enumerate() {
        let indent = line.len() - line.trim_start_matches([' ', '-', '?', '\t']).len();
        // Brackets in comments do not nest. Those in quoted text are counted, but they are few.
        let content = line.split_once(" #").map_or(line, |(content, _)| content);
        let content = if content.starts_with('#') { "" } else { content };
        let mut deepest = flow;
        for byte in content.bytes() {
            match byte {
                b'[' | b'{' => flow += 1,
                b']' | b'}' => flow = flow.saturating_sub(1),
                _ => {}
            }
            deepest = deepest.max(flow);
        }
        if deepest > MAX_DEPTH || indent > 8 * MAX_DEPTH {
            let what = format!("the document has more than {MAX_DEPTH} nested levels; use fewer levels");
            return Err(DocumentError::Content { what, line: number + 1, column: 1 });
        }
    }
    Ok(())
}
