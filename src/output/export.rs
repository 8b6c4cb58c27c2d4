//! Formats the commands of an exported plan as the text of a shell script, with everything else in comments.

use std::fmt::Write;

use hearth_halda::export::{DeviceCommand, Engine, ExportedPlan};
use hearth_schema::plan::Role;

use super::escape_line;

/// Formats the commands for the plan of the scenario named `scenario`.
pub fn format_export(scenario: &str, exported: &ExportedPlan) -> String {
    let ExportedPlan { engine, notes, placeholders, commands, not_expressed } = exported;
    let engine = match engine {
        Engine::LlamaCpp => "llama.cpp",
        Engine::PrimaCpp => "prima.cpp",
    };
    let mut text = comment("", &format!("The plan of `{scenario}` for {engine}."));
    for note in notes {
        text += &comment("", note);
    }
    if !placeholders.is_empty() {
        let words: Vec<String> =
            placeholders.iter().map(|word| format!("{} ({})", word.name, word.meaning)).collect();
        text += &comment("", &format!("Replace: {}.", words.join(", ")));
    }
    for command in commands {
        let DeviceCommand { device, role, command: line, .. } = command;
        let role = if *role == Role::Head { ", the head" } else { "" };
        let layers = command.layers_text();
        let _ = write!(text, "\n{}{line}\n", comment("", &format!("{device}{role}: {layers}")));
    }
    text.push('\n');
    if not_expressed.is_empty() {
        return text + &comment("", "The flags express the whole plan.");
    }
    text += &comment("", "Not expressed by the flags:");
    for sentence in not_expressed {
        text += &comment("- ", sentence);
    }
    text
}

/// Returns a line with a comment. Names in it cannot begin another line, which a shell would run.
fn comment(mark: &str, text: &str) -> String {
    format!("# {mark}{}\n", escape_line(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_in_their_comments() {
        let exported = ExportedPlan {
            engine: Engine::PrimaCpp,
            notes: vec!["a note\nabout\r`x`".to_owned()],
            placeholders: Vec::new(),
            commands: Vec::new(),
            not_expressed: vec!["one\ntwo".to_owned()],
        };
        let text = format_export("home\nrm x", &exported);
        assert!(text.lines().all(|line| line.is_empty() || line.starts_with("# ")), "{text}");
        assert!(!text.contains('\r') && text.contains("# - one\\u000atwo\n"), "{text}");
    }
}
