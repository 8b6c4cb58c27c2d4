//! Tests of rules that rustfmt and clippy do not check, such as the size of files and their first line.
//!
//! Lints check the length of functions, printing in libraries and unfinished code (`Cargo.toml`, `clippy.toml`).

use regex::Regex;

use crate::repository::{TextFile, rust_files, text_files};

/// Maximum number of lines of a Rust file.
const MAX_FILE_LINES: usize = 600;

/// Fails with a list of all places that violate a rule.
fn assert_none(rule: &str, places: &[String]) {
    assert!(places.is_empty(), "{rule} ({} places)\n  {}", places.len(), places.join("\n  "));
}

/// Returns the path, number and text of each line of the files that matches a regular expression.
fn matching_lines(files: Vec<TextFile>, pattern: &Regex) -> Vec<String> {
    let mut found = Vec::new();
    for file in files {
        let lines = file.text.lines().enumerate().filter(|(_, line)| pattern.is_match(line));
        found.extend(lines.map(|(at, line)| format!("{}:{}: {}", file.path, at + 1, line.trim())));
    }
    found
}

#[test]
fn files_are_at_most_600_lines() {
    let lines = rust_files().into_iter().map(|file| (file.text.lines().count(), file.path));
    let long = lines.filter(|(lines, _)| *lines > MAX_FILE_LINES);
    let places: Vec<String> = long.map(|(lines, path)| format!("{path}: {lines} lines")).collect();
    assert_none("split files with more than one concept", &places);
}

#[test]
fn files_begin_with_one_line_of_documentation() {
    let found = rust_files().into_iter().filter(|file| {
        let first = file.text.lines().next().unwrap_or_default();
        first.strip_prefix("//! ").is_none_or(|rest| rest.trim().is_empty())
    });
    let paths: Vec<String> = found.map(|file| file.path).collect();
    assert_none("begin the file with `//!` and a description", &paths);
}

#[test]
fn files_are_not_named_utils() {
    let empty = ["util", "utils", "helpers", "common", "misc"];
    let is_empty = |path: &str| path.trim_end_matches(".rs").split('/').any(|part| empty.contains(&part));
    let found = rust_files().into_iter().map(|file| file.path).filter(|path| is_empty(path));
    assert_none("name files by their concept", &found.collect::<Vec<_>>());
}

#[test]
fn text_has_no_tabs_and_no_trailing_white_space() {
    let mut found = Vec::new();
    for file in text_files().into_iter().filter(|file| !file.is_data()) {
        for (at, line) in file.text.lines().enumerate() {
            if line.ends_with(' ') || line.contains('\t') {
                found.push(format!("{}:{}", file.path, at + 1));
            }
        }
        if file.text.contains('\r') {
            found.push(format!("{}: carriage return", file.path));
        }
        if !file.text.is_empty() && (!file.text.ends_with('\n') || file.text.ends_with("\n\n")) {
            found.push(format!("{}: does not end with one newline", file.path));
        }
    }
    let rule = "remove tabs, white space at the ends of lines, and empty lines at the ends of files";
    assert_none(rule, &found);
}

#[test]
fn comments_have_no_marks_of_unfinished_work() {
    // In two parts, so that this line is not found.
    let mark = Regex::new(concat!(r"//.*\b(TO", "DO|FIX", "ME|XX", r"X)\b")).expect("a regular expression");
    assert_none("finish the work", &matching_lines(rust_files(), &mark));
}

/// Checks `SAFETY:` comments in NEON code, which clippy checks only where this code is compiled.
#[test]
fn neon_code_argues_every_unsafe_block() {
    let mut found = Vec::new();
    for file in rust_files().into_iter().filter(|file| file.path.contains("neon")) {
        let lines: Vec<&str> = file.text.lines().collect();
        for (at, line) in lines.iter().enumerate().filter(|(_, line)| line.contains("unsafe {")) {
            let is_comment = |line: &&&str| line.trim_start().starts_with("//");
            // The comment may be above the first line of a statement of two lines.
            let statement = usize::from(at > 0 && !is_comment(&&lines[at - 1]));
            let mut before = lines[..at].iter().rev().skip(statement).take_while(is_comment);
            if !line.contains("SAFETY:") && !before.any(|line| line.contains("SAFETY:")) {
                found.push(format!("{}:{}", file.path, at + 1));
            }
        }
    }
    assert_none("say in a comment `SAFETY:` why the block is sound", &found);
}

#[test]
fn no_file_has_an_absolute_path() {
    // If the letters follow another folder or a host, the path is not absolute.
    let absolute = Regex::new(r"(^|[^\w.-])/(root|home|work|Users)/").expect("a regular expression");
    assert_none("use a path relative to the root", &matching_lines(text_files(), &absolute));
}

#[test]
fn decisions_have_a_unique_number_and_four_parts() {
    let parts = ["## Context", "## Decision", "## Alternatives", "## Consequences"];
    let mut numbers = Vec::new();
    let mut found = Vec::new();
    for file in text_files() {
        let Some(name) = file.path.strip_prefix("docs/decisions/0") else { continue };
        let number = name.get(..3).filter(|digits| digits.parse::<u32>().is_ok());
        let headings: Vec<&str> = file.text.lines().filter(|line| line.starts_with("## ")).collect();
        if headings != parts || number.is_none() || numbers.contains(&number.map(str::to_owned)) {
            found.push(file.path.clone());
        }
        numbers.push(number.map(str::to_owned));
    }
    assert!(numbers.len() > 30, "{} decisions", numbers.len());
    assert_none("a decision has a number of its own and the parts of the other decisions", &found);
}

#[test]
fn cited_decisions_exist() {
    let files = text_files();
    let mut found = Vec::new();
    let page = Regex::new(r"docs/decisions/[A-Za-z0-9./-]*\.md").expect("a regular expression");
    for file in &files {
        let cited = page.find_iter(&file.text).map(|cited| cited.as_str());
        let missing = cited.filter(|cited| !files.iter().any(|other| other.path == *cited));
        found.extend(missing.map(|cited| format!("{}: {cited}", file.path)));
    }
    assert_none("cite a page of docs/decisions that exists", &found);
}
