//! Folders of reports, which are replaced as a whole.
//!
//! A report is built in a partial folder beside its target, and then exchanged with the target. So a reader sees the
//! old or the new report, and no file of an older report remains. Only a folder that is empty or contains nothing but
//! the files of its list (`.hearth-files`) is replaced; into any other folder the files are moved one by one. See
//! docs/decisions/0041-replaced-report-folders.md.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::Error;
use crate::files::{canonical_path, check_parent_folder};
use crate::partial::{Partial, remove_abandoned, sync_folder};

/// The file in a report folder that lists the files of the report: a line with the kind of the report, then a line for
/// each file.
const LIST: &str = ".hearth-files";

/// A report that is being written. Without [`finish`](Self::finish) it is removed on drop.
#[derive(Debug)]
pub struct ReportFolder {
    partial: Partial,
    target: PathBuf,
    /// The command that writes the report. A report only replaces reports of its kind, because others may contain the
    /// traces that it shows.
    kind: &'static str,
}

impl ReportFolder {
    /// Starts a report that is going to be the folder `target`, whose parent folder must exist.
    pub fn create(target: &Path, kind: &'static str) -> Result<ReportFolder, Error> {
        check_parent_folder(target)?;
        let failed = |error: &io::Error| Error::from_folder_error(target, "create", error);
        if target.exists() && !target.is_dir() {
            return Err(failed(&io::ErrorKind::AlreadyExists.into()));
        }
        let path = canonical_path(target);
        remove_abandoned(&path);
        let name = path.file_name().unwrap_or_default();
        let beside = || Partial::new_folder(path.parent().unwrap_or(&path), name);
        // The parent folder may not be writable, and a mount point cannot be replaced.
        let inside = || Partial::new_folder(&path, name);
        let partial = if is_replaceable(&path, kind) {
            beside().or_else(|error| if path.is_dir() { inside() } else { Err(error) })
        } else {
            inside()
        };
        let partial = partial.map_err(|error| failed(&error))?;
        Ok(ReportFolder { partial, target: path, kind })
    }

    /// Writes the files of a report at once, and replaces the folder.
    pub fn write_all(target: &Path, kind: &'static str, files: &[(String, Vec<u8>)]) -> Result<(), Error> {
        Self::create(target, kind)?.finish(files)
    }

    /// Writes the last files of a report, and completes it. If this fails, the traces are kept ([`Self::keep_failed`]).
    pub fn finish(self, files: &[(String, Vec<u8>)]) -> Result<(), Error> {
        let written = files.iter().try_for_each(|(name, bytes)| self.write(name, bytes)).and_then(|()| {
            self.replace().map_err(|error| Error::from_folder_error(&self.target, "write", &error))
        });
        if written.is_err() {
            self.keep_failed();
        }
        written
    }

    /// The folder in which the report is built.
    pub fn path(&self) -> &Path {
        self.partial.path()
    }

    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        let path = self.path().join(name);
        fs::write(&path, bytes)
            .map_err(|error| Error::from_io_error(&self.target.join(name), "write", &error))
    }

    /// Keeps an incomplete report that has traces, as `NAME.failed` beside the target. Returns its path; `None` if
    /// there is nothing to keep or if it cannot be kept.
    pub fn keep_failed(self) -> Option<PathBuf> {
        let names = file_names(self.path()).ok()?;
        let has_traces = names.iter().any(|name| Path::new(name).extension() == Some("trace".as_ref()));
        let mut name = self.target.file_name().filter(|_| has_traces)?.to_os_string();
        name.push(".failed");
        let kept = self.target.with_file_name(name);
        fs::write(self.path().join(LIST), format!("{}\n{}\n", self.kind, names.join("\n"))).ok()?;
        if kept.exists() {
            if !is_replaceable(&kept, self.kind) {
                return None;
            }
            fs::remove_dir_all(&kept).ok()?;
        }
        fs::rename(self.path(), &kept).ok()?;
        Some(kept)
    }

    fn replace(&self) -> io::Result<()> {
        let names = file_names(self.path())?;
        fs::write(self.path().join(LIST), format!("{}\n{}\n", self.kind, names.join("\n")))?;
        for name in names.iter().map(String::as_str).chain([LIST]) {
            File::open(self.path().join(name))?.sync_all()?;
        }
        sync_folder(self.path());
        let is_beside = self.path().parent() == self.target.parent();
        if is_beside && is_replaceable(&self.target, self.kind) && exchange(self.path(), &self.target).is_ok()
        {
            self.target.parent().map(sync_folder);
            return Ok(());
        }
        let listed = listed_names(&self.target, self.kind);
        for name in &names {
            fs::rename(self.path().join(name), self.target.join(name))?;
        }
        // The list of another kind of report stays, and a folder with files of both is not replaced.
        if listed.is_some() || !self.target.join(LIST).exists() {
            fs::rename(self.path().join(LIST), self.target.join(LIST))?;
            for stale in listed.into_iter().flatten().filter(|name| !names.contains(name)) {
                let _ = fs::remove_file(self.target.join(stale));
            }
        }
        sync_folder(&self.target);
        Ok(())
    }
}

/// Returns whether a folder is missing, empty, or a report of the given kind without other files. The current folder is
/// not replaceable, because its shell would stay in the removed folder.
fn is_replaceable(folder: &Path, kind: &str) -> bool {
    if !folder.exists() {
        return true;
    }
    let is_current = std::env::current_dir().is_ok_and(|current| current.starts_with(folder));
    let Some(found) = file_names(folder).ok().filter(|_| !is_current) else { return false };
    found.is_empty()
        || listed_names(folder, kind).is_some_and(|listed| found.iter().all(|name| listed.contains(name)))
}

/// Returns the files that the list of a report names, if the report is of this kind. They may not exist.
fn listed_names(folder: &Path, kind: &str) -> Option<Vec<String>> {
    let text = fs::read_to_string(folder.join(LIST)).ok()?;
    let names = text.strip_prefix(kind)?.strip_prefix('\n')?.lines();
    // A name with a folder cannot be in a list that hearth wrote.
    names.map(|name| (!name.contains('/') && name != "..").then(|| name.to_owned())).collect()
}

/// Returns the names of the files in a folder, without [`LIST`]. An error if there is anything but files.
fn file_names(folder: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().into_string().ok().filter(|name| !name.contains('\n'));
        let name = name.filter(|_| entry.file_type().is_ok_and(|kind| kind.is_file()));
        names.push(name.ok_or(io::ErrorKind::InvalidInput)?);
    }
    names.retain(|name| name != LIST);
    names.sort();
    Ok(names)
}

/// Exchanges a finished report with the report at `target`, or renames it to `target` if there is none.
fn exchange(finished: &Path, target: &Path) -> io::Result<()> {
    let Ok(old) = fs::metadata(target) else { return fs::rename(finished, target) };
    fs::set_permissions(finished, old.permissions())?;
    exchange_names(finished, target)
}

#[cfg(target_os = "linux")]
fn exchange_names(one: &Path, other: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    Ok(renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE)?)
}

#[cfg(not(target_os = "linux"))]
fn exchange_names(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Writes a report of these files, whose contents are `text`, and returns all files of the folder afterwards.
    fn write(target: &Path, kind: &'static str, names: &[&str], text: &str) -> BTreeMap<String, String> {
        let file = |name: &&str| ((*name).to_owned(), text.as_bytes().to_vec());
        ReportFolder::write_all(target, kind, &names.iter().map(file).collect::<Vec<_>>()).unwrap();
        let siblings = fs::read_dir(target.parent().unwrap()).unwrap().count();
        assert_eq!(siblings, 1, "nothing is left beside the report");
        let read = |name: String| (name.clone(), fs::read_to_string(target.join(name)).unwrap());
        file_names(target).unwrap().into_iter().map(read).collect()
    }

    fn expected(files: &[(&str, &str)]) -> BTreeMap<String, String> {
        files.iter().map(|&(name, text)| (name.to_owned(), text.to_owned())).collect()
    }

    #[test]
    fn report_of_the_same_kind_is_replaced_as_a_whole() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("report");
        assert_eq!(write(&target, "r", &["a", "b"], "1"), expected(&[("a", "1"), ("b", "1")]));
        let reader = File::open(&target).unwrap();
        assert_eq!(write(&target, "r", &["a", "c"], "2"), expected(&[("a", "2"), ("c", "2")]));
        #[cfg(target_os = "linux")]
        {
            use std::os::unix::fs::MetadataExt;
            let replaced = reader.metadata().unwrap().ino() != fs::metadata(&target).unwrap().ino();
            assert!(replaced, "the folder is a different one");
        }
    }

    #[test]
    fn files_of_others_stay() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("report");
        fs::create_dir(&target).unwrap();
        fs::write(target.join("notes"), "mine").unwrap();
        fs::write(target.join("a"), "0").unwrap();
        let both = expected(&[("a", "1"), ("b", "1"), ("notes", "mine")]);
        assert_eq!(write(&target, "r", &["a", "b"], "1"), both);
        // `b` is listed and so removed, and `notes` is not.
        assert_eq!(write(&target, "r", &["a"], "2"), expected(&[("a", "2"), ("notes", "mine")]));
    }

    #[test]
    fn report_of_another_kind_stays() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("report");
        write(&target, "lab", &["index", "run.trace"], "1");
        let both = expected(&[("index", "2"), ("run.trace", "1")]);
        assert_eq!(write(&target, "r", &["index"], "2"), both);
        assert_eq!(write(&target, "lab", &["index"], "3"), expected(&[("index", "3")]));
    }

    #[test]
    fn traces_of_a_failed_report_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("report");
        let kept = folder.path().join("report.failed");
        for text in ["1", "2"] {
            let report = ReportFolder::create(&target, "r").unwrap();
            report.write("run.trace", text.as_bytes()).unwrap();
            assert_eq!(report.keep_failed().as_deref(), Some(&*kept));
            assert_eq!(fs::read_to_string(kept.join("run.trace")).unwrap(), text);
        }
        fs::write(kept.join("notes"), "mine").unwrap();
        let report = ReportFolder::create(&target, "r").unwrap();
        report.write("run.trace", b"3").unwrap();
        assert_eq!(report.keep_failed(), None, "it has a file of the user");
        assert!(ReportFolder::create(&target, "r").unwrap().keep_failed().is_none(), "it has no traces");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn unfinished_report_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("report");
        write(&target, "r", &["a"], "1");
        let report = ReportFolder::create(&target, "r").unwrap();
        report.write("a", b"2").unwrap();
        drop(report);
        assert_eq!(fs::read_to_string(target.join("a")).unwrap(), "1");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
