//! Every name in GLOSSARY.md exists in the code.
//!
//! The glossary ties the papers' symbols to the code's names. Its second column holds the code names, each in
//! backquotes; a path like `Plan::ring_layers` stands for all of its words.

use std::collections::BTreeSet;

use crate::repository::{root, rust_files};

#[test]
fn every_code_name_of_the_glossary_is_an_identifier() {
    let text = std::fs::read_to_string(root().join("GLOSSARY.md")).expect("GLOSSARY.md stands in the root");
    let sources = rust_files().into_iter().filter(|file| !file.path.starts_with("tests/"));
    let known: BTreeSet<String> =
        sources.flat_map(|file| words(&file.text).map(str::to_owned).collect::<Vec<_>>()).collect();
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

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c| !is_word(c)).filter(|word| !word.is_empty())
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}
