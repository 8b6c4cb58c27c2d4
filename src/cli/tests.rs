//! Every command in the help and in the documents is valid.
//!
//! The commands are parsed, not run: `tests/it/examples.rs` runs those of the help that can be run anywhere.

use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory, Parser};

use super::Cli;

/// The words of a line as a shell has them: quotes group, and nothing is replaced.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for c in line.chars() {
        match (c, quote) {
            (c, Some(open)) if c == open => quote = None,
            ('\'' | '"', None) => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (c, None) if c.is_whitespace() => words.extend(word.take()),
            (c, _) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// Checks that a command line of `hearth` is understood; what a shell does with its output is cut off.
fn understood(line: &str, place: &str) {
    let end = |word: &String| matches!(word.as_str(), "&" | "|" | ">" | "#" | ";" | "&&" | "<" | "2>");
    let words: Vec<String> = words(line).into_iter().take_while(|word| !end(word)).collect();
    match Cli::try_parse_from(&words) {
        Err(error) if error.use_stderr() => panic!("{place}: `{line}`: {error}"),
        _ => {}
    }
}

fn examples(command: &Command) -> Vec<String> {
    let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    help.lines().filter_map(|line| line.trim().strip_prefix("Example: ")).map(str::to_owned).collect()
}

#[test]
fn every_command_has_an_example_that_is_understood() {
    let command = Cli::command();
    let verbs = command.get_subcommands();
    for verb in verbs.flat_map(|verb| std::iter::once(verb).chain(verb.get_subcommands())) {
        let found = examples(verb);
        assert!(!found.is_empty(), "`hearth {} --help` has no example", verb.get_name());
        for line in found {
            assert!(line.starts_with("hearth "), "{line}");
            understood(&line, verb.get_name());
        }
    }
    for line in examples(&command) {
        understood(&line, "hearth --help");
    }
}

fn markdown(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder of documents").flatten() {
        let path = entry.path();
        if path.is_dir() {
            markdown(&path, found);
        } else if path.extension().is_some_and(|kind| kind == "md") {
            found.push(path);
        }
    }
}

#[test]
fn every_command_in_a_document_is_understood() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut documents = vec![root.join("README.md"), root.join("CONTRIBUTING.md")];
    markdown(&root.join("docs"), &mut documents);
    let mut count = 0;
    for path in documents {
        let text = std::fs::read_to_string(&path).expect("a document").replace("\\\n", " ");
        // Commands stand in blocks that are set off, and nowhere else at the begin of a line.
        for line in text.lines().filter(|line| line.starts_with("    ") || line.starts_with("$ ")) {
            let line = line.trim().trim_start_matches("$ ");
            // The reference of commands shows a second line of usage: `hearth sweep <COMMAND>`.
            if line.starts_with("hearth ") && !line.contains(" ..") && !line.contains('<') {
                understood(line, &path.display().to_string());
                count += 1;
            }
        }
    }
    assert!(count > 20, "only {count} commands were found");
}

#[test]
fn words_are_those_of_a_shell() {
    assert_eq!(words("hearth  plan 'a b' --x=\"c d\" ''"), ["hearth", "plan", "a b", "--x=c d", ""]);
}

#[test]
fn the_command_line_contradicts_itself_nowhere() {
    Cli::command().debug_assert();
}
