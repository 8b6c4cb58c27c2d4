//! A hub with its cache: lists the models of a repository, downloads one, and finds downloaded ones.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use hearth_profiles::Bytes;
use hearth_schema::hub_model::{HubModelName, Repository};
use serde::Serialize;

use crate::cache::RepositoryCache;
use crate::download::{Download, sleep};
use crate::http::{HttpClient, RequestError};
use crate::{HubConfig, HubError, HubErrorKind, Listing, Monitor, RetryPolicy, Variant, select};

/// Maximum number of attempts to list a repository. source: assumed; a person waits for the list
const LISTING_ATTEMPTS: u32 = 3;
/// Time between two checks for a cancellation. source: assumed, short for a person
const CANCEL_INTERVAL: Duration = Duration::from_millis(100);

/// A model hub and the cache of downloaded models.
#[derive(Debug)]
pub struct Hub {
    config: HubConfig,
}

/// The result of [`Hub::pull`].
#[derive(Debug)]
pub enum Pull {
    /// The path of the model, or of the first file of a split model.
    Model(PathBuf),
    /// The repository has several models, and the name selects none.
    Choice(Vec<ListedModel>),
}

/// A model of a repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ListedModel {
    pub quant: String,
    pub bytes: u64,
    pub files: Vec<String>,
    pub downloaded: bool,
}

impl Hub {
    pub fn new(config: HubConfig) -> Hub {
        Hub { config }
    }

    /// Returns the path of a model. A downloaded model is found without a request; another one is downloaded.
    pub fn locate(&self, name: &HubModelName, monitor: &Monitor) -> Result<PathBuf, HubError> {
        if let Some(path) = self.find_downloaded(name) {
            return Ok(path);
        }
        self.with_client(monitor, |client| {
            let listing = self.list(client, &name.repository, monitor)?;
            self.download(client, &listing, select_in(&listing, name)?, monitor)
        })
    }

    /// Downloads the latest version of a model, or lists the models of a repository if the name selects none of
    /// several. If the hub cannot be reached, a downloaded model is used, with a warning.
    pub fn pull(&self, name: &HubModelName, monitor: &Monitor) -> Result<Pull, HubError> {
        let pulled = self.with_client(monitor, |client| {
            let listing = self.list(client, &name.repository, monitor)?;
            if name.selector.is_none() && listing.variants.len() > 1 {
                return Ok(Pull::Choice(self.choice(&listing)));
            }
            self.download(client, &listing, select_in(&listing, name)?, monitor).map(Pull::Model)
        });
        match pulled {
            Err(error) if error.kind() == HubErrorKind::Unreachable => {
                let path = self.find_downloaded(name).ok_or_else(|| error.clone())?;
                if !self.config.is_offline {
                    tracing::warn!("{error}; using the downloaded file, which may not be the latest");
                }
                Ok(Pull::Model(path))
            }
            pulled => pulled,
        }
    }

    fn choice(&self, listing: &Listing) -> Vec<ListedModel> {
        let cache = self.cache(&listing.repository);
        let model = |variant: &Variant| ListedModel {
            quant: variant.quant.clone(),
            bytes: listing.bytes_of(variant),
            files: variant.paths.clone(),
            downloaded: listing.files_of(variant).all(|file| cache.has_file(&listing.commit, file)),
        };
        listing.variants.iter().map(model).collect()
    }

    /// Finds a model in the cache, first in the commit of the branch.
    fn find_downloaded(&self, name: &HubModelName) -> Option<PathBuf> {
        let cache = self.cache(&name.repository);
        cache.commits().iter().find_map(|commit| {
            let paths = cache.downloaded_paths(commit);
            let variants = Variant::find_all(paths.iter().map(String::as_str));
            let variant = select(&variants, name.selector.as_deref()).ok()?;
            Some(cache.snapshot_path(commit, &variant.paths[0]))
        })
    }

    fn list(
        &self,
        client: &HttpClient,
        repository: &Repository,
        monitor: &Monitor,
    ) -> Result<Listing, HubError> {
        if self.config.is_offline {
            return Err(HubError::unreachable(
                "no such model is downloaded, and `HF_HUB_OFFLINE` forbids downloads",
            )
            .with_location(repository)
            .with_hint(
                "unset `HF_HUB_OFFLINE`, or name one of several downloaded models by its quantisation",
            ));
        }
        let retry_policy = RetryPolicy {
            attempts: self.config.retry_policy.attempts.min(LISTING_ATTEMPTS),
            ..self.config.retry_policy
        };
        let mut failures = 0;
        loop {
            let result = Listing::fetch(client, repository);
            monitor.check_cancelled()?;
            match result {
                Ok(listing) => return Ok(listing),
                Err(RequestError::Permanent(error)) => return Err(error),
                Err(RequestError::Transient { error, retry_after }) => {
                    failures += 1;
                    tracing::debug!("attempt {failures}: {error}");
                    let Some(pause) = retry_policy.pause(failures, retry_after) else { return Err(error) };
                    sleep(pause, monitor)?;
                }
            }
        }
    }

    /// Downloads the missing files of a model, and returns the path of the first file.
    fn download(
        &self,
        client: &HttpClient,
        listing: &Listing,
        variant: &Variant,
        monitor: &Monitor,
    ) -> Result<PathBuf, HubError> {
        let (cache, total_bytes) = (self.cache(&listing.repository), listing.bytes_of(variant));
        self.check_disk_space(&cache, listing, variant)?;
        let (mut bytes_before, mut first_path) = (0u64, None);
        for file in listing.files_of(variant) {
            if !cache.has_file(&listing.commit, file) {
                tracing::info!(
                    "downloading {} ({}) from {}",
                    file.path,
                    Bytes(file.bytes),
                    listing.repository
                );
                let Repository { owner, name } = &listing.repository;
                let segments =
                    [owner, name, "resolve", &listing.commit].into_iter().chain(file.path.split('/'));
                let (url, retry_policy) = (client.endpoint.url(segments), &self.config.retry_policy);
                Download {
                    client,
                    cache: &cache,
                    retry_policy,
                    monitor,
                    url,
                    file,
                    bytes_before,
                    total_bytes,
                }
                .run()?;
            }
            let linked = cache.link(&listing.commit, file);
            let path = linked.map_err(|error| {
                HubError::from_io_error(&cache.snapshot_path(&listing.commit, &file.path), "link", &error)
            })?;
            first_path.get_or_insert(path);
            bytes_before = bytes_before.saturating_add(file.bytes);
        }
        // The files are there, so that a failure only makes the next offline run search longer.
        if let Err(error) = cache.set_main(&listing.commit) {
            tracing::warn!("cannot record the version of {} in the cache: {error}", listing.repository);
        }
        Ok(first_path.expect("a model has a file"))
    }

    fn check_disk_space(
        &self,
        cache: &RepositoryCache,
        listing: &Listing,
        variant: &Variant,
    ) -> Result<(), HubError> {
        let missing = listing.files_of(variant).filter(|file| !cache.has_file(&listing.commit, file));
        let needed = missing
            .fold(0u64, |sum, file| sum.saturating_add(file.bytes.saturating_sub(cache.partial_bytes(file))));
        let folder = cache.blob_folder();
        std::fs::create_dir_all(&folder)
            .map_err(|error| HubError::from_io_error(&folder, "create", &error))?;
        let Some(free) = free_bytes(&folder).filter(|&free| free < needed) else { return Ok(()) };
        let what = format!(
            "the model does not fit on the disk: {} are missing, and {} are free",
            Bytes(needed),
            Bytes(free)
        );
        Err(HubError::failed(what).with_location(self.config.cache.display()).with_hint(
            "free some space, choose a smaller quantisation, or set `HF_HOME` to a folder on another disk",
        ))
    }

    fn cache(&self, repository: &Repository) -> RepositoryCache {
        RepositoryCache::new(&self.config.cache, repository)
    }

    /// Calls a function with a client whose requests end when the user cancels, also while they wait for data.
    fn with_client<T>(
        &self,
        monitor: &Monitor,
        work: impl FnOnce(&HttpClient) -> Result<T, HubError>,
    ) -> Result<T, HubError> {
        let client = HttpClient::new(&self.config);
        let (done_tx, done_rx) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let done_rx = done_rx;
                while done_rx.recv_timeout(CANCEL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                    if (monitor.is_cancelled)() {
                        return client.shut_down();
                    }
                }
            });
            let result = work(&client);
            drop(done_tx);
            result
        })
    }
}

fn select_in<'l>(listing: &'l Listing, name: &HubModelName) -> Result<&'l Variant, HubError> {
    select(&listing.variants, name.selector.as_deref()).map_err(|error| error.with_location(name))
}

impl RetryPolicy {
    /// Returns the pause after a number of failures in a row; `None` if there is no further attempt.
    pub(crate) fn pause(&self, failures: u32, retry_after: Option<Duration>) -> Option<Duration> {
        if failures >= self.attempts || retry_after.is_some_and(|wait| wait > self.max_pause) {
            return None;
        }
        let doubled = self.first_pause.saturating_mul(1 << (failures - 1).min(16));
        Some(doubled.min(self.max_pause).max(retry_after.unwrap_or_default()))
    }
}

/// Returns the free space for this user on the disk of a folder; `None` if the system does not tell.
fn free_bytes(folder: &Path) -> Option<u64> {
    let disk = rustix::fs::statvfs(folder).ok()?;
    Some(disk.f_bavail.saturating_mul(disk.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_and_end() {
        let retry_policy = RetryPolicy {
            attempts: 4,
            first_pause: Duration::from_secs(8),
            max_pause: Duration::from_secs(20),
            ..RetryPolicy::default()
        };
        let seconds = |failures| retry_policy.pause(failures, None).map(|pause| pause.as_secs());
        assert_eq!([1, 2, 3, 4].map(seconds), [Some(8), Some(16), Some(20), None]);
        let requested =
            |wait| retry_policy.pause(1, Some(Duration::from_secs(wait))).map(|pause| pause.as_secs());
        assert_eq!([0, 15, 20, 21].map(requested), [Some(8), Some(15), Some(20), None]);
    }
}
