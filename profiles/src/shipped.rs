//! Shipped documents: YAML files that are compiled into the program.

/// The error for a name that no shipped document has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no {kind} `{name}` is shipped: use one of {known_names}")]
pub struct UnknownDocument {
    pub kind: &'static str,
    pub name: String,
    /// All names of shipped documents of this kind, separated by commas.
    pub known_names: String,
}

/// Defines `shipped_names` and `shipped_yaml` for a list of documents.
macro_rules! shipped {
    ($kind:literal in $folder:literal: $($document:literal),+ $(,)?) => {
        const SHIPPED: &[(&str, &str)] = &[$((
            $document,
            include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/", $folder, "/", $document, ".yaml")),
        )),+];

        /// Returns the names of all shipped documents of this kind.
        pub fn shipped_names() -> impl Iterator<Item = &'static str> {
            SHIPPED.iter().map(|&(name, _)| name)
        }

        /// Returns the text of a shipped document.
        pub fn shipped_yaml(name: &str) -> Result<&'static str, $crate::UnknownDocument> {
            let found = SHIPPED.iter().find(|&&(shipped, _)| shipped == name);
            found.map(|&(_, text)| text).ok_or_else(|| $crate::UnknownDocument {
                kind: $kind,
                name: name.to_owned(),
                known_names: shipped_names().collect::<Vec<_>>().join(", "),
            })
        }
    };
}

pub(crate) use shipped;
