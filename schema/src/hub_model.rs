//! Names of models on a model hub: `hf:OWNER/REPO` or `hf:OWNER/REPO:SELECTOR`.
//!
//! The selector is a quantisation such as `Q4_K_M`, or the name of a file in the repository. Such a name can be written
//! wherever the path of a model file can. A file whose name begins with `hf:` is written as `./hf:NAME`.
//!
//! Not here: the hub and the downloaded files (`hearth_hub`).

use std::fmt;
use std::str::FromStr;

/// The letters before the name of a repository, by which such a name differs from a path.
pub const PREFIX: &str = "hf:";

/// How to write such a name, for hints.
pub const NAME_HINT: &str = "write OWNER/REPO or OWNER/REPO:QUANT, such as hf:Qwen/Qwen3-8B-GGUF:Q4_K_M";

/// Maximum length of the owner and of the repository. source: the hub's limit of 96 characters
const MAX_PART_LEN: usize = 96;
/// Maximum length of the selector, in bytes. source: assumed, longer than the path of a file on the hub
const MAX_SELECTOR_LEN: usize = 512;

/// A repository on a model hub, such as `Qwen/Qwen3-8B-GGUF`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repository {
    pub owner: String,
    pub name: String,
}

impl fmt::Display for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)
    }
}

/// The name of a model on a model hub.
///
/// ```
/// use hearth_schema::hub_model::HubModelName;
/// let name: HubModelName = "hf:Qwen/Qwen3-8B-GGUF:q4_k_m".parse()?;
/// assert_eq!(name.repository.to_string(), "Qwen/Qwen3-8B-GGUF");
/// assert_eq!(name.selector.as_deref(), Some("q4_k_m"));
/// # Ok::<(), hearth_schema::hub_model::InvalidHubModelName>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubModelName {
    pub repository: Repository,
    /// The quantisation or the file; `None` for the only model of a repository.
    pub selector: Option<String>,
}

impl fmt::Display for HubModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", self.repository)?;
        self.selector.iter().try_for_each(|selector| write!(f, ":{selector}"))
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{}` is not the name of a model on a hub: {reason}", .name.escape_debug())]
pub struct InvalidHubModelName {
    pub name: String,
    pub reason: &'static str,
}

impl FromStr for HubModelName {
    type Err = InvalidHubModelName;

    /// Parses a name with or without the prefix `hf:`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = |reason| InvalidHubModelName { name: text.to_owned(), reason };
        let name = text.strip_prefix(PREFIX).unwrap_or(text);
        if name.contains("://") {
            return Err(invalid("it is a URL"));
        }
        let (repository, selector) =
            name.split_once(':').map_or((name, None), |(name, part)| (name, Some(part)));
        let (owner, name) = repository.split_once('/').ok_or_else(|| invalid("it has no owner"))?;
        if let Some(reason) = [owner, name].into_iter().find_map(part_error) {
            return Err(invalid(reason));
        }
        if let Some(selector) = selector {
            if selector.is_empty() || selector.len() > MAX_SELECTOR_LEN {
                return Err(invalid("the quantisation after the colon is empty or too long"));
            }
            if selector.contains(char::is_control) {
                return Err(invalid("the quantisation has a control character"));
            }
        }
        let repository = Repository { owner: owner.to_owned(), name: name.to_owned() };
        Ok(HubModelName { repository, selector: selector.map(str::to_owned) })
    }
}

/// Returns why a text cannot be the owner or the name of a repository, which become a part of paths and URLs.
fn part_error(part: &str) -> Option<&'static str> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if part.is_empty() {
        Some("the owner or the repository is empty")
    } else if part.len() > MAX_PART_LEN {
        Some("the owner or the repository has more than 96 characters")
    } else if !part.chars().all(is_allowed) {
        Some("owner and repository consist of letters, digits, `-`, `_` and `.`")
    // `--` separates owner and repository in the cache.
    } else if part.starts_with(['.', '-'])
        || part.ends_with(['.', '-'])
        || part.contains("..")
        || part.contains("--")
    {
        Some("owner and repository have no `--` or `..`, and no `-` or `.` at their ends")
    } else {
        None
    }
}

/// Returns whether a model is named by a repository on a hub, and not by a path.
pub fn is_hub_model_name(model: &str) -> bool {
    model.starts_with(PREFIX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_owner_and_repository_are_required() {
        let parse = |text: &str| text.parse::<HubModelName>();
        for text in
            ["a/b", "hf:a/b", "TheBloke/Llama-2-7B-GGUF:Q4_K_M", "hf:a/b.c:sub/x-Q8_0.gguf", "a/b:UD-Q4_K_XL"]
        {
            let name = parse(text).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(name.to_string().trim_start_matches(PREFIX), text.trim_start_matches(PREFIX));
            assert_eq!(parse(&name.to_string()).as_ref(), Ok(&name));
        }
        let wrong = "|hf:|a|hf:a|a/|/b|a/b:|a/b/c|a/..|../b|a/.b|a/b..c|-a/b|a--b/c|a b/c|a/b%2f|hf:https://x.co/a/b|\
            a/b:x\ny|hf:hf:a/b|ä/b|a\\b/c";
        for text in wrong.split('|') {
            assert!(parse(text).is_err(), "{text:?}");
        }
        assert!(parse(&format!("a/{}", "b".repeat(97))).is_err());
        assert!(parse(&format!("a/b:{}", "c".repeat(513))).is_err());
    }

    proptest! {
        #[test]
        fn a_parsed_repository_is_two_path_components(text in "[a./:-]{0,8}|hf:.{0,12}|\\PC{0,12}") {
            if let Ok(name) = text.parse::<HubModelName>() {
                for part in [&name.repository.owner, &name.repository.name] {
                    let components: Vec<_> = std::path::Path::new(part).components().collect();
                    prop_assert!(matches!(&components[..], [std::path::Component::Normal(_)]), "{}", text);
                }
            }
        }
    }
}
