//! The text files of the project.
//!
//! Those that git tracks. In a copy without git (a source archive) the folders are walked instead, without
//! build outputs and hidden folders; the rules then also see files that nobody has added yet.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

pub struct TextFile {
    /// Relative to the root, with forward slashes.
    pub path: String,
    pub text: String,
}

impl TextFile {
    /// The part after the last dot, or nothing.
    pub fn extension(&self) -> &str {
        Path::new(&self.path).extension().and_then(|extension| extension.to_str()).unwrap_or_default()
    }

    /// Whether it is data that others wrote or a program generated: bytes are kept as they came.
    pub fn is_data(&self) -> bool {
        self.path.split('/').any(|part| matches!(part, "data" | "golden" | "snapshots" | "fixtures"))
            || self.extension() == "proptest-regressions"
            || self.extension() == "lock"
    }
}

pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Every tracked text file, in the order of their paths. Files that are not UTF-8 are left out.
pub fn text_files() -> Vec<TextFile> {
    let mut paths = tracked().unwrap_or_else(|| {
        let mut found = Vec::new();
        walk(&root(), "", &mut found);
        found
    });
    paths.sort();
    let read = |path: String| {
        let text = String::from_utf8(fs::read(root().join(&path)).ok()?).ok()?;
        (!text.contains('\0')).then_some(TextFile { path, text })
    };
    let files: Vec<TextFile> = paths.into_iter().filter_map(read).collect();
    assert!(files.iter().any(|file| file.path == "Cargo.toml"), "the root is not where the project is");
    files
}

/// Every tracked Rust file.
pub fn rust_files() -> Vec<TextFile> {
    text_files().into_iter().filter(|file| file.extension() == "rs").collect()
}

/// What git tracks, or nothing where git or its folder is missing.
fn tracked() -> Option<Vec<String>> {
    if !root().join(".git").exists() {
        return None;
    }
    let output = Command::new("git").args(["ls-files", "-z"]).current_dir(root()).output().ok()?;
    let list = String::from_utf8(output.stdout).ok()?;
    let paths: Vec<String> = list.split('\0').filter(|path| !path.is_empty()).map(str::to_owned).collect();
    (output.status.success() && !paths.is_empty()).then_some(paths)
}

fn walk(folder: &Path, prefix: &str, found: &mut Vec<String>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = format!("{prefix}{name}");
        if entry.path().is_dir() {
            let skipped = name.starts_with('.') && name != ".ci";
            if !skipped && !matches!(name.as_str(), "target" | "out") {
                walk(&entry.path(), &format!("{path}/"), found);
            }
        } else {
            found.push(path);
        }
    }
}
