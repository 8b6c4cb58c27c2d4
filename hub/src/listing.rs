//! The files of a repository, as the hub lists them.
//!
//! `GET /api/models/OWNER/REPO/revision/main?blobs=true` returns the commit of the branch and, for each file, its path,
//! size and SHA-256 digest. All of it is checked, since the names become paths and the sizes become files on disk.

use std::io::Read;

use hearth_schema::hub_model::Repository;
use serde::Deserialize;

use crate::http::{HttpClient, RequestError};
use crate::{HubError, Variant};

/// Maximum size of the list, in bytes. source: assumed; 300 bytes a file, and large repositories have 10,000
/// files
const MAX_LISTING_BYTES: u64 = 16 << 20;
/// Maximum length of a path in a repository, in bytes. source: assumed, a quarter of Linux's limit for a path
const MAX_PATH_LEN: usize = 1024;
/// Maximum length of a name in a path. source: the 255 bytes of Linux's file systems
const MAX_NAME_LEN: usize = 255;

/// A file of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteFile {
    /// The path in the repository: names without `..`, separated by `/`.
    pub path: String,
    pub bytes: u64,
    /// 64 hexadecimal digits in lower case.
    pub sha256: String,
}

/// The GGUF files of a repository at a commit.
#[derive(Debug, Clone)]
pub struct Listing {
    pub repository: Repository,
    /// The commit, 40 hexadecimal digits in lower case.
    pub commit: String,
    pub files: Vec<RemoteFile>,
    pub variants: Vec<Variant>,
}

#[derive(Deserialize)]
struct RepositoryInfo {
    sha: String,
    siblings: Vec<FileInfo>,
}

#[derive(Deserialize)]
struct FileInfo {
    rfilename: String,
    size: Option<u64>,
    lfs: Option<LfsInfo>,
}

#[derive(Deserialize)]
struct LfsInfo {
    sha256: String,
    size: u64,
}

impl Listing {
    /// Requests the list of a repository.
    pub(crate) fn fetch(client: &HttpClient, repository: &Repository) -> Result<Listing, RequestError> {
        let Repository { owner, name } = repository;
        let url = client.endpoint.url(["api", "models", owner, name, "revision", "main"]) + "?blobs=true";
        let response = client.get_document(&url)?;
        let mut text = Vec::new();
        response.into_body().into_reader().take(MAX_LISTING_BYTES + 1).read_to_end(&mut text).map_err(
            |error| {
                let error = HubError::unreachable(format!("the list of files was not received: {error}"));
                RequestError::transient(error.with_location(repository))
            },
        )?;
        Self::parse(repository, &text)
            .map_err(|error| RequestError::Permanent(error.with_location(repository)))
    }

    pub(crate) fn parse(repository: &Repository, text: &[u8]) -> Result<Listing, HubError> {
        if text.len() as u64 > MAX_LISTING_BYTES {
            return Err(HubError::failed(format!(
                "the list of files is larger than {MAX_LISTING_BYTES} bytes"
            )));
        }
        let info: RepositoryInfo = serde_json::from_slice(text).map_err(|error| {
            HubError::failed(format!("the hub sent no list of files: {error}"))
                .with_hint("check `HF_ENDPOINT`, and whether the network needs a sign-in on a web page")
        })?;
        if !is_hex(&info.sha, 40) {
            return Err(HubError::failed("the hub sent no commit of the repository"));
        }
        let is_model = |file: &FileInfo| !Variant::find_all([file.rfilename.as_str()]).is_empty();
        let models = info.siblings.into_iter().filter(is_model);
        let mut files: Vec<RemoteFile> =
            models.filter_map(|file| checked_file(file).transpose()).collect::<Result<_, _>>()?;
        // Sorted for the search in `files_of`.
        files.sort_by(|one, other| one.path.cmp(&other.path));
        let variants = Variant::find_all(files.iter().map(|file| file.path.as_str()));
        Ok(Listing { repository: repository.clone(), commit: info.sha, files, variants })
    }

    /// Returns the files of a model, in the order of their numbers.
    pub fn files_of<'l>(&'l self, variant: &'l Variant) -> impl Iterator<Item = &'l RemoteFile> {
        variant.paths.iter().filter_map(|path| {
            let index = self.files.binary_search_by(|file| file.path.cmp(path)).ok()?;
            Some(&self.files[index])
        })
    }

    /// Returns the size of a model in bytes.
    pub fn bytes_of(&self, variant: &Variant) -> u64 {
        self.files_of(variant).fold(0, |sum, file| sum.saturating_add(file.bytes))
    }
}

/// Checks the name, size and digest of a file. Returns `None` for a file without a digest, which cannot be verified: a
/// small file in the Git repository itself.
fn checked_file(file: FileInfo) -> Result<Option<RemoteFile>, HubError> {
    let FileInfo { rfilename: path, size, lfs } = file;
    let wrong =
        |what: &str| HubError::failed(format!("the file `{}` of the repository {what}", shortened(&path)));
    if !is_safe_path(&path) {
        return Err(wrong("has a name that is not safe to use"));
    }
    let Some(lfs) = lfs else {
        tracing::warn!("{path} is left out, because the hub has no SHA-256 digest of it");
        return Ok(None);
    };
    if !is_hex(&lfs.sha256, 64) {
        return Err(wrong("has an invalid SHA-256 digest"));
    }
    if size.is_some_and(|size| size != lfs.size) {
        return Err(wrong("has two different sizes"));
    }
    Ok(Some(RemoteFile { path, bytes: lfs.size, sha256: lfs.sha256 }))
}

/// Returns whether a path in a repository is a relative path of normal names, and can be printed on one line.
pub(crate) fn is_safe_path(path: &str) -> bool {
    let is_safe_name = |name: &str| !matches!(name, "" | "." | "..") && name.len() <= MAX_NAME_LEN;
    let is_bad_char = |c: char| c.is_control() || c == '\\';
    path.len() <= MAX_PATH_LEN && !path.contains(is_bad_char) && path.split('/').all(is_safe_name)
}

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Returns the beginning of a name for an error message, without control characters.
fn shortened(name: &str) -> String {
    let short: String = name.chars().take(60).collect();
    let end = if short.len() < name.len() { ".." } else { "" };
    format!("{}{end}", short.escape_debug())
}

#[cfg(test)]
mod tests {
    use std::path::{Component, Path};

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn parse(text: &str) -> Result<Listing, HubError> {
        let repository = Repository { owner: "o".into(), name: "r".into() };
        Listing::parse(&repository, text.as_bytes())
    }

    /// A change to a file of a list.
    type Change = fn(&mut serde_json::Value);

    fn with_file(path: &str, change: impl FnOnce(&mut serde_json::Value)) -> String {
        let mut file =
            json!({ "rfilename": path, "size": 5, "lfs": { "sha256": "0a".repeat(32), "size": 5 } });
        change(&mut file);
        let siblings = json!([{ "rfilename": "../README.md" }, file]);
        json!({ "sha": "c".repeat(40), "siblings": siblings, "private": false }).to_string()
    }

    #[test]
    fn models_are_listed_with_size_and_digest() {
        let listing = parse(&with_file("sub/m-Q8_0.gguf", |_| ())).expect("valid");
        let file = RemoteFile { path: "sub/m-Q8_0.gguf".into(), bytes: 5, sha256: "0a".repeat(32) };
        assert_eq!((listing.files, listing.commit), (vec![file], "c".repeat(40)));
        let unverifiable = parse(&with_file("m.gguf", |file| file["lfs"] = json!(null))).expect("valid");
        assert_eq!((unverifiable.files, unverifiable.variants), (vec![], vec![]));
    }

    #[test]
    fn hostile_lists_are_refused() {
        let long = format!("{}.gguf", "x".repeat(300));
        for path in [
            "../m.gguf",
            "/m.gguf",
            "a//m.gguf",
            "a/../m.gguf",
            "a\\..\\m.gguf",
            "\u{1b}m.gguf",
            "a\n.gguf",
            "./m.gguf",
            &long,
        ] {
            let error = parse(&with_file(path, |_| ())).expect_err(path);
            assert!(error.to_string().contains("not safe"), "{error}");
            assert!(!error.to_string().contains(char::is_control), "{error:?}");
        }
        let wrong: [(&str, Change); 5] = [
            ("invalid SHA-256", |file| file["lfs"]["sha256"] = json!("../../../x")),
            ("two different sizes", |file| file["size"] = json!(6)),
            ("no list of files", |file| file["lfs"]["size"] = json!(-1)),
            ("no list of files", |file| file["lfs"]["size"] = json!(1e300)),
            ("no list of files", |file| file["rfilename"] = json!(["a"])),
        ];
        for (part, change) in wrong {
            let error = parse(&with_file("m.gguf", change)).expect_err(part);
            assert!(error.to_string().contains(part), "{error}");
        }
        for text in [
            "",
            "[]",
            "<!doctype html><html>",
            "{}",
            "{\"sha\": \"../x\", \"siblings\": []}",
            &"[".repeat(5000),
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
        assert!(
            parse(&" ".repeat(MAX_LISTING_BYTES as usize + 1))
                .expect_err("too long")
                .to_string()
                .contains("larger")
        );
    }

    proptest! {
        #[test]
        fn safe_paths_stay_in_their_folder(path in "[./a\\\\]{0,9}|\\PC{0,9}|.{0,9}") {
            if is_safe_path(&path) {
                let is_name = |part| matches!(part, Component::Normal(_));
                prop_assert!(Path::new(&path).components().all(is_name), "{}", path);
            }
        }
    }
}
