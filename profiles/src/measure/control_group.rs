//! Which control groups is this process in, and what do they allow?
//!
//! `/proc/self/cgroup` names a group of version 2 (no controllers), of version 1 (one hierarchy a
//! controller), or of both where they are mixed. A limit of any group above also holds. Elsewhere than Linux
//! there are none.

use std::fs;
use std::path::{Path, PathBuf};

use crate::units::Seconds;

/// Which files a group has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    /// One hierarchy a controller.
    One,
    /// One hierarchy.
    Two,
}

/// The folders of this process's groups for a controller, each followed by those above it.
pub(super) fn folders(controller: &str) -> Vec<(Version, PathBuf)> {
    let text = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mut found = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':');
        let (_, Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let path = path.trim_start_matches('/');
        if controllers.is_empty() {
            for root in ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"] {
                climb(Path::new(root), path, Version::Two, &mut found);
            }
        } else if controllers.split(',').any(|own| own == controller) {
            for mount in [controllers, controller] {
                climb(&Path::new("/sys/fs/cgroup").join(mount), path, Version::One, &mut found);
            }
        }
    }
    found
}

fn climb(root: &Path, path: &str, version: Version, found: &mut Vec<(Version, PathBuf)>) {
    let mut at = root.join(path);
    while at.starts_with(root) {
        if at.is_dir() {
            found.push((version, at.clone()));
        }
        if !at.pop() {
            return;
        }
    }
}

/// How much processor a group may use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Quota {
    /// Cores, in whole and in part.
    pub(super) cores: f64,
    /// The time over which that is kept.
    pub(super) period: Seconds,
}

/// The tightest processor quota on this process.
pub(super) fn processor_quota() -> Option<Quota> {
    let quotas = folders("cpu").into_iter().filter_map(|(version, folder)| quota(version, &folder));
    quotas.min_by(|a, b| a.cores.total_cmp(&b.cores))
}

fn quota(version: Version, folder: &Path) -> Option<Quota> {
    let number = |text: &str| text.trim().parse::<f64>().ok().filter(|&number| number > 0.0);
    let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
    let (quota, period) = match version {
        Version::One => (number(&read("cpu.cfs_quota_us")?)?, number(&read("cpu.cfs_period_us")?)?),
        Version::Two => {
            let text = read("cpu.max")?;
            let (quota, period) = text.split_once(' ')?;
            (number(quota)?, number(period)?)
        }
    };
    Some(Quota { cores: quota / period, period: Seconds(period * 1e-6) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_of_each_version_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("cpu.max", "max 100000\n");
        assert_eq!(quota(Version::Two, folder.path()), None);
        write("cpu.max", "5000 10000\n");
        let half = Quota { cores: 0.5, period: Seconds(0.01) };
        assert_eq!(quota(Version::Two, folder.path()), Some(half));
        write("cpu.cfs_quota_us", "-1\n");
        write("cpu.cfs_period_us", "100000\n");
        assert_eq!(quota(Version::One, folder.path()), None, "no limit");
        write("cpu.cfs_quota_us", "150000\n");
        assert_eq!(quota(Version::One, folder.path()).map(|quota| quota.cores), Some(1.5));
    }

    #[test]
    fn groups_are_climbed_to_the_root() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("a/b")).unwrap();
        let mut found = Vec::new();
        climb(root.path(), "a/b", Version::Two, &mut found);
        let names: Vec<_> =
            found.iter().map(|(_, folder)| folder.strip_prefix(root.path()).unwrap()).collect();
        assert_eq!(names, [Path::new("a/b"), Path::new("a"), Path::new("")]);
    }
}
