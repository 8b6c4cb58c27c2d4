//! Reads the name of this machine's CPU, and the CPUs and the CPU quota of this process.

use std::fs;

use super::cgroup;

/// Returns the name of the CPU as the operating system reports it.
pub fn cpu_name() -> String {
    // The key is "model name" on x86 and on some ARM kernels, and "Hardware" on other ARM kernels.
    cpuinfo_field("model name")
        .or_else(|| cpuinfo_field("Hardware"))
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// Returns the name of the CPU and the numbers that identify its microarchitecture: family and model on x86,
/// implementer and part on ARM. The name alone does not, for example in a virtual machine.
pub fn cpu_description() -> String {
    let numbers = |first: &str, second: &str| Some((cpuinfo_field(first)?, cpuinfo_field(second)?));
    let name = cpu_name();
    if let Some((family, model)) = numbers("cpu family", "model") {
        return format!("{name}, family {family}, model {model}");
    }
    match numbers("CPU implementer", "CPU part") {
        Some((implementer, part)) => format!("{name}, implementer {implementer}, part {part}"),
        None => name,
    }
}

/// Returns the first value of a key in `/proc/cpuinfo`.
fn cpuinfo_field(name: &str) -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    fields.find_map(|(key, value)| (key.trim() == name).then(|| value.trim().to_owned()))
}

/// Returns a description of this process's CPU quota, or `None` if there is no quota.
pub fn cpu_quota_description() -> Option<String> {
    let quota = cgroup::cpu_quota()?;
    Some(format!("a quota of {:.2} cores in periods of {}", quota.cores, quota.period))
}

/// Returns the indices of the CPUs that the calling thread may run on; empty if they are unknown, as on systems other
/// than Linux.
pub fn allowed_cpus() -> Vec<u32> {
    #[cfg(any(target_os = "android", target_os = "linux"))]
    {
        use rustix::thread::{CpuSet, sched_getaffinity};
        let Ok(allowed) = sched_getaffinity(None) else { return Vec::new() };
        (0..CpuSet::MAX_CPU as u32).filter(|&cpu| allowed.is_set(cpu as usize)).collect()
    }
    #[cfg(not(any(target_os = "android", target_os = "linux")))]
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_has_name() {
        assert!(!cpu_name().is_empty());
        assert!(cpu_description().starts_with(&cpu_name()));
    }
}
