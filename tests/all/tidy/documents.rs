//! Do scenarios ask, do device profiles say where numbers come from, do decisions give reasons?

use super::Findings;
use crate::repository::{TextFile, text_files};

fn in_folder(folder: &'static str, extension: &'static str) -> impl Iterator<Item = TextFile> {
    text_files()
        .into_iter()
        .filter(move |file| file.path.starts_with(folder) && file.extension() == extension && !file.is_data())
}

#[test]
fn every_scenario_asks_a_question() {
    let mut findings = Findings::of("begin the scenario with a comment whose first paragraph ends with `?`");
    for file in in_folder("scenarios/", "yaml") {
        let comment = file.text.lines().map_while(|line| line.strip_prefix('#')).map(str::trim);
        let paragraph: Vec<&str> = comment.take_while(|line| !line.is_empty()).collect();
        if !paragraph.last().is_some_and(|line| line.ends_with('?')) {
            findings.at(&file.path, 1, file.text.lines().next().unwrap_or_default());
        }
    }
    findings.assert_none();
}

#[test]
fn every_number_of_a_device_has_a_source() {
    let mut findings = Findings::of("write `value:` and `source:` for each number");
    for file in in_folder("profiles/devices/", "yaml").chain(in_folder("scenarios/paper/devices/", "yaml")) {
        let lines: Vec<&str> = file.text.lines().collect();
        for (at, line) in lines.iter().enumerate() {
            let Some(value) = quantity(line) else { continue };
            let (from, to) = (at.saturating_sub(1), (at + 3).min(lines.len()));
            let sourced = line.contains("value:") && lines[from..to].iter().any(|near| has_source(near));
            if !sourced {
                findings.at(&file.path, at + 1, value);
            }
        }
    }
    findings.assert_none();
}

/// The quantity of a `key: 2.98 GB/s` line, or of a line in braces. Counts, versions and names are none.
fn quantity(line: &str) -> Option<&str> {
    let line = line.trim();
    if line.starts_with('#') {
        return None;
    }
    let (key, rest) = line.trim_start_matches("- ").split_once(": ")?;
    let value = if rest.starts_with('{') { rest.split_once("value: ")?.1 } else { rest };
    let value = value.trim_start_matches(['"', '\'']).split([',', '}', '#']).next()?.trim();
    let (number, unit) = value.split_once(' ')?;
    // A sentence may begin with a number as well; a quantity ends with its unit.
    let is_unit = unit.starts_with(char::is_alphabetic) && !unit.contains(char::is_whitespace);
    let is_number = number.parse::<f64>().is_ok() && is_unit;
    (is_number && !matches!(key, "name" | "about" | "source" | "spread")).then_some(value)
}

fn has_source(line: &str) -> bool {
    line.split_once("source:").is_some_and(|(_, source)| !source.trim().is_empty())
}

#[test]
fn a_number_without_a_source_is_seen() {
    assert_eq!(quantity("  latency: 2 ms"), Some("2 ms"));
    assert_eq!(quantity("  q4_k: { value: 70 GFLOP/s, source: measured }"), Some("70 GFLOP/s"));
    assert_eq!(quantity("  - value: 2.98 GB/s"), Some("2.98 GB/s"));
    assert_eq!(quantity("  name: 4 cores"), None);
    assert_eq!(quantity("  inferred: 0.78 of what other programs hold"), None);
    assert_eq!(quantity("  cores: 8"), None);
    assert!(has_source("source: measured, 30 repeats") && !has_source("source:"));
}

#[test]
fn every_decision_has_its_four_parts() {
    let mut findings =
        Findings::of("give the page the headings Context, Choice, Alternatives and Consequence");
    let mut numbers = Vec::new();
    for file in in_folder("docs/decisions/", "md") {
        for part in ["Context", "Choice", "Alternatives", "Consequence"] {
            let heading = format!("## {part}");
            if !file.text.lines().any(|line| line.starts_with(&heading)) {
                findings.at(&file.path, 1, &format!("has no `{heading}`"));
            }
        }
        let number: String =
            file.path["docs/decisions/".len()..].chars().take_while(char::is_ascii_digit).collect();
        if number.len() != 4 || numbers.contains(&number) {
            findings.at(&file.path, 1, "needs a number of four digits that no other page has");
        }
        numbers.push(number);
    }
    findings.assert_none();
}

#[test]
fn every_decision_that_is_cited_exists() {
    let mut findings = Findings::of("cite a page of docs/decisions that exists, or write it");
    let files = text_files();
    for file in &files {
        for (line, text) in file.text.lines().enumerate() {
            for (at, start) in text.match_indices("docs/decisions/") {
                let name: String = text[at + start.len()..]
                    .chars()
                    .take_while(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.'))
                    .collect();
                let cited = format!("docs/decisions/{}", name.trim_end_matches('.'));
                let exists = files.iter().any(|other| other.path == cited);
                if name.len() > 4 && !exists {
                    findings.at(&file.path, line + 1, &cited);
                }
            }
        }
    }
    findings.assert_none();
}
