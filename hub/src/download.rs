//! Download of one file: continues a partial file, repeats broken requests, and compares the SHA-256 digest.
//!
//! The partial file keeps the received bytes when a connection breaks or the process ends. The next attempt hashes them
//! and requests the rest (HTTP ranges). A URL names a commit, so that the content behind it does not change. The file
//! gets its name in the cache only after its digest was compared.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hearth_profiles::Bytes;
use sha2::{Digest, Sha256};
use ureq::Body;
use ureq::http::header::{CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE};
use ureq::http::{HeaderName, Response};

use crate::cache::{FileLock, RepositoryCache};
use crate::http::{HttpClient, RequestError};
use crate::listing::RemoteFile;
use crate::{Activity, HubError, Monitor, Progress, RetryPolicy};

/// Bytes that are read at once. source: assumed, a quarter of a megabyte is received in milliseconds
const BLOCK_BYTES: usize = 1 << 18;
/// Bytes after which an attempt counts as progress. source: assumed; with fewer, a server could break the connection
/// after every byte and never end a download
const MIN_PROGRESS_BYTES: u64 = 1 << 20;
/// Time between two checks of a lock or a cancellation. source: assumed, short for a person
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The download of a file of a model.
pub(crate) struct Download<'d> {
    pub(crate) client: &'d HttpClient,
    pub(crate) cache: &'d RepositoryCache,
    pub(crate) retry_policy: &'d RetryPolicy,
    pub(crate) monitor: &'d Monitor<'d>,
    pub(crate) url: String,
    pub(crate) file: &'d RemoteFile,
    /// Bytes of the other files of the model that are complete.
    pub(crate) bytes_before: u64,
    /// Bytes of all files of the model.
    pub(crate) total_bytes: u64,
}

impl Download<'_> {
    /// Downloads the file into the cache, unless another process has done it in the meantime.
    pub(crate) fn run(&self) -> Result<(), HubError> {
        let _lock = self.lock()?;
        if self.cache.has_blob(self.file) {
            return Ok(());
        }
        let mut partial = PartialFile::open(self.cache.partial_path(self.file), self.file.bytes)?;
        self.hash_received(&mut partial)?;
        self.receive_rest(&mut partial)?;
        partial.commit(&self.file.sha256, &self.cache.blob_path(self.file))
    }

    /// Waits until no other process downloads this file.
    fn lock(&self) -> Result<FileLock, HubError> {
        let failed = |error| HubError::from_io_error(&self.cache.blob_path(self.file), "lock", &error);
        let lock = self.cache.open_lock(self.file).map_err(failed)?;
        let (mut bytes, mut unchanged) = (None, Duration::ZERO);
        while !lock.try_hold() {
            let received = self.cache.partial_bytes(self.file);
            if bytes.is_none() {
                tracing::info!("another process downloads {}; waiting for it", self.file.path);
            }
            unchanged = if bytes == Some(received) { unchanged + POLL_INTERVAL } else { Duration::ZERO };
            bytes = Some(received);
            if unchanged >= self.retry_policy.other_process {
                return Err(HubError::failed("another process downloads this file, but makes no progress")
                    .with_location(self.cache.partial_path(self.file).display())
                    .with_hint("stop the other process, or wait for it"));
            }
            self.report(Activity::Waiting, received);
            sleep(POLL_INTERVAL, self.monitor)?;
        }
        Ok(lock)
    }

    /// Hashes what an earlier download left.
    fn hash_received(&self, partial: &mut PartialFile) -> Result<(), HubError> {
        let (left, mut block) = (partial.left_bytes, vec![0; BLOCK_BYTES]);
        if left > 0 {
            tracing::info!(
                "continuing {} after {} of {}",
                self.file.path,
                Bytes(left),
                Bytes(self.file.bytes)
            );
        }
        while partial.bytes < left {
            self.monitor.check_cancelled()?;
            let wanted = block.len().min((left - partial.bytes) as usize);
            partial.hash_next(&mut block[..wanted])?;
            self.report(Activity::Verifying, partial.bytes);
        }
        Ok(())
    }

    fn receive_rest(&self, partial: &mut PartialFile) -> Result<(), HubError> {
        let (mut failures, mut max_bytes) = (0, partial.bytes);
        while partial.bytes < self.file.bytes {
            let result = self.receive(partial);
            self.monitor.check_cancelled()?;
            let (error, retry_after) = match result {
                Ok(()) => continue,
                Err(RequestError::Permanent(error)) => return Err(error),
                Err(RequestError::Transient { error, retry_after }) => (error, retry_after),
            };
            if partial.bytes >= max_bytes.saturating_add(MIN_PROGRESS_BYTES) {
                (failures, max_bytes) = (0, partial.bytes);
            }
            failures += 1;
            let Some(pause) = self.retry_policy.pause(failures, retry_after) else {
                return Err(self.unfinished(error, partial.bytes));
            };
            tracing::info!("{error}; trying again");
            sleep(pause, self.monitor)?;
        }
        Ok(())
    }

    fn unfinished(&self, error: HubError, bytes: u64) -> HubError {
        let (received, all) = (Bytes(bytes), Bytes(self.file.bytes));
        error.with_hint(format!("{received} of {all} are kept: run the command again to continue"))
    }

    /// Requests the rest of the file and appends what is received.
    fn receive(&self, partial: &mut PartialFile) -> Result<(), RequestError> {
        let response = self.client.get_file(&self.url, partial.bytes)?;
        self.check_response(&response, partial)?;
        let mut body = response.into_body().into_reader();
        let mut block = vec![0; BLOCK_BYTES];
        while partial.bytes < self.file.bytes {
            self.monitor.check_cancelled().map_err(RequestError::Permanent)?;
            let broken = |reason: &dyn std::fmt::Display| {
                let what = format!(
                    "the connection broke after {} of {}: {reason}",
                    Bytes(partial.bytes),
                    Bytes(self.file.bytes)
                );
                RequestError::transient(HubError::unreachable(what).with_location(&self.file.path))
            };
            let received = match body.read(&mut block) {
                Ok(0) => return Err(broken(&"the server closed it")),
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(broken(&error)),
            };
            if received as u64 > self.file.bytes - partial.bytes {
                let what = format!(
                    "the server sends more than the {} bytes that the hub announced",
                    self.file.bytes
                );
                return Err(RequestError::Permanent(partial.discard(&what)));
            }
            partial.append(&block[..received]).map_err(RequestError::Permanent)?;
            self.report(Activity::Downloading, partial.bytes);
        }
        Ok(())
    }

    /// Checks that the body of a response continues the partial file. Begins again if the server sends the whole file.
    fn check_response(
        &self,
        response: &Response<Body>,
        partial: &mut PartialFile,
    ) -> Result<(), RequestError> {
        let header = |name: HeaderName| response.headers().get(name).and_then(|value| value.to_str().ok());
        let wrong = |what: String| {
            RequestError::Permanent(HubError::failed(what).with_location(&self.file.path).with_hint(
                "check whether the network needs a sign-in on a web page, or a proxy changes downloads",
            ))
        };
        if header(CONTENT_TYPE).is_some_and(|kind| kind.to_ascii_lowercase().starts_with("text/html")) {
            return Err(wrong("the server sent a web page instead of the file".into()));
        }
        match response.status().as_u16() {
            206 => {
                let range = header(CONTENT_RANGE).unwrap_or_default();
                if !continues(range, partial.bytes, self.file.bytes) {
                    return Err(wrong(format!(
                        "the server sent a wrong part of the file (`{}`)",
                        range.escape_debug()
                    )));
                }
            }
            200 if partial.bytes > 0 => {
                tracing::info!(
                    "the server cannot continue {}; it is sent again from its beginning",
                    self.file.path
                );
                partial.restart().map_err(RequestError::Permanent)?;
            }
            200 => {}
            status => {
                let what = format!("the server refused to send the rest of the file (HTTP status {status})");
                if partial.bytes == 0 {
                    return Err(wrong(what));
                }
                partial.restart().map_err(RequestError::Permanent)?;
                return Err(RequestError::transient(HubError::failed(what).with_location(&self.file.path)));
            }
        }
        let (expected, announced) = (self.file.bytes - partial.bytes, header(CONTENT_LENGTH));
        match announced {
            Some(length) if length.parse() != Ok(expected) => {
                Err(wrong(format!("the server sends {length} bytes, but {expected} are missing")))
            }
            _ => Ok(()),
        }
    }

    fn report(&self, activity: Activity, bytes: u64) {
        let done = self.bytes_before.saturating_add(bytes).min(self.total_bytes);
        (self.monitor.on_progress)(Progress { activity, done, total: self.total_bytes });
    }
}

/// Returns whether a Content-Range, such as `bytes 5-9/10`, begins at `start` in a file of `total` bytes.
fn continues(range: &str, start: u64, total: u64) -> bool {
    let parse = || {
        let (range, all) = range.trim().strip_prefix("bytes ")?.split_once('/')?;
        let (first, _) = range.split_once('-')?;
        Some(first.trim().parse() == Ok(start) && (all == "*" || all.trim().parse() == Ok(total)))
    };
    parse() == Some(true)
}

/// Sleeps for a while, unless the user cancels.
pub(crate) fn sleep(time: Duration, monitor: &Monitor) -> Result<(), HubError> {
    let mut left = time;
    while !left.is_zero() {
        monitor.check_cancelled()?;
        let step = left.min(POLL_INTERVAL);
        std::thread::sleep(step);
        left -= step;
    }
    monitor.check_cancelled()
}

/// A file that is not complete, with the digest of its bytes so far.
struct PartialFile {
    path: PathBuf,
    file: File,
    hasher: Sha256,
    /// Bytes that were hashed. The file is not read or written after them.
    bytes: u64,
    /// Bytes that an earlier download left.
    left_bytes: u64,
}

impl PartialFile {
    /// Opens or creates the partial file of a file of `total` bytes.
    fn open(path: PathBuf, total: u64) -> Result<PartialFile, HubError> {
        let open = || {
            path.parent().map_or(Ok(()), fs::create_dir_all)?;
            let file = File::options().read(true).write(true).create(true).truncate(false).open(&path)?;
            let left = file.metadata()?.len();
            if left > total {
                file.set_len(0)?;
            }
            Ok((file, if left > total { 0 } else { left }))
        };
        let (file, left_bytes) = open().map_err(|error| HubError::from_io_error(&path, "open", &error))?;
        Ok(PartialFile { path, file, hasher: Sha256::new(), bytes: 0, left_bytes })
    }

    fn hash_next(&mut self, block: &mut [u8]) -> Result<(), HubError> {
        self.file.read_exact(block).map_err(|error| HubError::from_io_error(&self.path, "read", &error))?;
        self.hasher.update(&*block);
        self.bytes += block.len() as u64;
        Ok(())
    }

    fn append(&mut self, block: &[u8]) -> Result<(), HubError> {
        self.file.write_all(block).map_err(|error| HubError::from_io_error(&self.path, "write", &error))?;
        self.hasher.update(block);
        self.bytes += block.len() as u64;
        Ok(())
    }

    fn restart(&mut self) -> Result<(), HubError> {
        let emptied = self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0)));
        emptied.map_err(|error| HubError::from_io_error(&self.path, "write", &error))?;
        (self.hasher, self.bytes) = (Sha256::new(), 0);
        Ok(())
    }

    /// Deletes the file, and returns the error that says so.
    fn discard(&self, what: &str) -> HubError {
        let _ = fs::remove_file(&self.path);
        HubError::failed(format!("{what}; the partial file was deleted"))
            .with_location(self.path.display())
            .with_hint("run the command again; if it fails again, a proxy or the server changes the file")
    }

    /// Compares the digest, writes the file to disk and renames it to `target`.
    fn commit(self, sha256: &str, target: &Path) -> Result<(), HubError> {
        let found = format!("{:x}", self.hasher.clone().finalize());
        if found != sha256 {
            let what = format!(
                "the downloaded file is damaged: its SHA-256 digest is {found}, and should be {sha256}"
            );
            return Err(self.discard(&what));
        }
        let renamed = self.file.sync_all().and_then(|()| fs::rename(&self.path, target));
        renamed.map_err(|error| HubError::from_io_error(target, "write", &error))?;
        // Some file systems cannot sync a folder; the bytes of the file are on disk in any case.
        let _ = target.parent().map(|folder| File::open(folder).and_then(|folder| folder.sync_all()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_requested_rest_continues_a_file() {
        assert!(
            continues("bytes 5-9/10", 5, 10)
                && continues("bytes 5-9/*", 5, 10)
                && continues("bytes 0-9/10", 0, 10)
        );
        for wrong in
            ["", "bytes 4-9/10", "bytes 5-9/11", "bytes */10", "items 5-9/10", "bytes 5-9", "bytes -5-9/10"]
        {
            assert!(!continues(wrong, 5, 10), "{wrong}");
        }
    }
}
