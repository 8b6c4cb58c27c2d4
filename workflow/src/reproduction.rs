//! Simulates published experiments, one table cell at a time.
//!
//! A `published/1` document names scenarios (rows) and systems (columns). Every cell with a published number is
//! planned and simulated, or predicted from the compute rate and the memory bandwidth of a GPU ([`crate::roofline`]).
//! If a cell cannot be planned or run, the reason is its result.

use std::collections::BTreeMap;
use std::path::Path;

use hearth_core::memory::DeviceMemory;
use hearth_core::{Cluster, metrics};
use hearth_profiles::Bytes;
use hearth_reports::published::results::{CellResult, Footprint, Results, SimulatedRun};
use hearth_reports::published::{PublishedResults, System};
use hearth_schema::trace::Outcome;
use hearth_schema::{Plan, Trace};
use hearth_sim::Disturbances;

use crate::scenario::Resolver;
use crate::simulation::{self, MemoryOptions};
use crate::{Budget, Error, LoadedScenario, NoProgress, Progress, limits, planning, roofline, uncertainty};

/// Budget of a system that is planned with `refine`. Only the number of plans is limited, so that the result is the
/// same on every machine.
const BUDGET: Budget<'static> =
    Budget { max_seconds: u64::MAX, max_evaluations: Some(500), progress: &NoProgress };

/// The results of a document, and the cells that could not be simulated.
#[derive(Debug)]
pub struct Reproduction {
    pub results: Results,
    /// Label of the row, name of the system, and the reason why there is no time.
    pub refused_cells: Vec<(String, String, Error)>,
}

/// Simulates all cells of a document. The paths of its scenarios are relative to `folder`. If `draws` is above 0, the
/// spread of each time is estimated from that number of random draws of the parameters.
pub fn reproduce(
    published: &PublishedResults,
    folder: &Path,
    draws: usize,
    resolver: &'static dyn Resolver,
    progress: &dyn Progress,
) -> Result<Reproduction, Error> {
    let runs = published.cells_to_simulate();
    let (mut results, mut refused_cells) = (Results::new(), Vec::new());
    for (done, (row, system)) in runs.iter().copied().enumerate() {
        let (entry, system_entry) = (&published.rows[row], &published.systems[system]);
        let what = format!("{} ({}, {})", published.name, entry.label, system_entry.name);
        progress.report(&what, done as u64, runs.len() as u64);
        let cell = match (&entry.scenario, &entry.roofline, &system_entry.gpu) {
            (Some(scenario), ..) => {
                simulate_cell(&load(&folder.join(scenario), system_entry, resolver)?, published.warm, draws)
            }
            (None, Some(pass), Some(gpu)) => Ok(roofline::predict(folder, pass, gpu)?),
            // The validation of the document refuses such a row.
            _ => Err(Error::failed(format!("`{}` has neither a scenario nor a GPU", entry.label))),
        };
        let cell = cell.unwrap_or_else(|error| {
            let why = error.what();
            refused_cells.push((entry.label.clone(), system_entry.name.clone(), error));
            CellResult::Refused { refused: why }
        });
        results.insert((row, system), cell);
    }
    Ok(Reproduction { results, refused_cells })
}

/// Loads a scenario with the options of a system.
fn load(path: &Path, system: &System, resolver: &'static dyn Resolver) -> Result<LoadedScenario, Error> {
    let mut loaded = LoadedScenario::read(path, resolver)?;
    if let Some(planner) = &system.planner {
        loaded.scenario.planner = planner.clone();
    }
    if let Some(residency) = system.residency {
        loaded.scenario.residency = Some(residency);
        loaded.scenario.devices.iter_mut().for_each(|device| device.residency = None);
    }
    if let Some(soc) = system.soc {
        loaded.scenario.devices.iter_mut().for_each(|device| device.soc = Some(soc));
    }
    Ok(loaded)
}

/// Plans and simulates one cell.
fn simulate_cell(loaded: &LoadedScenario, warm: bool, draws: usize) -> Result<CellResult, Error> {
    let mut cluster = loaded.cluster(None)?;
    let plan = planning::make(loaded, &cluster, &loaded.scenario.planner, BUDGET)?;
    limits::apply_memory_limits(&loaded.scenario, &mut cluster, &plan, Bytes::ZERO);
    let trace = simulation::simulate(&cluster, &plan, &loaded.scenario, warm)?;
    let memory = MemoryOptions { warm, ignore_size: false };
    let spread = if draws == 0 || trace.outcome != Outcome::Ok {
        None
    } else {
        let none = Disturbances::default();
        Some(uncertainty::spread(&plan, &cluster, &loaded.scenario, memory, &none, draws)?)
    };
    Ok(CellResult::Ran(SimulatedRun { spread, ..simulated(&plan, &cluster, &trace) }))
}

fn simulated(plan: &Plan, cluster: &Cluster, trace: &Trace) -> SimulatedRun {
    let metrics = metrics::compute(trace);
    let pressure: BTreeMap<String, f64> =
        metrics.devices.iter().map(|device| (device.name.clone(), device.memory_pressure)).collect();
    SimulatedRun {
        outcome: trace.outcome,
        tpot_ms: metrics.tpot_ms.map(|tpot| tpot.mean),
        ttft_ms: metrics.ttft_ms,
        energy_j: simulation::soc_metrics(cluster, plan, trace).and_then(|metrics| metrics.prefill_energy_j),
        pressure,
        footprint: footprint(plan, cluster),
        plan_summary: summary(plan),
        unvalidated_parts: trace
            .header
            .devices
            .iter()
            .filter_map(|device| Some(format!("{}: {}", device.name, device.unvalidated.as_ref()?)))
            .collect(),
        spread: None,
    }
}

/// Returns the needed and the available memory of each processor of the plan's devices.
fn footprint(plan: &Plan, cluster: &Cluster) -> Vec<Footprint> {
    let mut footprint = Vec::new();
    for (place, planned) in plan.devices.iter().enumerate() {
        let Some(member) = cluster.member(&planned.name) else { continue };
        let memory = DeviceMemory::new(plan, place, &cluster.model, &member.device, false);
        let mut push = |kind: &str, bytes: Bytes, available: Bytes| {
            let processor = format!("{}-{kind}", planned.name);
            footprint.push(Footprint { processor, bytes: bytes.0, available: available.0 });
        };
        push("cpu", memory.needed_memory(), memory.available);
        if member.device.gpu.is_some() {
            push("gpu", memory.gpu_needed, memory.gpu_available);
        }
    }
    footprint
}

/// Returns the number of layers of each device, with those on the GPU in brackets, and the number of rounds.
fn summary(plan: &Plan) -> String {
    let layers = |place: usize| plan.windows(place).iter().map(|window| window.len() as u32).sum::<u32>();
    let on_gpu =
        |place: usize| (0..plan.rounds).map(|round| plan.gpu_window(place, round).len() as u32).sum::<u32>();
    let device = |place: usize| {
        let name = &plan.devices[place].name;
        match (layers(place), on_gpu(place)) {
            (layers, 0) => format!("{name} {layers}"),
            (layers, gpu) => format!("{name} {layers} ({gpu})"),
        }
    };
    let devices: Vec<String> = (0..plan.devices.len()).map(device).collect();
    let rounds = if plan.rounds > 1 { format!(", {} rounds", plan.rounds) } else { String::new() };
    format!("{}{rounds}", devices.join(" + "))
}
