//! Tests that the commands and names in the documents are valid.
//!
//! The indented lines of each document form a script, which runs in its own folder. Commands that a test cannot run
//! unchanged are replaced or left out.

use std::collections::BTreeSet;
use std::fs;
use std::net::TcpListener;
use std::process::Command;

use regex::Regex;

use crate::folder::Folder;
use crate::processes::{model_path, program_path, run_script};
use crate::repository::{TextFile, repository_root, rust_files, text_files};

/// A document whose commands the test runs as a script, with the changes to the script.
struct Document {
    path: &'static str,
    /// Strings in the script and their replacements. `PORT1` to `PORT3` are free ports, `MODEL` a small trained model.
    replaced: &'static [(&'static str, &'static str)],
    /// Beginnings of the lines that are left out of the script, each with the reason.
    left_out: &'static [(&'static str, &'static str)],
}

const DOCUMENTS: [Document; 6] = [
    Document {
        path: "README.md",
        replaced: &[
            ("hearth run model.gguf 'What", "cp MODEL model.gguf\nhearth run model.gguf 'What"),
            (
                "hearth serve model.gguf",
                "hearth serve model.gguf --listen 127.0.0.1:PORT1 & wait_for_port PORT1",
            ),
        ],
        left_out: &[("./run-demo", "a separate test that takes minutes"), ("./run-tests", "runs this test")],
    },
    Document {
        path: "docs/concepts/planners.md",
        replaced: &[("--refine-seconds 60", "--refine-seconds 5")],
        left_out: &[],
    },
    Document {
        path: "docs/concepts/residency.md",
        replaced: &[],
        left_out: &[(
            "hearth lab",
            "needs control groups and a large model; separate tests run it if they are available",
        )],
    },
    Document {
        path: "docs/guides/serving.md",
        replaced: &[
            (
                "hearth serve plan.yaml --model model.gguf --sequences 4",
                "cp MODEL model.gguf\nhearth init one.yaml --model model.gguf --device one=d3\n\
                 hearth plan one.yaml --model model.gguf --strategy single -o plan.yaml\n\
                 hearth serve plan.yaml --model model.gguf --sequences 4 --listen 127.0.0.1:PORT1 & wait_for_port PORT1",
            ),
            ("127.0.0.1:8080", "127.0.0.1:PORT1"),
            (
                "hearth serve embedding.gguf --listen 127.0.0.1:8081",
                "hearth serve model.gguf --pooling last --listen 127.0.0.1:PORT3 & wait_for_port PORT3",
            ),
            ("127.0.0.1:8081", "127.0.0.1:PORT3"),
            (
                "--listen 0.0.0.0:8080 --token token",
                "--listen 127.0.0.1:PORT2 --token token & wait_for_port PORT2",
            ),
        ],
        left_out: &[],
    },
    Document {
        path: "docs/guides/first-ring.md",
        replaced: &[
            ("hearth synth --preset 1b --quant q4_k_m -o model.gguf", "cp MODEL model.gguf"),
            (
                "hearth profile --model model.gguf --name desktop",
                "hearth profile --quick --model model.gguf --name desktop",
            ),
            (
                "hearth profile --model model.gguf --name laptop -o laptop.yaml",
                "sed 's/desktop/laptop/' desktop.yaml > laptop.yaml",
            ),
            ("hearth profile --quick --peer", "hearth profile --quick --model model.gguf --peer"),
            (
                "hearth worker --listen 0.0.0.0:9001 --model model.gguf --key ring.key --name laptop",
                "hearth worker --listen 127.0.0.1:PORT1 --model model.gguf --key ring.key & wait_for_port PORT1",
            ),
            ("192.168.1.7:9001", "127.0.0.1:PORT1"),
            ("--sequences 2", "--sequences 2 --listen 127.0.0.1:PORT3 & wait_for_port PORT3"),
            ("127.0.0.1:8080", "127.0.0.1:PORT3"),
        ],
        left_out: &[("scripts/setup.sh", "installs packages"), ("cargo install", "installs the program")],
    },
    Document {
        path: "docs/guides/sweeps.md",
        replaced: &[(
            "parallel hearth sweep SCENARIO --vary seed=1..64/64 --jobs 1 --shard {}/8 -o part-{}.csv ::: 1 2 3 4 5 6 7 8",
            "for i in 1 2 3 4 5 6 7 8; do hearth sweep SCENARIO --vary seed=1..64/64 --shard $i/8 -o part-$i.csv; done",
        )],
        left_out: &[("sbatch", "needs Slurm"), ("'hearth sweep", "the same")],
    },
];

fn commands(text: &str) -> Vec<String> {
    let indented = text.lines().filter_map(|line| line.strip_prefix("    "));
    indented.filter(|line| !line.trim().is_empty()).map(str::to_owned).collect()
}

/// Returns the indented lines of a document as a script, with the changes of [`Document`].
fn script(document: &Document, ports: &[u16]) -> String {
    let text = fs::read_to_string(repository_root().join(document.path)).expect("a document");
    let mut lines = commands(&text);
    for (begin, reason) in document.left_out {
        let before = lines.len();
        lines.retain(|line| !line.trim_start().starts_with(begin));
        assert!(lines.len() < before, "{}: no line begins with `{begin}`", document.path);
        println!("{}: left out: {begin}, {reason}", document.path);
    }
    let mut script = lines.join("\n");
    for (from, to) in document.replaced {
        assert!(script.contains(from), "{}: the script does not contain `{from}`", document.path);
        script = script.replace(from, to);
    }
    for (at, port) in ports.iter().enumerate() {
        script = script.replace(&format!("PORT{}", at + 1), &port.to_string());
    }
    script.replace("MODEL", &model_path("q4_k"))
}

/// Returns three ports that are not in use.
fn free_ports() -> [u16; 3] {
    // All are open at the same time, so that they differ.
    let listeners = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").expect("a free port"));
    listeners.each_ref().map(|one| one.local_addr().expect("an address").port())
}

fn run_in_a_folder(document: &Document) {
    let (folder, root) = (Folder::new(), env!("CARGO_MANIFEST_DIR"));
    let ports = free_ports();
    let [first, second, _] = ports;
    let script = format!(
        "wait_for_port() {{ for _ in $(seq 100); do if (exec 3<>/dev/tcp/127.0.0.1/$1) 2>/dev/null; then return; fi; sleep 0.1; done; return 1; }}
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
cp -r '{root}/scenarios' . && mkdir -p tests out .local/share/bash-completion/completions
ln -s '{root}/tests/data' tests/data
sed -i 's/:9001/:{first}/; s/:9002/:{second}/' scenarios/home/psalm-on-three.yaml
cp scenarios/home/llama-8b-for-two.yaml SCENARIO
set -x
{}
",
        script(document, &ports)
    );
    run_script(&folder, document.path, 900, &script);
}

#[test]
fn commands_in_documents_work() {
    std::thread::scope(|scope| {
        for document in &DOCUMENTS {
            scope.spawn(|| run_in_a_folder(document));
        }
    });
}

#[test]
fn every_document_with_commands_is_tested() {
    let folders = ["docs/guides/", "docs/concepts/", "docs/reference/", "docs/development/"];
    for TextFile { path, text } in text_files().into_iter().filter(|file| file.extension() == "md") {
        if path.contains('/') && !folders.iter().any(|folder| path.starts_with(folder)) {
            continue;
        }
        let has = commands(&text).iter().any(|line| line.starts_with("hearth "));
        let known = DOCUMENTS.iter().any(|document| document.path == path);
        assert!(!has || known, "{path} has commands that no test runs");
    }
}

#[test]
fn command_reference_is_current() {
    let root = repository_root();
    let output =
        Command::new(root.join("scripts/commands.sh")).arg(program_path()).output().expect("bash runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let current = fs::read_to_string(root.join("docs/reference/commands.md")).unwrap_or_default();
    assert!(
        current.as_bytes() == output.stdout,
        "update it: scripts/commands.sh HEARTH > docs/reference/commands.md"
    );
}

#[test]
fn every_code_name_of_the_glossary_is_an_identifier() {
    let text = fs::read_to_string(repository_root().join("GLOSSARY.md")).expect("GLOSSARY.md");
    let word = Regex::new(r"\w+").expect("a regular expression");
    let words = |text: &str| word.find_iter(text).map(|word| word.as_str().to_owned()).collect::<Vec<_>>();
    let sources = rust_files().into_iter().filter(|file| !file.path.starts_with("tests/"));
    let known: BTreeSet<String> = sources.flat_map(|file| words(&file.text)).collect();
    let names = code_names(&text);
    assert!(names.len() >= 20, "the glossary's tables have their code names in the second column");
    let missing: Vec<&String> =
        names.iter().filter(|name| !words(name).iter().all(|word| known.contains(word))).collect();
    assert!(missing.is_empty(), "rename these in GLOSSARY.md, the code does not have them: {missing:?}");
}

/// Returns the names in backquotes in the second column of the glossary's tables, such as `Plan::layers_per_round`.
fn code_names(text: &str) -> Vec<String> {
    let rows = text.lines().filter(|line| line.starts_with('|') && !line.contains("---"));
    let cells = rows.filter_map(|row| row.split('|').nth(2));
    let quoted = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    quoted
        .filter(|name| name.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
        .map(str::to_owned)
        .collect()
}
