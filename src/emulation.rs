//! The emulated links of a lab's processes.
//!
//! The lab writes a file for each device: the path to every peer by address, and the path to all others, which connected to
//! it or have no known address. The file is read whenever a connection is made, because a worker is started before the
//! addresses of the others are known.
//!
//! Not here: what a path does to a message (`hearth_ring::Emulated`).

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hearth_ring::{Way, Ways};
use serde::{Deserialize, Serialize};

use crate::diagnostics::Failure;

/// The size limit of the file.
/// source: assumed
const MAX_BYTES: u64 = 1 << 20;

/// The paths from one device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EmulatedLinks {
    /// To peers that are not named below.
    pub others: Way,
    /// To peers by address.
    pub peers: BTreeMap<String, Way>,
}

impl EmulatedLinks {
    fn read(path: &Path) -> io::Result<EmulatedLinks> {
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        if fs::metadata(path).map_err(named)?.len() > MAX_BYTES {
            return Err(named(io::Error::other("this is not a file of links")));
        }
        let text = fs::read_to_string(path).map_err(named)?;
        serde_json::from_str(&text).map_err(|error| named(io::Error::other(error)))
    }

    /// The text of the file.
    pub fn to_json(&self) -> Result<String, Failure> {
        serde_json::to_string_pretty(self).map_err(Failure::running)
    }
}

/// The paths of a file, which is read when one is needed.
pub fn ways(path: &Path) -> Ways {
    let path = PathBuf::from(path);
    Arc::new(move |address| {
        let EmulatedLinks { others, peers } = EmulatedLinks::read(&path)?;
        Ok(address.and_then(|address| peers.get(address)).cloned().unwrap_or(others))
    })
}

/// The longest delay of what was just written.
pub fn longest(path: &Path) -> Duration {
    let latency = |way: &Way| way.latency.0 * (3.0 * way.sigma).exp();
    let told = EmulatedLinks::read(path)
        .map_or(0.0, |told| told.peers.values().map(latency).fold(latency(&told.others), f64::max));
    Duration::from_secs_f64(told.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use hearth_profiles::Seconds;

    use super::*;

    #[test]
    fn named_peers_have_their_own_path() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("links.json");
        let ways = ways(&file);
        assert!(ways(Some("a:1")).is_err(), "there is no file yet");
        let (near, far) = (Way::of(Seconds(0.001)), Way { sigma: 0.5, ..Way::of(Seconds(0.02)) });
        let told =
            EmulatedLinks { others: near.clone(), peers: BTreeMap::from([("a:1".into(), far.clone())]) };
        fs::write(&file, told.to_json().expect("JSON")).expect("it is written");
        assert_eq!(ways(Some("a:1")).expect("a way"), far);
        assert_eq!(ways(Some("b:1")).expect("a way"), near);
        assert_eq!(ways(None).expect("a way"), near);
        assert!((longest(&file).as_secs_f64() - 0.02 * 1.5_f64.exp()).abs() < 1e-6);
        fs::write(&file, "{}").expect("it is written");
        let error = ways(None).expect_err("nothing is told").to_string();
        assert!(error.contains("links.json") && error.contains("others"), "{error}");
    }
}
