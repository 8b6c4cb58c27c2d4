//! What several studies need: cgroups around a process, and a clock of processor time.

#[cfg(target_os = "linux")]
pub mod cgroups;
pub mod stopwatch;
