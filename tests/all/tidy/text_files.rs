//! Is every text file clean, whatever its language?

use super::Findings;
use crate::repository::{TextFile, text_files};

/// Text that people write here; data and generated files keep the bytes they came with.
fn written() -> impl Iterator<Item = TextFile> {
    text_files().into_iter().filter(|file| !file.is_data())
}

#[test]
fn no_line_ends_in_white_space() {
    let mut findings = Findings::of("remove the white space at the end of the line");
    for file in written() {
        for (line, text) in file.text.lines().enumerate() {
            if text.ends_with([' ', '\t', '\r']) || file.text.contains('\r') {
                findings.at(&file.path, line + 1, text.trim());
            }
        }
    }
    findings.assert_none();
}

#[test]
fn no_file_has_tabs() {
    let mut findings = Findings::of("indent with spaces, and write `\\t` in strings");
    for file in written() {
        for (line, text) in file.text.lines().enumerate().filter(|(_, text)| text.contains('\t')) {
            findings.at(&file.path, line + 1, text.trim());
        }
    }
    findings.assert_none();
}

#[test]
fn every_file_ends_with_one_newline() {
    let mut findings = Findings::of("end the file with exactly one newline");
    for file in written().filter(|file| !file.text.is_empty()) {
        if !file.text.ends_with('\n') || file.text.ends_with("\n\n") {
            findings.at(&file.path, file.text.lines().count(), "the last line");
        }
    }
    findings.assert_none();
}

#[test]
fn no_file_names_a_folder_of_one_machine() {
    let mut findings = Findings::of("use a path relative to the root: this one exists on one machine only");
    let folders =
        [concat!("/ro", "ot/"), concat!("/ho", "me/"), concat!("/wo", "rk/"), concat!("/Use", "rs/")];
    for file in text_files() {
        for (line, text) in file.text.lines().enumerate() {
            if folders.iter().any(|folder| names(text, folder)) {
                findings.at(&file.path, line + 1, text.trim());
            }
        }
    }
    findings.assert_none();
}

/// Whether a line has this absolute path; the same letters after another folder or host are not one.
fn names(line: &str, folder: &str) -> bool {
    line.match_indices(folder)
        .any(|(at, _)| !line[..at].ends_with(|c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | '-')))
}
