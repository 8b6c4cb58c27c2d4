//! Emulated network links between the processes of a lab.
//!
//! The lab writes a file for each device, with the emulated network path to the address of every other device, and a
//! default network path for all remaining addresses. A worker starts before the addresses of the other devices are
//! known, so the file is read at each new connection.
//!
//! Not here: how a network path delays messages (`hearth_ring::EmulatedTransport`).

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hearth_ring::{EmulatedPath, PathLookup};
use serde::{Deserialize, Serialize};

/// Maximum size of a file of emulated links, in bytes.
/// source: assumed
const MAX_BYTES: u64 = 1 << 20;

/// The emulated network paths from one device of a lab to other addresses.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EmulatedLinks {
    /// The network path to every address that is not in `paths_by_address`.
    #[serde(rename = "others")]
    pub default_path: EmulatedPath,
    /// The network paths to the other devices of the lab, by their addresses.
    #[serde(rename = "peers")]
    pub paths_by_address: BTreeMap<String, EmulatedPath>,
}

impl EmulatedLinks {
    fn read(path: &Path) -> io::Result<EmulatedLinks> {
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        if fs::metadata(path).map_err(named)?.len() > MAX_BYTES {
            return Err(named(io::Error::other("a file of emulated links must be at most 1 MiB")));
        }
        let text = fs::read_to_string(path).map_err(named)?;
        serde_json::from_str(&text).map_err(|error| named(io::Error::other(error)))
    }
}

/// Returns a function that looks up the emulated network path to an address in `file`. It reads the file at each call.
pub fn path_lookup(file: &Path) -> PathLookup {
    let file = PathBuf::from(file);
    Arc::new(move |address| {
        let EmulatedLinks { default_path, paths_by_address } = EmulatedLinks::read(&file)?;
        Ok(address.and_then(|address| paths_by_address.get(address)).cloned().unwrap_or(default_path))
    })
}

/// Estimates the maximum delay on the emulated network paths in `file`, limited to 1 s: latency * exp(3 sigma), where
/// sigma is the standard deviation of the logarithm of the latency.
pub fn max_delay(file: &Path) -> Duration {
    let latency = |path: &EmulatedPath| path.latency.0 * (3.0 * path.sigma).exp();
    let max = EmulatedLinks::read(file).map_or(0.0, |links| {
        links.paths_by_address.values().map(latency).fold(latency(&links.default_path), f64::max)
    });
    Duration::from_secs_f64(max.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use hearth_profiles::Seconds;

    use super::*;

    #[test]
    fn each_known_address_has_its_own_network_path() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("links.json");
        let paths = path_lookup(&file);
        assert!(paths(Some("a:1")).is_err(), "there is no file yet");
        let near = EmulatedPath::with_latency(Seconds(0.001));
        let far = EmulatedPath { sigma: 0.5, ..EmulatedPath::with_latency(Seconds(0.02)) };
        let paths_by_address = BTreeMap::from([("a:1".into(), far.clone())]);
        let links = EmulatedLinks { default_path: near.clone(), paths_by_address };
        fs::write(&file, serde_json::to_vec(&links).expect("JSON")).expect("it is written");
        assert_eq!(paths(Some("a:1")).expect("a path"), far);
        assert_eq!(paths(Some("b:1")).expect("a path"), near);
        assert_eq!(paths(None).expect("a path"), near);
        assert!((max_delay(&file).as_secs_f64() - 0.02 * 1.5_f64.exp()).abs() < 1e-6);
        fs::write(&file, "{}").expect("it is written");
        let error = paths(None).expect_err("an empty document").to_string();
        assert!(error.contains("links.json") && error.contains("others"), "{error}");
    }
}
