//! The models among the files of a repository, named by their quantisation.
//!
//! A repository usually has one model in several quantisations. The quantisation is the last part of the file name that
//! looks like one: `Q4_K_M` in `Qwen3-8B-Q4_K_M.gguf`, `Q5_K_S` in `llama-2-7b.Q5_K_S.gguf`. The files of a split model
//! (`-00001-of-00008.gguf`) are one model. Vision projectors (`mmproj`) and importance matrices are no models.

use std::collections::BTreeMap;

use hearth_profiles::gguf::split_suffix;

use crate::HubError;

/// Maximum number of models that an error lists. source: assumed, fits on a screen
const MAX_LISTED: usize = 40;
/// Largest edit distance between a selector and a suggestion. source: assumed, two mistyped letters
const MAX_EDITS: usize = 2;

/// A model in a repository: one file, or several files of a split model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variant {
    /// The quantisation as in the file name, such as `Q4_K_M`; without one, the name of the file without `.gguf`.
    pub quant: String,
    /// The paths of the files in the repository, in the order of their numbers.
    pub paths: Vec<String>,
    /// The number of files that the names announce; more than `paths` has if files are missing.
    file_count: u32,
}

impl Variant {
    /// Finds the models among the paths of a repository, sorted by path.
    pub fn find_all<'p>(paths: impl IntoIterator<Item = &'p str>) -> Vec<Variant> {
        // Paths of one model are equal except for the number of the file.
        let mut models: BTreeMap<(&str, Option<u32>), BTreeMap<u32, &str>> = BTreeMap::new();
        for path in paths.into_iter().filter(|path| is_model(path)) {
            let (stem, number, count) = split_path(path);
            models.entry((stem, count)).or_default().insert(number, path);
        }
        let variant = |((stem, count), files): ((&str, Option<u32>), BTreeMap<u32, &str>)| Variant {
            quant: quantisation(stem),
            paths: files.into_values().map(str::to_owned).collect(),
            file_count: count.unwrap_or(1),
        };
        models.into_iter().map(variant).collect()
    }

    /// Whether all files of the model are in the repository.
    pub fn is_complete(&self) -> bool {
        self.paths.len() as u32 == self.file_count
    }

    fn is_selected_by(&self, selector: &str) -> bool {
        let equals = |name: &str| name.eq_ignore_ascii_case(selector);
        let is_path = |path: &String| equals(path) || equals(file_name(path));
        equals(&self.quant) || self.paths.iter().any(is_path)
    }
}

/// Returns the model that a selector names: a quantisation, a file name or a path, in any case. Without a selector, the
/// only model is returned.
pub fn select<'v>(variants: &'v [Variant], selector: Option<&str>) -> Result<&'v Variant, HubError> {
    let found: Vec<&Variant> =
        variants.iter().filter(|one| selector.is_none_or(|selector| one.is_selected_by(selector))).collect();
    match (&found[..], selector) {
        ([one], _) if one.is_complete() => Ok(one),
        ([one], _) => {
            let what = format!(
                "`{}` is incomplete: {} of its {} files exist",
                one.quant,
                one.paths.len(),
                one.file_count
            );
            Err(HubError::failed(what).with_hint("choose another quantisation, or another repository"))
        }
        ([], _) if variants.is_empty() => Err(HubError::invalid("there is no GGUF model").with_hint(
            "hearth reads models in GGUF format; their repositories often have names that end in `-GGUF`",
        )),
        ([], selector) => {
            let selector = selector.unwrap_or_default();
            let what = format!(
                "there is no model `{}`: there are {}",
                selector.escape_debug(),
                list(variants.iter())
            );
            let error = HubError::invalid(what);
            Err(match suggestion(variants, selector) {
                Some(quant) => error.with_hint(format!("did you mean `{quant}`?")),
                None => error.with_hint("name one of them after a colon, such as OWNER/REPO:QUANT"),
            })
        }
        (several, None) => {
            let what = format!("there are {} models: {}", several.len(), list(several.iter().copied()));
            Err(HubError::invalid(what).with_hint("name one of them after a colon, such as OWNER/REPO:QUANT"))
        }
        (several, Some(selector)) => {
            let names: Vec<String> = several.iter().map(|one| format!("`{}`", one.paths[0])).collect();
            let what =
                format!("`{}` fits {} models: {}", selector.escape_debug(), several.len(), names.join(", "));
            Err(HubError::invalid(what).with_hint("give the name of a file instead of the quantisation"))
        }
    }
}

fn list<'v>(variants: impl Iterator<Item = &'v Variant>) -> String {
    let quants: Vec<&str> = variants.map(|one| one.quant.as_str()).collect();
    let more = quants.len().saturating_sub(MAX_LISTED);
    let listed = quants[..quants.len() - more].join(", ");
    if more == 0 { listed } else { format!("{listed} and {more} more") }
}

/// Returns the quantisation that a mistyped selector probably means.
fn suggestion<'v>(variants: &'v [Variant], selector: &str) -> Option<&'v str> {
    let wanted = selector.to_ascii_uppercase();
    let with_distance = |one: &'v Variant| {
        let quant = one.quant.to_ascii_uppercase();
        // `Q4` and `Q4K` are meant as the beginning of a name, with or without its underscores.
        let squeezed = |text: &str| text.replace(['_', '-'], "");
        let is_part = !wanted.is_empty() && squeezed(&quant).starts_with(&squeezed(&wanted));
        let distance = if is_part { 0 } else { strsim::damerau_levenshtein(&quant, &wanted) };
        (distance, one.quant.as_str())
    };
    let closest = variants.iter().map(with_distance).min_by_key(|&(distance, _)| distance);
    closest.filter(|&(distance, _)| distance <= MAX_EDITS).map(|(_, quant)| quant)
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn without_extension(path: &str) -> Option<&str> {
    let at = path.len().checked_sub(".gguf".len())?;
    path.get(at..).filter(|end| end.eq_ignore_ascii_case(".gguf")).map(|_| &path[..at])
}

fn is_model(path: &str) -> bool {
    let name = file_name(path).to_ascii_lowercase();
    let Some(stem) = without_extension(&name) else { return false };
    // Quantisations that were made with an importance matrix may have the word in their name, too.
    let is_matrix = stem.contains("imatrix") && quantisation_in(stem).is_none();
    !stem.is_empty() && !stem.contains("mmproj") && !is_matrix
}

/// Splits a path into the part that all files of a model have in common, the number of the file (from 1), and the
/// number of files; `None` if the model is not split.
fn split_path(path: &str) -> (&str, u32, Option<u32>) {
    let suffix = || {
        let stem = without_extension(path)?;
        let (stem, count) = stem.rsplit_once("-of-")?;
        let (stem, number) = stem.rsplit_once('-')?;
        let (number, count): (u32, u32) = (number.parse().ok()?, count.parse().ok()?);
        // The reader of split models finds the other files by exactly this suffix.
        let is_split = (1..=count).contains(&number)
            && path.strip_suffix(&split_suffix(number - 1, count)) == Some(stem);
        is_split.then_some((stem, number, Some(count)))
    };
    suffix().unwrap_or((without_extension(path).unwrap_or(path), 1, None))
}

fn quantisation(stem: &str) -> String {
    let name = file_name(stem);
    quantisation_in(name).unwrap_or(name).to_owned()
}

/// Returns the last part of a name, between `-` and `.`, that is a quantisation, with the prefix `UD-` if it has one.
fn quantisation_in(name: &str) -> Option<&str> {
    let mut end = name.len();
    loop {
        let begin = name[..end].rfind(['-', '.']).map_or(0, |at| at + 1);
        if is_quantisation(&name[begin..end]) {
            let prefixed = begin
                .checked_sub(3)
                .filter(|&at| name.get(at..begin).is_some_and(|it| it.eq_ignore_ascii_case("UD-")));
            let begin = prefixed.filter(|&at| at == 0 || name[..at].ends_with(['-', '.'])).unwrap_or(begin);
            return Some(&name[begin..end]);
        }
        end = begin.checked_sub(1)?;
    }
}

/// Returns whether a word is a quantisation, such as `Q4_K_M`, `IQ2_XXS`, `TQ1_0`, `BF16`, `fp16` or `MXFP4`.
fn is_quantisation(word: &str) -> bool {
    let word = word.to_ascii_uppercase();
    if ["BF16", "F16", "F32", "FP16", "FP32", "MXFP4", "NVFP4", "MXFP4_MOE"].contains(&word.as_str()) {
        return true;
    }
    let digits = ["IQ", "TQ", "I", "Q"].iter().find_map(|prefix| word.strip_prefix(prefix));
    digits.is_some_and(|rest| {
        let is_quant_letter = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
        let mut rest = rest.chars();
        rest.next().is_some_and(|digit| digit.is_ascii_digit())
            && rest.next().is_none_or(|separator| separator == '_')
            && rest.all(is_quant_letter)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::HubErrorKind;

    #[test]
    fn quantisation_is_found_in_names_of_known_repositories() {
        for (path, quant) in [
            ("Qwen3-8B-Q4_K_M.gguf", "Q4_K_M"),
            ("llama-2-7b.Q5_K_S.gguf", "Q5_K_S"),
            ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "q4_k_m"),
            ("Qwen3-0.6B-UD-IQ2_XXS.gguf", "UD-IQ2_XXS"),
            ("Phi-3-mini-4k-instruct-fp16.gguf", "fp16"),
            ("gpt-oss-20b-mxfp4.gguf", "mxfp4"),
            ("gemma-3-4b-it-BF16.gguf", "BF16"),
            ("Phi-3-mini-4k-instruct-q4.gguf", "q4"),
            ("Llama-3-8B.Q8_0.imatrix.gguf", "Q8_0"),
            ("ggml-model-i2_s.gguf", "i2_s"),
            ("Bonsai-TQ1_0.gguf", "TQ1_0"),
            ("Llama-3.2-1B-Instruct-Q4_0_4_8.GGUF", "Q4_0_4_8"),
            ("BF16/Big-BF16-00002-of-00002.gguf", "BF16"),
            ("stories15M.gguf", "stories15M"),
            ("sub/Q8-Chat.gguf", "Q8"),
        ] {
            let found = Variant::find_all([path]);
            assert_eq!(found.iter().map(|one| one.quant.as_str()).collect::<Vec<_>>(), [quant], "{path}");
        }
    }

    #[test]
    fn files_that_are_no_models_are_left_out() {
        let paths = [
            "mmproj-F16.gguf",
            "x.mmproj-Q8_0.gguf",
            "model-imatrix.gguf",
            "README.md",
            ".gguf",
            "gguf",
            "a/.gguf",
        ];
        assert_eq!(Variant::find_all(paths), []);
    }

    const PATHS: [&str; 6] = [
        "m-Q4_K_M.gguf",
        "m-Q8_0.gguf",
        "big/m-BF16-00002-of-00002.gguf",
        "big/m-BF16-00001-of-00002.gguf",
        "m-Q6_K-00001-of-00003.gguf",
        "m-UD-Q4_K_XL.gguf",
    ];

    #[test]
    fn selector_is_a_quantisation_or_a_file_in_any_case() {
        let variants = Variant::find_all(PATHS);
        assert_eq!(variants.len(), 5);
        for (selector, first) in [
            ("q4_k_m", "m-Q4_K_M.gguf"),
            ("M-q4_k_m.GGUF", "m-Q4_K_M.gguf"),
            ("ud-q4_k_xl", "m-UD-Q4_K_XL.gguf"),
            ("bf16", "big/m-BF16-00001-of-00002.gguf"),
            ("big/m-BF16-00002-of-00002.gguf", "big/m-BF16-00001-of-00002.gguf"),
        ] {
            assert_eq!(select(&variants, Some(selector)).expect("it exists").paths[0], first, "{selector}");
        }
        assert_eq!(select(&variants, Some("bf16")).expect("it exists").paths.len(), 2);
        assert_eq!(select(&variants[..1], None).expect("the only one").quant, "BF16");
    }

    #[test]
    fn wrong_selectors_are_explained() {
        let variants = Variant::find_all(PATHS);
        let error = |selector| select(&variants, selector).expect_err("no model");
        let all = "BF16, Q4_K_M, Q6_K, Q8_0, UD-Q4_K_XL";
        assert_eq!(error(Some("Q5_K_M")).to_string(), format!("there is no model `Q5_K_M`: there are {all}"));
        assert_eq!(error(Some("Q5_K_M")).hint(), Some("did you mean `Q4_K_M`?"));
        assert_eq!(error(Some("q4k")).hint(), Some("did you mean `Q4_K_M`?"));
        assert_eq!(error(Some("Q80")).hint(), Some("did you mean `Q8_0`?"));
        assert!(error(Some("elephant")).hint().is_some_and(|hint| hint.contains("after a colon")));
        assert_eq!(error(None).to_string(), format!("there are 5 models: {all}"));
        assert_eq!(error(Some("Q6_K")).to_string(), "`Q6_K` is incomplete: 1 of its 3 files exist");
        assert_eq!(error(Some("\u{1b}")).to_string().find('\u{1b}'), None);
        let two = Variant::find_all(["a-1b-Q8_0.gguf", "a-3b-Q8_0.gguf"]);
        let ambiguous = select(&two, Some("Q8_0")).expect_err("two models");
        assert_eq!(ambiguous.to_string(), "`Q8_0` fits 2 models: `a-1b-Q8_0.gguf`, `a-3b-Q8_0.gguf`");
        assert_eq!(select(&[], None).expect_err("none").kind(), HubErrorKind::Invalid);
        // A model in one file, and the same model split into one file.
        assert_eq!(Variant::find_all(["a-Q8_0.gguf", "a-Q8_0-00001-of-00001.gguf"]).len(), 2);
    }

    /// Names of models, some of them split.
    const NAME_PATTERN: &str = "[a-c]{1,2}[-.](UD-)?I?Q[2-8](_[KS0M]){0,2}(-0000[1-3]-of-0000[1-3])?\\.gguf";

    proptest! {
        #[test]
        fn every_complete_model_is_selected_by_its_paths(
            names in prop::collection::btree_set(NAME_PATTERN, 1..8),
        ) {
            let variants = Variant::find_all(names.iter().map(String::as_str));
            let listed: usize = variants.iter().map(|one| one.paths.len()).sum();
            prop_assert_eq!(listed, names.len(), "every file belongs to one model");
            for one in &variants {
                for path in &one.paths {
                    match select(&variants, Some(path)) {
                        Ok(found) => prop_assert_eq!(found, one),
                        Err(_) => prop_assert!(!one.is_complete()),
                    }
                }
            }
        }

        #[test]
        fn any_names_are_grouped_without_a_panic(
            names in prop::collection::vec("\\PC{0,20}(\\.gguf)?", 0..5),
            selector in "\\PC{0,9}",
        ) {
            let variants = Variant::find_all(names.iter().map(String::as_str));
            let _ = select(&variants, Some(&selector)).is_ok();
            for name in &names {
                let _ = quantisation_in(name);
            }
        }
    }
}
