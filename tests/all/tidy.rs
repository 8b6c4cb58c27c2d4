//! Does every file keep the house rules?
//!
//! Each rule names the file, the line and what to do. An exception is listed with its reason, and one that
//! is no longer needed fails as well. Not here: layout and lints, which are rustfmt's and clippy's.

mod documents;
mod rust_files;
mod text_files;

use std::fmt::Write;

/// What breaks one rule.
pub struct Findings {
    rule: &'static str,
    places: Vec<String>,
}

impl Findings {
    /// None yet. The rule is a sentence that says what to do.
    pub fn of(rule: &'static str) -> Self {
        Self { rule, places: Vec::new() }
    }

    /// A line of a file, from 1.
    pub fn at(&mut self, path: &str, line: usize, what: &str) {
        self.places.push(format!("{path}:{line}: {what}"));
    }

    /// Fails with every place, so that one run shows them all.
    pub fn assert_none(self) {
        if self.places.is_empty() {
            return;
        }
        let mut message = format!("{} ({} places)", self.rule, self.places.len());
        for place in &self.places {
            let _ = write!(message, "\n  {place}");
        }
        panic!("{message}");
    }
}
