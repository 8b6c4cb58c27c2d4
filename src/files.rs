//! How are files read that may be anything, and written so that nothing is lost?
//!
//! Reading has bounds. Writing is as a whole or not at all, and whether it can be is asked before long work is done for
//! it: into a folder that is there, over nothing that is read for it, no two results into one file.
//!
//! Not here: what stands in a file ([`crate::documents`]).

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::diagnostics::Failure;

/// Reads a text file of at most so many bytes, whatever it says of its own length: a pipe says nothing.
pub fn read_at_most(path: &Path, most: u64) -> Result<String, Failure> {
    text_of(fs::File::open(path).map_err(|error| Failure::file(path, "open", &error))?, path, most)
}

/// The same of what is open already; `path` is its name.
pub fn text_of(from: impl Read, path: &Path, most: u64) -> Result<String, Failure> {
    let mut bytes = Vec::new();
    from.take(most + 1).read_to_end(&mut bytes).map_err(|error| Failure::file(path, "read", &error))?;
    // A text may begin with these letters too, but its next byte is none below a space.
    if bytes.starts_with(b"GGUF") && bytes.get(4).is_some_and(|byte| *byte < b'\t') {
        return Err(Failure::unusable("this is a model, and a text is wanted here, as a scenario or a plan")
            .at(path.display())
            .hint("a scenario names its model; some verbs take another with `--model GGUF`"));
    }
    if bytes.len() as u64 > most {
        let what = format!("there are more than the {most} bytes that are read");
        return Err(Failure::unusable(what).at(path.display()).hint("is this the file you meant?"));
    }
    String::from_utf8(bytes).map_err(|error| {
        let what = format!("this is no text: byte {} is not UTF-8", error.utf8_error().valid_up_to() + 1);
        Failure::unusable(what).at(path.display()).hint("is this the file you meant?")
    })
}

/// The folder that a path names before its last part.
fn folder_of(path: &Path) -> Option<&Path> {
    path.parent().filter(|folder| !folder.as_os_str().is_empty())
}

/// Refuses a file whose folder is not there, before long work is done for it: a mistyped folder is not made.
pub fn in_a_folder(path: &Path) -> Result<(), Failure> {
    match folder_of(path).filter(|folder| !folder.is_dir()) {
        Some(missing) => Err(Failure::unusable(format!("there is no folder `{}`", missing.display()))
            .at(path.display())
            .hint("check the path, or make the folder first")),
        None => Ok(()),
    }
}

/// Refuses, before long work is done for them, files that cannot be written, that are read for it, or that are one.
pub fn can_write<'p>(
    outputs: impl IntoIterator<Item = &'p PathBuf>,
    inputs: impl IntoIterator<Item = &'p PathBuf>,
) -> Result<(), Failure> {
    let mut taken: Vec<(PathBuf, &str)> =
        inputs.into_iter().map(|input| (real(input), "this file is read here, and would be lost")).collect();
    for output in outputs {
        let Some(beside) = beside(output)? else { continue };
        let place = real(output);
        if let Some((_, why)) = taken.iter().find(|(other, _)| *other == place) {
            return Err(Failure::unusable(*why).at(output.display()).hint("name another file to write to"));
        }
        let tried = fs::write(&beside, []).and_then(|()| fs::remove_file(&beside));
        tried.map_err(|error| Failure::file(output, "write", &error))?;
        taken.push((place, "two results are to be written to this file, and one would be lost"));
    }
    Ok(())
}

/// Which file a path names, whether or not it is there.
pub fn real(path: &Path) -> PathBuf {
    let folder = folder_of(path).unwrap_or(Path::new("."));
    let made = || Some(fs::canonicalize(folder).ok()?.join(path.file_name()?));
    fs::canonicalize(path).ok().or_else(made).unwrap_or_else(|| path.to_path_buf())
}

/// Writes a file as a whole or not at all: whoever reads it meanwhile sees the old one or the new one. What is no
/// file (a pipe, a device) is written to as it is.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    write_by(path, |path| fs::write(path, bytes))
}

/// The same with whatever writes the file at the path that it is given.
pub fn write_by(path: &Path, fill: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<(), Failure> {
    let Some(beside) = beside(path)? else {
        in_a_folder(path)?;
        return fill(path).map_err(|error| Failure::file(path, "write", &error));
    };
    fill(&beside).and_then(|()| fs::rename(&beside, real(path))).map_err(|error| {
        // What is left of it is of no use to anybody.
        let _ = fs::remove_file(&beside);
        Failure::file(path, "write", &error)
    })
}

/// A file of this process beside the one to be written, where nothing or a file stands there.
fn beside(path: &Path) -> Result<Option<PathBuf>, Failure> {
    let there = fs::metadata(path);
    if there.as_ref().is_ok_and(fs::Metadata::is_dir) {
        return Err(Failure::unusable("this is a folder").at(path.display()).hint("name a file in it"));
    }
    if there.is_ok_and(|there| !there.is_file()) {
        return Ok(None);
    }
    let target = real(path);
    let Some(name) = target.file_name() else {
        return Err(Failure::unusable("this names no file").at(path.display()).hint("check the path"));
    };
    in_a_folder(path)?;
    let name = format!(".{}.{}.part", name.to_string_lossy(), std::process::id());
    Ok(Some(target.with_file_name(name)))
}

/// Makes a folder inside one that is there.
pub fn make_folder(folder: &Path) -> Result<(), Failure> {
    in_a_folder(folder)?;
    fs::create_dir_all(folder).map_err(|error| Failure::file(folder, "create", &error))
}

/// Writes a file of a folder that is made for it, beside what is there already; `name` may have folders in it.
pub fn write_in(folder: &Path, name: impl AsRef<Path>, bytes: &[u8]) -> Result<(), Failure> {
    make_folder(folder)?;
    let path = folder.join(name);
    let own = path.parent().unwrap_or(folder);
    fs::create_dir_all(own).map_err(|error| Failure::file(own, "create", &error))?;
    write(&path, bytes)
}
