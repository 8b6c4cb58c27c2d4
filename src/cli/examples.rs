//! The examples in the help of commands, broken into lines that a shell can continue.
//!
//! clap wraps long lines at spaces. A wrapped example could not be copied to a shell, so examples are broken before,
//! with a backslash at the end of each line.

use clap::Command;
use rustix::termios::tcgetwinsize;

/// What the lines of examples begin with.
const PREFIXES: [&str; 2] = ["Example: ", "Then: "];

/// Number of columns without a terminal and without the environment variable `COLUMNS`. source: that of clap
const DEFAULT_COLUMNS: usize = 100;

/// Breaks the examples of a command and of its subcommands, and sets the width of their help.
pub fn break_examples(command: Command) -> Command {
    let terminal = tcgetwinsize(std::io::stdout()).ok().map(|size| usize::from(size.ws_col));
    let variable = || std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    let columns = terminal.filter(|columns| *columns > 0).or_else(variable).unwrap_or(DEFAULT_COLUMNS);
    break_at(command.term_width(columns), columns)
}

fn break_at(command: Command, columns: usize) -> Command {
    let help = command.get_after_help().map(ToString::to_string);
    let command = match help {
        Some(help) => {
            let lines: Vec<String> = help.lines().map(|line| break_line(line, columns)).collect();
            command.after_help(lines.join("\n"))
        }
        None => command,
    };
    command.mut_subcommands(|subcommand| break_at(subcommand, columns))
}

fn break_line(line: &str, columns: usize) -> String {
    let Some(prefix) = PREFIXES.into_iter().find(|prefix| line.starts_with(prefix)) else {
        return line.to_owned();
    };
    let example = &line[prefix.len()..];
    let indent = " ".repeat(prefix.len() + 4);
    let (mut text, mut width) = (prefix.to_owned(), prefix.len());
    for (index, part) in parts(example).iter().enumerate() {
        // Room for a space before the part, and for a space and a backslash after it.
        if index > 0 && width + 1 + part.chars().count() + 2 > columns {
            text += " \\\n";
            text += &indent;
            width = indent.len();
        } else if index > 0 {
            text += " ";
            width += 1;
        }
        text += part;
        width += part.chars().count();
    }
    text
}

/// Returns the words of a command line; a flag and its value are one part.
fn parts(line: &str) -> Vec<String> {
    let mut parts: Vec<String> = Vec::new();
    for word in words(line) {
        let is_flag = |part: &&mut String| part.starts_with('-') && !part.contains(' ');
        match parts.last_mut().filter(is_flag) {
            Some(flag) if !word.starts_with('-') => {
                flag.push(' ');
                flag.push_str(word);
            }
            _ => parts.push(word.to_owned()),
        }
    }
    parts
}

/// Splits a command line at spaces that are not quoted.
fn words(line: &str) -> impl Iterator<Item = &str> {
    let mut quote = None;
    line.split(move |letter| {
        match (quote, letter) {
            (None, '\'' | '"') => quote = Some(letter),
            (Some(open), _) if open == letter => quote = None,
            _ => {}
        }
        quote.is_none() && letter == ' '
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn examples(command: &Command, found: &mut Vec<String>) {
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        // What begins a line continues the line before.
        let joined = help.replace(" \\\n", "\\ ");
        found.extend(joined.lines().map(str::to_owned));
        command.get_subcommands().for_each(|command| examples(command, found));
    }

    #[test]
    fn broken_examples_are_the_same_commands() {
        let (mut whole, mut broken) = (Vec::new(), Vec::new());
        examples(&crate::cli::Cli::command(), &mut whole);
        examples(&break_at(crate::cli::Cli::command(), 60), &mut broken);
        let without_breaks = |line: &String| {
            let words: Vec<&str> = line.split_whitespace().map(|word| word.trim_end_matches('\\')).collect();
            words.join(" ")
        };
        let whole: Vec<String> = whole.iter().map(without_breaks).collect();
        let again: Vec<String> = broken.iter().map(without_breaks).collect();
        assert_eq!(whole, again);
        assert!(broken.iter().filter(|line| line.contains("\\ ")).count() > 10, "{broken:?}");
    }

    #[test]
    fn long_examples_are_broken_between_words() {
        let line = "Example: hearth experts tests/a.csv --budget '1 GiB,4 GiB' --policy lru,belady";
        let broken = break_line(line, 50);
        let expected = [
            "Example: hearth experts tests/a.csv \\",
            "             --budget '1 GiB,4 GiB' \\",
            "             --policy lru,belady",
        ];
        assert_eq!(broken.lines().collect::<Vec<_>>(), expected);
        assert_eq!(break_line(line, 200), line);
        assert_eq!(break_line("no example, however long it is", 10), "no example, however long it is");
    }
}
