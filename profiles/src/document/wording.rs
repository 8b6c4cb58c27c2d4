//! Rewords the error messages of the YAML parser for users.
//!
//! The parser's messages name Rust types and list all known keys. The reworded messages describe the type in words and
//! suggest the known key that is most similar to the unknown key.

/// Rust types in the parser's messages, each with its description for users.
const TYPES: [(&str, &str); 6] = [
    ("u8", "a whole number from 0 to 255"),
    ("u16", "a whole number from 0 to 65535"),
    ("u32", "a whole number from 0 to 4294967295"),
    ("u64", "a whole number, 0 or more"),
    ("usize", "a whole number, 0 or more"),
    ("f64", "a number"),
];

pub(super) fn reword(message: String) -> String {
    if let Some(key) = suggestion(&message) {
        return format!("{message}; did you mean `{key}`?");
    }
    // The parser says this mostly of lines that begin at an unexpected column.
    if message.contains("did not find expected '-' indicator")
        || message.contains("while parsing a block mapping")
    {
        return format!("{message}; check the indentation and the quotes near this line");
    }
    let typed = TYPES.iter().find_map(|(name, words)| {
        message.strip_suffix(&format!("expected {name}")).map(|start| format!("{start}expected {words}"))
    });
    typed.unwrap_or(message)
}

/// Returns the known key that is most similar to the unknown key of a message, if the difference can be a typing error:
/// at most a third of the letters are wrong, and two swapped letters count as one error.
fn suggestion(message: &str) -> Option<&str> {
    let (_, rest) =
        message.split_once("unknown field `").or_else(|| message.split_once("unknown variant `"))?;
    // Names are in every second pair of backticks: the unknown one, then the known ones.
    let mut names = rest.split('`').step_by(2);
    let unknown = names.next()?;
    let distance = |known: &str| strsim::osa_distance(unknown, known);
    let nearest = names.filter(|name| !name.is_empty()).min_by_key(|known| distance(known))?;
    (distance(nearest) <= unknown.chars().count().div_ceil(3)).then_some(nearest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_key_is_suggested() {
        let keys = "expected one of `schema`, `name`, `seed`, `model`";
        let cases = [
            ("sede", Some("seed")),
            ("modle", Some("model")),
            ("models", Some("model")),
            ("colour", None),
            ("", None),
        ];
        for (key, near) in cases {
            assert_eq!(suggestion(&format!("seed: unknown field `{key}`, {keys}")), near, "{key}");
        }
        assert_eq!(suggestion("unknown variant `pinnned`, expected `mapped` or `pinned`"), Some("pinned"));
        assert_eq!(suggestion("unknown field `x`, there are no fields"), None);
        assert_eq!(suggestion("missing field `seed`"), None);
        let reworded = reword("did not find expected '-' indicator, while parsing a block collection".into());
        assert!(reworded.ends_with("; check the indentation and the quotes near this line"), "{reworded}");
    }

    #[test]
    fn types_are_described() {
        let reworded = reword("seed: invalid type: string \"x\", expected u64".to_owned());
        assert_eq!(reworded, "seed: invalid type: string \"x\", expected a whole number, 0 or more");
        let reworded = reword("invalid value: integer `-1`, expected u32".to_owned());
        assert!(reworded.ends_with("expected a whole number from 0 to 4294967295"), "{reworded}");
        assert_eq!(reword("expected a string".to_owned()), "expected a string");
    }
}
