//! Reads files of limited size and writes files atomically.
//!
//! A file is written as a whole or not at all, and is on disk before it gets its name. Before it starts long work, a
//! command checks that its outputs can be written: the folders exist, no input is overwritten, and no two outputs are
//! the same file.
//!
//! Not here: the content of a file ([`crate::documents`]), and folders that are written as a whole
//! ([`crate::report_folder`]).

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use crate::Error;
use crate::partial::Partial;

/// Reads a text file of at most `max_bytes` bytes. The limit also applies to pipes, whose size is unknown.
pub fn read_text_at_most(path: &Path, max_bytes: u64) -> Result<String, Error> {
    let file = fs::File::open(path).map_err(|error| Error::from_io_error(path, "open", &error))?;
    read_text_from(file, path, max_bytes)
}

/// Reads text of at most `max_bytes` bytes from an open file. `path` is the location in errors.
pub fn read_text_from(from: impl Read, path: &Path, max_bytes: u64) -> Result<String, Error> {
    let mut bytes = Vec::new();
    from.take(max_bytes + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| Error::from_io_error(path, "read", &error))?;
    // Text can begin with these letters, too, but not with a control character after them.
    if bytes.starts_with(b"GGUF") && bytes.get(4).is_some_and(|byte| *byte < b'\t') {
        let what = "this file is a model; a text file is expected here, such as a scenario or a plan";
        let hint = "name the model in the scenario, or give it with `--model GGUF`";
        return Err(Error::invalid(what).with_location(path.display()).with_hint(hint));
    }
    let hint = "check that this is the right file";
    let wrong_file = |what: String| Error::invalid(what).with_location(path.display()).with_hint(hint);
    if bytes.len() as u64 > max_bytes {
        return Err(wrong_file(format!(
            "the file is larger than {max_bytes} bytes, the limit for this kind of file"
        )));
    }
    String::from_utf8(bytes).map_err(|error| {
        let first = error.utf8_error().valid_up_to() + 1;
        wrong_file(format!("this is not a text file: byte {first} is not UTF-8"))
    })
}

fn folder_of(path: &Path) -> Option<&Path> {
    path.parent().filter(|folder| !folder.as_os_str().is_empty())
}

/// Checks that the folder of a file exists. A missing folder is not created, because its name may be mistyped.
pub fn check_parent_folder(path: &Path) -> Result<(), Error> {
    let Some(missing) = folder_of(path).filter(|folder| !folder.is_dir()) else { return Ok(()) };
    Err(Error::invalid(format!("the folder `{}` does not exist", missing.display()))
        .with_location(path.display())
        .with_hint("check the path, or create the folder first"))
}

/// Checks that output files can be written, are not inputs, and are all different.
pub fn check_outputs<'p>(
    outputs: impl IntoIterator<Item = &'p PathBuf>,
    inputs: impl IntoIterator<Item = &'p PathBuf>,
) -> Result<(), Error> {
    let taken = |input: &PathBuf| (canonical_path(input), "this file is an input and would be overwritten");
    let mut taken: Vec<(PathBuf, &str)> = inputs.into_iter().map(taken).collect();
    for output in outputs {
        if PartialFile::create_if_regular(output)?.is_none() {
            continue;
        }
        let path = canonical_path(output);
        if let Some((_, why)) = taken.iter().find(|(other, _)| *other == path) {
            return Err(Error::invalid(*why)
                .with_location(output.display())
                .with_hint("write to a different file"));
        }
        taken.push((path, "two results would be written to this file"));
    }
    Ok(())
}

/// Returns the canonical path of a file, which need not exist.
pub fn canonical_path(path: &Path) -> PathBuf {
    let folder = folder_of(path).unwrap_or(Path::new("."));
    let made = || Some(fs::canonicalize(folder).ok()?.join(path.file_name()?));
    fs::canonicalize(path).ok().or_else(made).unwrap_or_else(|| path.to_path_buf())
}

/// Writes a file atomically: readers see the old or the new content. Pipes and device files are written directly.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    write_with(path, |file| file.write_all(bytes))
}

/// Writes a file atomically like [`write()`]. `fill` writes the content.
pub fn write_with(path: &Path, fill: impl FnOnce(&mut fs::File) -> std::io::Result<()>) -> Result<(), Error> {
    let failed = |error| Error::from_io_error(path, "write", &error);
    if let Some(mut file) = PartialFile::create_if_regular(path)? {
        fill(file.partial.file()).map_err(failed)?;
        return file.commit();
    }
    check_parent_folder(path)?;
    fs::File::create(path).and_then(|mut file| fill(&mut file)).map_err(failed)
}

/// An unfinished file under a temporary name. Without [`commit`](Self::commit) it is removed on drop.
pub struct PartialFile {
    partial: Partial,
    target: PathBuf,
}

impl PartialFile {
    /// Creates an unfinished file that is going to be `target`.
    pub fn create(target: &Path) -> Result<PartialFile, Error> {
        let what = "this is not a regular file";
        let error = || Error::invalid(what).with_location(target.display()).with_hint("name another file");
        Self::create_if_regular(target)?.ok_or_else(error)
    }

    /// Creates an unfinished file; `None` if `target` exists and is not a regular file.
    fn create_if_regular(target: &Path) -> Result<Option<PartialFile>, Error> {
        let metadata = fs::metadata(target);
        if metadata.as_ref().is_ok_and(fs::Metadata::is_dir) {
            let error = Error::invalid("this is a folder").with_location(target.display());
            return Err(error.with_hint("name a file in it"));
        }
        if metadata.is_ok_and(|metadata| !metadata.is_file()) {
            return Ok(None);
        }
        let path = canonical_path(target);
        let what = "this path does not name a file";
        let error = || Error::invalid(what).with_location(target.display()).with_hint("check the path");
        let name = path.file_name().ok_or_else(error)?;
        check_parent_folder(target)?;
        let partial = Partial::new_file(folder_of(&path).unwrap_or(Path::new(".")), name);
        let partial = partial.map_err(|error| Error::from_io_error(target, "write", &error))?;
        Ok(Some(PartialFile { partial, target: path }))
    }

    /// The temporary path.
    pub fn path(&self) -> &Path {
        self.partial.path()
    }

    /// Writes the file to disk and gives it its name.
    pub fn commit(self) -> Result<(), Error> {
        let PartialFile { partial, target } = self;
        partial.rename_to(&target).map_err(|error| Error::from_io_error(&target, "write", &error))
    }
}

/// Creates a folder inside an existing folder. Succeeds if the folder exists already.
pub fn create_folder(folder: &Path) -> Result<(), Error> {
    check_parent_folder(folder)?;
    fs::create_dir_all(folder).map_err(|error| Error::from_folder_error(folder, "create", &error))
}

/// Writes a file into a folder. `name` may contain folders; missing folders are created.
pub fn write_in_folder(folder: &Path, name: impl AsRef<Path>, bytes: &[u8]) -> Result<(), Error> {
    create_folder(folder)?;
    let path = folder.join(name);
    let own = path.parent().unwrap_or(folder);
    fs::create_dir_all(own).map_err(|error| Error::from_folder_error(own, "create", &error))?;
    write(&path, bytes)
}
