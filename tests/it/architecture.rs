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
use std::process::Command;

use serde_json::Value;

use crate::processes::expect_array;
use crate::repository::{TextFile, repository_root, rust_files, text_files};

/// The workspace crates that each crate may depend on, without the prefix `hearth-`. The root package may depend on
/// all crates except `studies`, on whose experiments no crate depends.
const ALLOWED: [(&str, &str); 15] = [
    ("profiles", ""),
    ("schema", "profiles"),
    ("core", "schema profiles"),
    ("halda", "core schema profiles"),
    ("sim", "core schema profiles"),
    ("kernels", "profiles"),
    ("runtime", "kernels core schema profiles"),
    ("gpu", "runtime kernels schema profiles"),
    ("ring", "runtime kernels core schema profiles"),
    ("lab", "ring runtime core schema profiles"),
    ("serve", "ring runtime schema profiles"),
    ("hub", "schema profiles"),
    ("reports", "core schema profiles"),
    ("workflow", "halda sim reports core schema profiles"),
    ("studies", "workflow halda sim reports core schema profiles"),
];

/// Additional dependencies that only the tests of a crate may have.
const ALLOWED_IN_TESTS: [(&str, &str); 1] = [("gpu", "ring")];

struct Package {
    name: String,
    /// The workspace packages that this package depends on, and whether only its tests do.
    dependencies: BTreeSet<(String, bool)>,
}

fn packages() -> Vec<Package> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline"])
        .current_dir(repository_root())
        .output()
        .expect("cargo runs, since it runs this test");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo metadata is JSON");
    let name =
        |value: &Value| value["name"].as_str().expect("a name").trim_start_matches("hearth-").to_owned();
    let package = |package: &Value| Package {
        name: name(package),
        // Only workspace packages are given by path.
        dependencies: expect_array(&package["dependencies"])
            .iter()
            .filter(|dependency| dependency["path"].is_string())
            .map(|dependency| (name(dependency), dependency["kind"] == "dev"))
            .collect(),
    };
    expect_array(&metadata["packages"]).iter().map(package).collect()
}

#[test]
fn crates_depend_only_downwards() {
    let packages = packages();
    for (name, _) in ALLOWED {
        assert!(packages.iter().any(|package| package.name == name), "the workspace has no `{name}`");
    }
    for package in packages.iter().filter(|package| package.name != "hearth") {
        let name = package.name.as_str();
        let entry = ALLOWED.iter().find(|(other, _)| *other == name);
        let (_, allowed) = entry.unwrap_or_else(|| panic!("add `{name}` to ALLOWED"));
        for (dependency, only_tests) in &package.dependencies {
            let in_tests = *only_tests && ALLOWED_IN_TESTS.contains(&(name, dependency));
            let is_allowed = in_tests || allowed.split(' ').any(|other| other == dependency);
            assert!(is_allowed, "`{name}` depends on `{dependency}`; it may depend on {allowed} only");
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
    assert_eq!(users, ["Cargo.toml", "exec/ring/Cargo.toml"], "one crate decodes bytes from the network");
}
