//! Tests that every command line in the help texts and in the documents can be parsed.
//!
//! The command lines are not run; `tests/it/examples.rs` runs the examples of the help that can run on any machine.

use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory, Parser};

use super::Cli;

/// Splits a line into words as a shell does, with quotes but without substitutions.
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

/// Checks that `hearth` can parse a command line; pipes and redirections at the end of the line are ignored.
fn assert_parses(line: &str, location: &str) {
    let end = |word: &String| matches!(word.as_str(), "&" | "|" | ">" | "#" | ";" | "&&" | "<" | "2>");
    let words: Vec<String> = words(line).into_iter().take_while(|word| !end(word)).collect();
    match Cli::try_parse_from(&words) {
        Err(error) if error.use_stderr() => panic!("{location}: `{line}`: {error}"),
        _ => {}
    }
}

/// Returns the command lines of the examples in the help of a command.
fn examples(command: &Command) -> Vec<String> {
    let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    help.lines().filter_map(|line| line.trim().strip_prefix("Example: ")).map(str::to_owned).collect()
}

#[test]
fn every_command_has_a_valid_example() {
    let command = Cli::command();
    command.clone().debug_assert();
    let verbs = command.get_subcommands();
    for verb in verbs.flat_map(|verb| std::iter::once(verb).chain(verb.get_subcommands())) {
        let found = examples(verb);
        assert!(!found.is_empty(), "`hearth {} --help` has no example", verb.get_name());
        for line in found {
            assert!(line.starts_with("hearth "), "{line}");
            assert_parses(&line, verb.get_name());
        }
    }
    for line in examples(&command) {
        assert_parses(&line, "hearth --help");
    }
}

/// Adds the Markdown files of a folder and its subfolders to `found`.
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
fn every_command_in_a_document_is_valid() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut documents = vec![root.join("README.md"), root.join("CONTRIBUTING.md")];
    markdown(&root.join("docs"), &mut documents);
    let mut count = 0;
    for path in documents {
        let text = std::fs::read_to_string(&path).expect("a document").replace("\\\n", " ");
        // Only the lines of indented blocks and lines after a `$` prompt can be commands.
        for line in text.lines().filter(|line| line.starts_with("    ") || line.starts_with("$ ")) {
            let line = line.trim().trim_start_matches("$ ");
            // The reference of commands shows a second line of usage: `hearth sweep <COMMAND>`.
            if line.starts_with("hearth ") && !line.contains(" ..") && !line.contains('<') {
                assert_parses(line, &path.display().to_string());
                count += 1;
            }
        }
    }
    assert!(count > 20, "only {count} commands were found");
}

#[test]
fn words_are_split_like_in_a_shell() {
    assert_eq!(words("hearth  plan 'a b' --x=\"c d\" ''"), ["hearth", "plan", "a b", "--x=c d", ""]);
}

#[test]
fn help_names_every_architecture() {
    let mut command = Cli::command();
    let synth = command.find_subcommand_mut("synth").expect("a command").render_long_help().to_string();
    for architecture in hearth_profiles::model::Architecture::all_runnable() {
        assert!(synth.contains(architecture.name()), "{architecture}");
    }
}
