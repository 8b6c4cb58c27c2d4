//! Processor of this machine: name, cores and quota.

use std::fs;

use super::control_group;

/// The name reported by the system.
pub fn name() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    // x86 says "model name"; ARM says it on some kernels, and "Hardware" on others.
    let field = |name: &str| {
        text.lines()
            .filter_map(|line| line.split_once(':'))
            .find_map(|(key, value)| (key.trim() == name).then(|| value.trim().to_owned()))
    };
    field("model name")
        .or_else(|| field("Hardware"))
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// Cores available to this process.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// A description of this process's quota; `None` without one.
pub fn quota() -> Option<String> {
    let quota = control_group::processor_quota()?;
    Some(format!("a quota of {:.2} cores in periods of {}", quota.cores, quota.period))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_has_name_and_cores() {
        assert!(!name().is_empty());
        assert!(cores() >= 1);
    }
}
