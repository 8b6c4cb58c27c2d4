//! Does every name in GLOSSARY.md exist in the code?
//!
//! The glossary ties the papers' symbols to the code's names. Its second column holds the code names, each in
//! backquotes; a path like `Plan::ring_layers` stands for all of its words.

use std::collections::BTreeSet;

use crate::repository::{root, rust_files};
use crate::rust_text::{code, is_word, words};

#[test]
fn every_code_name_of_the_glossary_is_an_identifier() {
    let text = std::fs::read_to_string(root().join("GLOSSARY.md")).expect("GLOSSARY.md stands in the root");
    let sources: Vec<String> = rust_files()
        .iter()
        .filter(|file| !file.path.starts_with("tests/"))
        .map(|file| code(&file.text))
        .collect();
    let known: BTreeSet<&str> = sources.iter().flat_map(|source| words(source)).collect();
    let names = code_names(&text);
    assert!(names.len() >= 20, "the glossary's tables have their code names in the second column");
    let missing: Vec<&String> =
        names.iter().filter(|name| !words(name).all(|word| known.contains(word))).collect();
    assert!(missing.is_empty(), "rename these in GLOSSARY.md, the code does not have them: {missing:?}");
}

/// The names in backquotes in the second column of every table.
fn code_names(text: &str) -> Vec<String> {
    let rows = text.lines().filter(|line| line.starts_with('|') && !line.contains("---"));
    let cells = rows.filter_map(|row| row.split('|').nth(2));
    let quoted = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    quoted.filter(|name| name.starts_with(is_word)).map(str::to_owned).collect()
}
