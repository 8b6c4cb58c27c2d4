//! Shipped documents: YAML files that are compiled into the program.

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no {kind} `{name}` is shipped: use one of {known_names}")]
pub struct UnknownDocument {
    pub kind: &'static str,
    pub name: String,
    /// The names of all shipped documents of this `kind`, separated by commas.
    pub known_names: String,
}

/// Defines `shipped_names` and `shipped_yaml` for a list of YAML files in a folder.
macro_rules! shipped {
    ($kind:literal in $folder:literal: $($document:literal),+ $(,)?) => {
        const SHIPPED: &[(&str, &str)] = &[$((
            $document,
            include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/", $folder, "/", $document, ".yaml")),
        )),+];

        #[doc = concat!("Returns the names of all shipped ", $kind, " documents.")]
        pub fn shipped_names() -> impl Iterator<Item = &'static str> {
            SHIPPED.iter().map(|&(name, _)| name)
        }

        #[doc = concat!("Returns the YAML text of a shipped ", $kind, " document.")]
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
