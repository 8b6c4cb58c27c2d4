//! The chat in a terminal: reads lines with history, and understands commands that begin with a slash.

use std::path::PathBuf;

use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::DefaultHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Editor, Helper};

use crate::machine::state_folder;

/// Marks the beginning and the end of a text of several lines.
const QUOTES: &str = r#"""""#;

pub const HELP: &str = "\
/clear        forget the conversation
/system TEXT  start again with this system message
/exit         end the chat, as Ctrl-D does
\"\"\"           begin and end a text of several lines
Ctrl-C        stop the answer, or discard the line";

/// What the user entered.
#[derive(Debug, PartialEq, Eq)]
pub enum Entry {
    Text(String),
    Clear,
    System(String),
    Help,
    Exit,
    /// SIGTERM or SIGHUP.
    Signal,
    UnknownCommand(String),
    Empty,
}

impl Entry {
    fn parse(line: &str) -> Entry {
        let line = line.trim();
        if let Some(text) = line.strip_prefix(QUOTES) {
            let text = text.strip_suffix(QUOTES).unwrap_or(text).trim_matches('\n');
            return if text.is_empty() { Entry::Empty } else { Entry::Text(text.to_owned()) };
        }
        let (command, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match command {
            "" => Entry::Empty,
            "/clear" => Entry::Clear,
            "/system" => Entry::System(rest.trim().to_owned()),
            "/help" | "/?" => Entry::Help,
            "/exit" | "/quit" | "/bye" => Entry::Exit,
            // A path is a text.
            _ if command.starts_with('/') && !command[1..].contains('/') => {
                Entry::UnknownCommand(command.to_owned())
            }
            _ => Entry::Text(line.to_owned()),
        }
    }
}

/// Reads what the user enters in the terminal.
pub struct LineReader {
    editor: Editor<EntryHelper, DefaultHistory>,
    history: Option<PathBuf>,
}

impl LineReader {
    /// Creates a reader with the texts of earlier chats as its history, if `keeps_history` is true.
    pub fn new(keeps_history: bool) -> Result<LineReader, ReadlineError> {
        let mut editor = Editor::new()?;
        editor.set_helper(Some(EntryHelper));
        let history = state_folder().filter(|_| keeps_history).map(|folder| folder.join("history"));
        if let Some(path) = &history {
            // Without a history of earlier chats, the chat works as well.
            let _ = editor.load_history(path);
        }
        Ok(LineReader { editor, history })
    }

    /// Reads one entry. Ctrl-C discards the line, and Ctrl-D is [`Entry::Exit`].
    pub fn read(&mut self) -> Result<Entry, ReadlineError> {
        match self.editor.readline(">>> ") {
            Ok(line) => {
                let entry = Entry::parse(&line);
                if entry != Entry::Empty {
                    self.remember(line);
                }
                Ok(entry)
            }
            Err(ReadlineError::Interrupted) => Ok(Entry::Empty),
            Err(ReadlineError::Eof) => Ok(Entry::Exit),
            Err(error) => Err(error),
        }
    }

    /// Adds a line to the history, and to its file, to which other chats may add lines too.
    fn remember(&mut self, line: String) {
        let _ = self.editor.add_history_entry(line);
        let Some(path) = &self.history else { return };
        let _ = path.parent().map(std::fs::create_dir_all);
        if let Err(error) = self.editor.append_history(path) {
            tracing::debug!("the history is not kept: {error}");
        }
    }
}

/// Tells the line editor when a text of several lines is complete.
struct EntryHelper;

impl Validator for EntryHelper {
    fn validate(&self, context: &mut ValidationContext) -> rustyline::Result<ValidationResult> {
        let text = context.input().trim();
        let rest = text.strip_prefix(QUOTES);
        let is_open = rest.is_some_and(|rest| !rest.ends_with(QUOTES));
        Ok(if is_open { ValidationResult::Incomplete } else { ValidationResult::Valid(None) })
    }
}

impl Completer for EntryHelper {
    type Candidate = String;
}
impl Highlighter for EntryHelper {}
impl Hinter for EntryHelper {
    type Hint = String;
}
impl Helper for EntryHelper {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_texts_and_commands() {
        for (line, expected) in [
            ("", Entry::Empty),
            ("  What is 1/2? ", Entry::Text("What is 1/2?".into())),
            ("/clear", Entry::Clear),
            ("/system  Be brief. ", Entry::System("Be brief.".into())),
            ("/system", Entry::System(String::new())),
            ("/exit", Entry::Exit),
            ("/clr", Entry::UnknownCommand("/clr".into())),
            ("/etc/fstab has a line that I do not understand", {
                Entry::Text("/etc/fstab has a line that I do not understand".into())
            }),
            ("\"\"\"one\ntwo\n\"\"\"", Entry::Text("one\ntwo".into())),
            ("\"\"\"\n/clear\"\"\"", Entry::Text("/clear".into())),
            ("\"\"\"\"\"\"", Entry::Empty),
        ] {
            assert_eq!(Entry::parse(line), expected, "{line:?}");
        }
    }
}
