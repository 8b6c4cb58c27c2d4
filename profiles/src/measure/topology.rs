//! The cores of this machine's CPU, and the order in which compute threads should use them.
//!
//! Two hardware threads of a core share its arithmetic and its caches, so they compute little more than one. Hybrid CPUs
//! have fast and slow cores. Linux describes both in `/sys/devices/system/cpu`. Other systems are not asked: there every
//! hardware thread counts as a core.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::Path;
use std::{fs, thread};

use super::processor::allowed_cpus;

/// The CPUs (hardware threads) that this process may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    /// The first hardware thread of each core, fastest cores first, then the second hardware threads, and so on.
    order: Vec<u32>,
    /// Number of cores with at least one of these CPUs.
    cores: usize,
}

impl Topology {
    /// Reads the topology of this machine. Without one, every CPU is a core.
    pub fn detect() -> Topology {
        Topology::read(&allowed_cpus(), Path::new("/sys/devices/system/cpu"))
    }

    /// Reads the topology of `cpus` from a folder like `/sys/devices/system/cpu`.
    fn read(cpus: &[u32], root: &Path) -> Topology {
        let value = |cpu: u32, name: &str| {
            let path = root.join(format!("cpu{cpu}")).join(name);
            fs::read_to_string(path).map(|text| text.trim().to_owned()).ok().filter(|text| !text.is_empty())
        };
        let mut cores: BTreeMap<String, Vec<u32>> = BTreeMap::new();
        for &cpu in cpus {
            let core = value(cpu, "topology/thread_siblings_list").unwrap_or_else(|| format!("cpu {cpu}"));
            cores.entry(core).or_default().push(cpu);
        }
        let speed = |cpu: u32| {
            let number = |name: &str| value(cpu, name).and_then(|text| text.parse::<u64>().ok());
            (number("cpu_capacity"), number("cpufreq/cpuinfo_max_freq"))
        };
        let siblings = cores.values().flat_map(|cpus| cpus.iter().copied().enumerate());
        let mut order: Vec<_> = siblings.map(|(thread, cpu)| (thread, Reverse(speed(cpu)), cpu)).collect();
        order.sort_unstable();
        Topology { order: order.into_iter().map(|(_, _, cpu)| cpu).collect(), cores: cores.len() }
    }

    /// Returns the CPU for the compute thread with this index, if the CPUs are known. More threads than CPUs share them.
    pub fn cpu(&self, thread: usize) -> Option<u32> {
        (!self.order.is_empty()).then(|| self.order[thread % self.order.len()])
    }

    /// Returns the default number of compute threads: one for each core, or fewer if a control group limits the CPU time
    /// of this process.
    pub fn compute_threads(&self) -> usize {
        let available = thread::available_parallelism().map_or(1, NonZero::get);
        if self.cores == 0 { available } else { available.min(self.cores) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a folder with `(cpu, file, content)`, and returns the order and the number of cores of `cpus`.
    fn topology(cpus: &[u32], files: &[(u32, &str, &str)]) -> (Vec<u32>, usize) {
        let root = tempfile::tempdir().expect("a folder");
        for (cpu, file, content) in files {
            let path = root.path().join(format!("cpu{cpu}")).join(file);
            fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
            fs::write(path, format!("{content}\n")).expect("a file");
        }
        let Topology { order, cores } = Topology::read(cpus, root.path());
        (order, cores)
    }

    const SIBLINGS: &str = "topology/thread_siblings_list";
    const MAX_FREQUENCY: &str = "cpufreq/cpuinfo_max_freq";

    #[test]
    fn one_thread_of_each_core_comes_first() {
        // Siblings are next to each other, as on many virtual machines, or half of the CPUs apart, as on most desktops.
        let adjacent =
            [(0, SIBLINGS, "0-1"), (1, SIBLINGS, "0-1"), (2, SIBLINGS, "2-3"), (3, SIBLINGS, "2-3")];
        assert_eq!(topology(&[0, 1, 2, 3], &adjacent), (vec![0, 2, 1, 3], 2));
        let apart = [(0, SIBLINGS, "0,2"), (1, SIBLINGS, "1,3"), (2, SIBLINGS, "0,2"), (3, SIBLINGS, "1,3")];
        assert_eq!(topology(&[0, 1, 2, 3], &apart), (vec![0, 1, 2, 3], 2));
        // A process that may use one thread of a core has this core.
        assert_eq!(topology(&[1, 2, 3], &adjacent), (vec![1, 2, 3], 2));
    }

    #[test]
    fn fast_cores_come_first() {
        let hybrid = [
            (0, SIBLINGS, "0"),
            (0, MAX_FREQUENCY, "3800000"),
            (1, SIBLINGS, "1-2"),
            (1, MAX_FREQUENCY, "5200000"),
            (2, SIBLINGS, "1-2"),
            (2, MAX_FREQUENCY, "5200000"),
        ];
        assert_eq!(topology(&[0, 1, 2], &hybrid), (vec![1, 0, 2], 2));
        let phone = [(0, "cpu_capacity", "326"), (1, "cpu_capacity", "1024"), (2, "cpu_capacity", "870")];
        assert_eq!(topology(&[0, 1, 2], &phone), (vec![1, 2, 0], 3));
    }

    #[test]
    fn unknown_topology_has_a_core_for_each_cpu() {
        assert_eq!(topology(&[0, 1, 5], &[(1, SIBLINGS, "")]), (vec![0, 1, 5], 3));
        let unknown = Topology::read(&[], Path::new("/nonexistent"));
        assert_eq!((unknown.cpu(3), unknown.compute_threads() >= 1), (None, true));
        let detected = Topology::detect();
        assert!(detected.compute_threads() >= 1);
        assert!(detected.order.is_empty() || detected.compute_threads() <= detected.order.len());
    }
}
