//! Temporary folders for the files of a test, and scenario texts.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use hearth_profiles::Document;
use hearth_schema::{Plan, Trace};
use tempfile::TempDir;

use crate::processes::plan_yaml;

/// A temporary folder, which is removed with all its files on drop.
pub struct Folder(TempDir);

impl Folder {
    pub fn new() -> Folder {
        Folder(tempfile::tempdir().expect("a temporary folder"))
    }

    /// Creates a folder with a scenario of [`TWO_DEVICES_YAML`], and also returns the path of the scenario.
    pub fn with_two_device_scenario() -> (Folder, String) {
        let folder = Folder::new();
        let path = folder.write("s.yaml", scenario_yaml(TWO_DEVICES_YAML));
        (folder, path)
    }

    /// Creates a folder on a disk whose speed can be limited: in the build directory, as `/tmp` may be in memory.
    pub fn on_disk() -> Folder {
        Folder(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary folder"))
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn path_of(&self, name: &str) -> String {
        self.path().join(name).display().to_string()
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        fs::write(self.path().join(name), bytes).expect("the temporary folder can be written");
        self.path_of(name)
    }

    /// Writes a file that only its owner can read, and returns its path.
    pub fn write_key(&self, name: &str, text: &str) -> String {
        self.write_with_mode(name, text, 0o600)
    }

    pub fn write_ring_key(&self) -> String {
        self.write_key("ring.key", "a phrase for tests of links")
    }

    pub fn write_script(&self, name: &str, lines: &str) -> String {
        self.write_with_mode(name, &format!("#!/bin/sh\n{lines}\n"), 0o755)
    }

    fn write_with_mode(&self, name: &str, text: &str, mode: u32) -> String {
        let path = self.write(name, text);
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("it is ours");
        path
    }

    /// Writes a plan for the q4_k test model ([`plan_yaml`]) to `plan.yaml`, and returns the path of the file.
    pub fn write_plan(&self, windows: &[u32], addresses: &[&str], context: u32) -> String {
        self.write("plan.yaml", plan_yaml("q4_k", windows, addresses, context))
    }

    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    pub fn read_plan(&self, name: &str) -> Plan {
        Plan::from_yaml(&self.read(name)).expect("a plan")
    }

    pub fn read_trace(&self, name: &str) -> Trace {
        Trace::read(&mut self.read(name).as_bytes()).expect("a trace")
    }

    pub fn has_file(&self, name: &str) -> bool {
        self.path().join(name).exists()
    }

    pub fn file_names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path()).expect("the folder").flatten();
        entries.map(|entry| entry.file_name().into_string().expect("a name")).collect()
    }
}

/// Returns a scenario with the model llama-8b and one link for all devices; `devices` are lines of YAML.
pub fn scenario_yaml(devices: &str) -> String {
    format!(
        "schema: scenario/1
name: test
seed: 1
model: {{profile: llama-8b}}
context: 512
workload: {{prompt: 16, generate: 4}}
devices:
{devices}
links:
  default:
    latency: {{value: 2 ms, source: test}}
    bandwidth: {{value: 400 Mbit/s, source: test}}
"
    )
}

/// Returns the scenario of [`scenario_yaml`] with a fast link, and with the given context and workload.
pub fn fast_link_scenario_yaml(devices: &str, context: u32, workload: &str) -> String {
    let text = scenario_yaml(devices).replace("2 ms", "50 us").replace("400 Mbit/s", "1 GB/s");
    let text = text.replace("context: 512", &format!("context: {context}"));
    text.replace("prompt: 16, generate: 4", workload)
}

pub const TWO_DEVICES_YAML: &str = "  - {name: a, profile: d3}\n  - {name: b, profile: d2}";
