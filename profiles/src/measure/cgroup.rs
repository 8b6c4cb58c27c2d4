//! Finds the control groups of this process and their CPU quota.
//!
//! `/proc/self/cgroup` lists groups of cgroup v2 (one hierarchy for all controllers), of cgroup v1 (one hierarchy for
//! each controller), or of both. `/proc/self/mountinfo` lists the mount points of the hierarchies. The limits of all
//! parent groups apply, too. Systems other than Linux have no control groups.

use std::fs;
use std::path::{Path, PathBuf};

use crate::units::Seconds;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupVersion {
    /// cgroup v1: one hierarchy for each controller.
    One,
    /// cgroup v2: a single hierarchy.
    Two,
}

/// Returns the folders of this process's control groups for a controller, such as `cpu`. The folder of each group is
/// followed by the folders of its parent groups. `root` is `/` except in tests.
pub fn cgroup_folders(root: &Path, controller: &str) -> Vec<(CgroupVersion, PathBuf)> {
    let read = |name: &str| fs::read_to_string(root.join(name)).unwrap_or_default();
    let (groups, mounts) = (read("proc/self/cgroup"), read("proc/self/mountinfo"));
    let mut found = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (_, Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let version = if controllers.is_empty() { CgroupVersion::Two } else { CgroupVersion::One };
        if version == CgroupVersion::One && controllers.split(',').all(|own| own != controller) {
            continue;
        }
        let mut mounted: Vec<Mount> =
            mounts.lines().filter_map(|line| Mount::read(line, version, controller)).collect();
        if mounted.is_empty() {
            mounted = Mount::default_points(version, controllers, controller);
        }
        for mount in mounted {
            let top = root.join(mount.at.trim_start_matches('/'));
            let folder = top.join(mount.relative_path(path));
            let hierarchy = folder.ancestors().take_while(|folder| folder.starts_with(&top));
            let existing = hierarchy.filter(|folder| folder.is_dir());
            found.extend(existing.map(|folder| (version, folder.to_owned())));
        }
    }
    found
}

/// A mount point of a control group hierarchy.
struct Mount<'t> {
    /// Path of the mounted group in the hierarchy; `/` if the whole hierarchy is mounted.
    top: &'t str,
    /// Path of the mount point in the file system.
    at: String,
}

impl<'t> Mount<'t> {
    /// Parses a line of `mountinfo`; `None` if it is not the mount of a hierarchy of `version` with `controller`.
    fn read(line: &'t str, version: CgroupVersion, controller: &str) -> Option<Self> {
        let (place, kind) = line.split_once(" - ")?;
        let mut place = place.split_ascii_whitespace().skip(3);
        let (top, at) = (place.next()?, place.next()?);
        let mut kind = kind.split_ascii_whitespace();
        let (name, options) = (kind.next()?, kind.nth(1)?);
        let fits = match version {
            CgroupVersion::One => name == "cgroup" && options.split(',').any(|option| option == controller),
            CgroupVersion::Two => name == "cgroup2",
        };
        fits.then(|| Self { top, at: at.into() })
    }

    fn default_points(version: CgroupVersion, controllers: &str, controller: &str) -> Vec<Self> {
        let folders = match version {
            CgroupVersion::One => [controllers, controller].map(|folder| format!("/sys/fs/cgroup/{folder}")),
            CgroupVersion::Two => ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(String::from),
        };
        folders.map(|at| Self { top: "/", at }).into()
    }

    /// Returns the path of a group relative to the mount point. In a container, the mounted group may have a different
    /// path than the container sees; the result is then the empty path, which means the mount point.
    fn relative_path<'p>(&self, path: &'p str) -> &'p str {
        let below = path.strip_prefix(self.top.trim_end_matches('/')).unwrap_or("");
        if below.split('/').any(|part| part == "..") { "" } else { below.trim_start_matches('/') }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct CpuQuota {
    /// CPU time per period divided by the length of the period, in cores.
    pub(super) cores: f64,
    pub(super) period: Seconds,
}

/// Returns the smallest CPU quota that applies to this process.
pub(super) fn cpu_quota() -> Option<CpuQuota> {
    let folders = cgroup_folders(Path::new("/"), "cpu").into_iter();
    let quotas = folders.filter_map(|(version, folder)| quota(version, &folder));
    quotas.min_by(|a, b| a.cores.total_cmp(&b.cores))
}

fn quota(version: CgroupVersion, folder: &Path) -> Option<CpuQuota> {
    let number = |text: &str| text.trim().parse::<f64>().ok().filter(|&number| number > 0.0);
    let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
    let (quota, period) = match version {
        CgroupVersion::One => (number(&read("cpu.cfs_quota_us")?)?, number(&read("cpu.cfs_period_us")?)?),
        CgroupVersion::Two => {
            let text = read("cpu.max")?;
            let (quota, period) = text.split_once(' ')?;
            (number(quota)?, number(period)?)
        }
    };
    Some(CpuQuota { cores: quota / period, period: Seconds(period * 1e-6) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quota_of_each_version_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("cpu.max", "max 100000\n");
        assert_eq!(quota(CgroupVersion::Two, folder.path()), None);
        write("cpu.max", "5000 10000\n");
        let half = CpuQuota { cores: 0.5, period: Seconds(0.01) };
        assert_eq!(quota(CgroupVersion::Two, folder.path()), Some(half));
        write("cpu.cfs_quota_us", "-1\n");
        write("cpu.cfs_period_us", "100000\n");
        assert_eq!(quota(CgroupVersion::One, folder.path()), None, "no limit");
        write("cpu.cfs_quota_us", "150000\n");
        assert_eq!(quota(CgroupVersion::One, folder.path()).map(|quota| quota.cores), Some(1.5));
    }

    #[test]
    fn mounts_follow_mountinfo() {
        let tree = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = tree.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("proc/self/cgroup", "4:memory:/docker/x/y\n2:cpu,cpuacct:/\n0::/../z\nodd\n");
        let mounts = "35 31 0:32 /docker/x /groups/memory rw - cgroup cgroup rw,memory\n\
             36 31 0:33 / /groups/all rw shared:1 - cgroup2 cgroup2 rw\nodd\n1 2 - cgroup\n";
        write("proc/self/mountinfo", mounts);
        for folder in ["groups/memory/y", "groups/all/z", "sys/fs/cgroup/cpu,cpuacct"] {
            fs::create_dir_all(tree.path().join(folder)).unwrap();
        }
        let found = |controller: &str| -> Vec<(CgroupVersion, String)> {
            let name = |path: &Path| path.strip_prefix(tree.path()).unwrap().display().to_string();
            cgroup_folders(tree.path(), controller).iter().map(|(is, path)| (*is, name(path))).collect()
        };
        let all = (CgroupVersion::Two, "groups/all".to_string());
        let one = |name: &str| (CgroupVersion::One, name.to_string());
        assert_eq!(found("memory"), [one("groups/memory/y"), one("groups/memory"), all.clone()]);
        assert_eq!(found("cpu"), [one("sys/fs/cgroup/cpu,cpuacct"), all]);
    }
}
