//! Tests of pulls from a server on this machine that speaks the hub's API.

#![allow(clippy::disallowed_methods)] // the tests of deadlines measure time

mod hostile;
mod pulling;
mod server;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hearth_hub::{Hub, HubConfig, HubError, Monitor, Pull, RetryPolicy};
use hearth_schema::hub_model::HubModelName;
use tempfile::TempDir;

use crate::server::{COMMIT, Server};

/// Deadlines of the tests, short enough to wait for them.
const PATIENCE: RetryPolicy = RetryPolicy {
    connect: Duration::from_secs(10),
    response: Duration::from_secs(10),
    no_data: Duration::from_secs(10),
    listing: Duration::from_secs(20),
    attempts: 3,
    first_pause: Duration::from_millis(1),
    max_pause: Duration::from_secs(2),
    other_process: Duration::from_secs(20),
};

/// A hub with an empty cache of its own.
struct Fixture {
    home: TempDir,
    hub: Hub,
}

impl Fixture {
    fn new(server: &Server) -> Fixture {
        Self::with(server, &[], PATIENCE)
    }

    fn with(server: &Server, variables: &[(&str, &str)], retry_policy: RetryPolicy) -> Fixture {
        let home = tempfile::tempdir().expect("a temporary folder");
        let hub = hub_at(home.path(), &server.endpoint, variables, retry_policy);
        Fixture { home, hub }
    }

    fn pull(&self, selector: &str) -> Result<PathBuf, HubError> {
        match self.hub.pull(&name(selector), &Monitor::NONE)? {
            Pull::Model(path) => Ok(path),
            Pull::Choice(models) => panic!("{models:?}"),
        }
    }

    fn folder(&self) -> PathBuf {
        self.home.path().join("hub/models--owner--repo")
    }

    fn snapshot(&self, path: &str) -> PathBuf {
        self.folder().join("snapshots").join(COMMIT).join(path)
    }

    /// The names of the files in the folder of the blobs.
    fn blobs(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder().join("blobs")).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// Writes the beginning of a file as an earlier download would have left it.
    fn write_partial(&self, sha256: &str, bytes: &[u8]) {
        let folder = self.folder().join("blobs");
        fs::create_dir_all(&folder).expect("it is ours");
        fs::write(folder.join(format!("{sha256}.incomplete")), bytes).expect("it is ours");
    }
}

fn hub_at(home: &Path, endpoint: &str, variables: &[(&str, &str)], retry_policy: RetryPolicy) -> Hub {
    let home = home.to_str().expect("UTF-8");
    let all = [&[("HF_HOME", home), ("HF_ENDPOINT", endpoint)], variables].concat();
    let config = HubConfig::from_variables(|name| {
        all.iter().find(|(other, _)| *other == name).map(|(_, value)| value.into())
    });
    Hub::new(config.expect("valid variables").with_retry_policy(retry_policy))
}

/// Returns the name of a model in the test server's repository; without a selector if it is empty.
fn name(selector: &str) -> HubModelName {
    let text = if selector.is_empty() { "owner/repo".to_owned() } else { format!("owner/repo:{selector}") };
    text.parse().expect("a valid name")
}

/// Returns bytes that differ everywhere, so that a part at a wrong place is noticed.
fn bytes(count: usize, seed: u8) -> Vec<u8> {
    (0..count).map(|at| (at as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0] ^ seed).collect()
}
