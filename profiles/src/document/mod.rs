//! YAML documents: parsing, validation, and errors with line and column.
//!
//! Every document's first key names its schema and major version (`schema: device/1`). Its size is limited before it is
//! parsed; an unknown key, a duplicate key and a number without a unit are errors with line and column; another schema
//! or version is reported before anything else.

mod duplicate_key;
mod key_place;
mod wording;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The largest document in bytes. A plan of a hundred devices has some tens of KiB.
pub const MAX_DOCUMENT_BYTES: usize = 4 << 20;

/// The deepest nesting, in levels. No schema goes beyond eight.
const MAX_DEPTH: usize = 32;

/// The kinds of documents.
const KINDS: [&str; 6] = ["device", "model", "plan", "published", "scenario", "trace"];

/// Errors of a document.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DocumentError {
    /// Text that is not YAML, or YAML that does not match the schema.
    #[error("{what}{}", place(*.line, *.column))]
    Content {
        what: String,
        /// Line, from 1; 0 if unknown.
        line: usize,
        /// Column, from 1; 0 if unknown.
        column: usize,
    },
    /// The first key does not name the expected schema.
    #[error(
        "this is not a {expected} document: {found}; {}{}",
        if *.other { "check which file is meant".to_owned() } else { format!("the first line must be `schema: {expected}`") },
        place(*.line, 1)
    )]
    Schema {
        /// For example `plan/1`.
        expected: &'static str,
        /// The first line that was found instead.
        found: String,
        /// Whether it is a document of another kind.
        other: bool,
        /// Line, from 1; 0 if the document is empty.
        line: usize,
    },
    /// Larger than [`MAX_DOCUMENT_BYTES`].
    #[error("the document has {bytes} bytes; at most {MAX_DOCUMENT_BYTES} are read")]
    TooLarge { bytes: usize },
    /// Valid YAML with impossible values.
    #[error("{what}")]
    Invalid {
        /// What is wrong, where, and how to fix it.
        what: String,
        /// The key, such as `cpu.matvec.q4_k`; empty if there is no single one. Parsing a document replaces this
        /// error by [`DocumentError::Content`] with the key's line and column.
        key: String,
    },
}

fn place(line: usize, column: usize) -> String {
    if line == 0 { String::new() } else { format!(" (line {line}, column {column})") }
}

impl DocumentError {
    /// An error of a document that contradicts itself.
    pub fn invalid(what: impl Into<String>) -> Self {
        DocumentError::Invalid { what: what.into(), key: String::new() }
    }

    /// An error in the value of one key. Segments of the key are joined by dots: `cpu.matvec.q4_k`.
    pub fn invalid_at(key: impl Into<String>, what: impl Into<String>) -> Self {
        DocumentError::Invalid { what: what.into(), key: key.into() }
    }

    /// Line and column, if they are known.
    pub fn location(&self) -> Option<(usize, usize)> {
        match self {
            DocumentError::Content { line, column, .. } if *line > 0 => Some((*line, *column)),
            DocumentError::Schema { line, .. } if *line > 0 => Some((*line, 1)),
            _ => None,
        }
    }

    /// The message without the location.
    pub fn what(&self) -> String {
        match self {
            DocumentError::Content { what, .. } => what.clone(),
            DocumentError::Schema { .. } => {
                let mut unplaced = self.clone();
                if let DocumentError::Schema { line, .. } = &mut unplaced {
                    *line = 0;
                }
                unplaced.to_string()
            }
            other => other.to_string(),
        }
    }

    /// Adds the location of the key.
    fn located(self, text: &str) -> Self {
        match self {
            DocumentError::Invalid { what, key } if !key.is_empty() => {
                let (line, column) = key_place::of(text, &key).unwrap_or((0, 0));
                DocumentError::Content { what, line, column }
            }
            other => other,
        }
    }
}

/// A key that was renamed since the last release. The old name is accepted for one more release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RenamedKey {
    /// The path of the old key, for example `links.air`.
    pub old: &'static str,
    /// The path of the new key.
    pub new: &'static str,
}

/// An old key in a document.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{}` is called `{}` now; the next release does not read the old name{}", .key.old, .key.new, place(*.line, *.column))]
pub struct Deprecation {
    /// The old and the new name.
    pub key: RenamedKey,
    /// Line of the key, from 1; 0 if unknown.
    pub line: usize,
    /// Column of the key, from 1; 0 if unknown.
    pub column: usize,
}

/// A document with a `schema:` key.
pub trait Document: Serialize + DeserializeOwned {
    /// Its schema and major version, for example `plan/1`.
    const SCHEMA: &'static str;

    /// Renamed keys. Their old names are aliases in the types.
    const RENAMED_KEYS: &'static [RenamedKey] = &[];

    /// Checks the values beyond what their types ensure.
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

    /// Returns the old keys in the text of a valid document.
    fn deprecations(text: &str) -> Vec<Deprecation> {
        let parsed: Option<serde_yaml::Value> = serde_yaml::from_str(text).ok();
        let has = |key: &&RenamedKey| {
            let mut segments = key.old.split('.');
            segments.try_fold(parsed.as_ref()?, |value, segment| value.get(segment)).map(|_| ())
        };
        let used = Self::RENAMED_KEYS.iter().filter(|key| has(key).is_some());
        used.map(|&key| {
            let (line, column) = key_place::of(text, key.old).unwrap_or((0, 0));
            Deprecation { key, line, column }
        })
        .collect()
    }

    fn to_yaml(&self) -> String {
        serde_yaml::to_string(self).expect("a document of plain values is always YAML")
    }
}

fn content(error: &serde_yaml::Error, document: &str) -> DocumentError {
    let duplicate = duplicate_key::find(document);
    let error = duplicate.as_ref().unwrap_or(error);
    let at = error.location().map_or((0, 0), |at| (at.line(), at.column()));
    // The parser writes the location that it reports; it is printed once, by us.
    let what = error.to_string().replacen(&format!(" at line {} column {}", at.0, at.1), "", 1);
    let what = match letter(document, at) {
        Some('\t') => format!("{what}: a tab; indent with spaces"),
        _ => wording::of(what),
    };
    DocumentError::Content { what, line: at.0, column: at.1 }
}

/// The character at a line and a column, both from 1.
fn letter(text: &str, (line, column): (usize, usize)) -> Option<char> {
    text.lines().nth(line.checked_sub(1)?)?.chars().nth(column.checked_sub(1)?)
}

/// Checks that the first key is `schema:`, by which a reader decides how to read the rest.
fn check_schema(text: &str, expected: &'static str) -> Result<(), DocumentError> {
    let mut lines = text.lines().map(str::trim_end).zip(1..);
    let first = lines.find(|(line, _)| !(line.is_empty() || line.starts_with('#') || *line == "---"));
    let line = first.map_or(0, |(_, number)| number);
    let Some(value) = first.and_then(|(line, _)| line.strip_prefix("schema:")) else {
        let found = first.map_or("it is empty".into(), |(line, _)| {
            format!("it begins with `{}`", line.chars().take(40).collect::<String>())
        });
        return Err(DocumentError::Schema { expected, found, other: false, line });
    };
    let value = value.split('#').next().unwrap_or_default().trim().trim_matches(['"', '\'']);
    if value == expected {
        return Ok(());
    }
    let kind = |text: &str| text.split('/').next().unwrap_or_default().to_string();
    let own = kind(value) == kind(expected);
    let unread = if own { ", which this release does not read" } else { "" };
    let other = !own && KINDS.contains(&kind(value).as_str());
    Err(DocumentError::Schema { expected, found: format!("it has schema `{value}`{unread}"), other, line })
}

/// Refuses deep nesting before the parser recurses into it.
fn check_depth(text: &str) -> Result<(), DocumentError> {
    let mut flow = 0usize;
    for (number, line) in text.lines().enumerate() {
        let indent = line.len() - line.trim_start_matches([' ', '-', '?', '\t']).len();
        // Text behind a comment mark opens nothing; quoted text may, and has few brackets.
        let said = line.split_once(" #").map_or(line, |(said, _)| said);
        let said = if said.starts_with('#') { "" } else { said };
        flow = said.bytes().fold(flow, |depth, byte| match byte {
            b'[' | b'{' => depth + 1,
            b']' | b'}' => depth.saturating_sub(1),
            _ => depth,
        });
        if flow > MAX_DEPTH || indent > 8 * MAX_DEPTH {
            let what = format!("nested more than {MAX_DEPTH} levels deep");
            return Err(DocumentError::Content { what, line: number + 1, column: 1 });
        }
    }
    Ok(())
}
