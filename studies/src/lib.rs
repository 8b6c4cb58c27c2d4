//! Library of the studies: cgroups for a child process, CPU time, and planning instances.

use std::process::ExitCode;

use hearth_core::Cluster;
use hearth_halda::{Device, Instance, Model, empty_plan};
use hearth_profiles::measure::sampling::thread_cpu_time;
use hearth_schema::Plan;
use hearth_schema::plan::{PlannedDevice, PlannerRecord, Role, ScenarioRecord};

#[cfg(target_os = "linux")]
pub mod cgroups;

pub type StudyError = Box<dyn std::error::Error + Send + Sync>;

/// Runs a study with the command-line arguments. If the study fails, prints the error.
pub fn run_study(study: impl FnOnce(&[String]) -> Result<(), StudyError>) -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match study(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the CPU time of this thread in seconds, which other programs affect less than wall-clock time.
pub fn thread_cpu_seconds() -> f64 {
    thread_cpu_time().expect("Linux has a CPU clock for each thread").as_secs_f64()
}

/// Runs a function. Returns its result and its CPU time in seconds.
pub fn measure_cpu_seconds<T>(run: impl FnOnce() -> T) -> (T, f64) {
    let started = thread_cpu_seconds();
    let result = run();
    (result, thread_cpu_seconds() - started)
}

/// Returns the model with 80 layers in `halda/tests/data/lda/medium.jsonl`, and the devices of all instances there.
pub fn medium_model_and_devices() -> Result<(Model, Vec<Device>), StudyError> {
    let mut instances: Vec<Instance> = Vec::new();
    for line in include_str!("../../halda/tests/data/lda/medium.jsonl").lines() {
        let mut row: serde_json::Value = serde_json::from_str(line)?;
        instances.push(serde_json::from_value(row["instance"].take())?);
    }
    let models = instances.iter().map(|instance| &instance.model);
    let model = models.clone().find(|model| model.model_layers == 80).ok_or("no 80-layer model")?.clone();
    Ok((model, instances.into_iter().flat_map(|instance| instance.devices).collect()))
}

/// Returns a planning instance with `count` of the given devices; each `run` selects different devices.
pub fn planning_instance(model: &Model, devices: &[Device], run: usize, count: usize) -> Instance {
    Instance {
        name: format!("{count}x{}", model.model_layers),
        slow_disk_threshold: 3e8,
        model: model.clone(),
        devices: (0..count).map(|index| devices[(run * 7 + index) % devices.len()].clone()).collect(),
        pair_hop_seconds: None,
    }
}

/// Returns a plan with these windows and GPU layers, in the order of the devices; devices without layers are omitted.
pub fn manual_plan(cluster: &Cluster, rounds: u32, windows: &[u32], gpu_layers: &[u32]) -> Plan {
    let layers = windows.iter().zip(gpu_layers);
    let device = |(place, (&window, &gpu_layers)): (usize, (&u32, &u32))| {
        let (member, role) = (&cluster.members[place], if place == 0 { Role::Head } else { Role::Worker });
        let residency = member.residency.unwrap_or_default();
        PlannedDevice { gpu_layers, residency, ..PlannedDevice::new(&member.name, role, window) }
    };
    let origin = ScenarioRecord { name: "study".into(), digest: String::new() };
    let planner = PlannerRecord { strategy: "manual".into(), options: vec![] };
    Plan {
        rounds,
        devices: layers.enumerate().filter(|(_, (window, _))| **window > 0).map(device).collect(),
        ..empty_plan(cluster, &origin, planner)
    }
}
