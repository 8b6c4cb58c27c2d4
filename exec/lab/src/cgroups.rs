//! Linux control groups that limit the memory, disk reads and CPU time of a device's process.
//!
//! Cgroup v2 has one tree with `memory.max`, `memory.swap.max`, `io.max` and `cpu.max`; cgroup v1 has a tree for each
//! controller, with `memory.limit_in_bytes`, `blkio.throttle.read_bps_device` and `cpu.cfs_quota_us`. Only a device
//! with a CPU limit is in a group of the `cpu` controller, because such a group also changes how the scheduler shares
//! CPUs. The name of a group contains the process ID of the lab, so that the groups of exited labs can be removed.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use hearth_profiles::device::quota;
use hearth_profiles::measure::cgroup::CgroupVersion;
use hearth_profiles::{Bytes, BytesPerSecond};
use rustix::process::{Pid, Signal, kill_process};

use super::{LabError, PREFIX, has_exited, owner};
use hearth_runtime::memory::CgroupMemory;

#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DeviceLimits {
    /// Maximum memory of the device's process, including page cache.
    pub memory: Option<Bytes>,
    /// Maximum rate of reads from the disk that stores the model.
    pub disk_read: Option<BytesPerSecond>,
    /// Maximum CPU time of all threads together, as a number of fully used CPUs.
    pub cpus: Option<f64>,
}

/// The cgroup folder of each controller; with cgroup v2, the same folder for all controllers.
#[derive(Debug, Clone)]
struct Folders {
    version: CgroupVersion,
    memory: PathBuf,
    disk: PathBuf,
    /// `None` if the `cpu` controller is not mounted, or if a group does not use this controller.
    cpu: Option<PathBuf>,
}

/// The control group hierarchy of the machine, given by the mount points of its controllers.
#[derive(Debug, Clone)]
pub struct CgroupHierarchy(Folders);

/// The control groups of a device. They are removed when this value is dropped.
#[derive(Debug)]
pub struct Cgroup {
    folders: Folders,
    /// The limited disk, as `major:minor`.
    disk_device: String,
}

impl Folders {
    fn distinct(&self) -> Vec<&PathBuf> {
        let mut folders: Vec<_> = [&self.memory, &self.disk].into_iter().chain(&self.cpu).collect();
        folders.dedup();
        folders
    }
}

impl CgroupHierarchy {
    /// Finds the control group controllers that are mounted under a folder, usually `/sys/fs/cgroup`.
    pub fn find(root: &Path) -> Result<CgroupHierarchy, LabError> {
        if root.join("cgroup.controllers").exists() {
            let (version, memory, disk) = (CgroupVersion::Two, root.to_path_buf(), root.to_path_buf());
            return Ok(CgroupHierarchy(Folders { version, cpu: Some(memory.clone()), memory, disk }));
        }
        let (memory, disk) = (root.join("memory"), root.join("blkio"));
        for (what, folder) in [("memory", &memory), ("disk reads", &disk)] {
            if !folder.join("cgroup.procs").exists() {
                let why = format!("{} is not a mounted controller", folder.display());
                return Err(LabError::NoGroups { what, why });
            }
        }
        let cpu = Some(root.join("cpu")).filter(|cpu| cpu.join("cgroup.procs").exists());
        Ok(CgroupHierarchy(Folders { version: CgroupVersion::One, memory, disk, cpu }))
    }

    /// Removes the control groups of labs whose process has exited.
    pub fn remove_stale_groups(&self) {
        self.remove(has_exited);
    }

    /// Returns whether another lab is running on this machine.
    pub fn has_other_labs(&self) -> bool {
        let entries = fs::read_dir(&self.0.memory).into_iter().flatten().flatten();
        let mut owners = entries.filter_map(|entry| owner(&entry.file_name()));
        owners.any(|owner| owner != std::process::id() && !has_exited(owner))
    }

    /// Kills the processes in this lab's control groups and removes the groups, for an exit without destructors.
    pub fn kill_and_remove_own_groups(&self) {
        self.remove(|owner| owner == std::process::id());
    }

    fn remove(&self, which: impl Fn(u32) -> bool) {
        let folders = self.0.distinct();
        for entry in folders.iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten() {
            if owner(&entry.file_name()).is_some_and(&which) {
                remove_group(&entry.path());
            }
        }
    }

    /// Creates the control groups of a device and sets its limits. The disk limit applies to the disk that stores
    /// `file`.
    pub fn create_group(&self, device: usize, file: &Path, limits: DeviceLimits) -> Result<Cgroup, LabError> {
        let name = format!("{PREFIX}{}-{device}", std::process::id());
        let no_groups = |what: &'static str, why: String| LabError::NoGroups { what, why };
        let disk_device =
            disk_of(file).map_err(|error| no_groups("disk reads", format!("{}: {error}", file.display())))?;
        let Folders { version, memory, disk, cpu } = &self.0;
        let missing = || no_groups("CPU time", "the controller `cpu` is not mounted".into());
        let cpu = limits.cpus.map(|_| cpu.as_ref().ok_or_else(missing)).transpose()?;
        if *version == CgroupVersion::Two {
            // A controller must be enabled in the parent before a group can use it. An error is ignored here, because
            // setting the limit fails if the controller is not enabled.
            for controller in ["+memory", "+io"].into_iter().chain(cpu.map(|_| "+cpu")) {
                let _ = fs::write(memory.join("cgroup.subtree_control"), controller);
            }
        }
        let [memory, disk] = [memory, disk].map(|parent| parent.join(&name));
        let folders = Folders { version: *version, memory, disk, cpu: cpu.map(|parent| parent.join(&name)) };
        let group = Cgroup { folders, disk_device };
        for folder in group.folders.distinct() {
            // A group of the same name may remain from an earlier process with the same ID.
            remove_group(folder);
            let path = folder.display();
            fs::create_dir(folder)
                .map_err(|error| no_groups("memory", format!("cannot create {path}: {error}")))?;
        }
        group.set_limits(limits)?;
        Ok(group)
    }
}

impl Cgroup {
    /// Sets the limits of the group. A resource whose limit in `limits` is `None` keeps its current limit.
    pub fn set_limits(&self, limits: DeviceLimits) -> Result<(), LabError> {
        let Folders { version, memory: folder, disk, .. } = &self.folders;
        if let Some(memory) = limits.memory {
            let memory = memory.0.to_string();
            // A device has no swap: weights that do not fit must be read again, not swapped. The file does not exist
            // if the kernel does not account for swap.
            if *version == CgroupVersion::One {
                let with_swap = folder.join("memory.memsw.limit_in_bytes");
                let accounts_swap = with_swap.exists();
                if accounts_swap {
                    // The limit with swap must not be below the memory limit, which may increase.
                    set(&with_swap, "-1")?;
                }
                set(&folder.join("memory.limit_in_bytes"), &memory)?;
                if accounts_swap {
                    set(&with_swap, &memory)?;
                }
            } else {
                set(&folder.join("memory.max"), &memory)?;
                let _ = fs::write(folder.join("memory.swap.max"), "0");
            }
        }
        if let Some(rate) = limits.disk_read {
            let rate = rate.0.round() as u64;
            let (name, value) = if *version == CgroupVersion::One {
                ("blkio.throttle.read_bps_device", format!("{} {rate}", self.disk_device))
            } else {
                ("io.max", format!("{} rbps={rate}", self.disk_device))
            };
            set(&disk.join(name), &value)?;
        }
        limits.cpus.map_or(Ok(()), |cpu| self.set_cpu_limit(Some(cpu)))
    }

    /// Sets the CPU limit, or removes it with `None`. Does nothing if the group was created without a CPU limit.
    pub fn set_cpu_limit(&self, cpus: Option<f64>) -> Result<(), LabError> {
        let Some(folder) = &self.folders.cpu else { return Ok(()) };
        let period = (quota::EMULATION_QUOTA_PERIOD.0 * 1e6).round() as u64;
        let quota = cpus.map(|cpus| (cpus * period as f64).round() as u64);
        if self.folders.version == CgroupVersion::Two {
            let quota = quota.map_or("max".to_string(), |quota| quota.to_string());
            return set(&folder.join("cpu.max"), &format!("{quota} {period}"));
        }
        // The shorter period first: the current quota may be too small a fraction of a longer period.
        set(&folder.join("cpu.cfs_period_us"), &period.to_string())?;
        set(&folder.join("cpu.cfs_quota_us"), &quota.map_or("-1".to_string(), |quota| quota.to_string()))
    }

    /// Drops the page cache that is charged to this group. Call it while the group has no processes. A page is charged
    /// to the first group that accesses it, and another group cannot release it.
    pub fn drop_page_cache(&self) {
        let (name, bytes) = match self.folders.version {
            CgroupVersion::One => ("memory.force_empty", 0),
            CgroupVersion::Two => ("memory.reclaim", self.memory().usage_bytes().unwrap_or(0)),
        };
        // The kernel does not release pages that others use. They remain, which is fine.
        let _ = fs::write(self.folders.memory.join(name), bytes.to_string());
    }

    /// Returns the `cgroup.procs` files to which a process writes its ID to join the groups.
    pub fn procs_files(&self) -> Vec<PathBuf> {
        self.folders.distinct().into_iter().map(|folder| folder.join("cgroup.procs")).collect()
    }

    /// Returns the counter of the bytes that the group reads through its disk throttle.
    pub fn throttle_counter(&self) -> ThrottleCounter {
        let version = self.folders.version;
        let file = self.folders.disk.join(match version {
            CgroupVersion::One => "blkio.throttle.io_service_bytes",
            CgroupVersion::Two => "io.stat",
        });
        ThrottleCounter { file, version, disk_device: self.disk_device.clone() }
    }

    pub fn memory(&self) -> CgroupMemory {
        CgroupMemory::new(self.folders.version, &self.folders.memory)
    }
}

/// The counter of the bytes that a group reads through its disk throttle. Without a disk limit, cgroup v1 counts none.
#[derive(Debug, Clone)]
pub struct ThrottleCounter {
    file: PathBuf,
    version: CgroupVersion,
    disk_device: String,
}

impl ThrottleCounter {
    /// Returns the bytes that the group has read from its disk so far, or `None` if the counter cannot be read.
    pub fn bytes_read(&self) -> Option<u64> {
        let text = fs::read_to_string(&self.file).ok()?;
        let mut lines = text.lines().filter(|line| line.starts_with(&format!("{} ", self.disk_device)));
        if self.version == CgroupVersion::One {
            let read = lines.find_map(|line| line.split_once(" Read "));
            return Some(read.and_then(|(_, bytes)| bytes.trim().parse().ok()).unwrap_or(0));
        }
        let mut fields = lines.flat_map(str::split_ascii_whitespace);
        Some(fields.find_map(|field| field.strip_prefix("rbytes=")?.parse().ok()).unwrap_or(0))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        self.folders.distinct().into_iter().for_each(|folder| remove_group(folder));
    }
}

/// Kills the processes of a group and removes the group. Retries for up to a second while its processes are exiting.
fn remove_group(folder: &Path) {
    let members = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
    for pid in members.lines().filter_map(|line| line.parse::<i32>().ok()).filter(|&pid| pid > 1) {
        // A process that has exited meanwhile is no error.
        let _ = Pid::from_raw(pid).map(|pid| kill_process(pid, Signal::KILL));
    }
    for _ in 0..50 {
        match fs::remove_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            _ => return,
        }
    }
}

fn set(path: &Path, value: &str) -> Result<(), LabError> {
    fs::write(path, value).map_err(|error| LabError::Limit {
        path: path.display().to_string(),
        value: value.into(),
        why: error.to_string(),
    })
}

/// Returns the disk that stores a file, as `major:minor`. Throttles apply to whole disks, not to partitions.
fn disk_of(file: &Path) -> io::Result<String> {
    let device = fs::metadata(file)?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let node = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    if node.join("partition").exists()
        && let Some(whole) = fs::canonicalize(&node)?.parent()
    {
        return Ok(fs::read_to_string(whole.join("dev"))?.trim().to_string());
    }
    Ok(format!("{major}:{minor}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }

    /// Creates a folder with empty files, which stands for mounted controllers of cgroup v1 or v2.
    fn tree(files: &[&str]) -> tempfile::TempDir {
        let tree = tempfile::tempdir().unwrap();
        for file in files {
            touch(&tree.path().join(file));
        }
        tree
    }

    fn read(folder: &Path, name: &str) -> String {
        fs::read_to_string(folder.join(name)).unwrap()
    }

    fn limits(memory: Bytes, disk_read: f64) -> DeviceLimits {
        DeviceLimits { memory: Some(memory), disk_read: Some(BytesPerSecond(disk_read)), cpus: None }
    }

    #[test]
    fn version_two_limits_are_written_to_the_files_of_the_kernel() {
        let tree = tree(&["cgroup.controllers"]);
        let groups = CgroupHierarchy::find(tree.path()).unwrap();
        let group = groups.create_group(1, tree.path(), limits(Bytes::from_mib(100), 200e6)).unwrap();
        assert_eq!(read(&group.folders.memory, "memory.max"), "104857600");
        assert_eq!(read(&group.folders.memory, "memory.swap.max"), "0");
        assert!(read(&group.folders.memory, "io.max").ends_with(" rbps=200000000"));
        // A plain file keeps only the last value that was written to it.
        assert_eq!(read(tree.path(), "cgroup.subtree_control"), "+io");
        let stat = format!("9:9 rbytes=7 wbytes=0\n{} rbytes=4096 wbytes=1 rios=1\n", group.disk_device);
        fs::write(group.folders.memory.join("io.stat"), stat).unwrap();
        assert_eq!(group.throttle_counter().bytes_read(), Some(4096));
        fs::write(group.folders.memory.join("memory.current"), "1000\n").unwrap();
        let stat = "anon 5\nfile 9\ninactive_file 600\nactive_file 100\n";
        fs::write(group.folders.memory.join("memory.stat"), stat).unwrap();
        assert_eq!(group.memory().unreclaimable_bytes(), Some(300));
    }

    #[test]
    fn version_one_limits_are_written_to_the_files_of_the_kernel() {
        let tree = tree(&["memory/cgroup.procs"]);
        assert!(CgroupHierarchy::find(tree.path()).unwrap_err().to_string().contains("disk reads"));
        touch(&tree.path().join("blkio/cgroup.procs"));
        let groups = CgroupHierarchy::find(tree.path()).unwrap();
        let limits = limits(Bytes::from_mib(1), 1e6);
        let group = groups.create_group(1, tree.path(), limits).unwrap();
        touch(&group.folders.memory.join("memory.memsw.limit_in_bytes"));
        group.set_limits(limits).unwrap();
        assert_eq!(read(&group.folders.memory, "memory.memsw.limit_in_bytes"), "1048576");
        assert!(!groups.has_other_labs(), "only this process has groups");
        touch(&tree.path().join("memory/hearth-lab-1-0/cgroup.procs"));
        assert!(groups.has_other_labs(), "process 1 always runs");
        assert_eq!(read(&group.folders.memory, "memory.limit_in_bytes"), "1048576");
        assert!(read(&group.folders.disk, "blkio.throttle.read_bps_device").ends_with(" 1000000"));
        assert_eq!(group.procs_files().len(), 2);
    }

    #[test]
    fn cpu_quota_is_set_and_removed_in_both_versions() {
        let half = DeviceLimits { cpus: Some(0.5), ..DeviceLimits::default() };
        let second = tree(&["cgroup.controllers"]);
        let groups = CgroupHierarchy::find(second.path()).unwrap();
        let group = groups.create_group(1, second.path(), half).unwrap();
        assert_eq!(read(&group.folders.memory, "cpu.max"), "5000 10000");
        assert_eq!(read(second.path(), "cgroup.subtree_control"), "+cpu");
        group.set_cpu_limit(None).unwrap();
        assert_eq!(read(&group.folders.memory, "cpu.max"), "max 10000");
        let free = groups.create_group(2, second.path(), DeviceLimits::default()).unwrap();
        assert!(free.set_cpu_limit(Some(1.0)).is_ok() && !free.folders.memory.join("cpu.max").exists());

        let first = tree(&["memory/cgroup.procs", "blkio/cgroup.procs"]);
        let create = || CgroupHierarchy::find(first.path()).unwrap().create_group(1, first.path(), half);
        let error = create().unwrap_err().to_string();
        assert!(error.contains("CPU time"), "{error}");
        touch(&first.path().join("cpu/cgroup.procs"));
        let group = create().unwrap();
        let folder = group.folders.cpu.clone().unwrap();
        assert_eq!(read(&folder, "cpu.cfs_period_us"), "10000");
        assert_eq!((read(&folder, "cpu.cfs_quota_us").as_str(), group.procs_files().len()), ("5000", 3));
        group.set_cpu_limit(None).unwrap();
        assert_eq!(read(&folder, "cpu.cfs_quota_us"), "-1");
    }
}
