//! Is every Rust file small, explained and finished?

use std::path::Path;

use super::Findings;
use crate::repository::rust_files;
use crate::rust_text::{code, functions, is_word};

/// The most lines a file may have.
const MAX_FILE_LINES: usize = 600;
/// The most lines a function may have, from `fn` to its closing brace.
const MAX_FUNCTION_LINES: usize = 70;

/// Longer files, each with the reason why it is not split.
const LONG_FILES: [(&str, &str); 0] = [];
/// Longer functions as `path::name`, each with the reason why it is not split.
const LONG_FUNCTIONS: [(&str, &str); 0] = [];

#[test]
fn files_are_at_most_600_lines() {
    let mut findings =
        Findings::of("split a file that holds more than one concept, or list it with a reason");
    let mut used = Vec::new();
    for file in rust_files() {
        let lines = file.text.lines().count();
        if lines <= MAX_FILE_LINES {
            continue;
        }
        match LONG_FILES.iter().find(|(path, _)| *path == file.path) {
            Some((path, _)) => used.push(*path),
            None => {
                findings.at(&file.path, lines, &format!("has {lines} lines; {MAX_FILE_LINES} are allowed"));
            }
        }
    }
    stale(&LONG_FILES, &used, &mut findings);
    findings.assert_none();
}

#[test]
fn functions_are_at_most_70_lines() {
    let mut findings = Findings::of("split a long function at its steps, or list it with a reason");
    let mut used = Vec::new();
    for file in rust_files() {
        for function in functions(&code(&file.text)) {
            let (start, length) = (*function.lines.start(), function.lines.count());
            if length <= MAX_FUNCTION_LINES {
                continue;
            }
            let place = format!("{}::{}", file.path, function.name);
            match LONG_FUNCTIONS.iter().find(|(listed, _)| *listed == place) {
                Some((listed, _)) => used.push(*listed),
                None => findings.at(
                    &file.path,
                    start,
                    &format!("`{}` has {length} lines; {MAX_FUNCTION_LINES} are allowed", function.name),
                ),
            }
        }
    }
    stale(&LONG_FUNCTIONS, &used, &mut findings);
    findings.assert_none();
}

fn stale(listed: &[(&str, &str)], used: &[&str], findings: &mut Findings) {
    for (place, reason) in listed.iter().filter(|(place, _)| !used.contains(place)) {
        findings.at(place, 1, &format!("is short now: remove the exception `{reason}`"));
    }
}

#[test]
fn every_file_begins_with_its_documentation() {
    let mut findings = Findings::of("begin the file with `//!`: the question that it answers");
    for file in rust_files() {
        let first = file.text.lines().next().unwrap_or_default();
        let said = first.strip_prefix("//!").is_some_and(|rest| !rest.trim().is_empty());
        if !said {
            findings.at(&file.path, 1, &format!("begins with `{first}`"));
        }
    }
    findings.assert_none();
}

#[test]
fn files_are_named_by_what_they_hold() {
    let mut findings = Findings::of("name a file by its concept");
    let empty = ["util", "utils", "helpers", "common", "misc"];
    for file in rust_files() {
        let parts = Path::new(&file.path).with_extension("");
        if parts.iter().any(|part| empty.iter().any(|name| part == *name)) {
            findings.at(&file.path, 1, "a name that would fit anything");
        }
    }
    findings.assert_none();
}

#[test]
fn nothing_is_left_unfinished() {
    let mut findings = Findings::of("finish it, or say in plain words what is missing");
    let calls = [concat!("to", "do!"), concat!("unimple", "mented!"), concat!("db", "g!")];
    let marks = [concat!("FIX", "ME"), concat!("XX", "X"), concat!("TO", "DO")];
    for file in rust_files() {
        for (line, text) in code(&file.text).lines().enumerate() {
            for call in calls.iter().filter(|call| has_word(text, call)) {
                findings.at(&file.path, line + 1, call);
            }
        }
        for (line, text) in file.text.lines().enumerate() {
            for mark in marks.iter().filter(|mark| has_word(text, mark)) {
                findings.at(&file.path, line + 1, mark);
            }
        }
    }
    findings.assert_none();
}

/// Whether `word` stands in a line as a word of its own.
fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let after = &line[at + word.len()..];
        !line[..at].ends_with(is_word) && (word.ends_with('!') || !after.starts_with(is_word))
    })
}

#[test]
fn every_unsafe_block_says_why_it_is_sound() {
    let mut findings = Findings::of("put a `SAFETY:` comment directly above the block or implementation");
    for file in rust_files() {
        let lines: Vec<&str> = file.text.lines().collect();
        for (at, text) in code(&file.text).lines().enumerate() {
            let opens = text.match_indices("unsafe").any(|(column, word)| {
                let rest = text[column + word.len()..].trim_start();
                !text[..column].ends_with(is_word) && (rest.starts_with('{') || rest.starts_with("impl"))
            });
            if opens && !is_justified(&lines, at) {
                findings.at(&file.path, at + 1, lines[at].trim());
            }
        }
    }
    findings.assert_none();
}

/// Whether a `SAFETY:` comment stands on the line, or above the statement that the line is part of.
fn is_justified(lines: &[&str], at: usize) -> bool {
    let mut above = lines[..=at].iter().rev().take(12);
    let own = above.next().is_some_and(|line| line.contains("SAFETY:"));
    own || above
        .take_while(|line| {
            let line = line.trim();
            // A finished statement or an empty line ends the search; comments and open expressions do not.
            line.starts_with("//") || !(line.is_empty() || line.ends_with(';') || line.ends_with('}'))
        })
        .any(|line| line.contains("SAFETY:"))
}
