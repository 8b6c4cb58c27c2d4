//! Shipped documents: YAML files that are compiled into the program.

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no {kind} `{name}` is shipped: use one of {suggestions}")]
pub struct UnknownDocument {
    pub kind: &'static str,
    pub name: String,
    /// The names of all shipped documents of this `kind`, or of the most similar ones if there are many.
    pub suggestions: String,
}

/// Number of names up to which an error lists all of them, and number of similar names otherwise. source: assumed, a
/// few lines of text
const MAX_LISTED: usize = 20;
const MAX_SIMILAR: usize = 5;

impl UnknownDocument {
    pub(crate) fn new(kind: &'static str, name: &str, known: &[&str]) -> Self {
        let mut names = known.to_vec();
        let mut suggestions = String::new();
        if names.len() > MAX_LISTED {
            let wanted = name.to_lowercase();
            names
                .sort_by_key(|known| (!known.contains(&wanted), strsim::damerau_levenshtein(known, &wanted)));
            names.truncate(MAX_SIMILAR);
            suggestions = format!(", or another of `hearth {kind} list`");
        }
        Self { kind, name: name.to_owned(), suggestions: names.join(", ") + &suggestions }
    }
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
            found.map(|&(_, text)| text).ok_or_else(|| $crate::UnknownDocument::new($kind, name, &shipped_names().collect::<Vec<_>>()))
        }
    };
}

pub(crate) use shipped;
