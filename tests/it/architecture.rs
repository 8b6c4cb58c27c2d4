//! Tests that the crates depend on each other only in the allowed directions.
//!
//! ```text
//! root -> workflow -> reports, halda, sim -> core -> schema -> profiles
//! root -> lab -> ring -> runtime -> kernels -> profiles
//!                        runtime -> core
//! ```
//!
//! Planner, simulator, executor (`exec/`) and reports never depend on each other, not even in tests, so that their
//! agreement is a result. Tests that compare two of them are in this binary.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::repository::{TextFile, root, rust_files, text_files};

/// The workspace crates that each crate may depend on. The root package may depend on all.
const ALLOWED: &[(&str, &[&str])] = &[
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
    // Experiments, on which no crate depends.
    (
        "hearth-studies",
        &[
            "hearth-workflow",
            "hearth-halda",
            "hearth-sim",
            "hearth-reports",
            "hearth-core",
            "hearth-schema",
            "hearth-profiles",
        ],
    ),
];

/// Additional dependencies that only the tests of a crate may have.
const ALLOWED_IN_TESTS: [(&str, &str); 1] = [("hearth-gpu", "hearth-ring")];

struct Package {
    name: String,
    folder: PathBuf,
    /// The workspace packages that it depends on, and whether only its tests do.
    dependencies: BTreeSet<(String, bool)>,
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
        // Only workspace packages are given by path.
        dependencies: list(&package["dependencies"])
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
    for &(name, _) in ALLOWED {
        assert!(packages.iter().any(|package| package.name == name), "the workspace has no `{name}`");
    }
    for package in packages.iter().filter(|package| package.folder != root()) {
        let name = package.name.as_str();
        let (_, allowed) = ALLOWED
            .iter()
            .find(|(other, _)| *other == name)
            .unwrap_or_else(|| panic!("add the allowed dependencies of `{name}` to ALLOWED"));
        for (dependency, only_tests) in &package.dependencies {
            assert!(
                allowed.contains(&dependency.as_str())
                    || *only_tests && ALLOWED_IN_TESTS.contains(&(name, dependency)),
                "`{name}` depends on `{dependency}`; it may depend on {allowed:?} only"
            );
        }
    }
}

/// Crates that use no files, clocks, processes or sockets.
const PURE: [&str; 5] = ["core", "schema", "halda", "sim", "reports"];

#[test]
fn pure_crates_open_nothing() {
    let opens = ["std::fs", "std::net", "File::open", "File::create", "std::process", "std::env"];
    for file in rust_files() {
        let is_pure = PURE.iter().any(|folder| file.path.starts_with(&format!("{folder}/src/")));
        if !is_pure || file.path.ends_with("/tests.rs") || file.path.contains("/tests/") {
            continue;
        }
        let non_test = file.text.lines().take_while(|line| line.trim() != "#[cfg(test)]");
        for (at, line) in non_test.enumerate().filter(|(_, line)| !line.trim_start().starts_with("//")) {
            let found = opens.iter().find(|name| line.contains(*name));
            assert!(found.is_none(), "{}:{}: a pure crate uses {found:?}", file.path, at + 1);
        }
    }
}

#[test]
fn bincode_is_used_by_the_ring_only() {
    let uses = |file: &TextFile| file.text.contains("bincode") && file.path.ends_with("Cargo.toml");
    let users: Vec<String> = text_files().into_iter().filter(uses).map(|file| file.path).collect();
    assert_eq!(
        users,
        ["Cargo.toml", "exec/ring/Cargo.toml"],
        "only one crate decodes bytes from the network"
    );
}
