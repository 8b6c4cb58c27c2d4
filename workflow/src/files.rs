//! Bounded reading and atomic writing of files.
//!
//! A file is written as a whole or not at all. Whether it can be written is checked before long work is done for it:
//! the folder exists, no input is overwritten, and no two results go into one file.
//!
//! Not here: the content of a file ([`crate::documents`]).

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::Error;

/// Reads a text file of at most `max` bytes, whatever its metadata says: a pipe has no length.
pub fn read_at_most(path: &Path, max: u64) -> Result<String, Error> {
    text_of(fs::File::open(path).map_err(|error| Error::file(path, "open", &error))?, path, max)
}

/// Reads text of at most `max` bytes from an open file; `path` is its name.
pub fn text_of(from: impl Read, path: &Path, max: u64) -> Result<String, Error> {
    let mut bytes = Vec::new();
    from.take(max + 1).read_to_end(&mut bytes).map_err(|error| Error::file(path, "read", &error))?;
    // A text may begin with these letters too, but not with a control character after them.
    if bytes.starts_with(b"GGUF") && bytes.get(4).is_some_and(|byte| *byte < b'\t') {
        return Err(Error::invalid(
            "this is a model file; a text file is expected here, such as a scenario or a plan",
        )
        .at(path.display())
        .hint("name the model in the scenario, or give it with `--model GGUF`"));
    }
    if bytes.len() as u64 > max {
        let what = format!("the file is larger than {max} bytes, the limit for this kind of file");
        return Err(Error::invalid(what).at(path.display()).hint("check that this is the right file"));
    }
    String::from_utf8(bytes).map_err(|error| {
        let what =
            format!("this is not a text file: byte {} is not UTF-8", error.utf8_error().valid_up_to() + 1);
        Error::invalid(what).at(path.display()).hint("check that this is the right file")
    })
}

/// The parent folder, if the path names one.
fn folder_of(path: &Path) -> Option<&Path> {
    path.parent().filter(|folder| !folder.as_os_str().is_empty())
}

/// Refuses a file whose folder does not exist: a mistyped folder is not created.
pub fn in_a_folder(path: &Path) -> Result<(), Error> {
    match folder_of(path).filter(|folder| !folder.is_dir()) {
        Some(missing) => Err(Error::invalid(format!("the folder `{}` does not exist", missing.display()))
            .at(path.display())
            .hint("check the path, or create the folder first")),
        None => Ok(()),
    }
}

/// Refuses outputs that cannot be written, that are inputs, or that are the same file.
pub fn can_write<'p>(
    outputs: impl IntoIterator<Item = &'p PathBuf>,
    inputs: impl IntoIterator<Item = &'p PathBuf>,
) -> Result<(), Error> {
    let mut taken: Vec<(PathBuf, &str)> = inputs
        .into_iter()
        .map(|input| (real(input), "this file is an input and would be overwritten"))
        .collect();
    for output in outputs {
        let Some(beside) = beside(output)? else { continue };
        let place = real(output);
        if let Some((_, why)) = taken.iter().find(|(other, _)| *other == place) {
            return Err(Error::invalid(*why).at(output.display()).hint("write to another file"));
        }
        let tried = fs::write(&beside, []).and_then(|()| fs::remove_file(&beside));
        tried.map_err(|error| Error::file(output, "write", &error))?;
        taken.push((place, "two results would be written to this file"));
    }
    Ok(())
}

/// The canonical path of a file, whether or not it exists.
pub fn real(path: &Path) -> PathBuf {
    let folder = folder_of(path).unwrap_or(Path::new("."));
    let made = || Some(fs::canonicalize(folder).ok()?.join(path.file_name()?));
    fs::canonicalize(path).ok().or_else(made).unwrap_or_else(|| path.to_path_buf())
}

/// Writes a file atomically: a reader sees the old one or the new one. A pipe or a device is written to directly.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    write_by(path, |path| fs::write(path, bytes))
}

/// Like `write`, with a function that writes the file at the path that it is given.
pub fn write_by(path: &Path, fill: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<(), Error> {
    let Some(beside) = beside(path)? else {
        in_a_folder(path)?;
        return fill(path).map_err(|error| Error::file(path, "write", &error));
    };
    fill(&beside).and_then(|()| fs::rename(&beside, real(path))).map_err(|error| {
        let _ = fs::remove_file(&beside);
        Error::file(path, "write", &error)
    })
}

/// Returns the path of the temporary file beside `path`, `None` if `path` is not a regular file.
fn beside(path: &Path) -> Result<Option<PathBuf>, Error> {
    let there = fs::metadata(path);
    if there.as_ref().is_ok_and(fs::Metadata::is_dir) {
        return Err(Error::invalid("this is a folder").at(path.display()).hint("name a file in it"));
    }
    if there.is_ok_and(|there| !there.is_file()) {
        return Ok(None);
    }
    let target = real(path);
    let Some(name) = target.file_name() else {
        return Err(Error::invalid("this path does not name a file")
            .at(path.display())
            .hint("check the path"));
    };
    in_a_folder(path)?;
    let name = format!(".{}.{}.part", name.to_string_lossy(), std::process::id());
    Ok(Some(target.with_file_name(name)))
}

/// Creates a folder inside an existing one.
pub fn make_folder(folder: &Path) -> Result<(), Error> {
    in_a_folder(folder)?;
    fs::create_dir_all(folder).map_err(|error| Error::file(folder, "create", &error))
}

/// Writes a file into a folder, which is created if needed; `name` may have folders in it.
pub fn write_in(folder: &Path, name: impl AsRef<Path>, bytes: &[u8]) -> Result<(), Error> {
    make_folder(folder)?;
    let path = folder.join(name);
    let own = path.parent().unwrap_or(folder);
    fs::create_dir_all(own).map_err(|error| Error::file(own, "create", &error))?;
    write(&path, bytes)
}
