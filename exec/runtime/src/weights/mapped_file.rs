//! A memory-mapped model file, which survives that another program truncates or changes the file.
//!
//! When a page of a mapping cannot be read, because the file was truncated or its disk failed, the system sends SIGBUS,
//! which would end the process without a message. A signal handler instead replaces the rest of the mapping by zeros
//! and marks the file as damaged. The computation goes on with wrong weights, and its result is discarded:
//! [`MappedFile::check`] must be called after every computation, before the result is used. It also reports a file
//! whose size or modification time has changed. A file that was deleted or replaced by another file is not a problem,
//! because the mapping keeps the old content.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use hearth_profiles::measure::mapping::FileMapping;

use crate::error::ExecError;

#[derive(Debug)]
pub(crate) struct MappedFile {
    path: PathBuf,
    file: File,
    /// The size and the modification time when the file was mapped.
    identity: (u64, Option<SystemTime>),
    registration: guard::Registration,
    // Unmapped after the registration has ended.
    map: FileMapping,
}

impl MappedFile {
    pub(super) fn open(path: &Path) -> Result<MappedFile, ExecError> {
        let failed = |source| ExecError::Map { path: path.to_owned(), source };
        let file = File::open(path).map_err(failed)?;
        let identity = identity(&file).map_err(failed)?;
        // If another program changes the file meanwhile, only the numbers are wrong; `guard` handles a file that
        // becomes shorter.
        let map = FileMapping::new(&file).map_err(failed)?;
        let registration = guard::register(&map);
        Ok(MappedFile { path: path.to_owned(), file, identity, registration, map })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns when the content was changed last, if the system knows it.
    pub(super) fn modified(&self) -> Option<SystemTime> {
        self.identity.1
    }

    pub(super) fn mapping(&self) -> &FileMapping {
        &self.map
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Fails if the content of the file has changed since it was mapped. With `may_grow`, only damage is an error.
    pub(super) fn check(&self, may_grow: bool) -> Result<(), ExecError> {
        let changed = |what| Err(ExecError::FileChanged { path: self.path.clone(), what });
        if self.registration.is_damaged() {
            return changed("was truncated or cannot be read");
        }
        if !may_grow && identity(&self.file).ok() != Some(self.identity) {
            return changed("was changed");
        }
        Ok(())
    }
}

fn identity(file: &File) -> std::io::Result<(u64, Option<SystemTime>)> {
    let metadata = file.metadata()?;
    Ok((metadata.len(), metadata.modified().ok()))
}

/// The signal handler for pages that cannot be read, and the mappings that it knows.
#[cfg(unix)]
mod guard {
    use std::mem::MaybeUninit;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use hearth_profiles::measure::mapping::page_bytes;

    /// A mapping that the signal handler knows; free if `start` is 0.
    struct Slot {
        start: AtomicUsize,
        end: AtomicUsize,
        is_damaged: AtomicBool,
    }

    /// Fixed, because a signal handler must not allocate or lock. Mappings beyond this number are not guarded.
    /// source: assumed; the files of several split models
    static SLOTS: [Slot; 1024] = [const {
        Slot { start: AtomicUsize::new(0), end: AtomicUsize::new(0), is_damaged: AtomicBool::new(false) }
    }; 1024];

    /// The page size, and the handler before ours.
    static INSTALLED: OnceLock<(usize, libc::sigaction)> = OnceLock::new();

    /// The slot of a mapping, freed when this value is dropped.
    #[derive(Debug)]
    pub(super) struct Registration(Option<usize>);

    /// Registers a mapping, which must stay mapped until the registration is dropped.
    pub(super) fn register(map: &[u8]) -> Registration {
        INSTALLED.get_or_init(install);
        let start = map.as_ptr() as usize;
        let is_claimed = |slot: &Slot| {
            slot.end.compare_exchange(0, start + map.len(), Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let slot = SLOTS.iter().position(|slot| !map.is_empty() && is_claimed(slot));
        if let Some(slot) = slot {
            SLOTS[slot].is_damaged.store(false, Ordering::Release);
            SLOTS[slot].start.store(start, Ordering::Release);
        }
        Registration(slot)
    }

    impl Registration {
        pub(super) fn is_damaged(&self) -> bool {
            self.0.is_some_and(|slot| SLOTS[slot].is_damaged.load(Ordering::Acquire))
        }
    }

    impl Drop for Registration {
        fn drop(&mut self) {
            if let Some(slot) = self.0 {
                SLOTS[slot].start.store(0, Ordering::Release);
                SLOTS[slot].end.store(0, Ordering::Release);
            }
        }
    }

    fn install() -> (usize, libc::sigaction) {
        let mut previous = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: all fields of a zeroed `sigaction` are valid, the handler has the signature that SA_SIGINFO requires,
        // and `previous` is written by the call, or stays zeroed, which means the default action.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handle as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&raw mut action.sa_mask);
            libc::sigaction(libc::SIGBUS, &raw const action, previous.as_mut_ptr());
            (page_bytes(), previous.assume_init())
        }
    }

    /// Replaces the unreadable rest of a registered mapping by zeros. For any other address, the previous handler is
    /// restored, and the access that is repeated after the return reaches it.
    extern "C" fn handle(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        // SAFETY: the system passes a valid `info` to a handler with SA_SIGINFO.
        let address = unsafe { (*info).si_addr() } as usize;
        let Some((page, previous)) = INSTALLED.get() else { return };
        for slot in &SLOTS {
            let (start, end) = (slot.start.load(Ordering::Acquire), slot.end.load(Ordering::Acquire));
            if start == 0 || !(start..end).contains(&address) {
                continue;
            }
            let first = address & !(page - 1);
            let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: the range is the rest of a live mapping, which is only read, and stays mapped and readable.
            let mapped =
                unsafe { libc::mmap(first as *mut libc::c_void, end - first, libc::PROT_READ, flags, -1, 0) };
            if mapped != libc::MAP_FAILED {
                slot.is_damaged.store(true, Ordering::Release);
                return;
            }
        }
        // SAFETY: `previous` was returned by the system.
        unsafe { libc::sigaction(libc::SIGBUS, previous, std::ptr::null_mut()) };
    }
}

/// On other systems, a mapped file cannot be truncated.
#[cfg(not(unix))]
mod guard {
    #[derive(Debug)]
    pub(super) struct Registration;

    pub(super) fn register(_: &[u8]) -> Registration {
        Registration
    }

    impl Registration {
        pub(super) fn is_damaged(&self) -> bool {
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn mapped(bytes: usize) -> (tempfile::TempDir, PathBuf, MappedFile) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.gguf");
        fs::write(&path, vec![7; bytes]).expect("written");
        let mapped = MappedFile::open(&path).expect("a file");
        (folder, path, mapped)
    }

    #[test]
    fn truncated_file_reads_as_zeros_and_is_reported() {
        let (_folder, path, mapped) = mapped(1 << 20);
        mapped.check(false).expect("unchanged");
        File::options().write(true).open(&path).and_then(|file| file.set_len(100)).expect("truncated");
        // Several threads reach the end at the same time.
        let sum = |_| mapped.mapping().iter().map(|&byte| u64::from(byte)).sum::<u64>();
        let sums: Vec<u64> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|at| scope.spawn(move || sum(at))).collect();
            threads.into_iter().map(|thread| thread.join().expect("no crash")).collect()
        });
        assert_eq!(sums, [700; 4], "a page is shorter than the rest of the file");
        let error = mapped.check(true).expect_err("damaged").to_string();
        assert!(error.contains("model.gguf") && error.contains("truncated"), "{error}");
        let (_other_folder, _, other) = self::mapped(1 << 20);
        other.check(false).expect("another file is not damaged");
    }

    #[test]
    fn changed_file_is_reported_and_replaced_file_is_not() {
        let (folder, path, mapped) = mapped(100);
        fs::rename(folder.path().join("model.gguf"), folder.path().join("old")).expect("renamed");
        fs::write(&path, "another model").expect("written");
        mapped.check(false).expect("the mapped file is the same");
        let old = File::options().append(true).open(folder.path().join("old")).expect("the old file");
        old.set_len(101).expect("longer");
        assert!(mapped.check(false).is_err() && mapped.check(true).is_ok());
    }
}
