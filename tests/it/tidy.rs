//! Tests of rules that rustfmt and clippy do not check, such as the size of files and their first line.
//!
//! Lints check the length of functions, printing in libraries and unfinished code (`Cargo.toml`, `clippy.toml`).

use crate::repository::{rust_files, text_files};

/// Maximum number of lines of a Rust file.
const MAX_FILE_LINES: usize = 600;

/// Fails with a list of all places that violate a rule.
fn assert_none(rule: &str, places: &[String]) {
    assert!(places.is_empty(), "{rule} ({} places)\n  {}", places.len(), places.join("\n  "));
}

#[test]
fn files_are_at_most_600_lines() {
    let lines = rust_files().into_iter().map(|file| (file.text.lines().count(), file.path));
    let long: Vec<String> = lines
        .filter(|(lines, _)| *lines > MAX_FILE_LINES)
        .map(|(lines, path)| format!("{path}: {lines} lines"))
        .collect();
    assert_none("split files with more than one concept", &long);
}

#[test]
fn files_begin_with_one_line_of_documentation() {
    let found = rust_files().into_iter().filter(|file| {
        let first = file.text.lines().next().unwrap_or_default();
        first.strip_prefix("//! ").is_none_or(|rest| rest.trim().is_empty())
    });
    assert_none(
        "begin the file with `//!` and a description",
        &found.map(|file| file.path).collect::<Vec<_>>(),
    );
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
            if line.ends_with([' ', '\r']) || line.contains('\t') {
                found.push(format!("{}:{}", file.path, at + 1));
            }
        }
        if !file.text.is_empty() && (!file.text.ends_with('\n') || file.text.ends_with("\n\n")) {
            found.push(format!("{}: does not end with one newline", file.path));
        }
    }
    assert_none(
        "remove tabs, white space at the end of a line, and empty lines at the end of a file",
        &found,
    );
}

#[test]
fn no_file_has_an_absolute_path() {
    let folders =
        [concat!("/ro", "ot/"), concat!("/ho", "me/"), concat!("/wo", "rk/"), concat!("/Use", "rs/")];
    // If the letters follow another folder or a host, the path is not absolute.
    let names = |line: &str, folder: &str| {
        line.match_indices(folder).any(|(at, _)| {
            !line[..at].ends_with(|c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | '-'))
        })
    };
    let mut found = Vec::new();
    for file in text_files() {
        for (at, line) in file.text.lines().enumerate() {
            if folders.iter().any(|folder| names(line, folder)) {
                found.push(format!("{}:{}: {}", file.path, at + 1, line.trim()));
            }
        }
    }
    assert_none("use a path relative to the root", &found);
}

#[test]
fn cited_decisions_exist() {
    let files = text_files();
    let mut found = Vec::new();
    for file in &files {
        for (at, _) in file.text.match_indices("docs/decisions/") {
            let is_name = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '/');
            let cited: String = file.text[at..].chars().take_while(is_name).collect();
            let cited = cited.trim_end_matches('.');
            let is_page = cited.strip_suffix(".md").is_some();
            if is_page && !files.iter().any(|other| other.path == cited) {
                found.push(format!("{}: {cited}", file.path));
            }
        }
    }
    assert_none("cite a page of docs/decisions that exists", &found);
}
