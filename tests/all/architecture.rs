//! Do the crates depend on one another only in the allowed directions?
//!
//! ```text
//! root -> workflow -> reports, halda, sim -> core -> schema -> profiles
//! root -> lab -> ring -> runtime -> kernels -> profiles
//!                        runtime -> core
//! ```
//!
//! Planner, simulator, executor (`exec/`) and reports never depend on one another, not even in tests: their agreement
//! is a result, not a construction. What compares two of them stands in this binary.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::repository::{TextFile, root, rust_files};
use crate::rust_text::{code, words};

/// The crates of this workspace that each crate may depend on. The root may depend on all.
const ARROWS: &[(&str, &[&str])] = &[
    ("hearth-profiles", &[]),
    ("hearth-schema", &["hearth-profiles"]),
    ("hearth-core", &["hearth-schema", "hearth-profiles"]),
    ("hearth-halda", &["hearth-core", "hearth-schema", "hearth-profiles"]),
    ("hearth-sim", &["hearth-core", "hearth-schema", "hearth-profiles"]),
    ("hearth-kernels", &["hearth-profiles"]),
    ("hearth-runtime", &["hearth-kernels", "hearth-core", "hearth-schema", "hearth-profiles"]),
    ("hearth-gpu", &["hearth-runtime", "hearth-kernels", "hearth-schema", "hearth-profiles"]),
    ("hearth-ring", &["hearth-runtime", "hearth-kernels", "hearth-core", "hearth-schema", "hearth-profiles"]),
    ("hearth-lab", &["hearth-ring", "hearth-runtime", "hearth-core", "hearth-schema", "hearth-profiles"]),
    ("hearth-serve", &["hearth-ring", "hearth-runtime", "hearth-schema", "hearth-profiles"]),
    ("hearth-reports", &["hearth-core", "hearth-schema", "hearth-profiles"]),
    (
        "hearth-workflow",
        &["hearth-halda", "hearth-sim", "hearth-reports", "hearth-core", "hearth-schema", "hearth-profiles"],
    ),
    // Experiments; no crate depends on them.
    (
        "hearth-studies",
        &["hearth-core", "hearth-halda", "hearth-profiles", "hearth-reports", "hearth-schema", "hearth-sim"],
    ),
];

/// What only the tests of a crate may depend on besides.
const ARROWS_OF_TESTS: [(&str, &str); 1] = [("hearth-gpu", "hearth-ring")];

/// A package of the workspace.
struct Package {
    name: String,
    folder: PathBuf,
    /// Packages of this workspace, and whether only tests need them.
    needs: BTreeSet<(String, bool)>,
}

fn packages() -> Vec<Package> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline"])
        .current_dir(root())
        .output()
        .expect("cargo runs, since it runs this test");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo metadata is JSON");
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let list = |value: &Value| value.as_array().expect("a list").clone();
    let package = |package: &Value| Package {
        name: text(&package["name"]),
        folder: Path::new(&text(&package["manifest_path"])).parent().expect("a folder").to_owned(),
        // Only packages of this workspace are given by path.
        needs: list(&package["dependencies"])
            .iter()
            .filter(|dependency| dependency["path"].is_string())
            .map(|dependency| (text(&dependency["name"]), dependency["kind"] == "dev"))
            .collect(),
    };
    list(&metadata["packages"]).iter().map(package).collect()
}

#[test]
fn crates_depend_only_downwards() {
    let packages = packages();
    for &(name, _) in ARROWS {
        assert!(packages.iter().any(|package| package.name == name), "the workspace has no `{name}`");
    }
    for package in packages.iter().filter(|package| package.folder != root()) {
        let name = package.name.as_str();
        let (_, allowed) = ARROWS
            .iter()
            .find(|(other, _)| *other == name)
            .unwrap_or_else(|| panic!("say in ARROWS what `{name}` may depend on"));
        for (need, by_tests) in &package.needs {
            assert!(
                allowed.contains(&need.as_str()) || *by_tests && ARROWS_OF_TESTS.contains(&(name, need)),
                "`{name}` depends on `{need}`; it may depend on {allowed:?} only"
            );
        }
    }
}

/// Files of a crate's library, tests beside it left out.
fn library(folder: &str) -> Vec<TextFile> {
    let prefix = format!("{folder}/src/");
    rust_files().into_iter().filter(|file| file.path.starts_with(&prefix)).collect()
}

/// The lines of a file's code, from 1, without its tests.
fn shipped(file: &TextFile) -> Vec<(usize, String)> {
    if file.path.ends_with("/tests.rs") || file.path.contains("/tests/") {
        return Vec::new();
    }
    let code = code(&file.text);
    let lines = code.lines().take_while(|line| line.trim() != "#[cfg(test)]");
    lines.enumerate().map(|(at, line)| (at + 1, line.to_owned())).collect()
}

#[test]
fn only_the_command_line_opens_documents() {
    for folder in ["core", "schema", "halda", "sim", "reports"] {
        for file in library(folder) {
            for (line, text) in shipped(&file) {
                let opens = ["std::fs", "std::net", "File::open", "File::create", "std::process", "std::env"];
                let found = opens.iter().find(|name| text.contains(*name));
                assert!(found.is_none(), "{}:{line}: a pure crate uses {found:?}", file.path);
            }
        }
    }
}

#[test]
fn libraries_neither_print_nor_exit() {
    let executor = ["exec/kernels", "exec/runtime", "exec/gpu", "exec/ring", "exec/lab"];
    for folder in ["profiles", "schema", "core", "halda", "sim", "reports"].into_iter().chain(executor) {
        for file in library(folder) {
            for (line, text) in shipped(&file) {
                let speaks = ["println!", "eprintln!", "print!", "eprint!", "process::exit"];
                let found = speaks.iter().find(|name| text.contains(*name));
                assert!(found.is_none(), "{}:{line}: a library uses {found:?}; return it", file.path);
            }
        }
    }
}

#[test]
fn bincode_stays_in_the_wire_module() {
    for file in rust_files() {
        let allowed = file.path == "exec/ring/src/wire.rs";
        let uses = words(&code(&file.text)).any(|word| word == "bincode");
        assert!(
            allowed || !uses,
            "{}: only exec/ring/src/wire.rs decodes with bincode, always with a limit",
            file.path
        );
    }
}
