//! Properties of this machine, for the report of a suite.

use std::fs;

use hearth_profiles::measure::processor::allowed_cpus;

/// Label of the load average, the only property that may change while a suite runs.
const LOAD_LABEL: &str = "load before the report";

pub fn properties() -> Vec<(String, String)> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let field = |path: &str, key: &str| {
        let text = read(path);
        let line = text.lines().find(|line| line.starts_with(key))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let first = |path: &str| Some(read(path).lines().next()?.trim().to_owned());
    let cores = allowed_cpus().len();
    let groups = if fs::exists("/sys/fs/cgroup/cgroup.controllers").unwrap_or(false) { "2" } else { "1" };
    let found = [
        ("processor", field("/proc/cpuinfo", "model name")),
        ("CPUs this process may use", Some(cores.to_string())),
        ("memory", field("/proc/meminfo", "MemTotal")),
        ("swap", field("/proc/meminfo", "SwapTotal")),
        ("kernel", first("/proc/sys/kernel/osrelease")),
        ("control groups", Some(format!("version {groups}"))),
        ("multi-generational page lists", first("/sys/kernel/mm/lru_gen/enabled")),
        (LOAD_LABEL, first("/proc/loadavg")),
        ("hearth", Some(env!("CARGO_PKG_VERSION").to_owned())),
    ];
    let known =
        |(key, value): (&str, Option<String>)| Some((key.to_owned(), value.filter(|it| !it.is_empty())?));
    found.into_iter().filter_map(known).collect()
}

pub fn constant_properties() -> Vec<(String, String)> {
    properties().into_iter().filter(|(key, _)| key != LOAD_LABEL).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernel_and_cpus_are_known() {
        let found = super::properties();
        let value = |key: &str| found.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str());
        assert!(value("kernel").is_some());
        assert!(value("CPUs this process may use").is_some_and(|cores| cores != "0"));
    }
}
