//! Lists the text files of the repository, for tests that check all of them.
//!
//! These are the files that git tracks. In a copy without git (a source archive) all folders are searched instead,
//! except build outputs and hidden folders, so untracked files are included.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

pub struct TextFile {
    /// The path relative to the root, with forward slashes.
    pub path: String,
    pub text: String,
}

impl TextFile {
    pub fn extension(&self) -> &str {
        Path::new(&self.path).extension().and_then(|extension| extension.to_str()).unwrap_or_default()
    }

    /// Returns whether the file is test data or generated (such as a lock file), so that its formatting is not checked.
    pub fn is_data(&self) -> bool {
        self.path
            .split('/')
            .any(|part| matches!(part, "corpus" | "data" | "golden" | "snapshots" | "fixtures"))
            || self.extension() == "proptest-regressions"
            || self.extension() == "lock"
    }
}

pub fn repository_root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Returns all text files, sorted by path. Files that are not UTF-8 are left out.
pub fn text_files() -> Vec<TextFile> {
    let mut paths = tracked().unwrap_or_else(|| files_below(&repository_root(), ""));
    paths.sort();
    let read = |path: String| {
        let text = String::from_utf8(fs::read(repository_root().join(&path)).ok()?).ok()?;
        (!text.contains('\0')).then_some(TextFile { path, text })
    };
    let files: Vec<TextFile> = paths.into_iter().filter_map(read).collect();
    assert!(files.iter().any(|file| file.path == "Cargo.toml"), "the root of the repository was not found");
    files
}

pub fn rust_files() -> Vec<TextFile> {
    text_files().into_iter().filter(|file| file.extension() == "rs").collect()
}

/// Returns the paths that git tracks; `None` if git or the `.git` folder is missing.
fn tracked() -> Option<Vec<String>> {
    if !repository_root().join(".git").exists() {
        return None;
    }
    let output = Command::new("git").args(["ls-files", "-z"]).current_dir(repository_root()).output().ok()?;
    let list = String::from_utf8(output.stdout).ok()?;
    let paths: Vec<String> = list.split('\0').filter(|path| !path.is_empty()).map(str::to_owned).collect();
    (output.status.success() && !paths.is_empty()).then_some(paths)
}

/// Returns the paths of all files in a folder and its subfolders, each with `prefix` in front.
fn files_below(folder: &Path, prefix: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = format!("{prefix}{name}");
        let is_hidden = name.starts_with('.') && name != ".ci";
        if !entry.path().is_dir() {
            found.push(path);
        } else if !is_hidden && !matches!(name.as_str(), "target" | "out") {
            found.extend(files_below(&entry.path(), &format!("{path}/")));
        }
    }
    found
}
