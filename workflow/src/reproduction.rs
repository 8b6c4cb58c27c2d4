//! Simulates published experiments, one table cell after the other or several at a time.
//!
//! A `published/1` document names scenarios (rows) and systems (columns). Every cell with a published number is
//! planned and simulated, or predicted from the compute rate and the memory bandwidth of a GPU
//! (`hearth_sim::mobile_gpu`). If a cell cannot be planned or run, the reason is its result.

use std::collections::BTreeMap;
use std::path::Path;

use hearth_core::memory::DeviceMemory;
use hearth_core::{Cluster, metrics};
use hearth_profiles::document::Document;
use hearth_profiles::model::ModelDocument;
use hearth_profiles::{Bytes, DeviceProfile};
use hearth_reports::published_results::results::{CellResult, CellResults, MemoryFootprint, SimulatedRun};
use hearth_reports::published_results::speeds::{ChannelQuantisation, GpuPeakRates, GpuRun};
use hearth_reports::published_results::{InferredValue, PublishedResults, ResultRow, System};
use hearth_schema::Plan;
use hearth_schema::plan::PlannedDevice;
use hearth_schema::trace::Outcome;
use hearth_sim::ScenarioEvents;
use hearth_sim::mobile_gpu::{MobileGpu, WeightFormat};

use crate::documents::read_document;
use crate::parallel_jobs::{run_jobs, thread_count};
use crate::scenario::ReferenceResolver;
use crate::simulation::{self, MemoryOptions};
use crate::{
    Error, LoadedScenario, NoProgress, Progress, SearchBudget, limits, planning, sweep, uncertainty,
};

/// The search budget for a system with the strategy `refine`. Only the number of simulated plans is limited, so that
/// the result is the same on every machine.
const BUDGET: SearchBudget<'static> =
    SearchBudget { max_seconds: u64::MAX, max_evaluations: Some(500), progress: &NoProgress };

/// The results for a document of published numbers, and the cells of the document that could not be simulated.
#[derive(Debug)]
pub struct Reproduction {
    pub results: CellResults,
    /// The results without each of the document's inferred values.
    pub without_inferred_values: Vec<CellResults>,
    /// Label of the row, name of the system, and error of each cell without a result.
    pub failed_cells: Vec<(String, String, Error)>,
}

/// Simulates all cells of a document, several at a time. The paths of its scenarios are relative to `folder`. If `draws`
/// is above 0, the uncertainty of each time is estimated from that number of random draws of the parameters. All inputs
/// are read and checked first.
pub fn reproduce(
    published: &PublishedResults,
    folder: &Path,
    draws: usize,
    resolver: &'static dyn ReferenceResolver,
    progress: &dyn Progress,
) -> Result<Reproduction, Error> {
    let runs = published.cells_to_simulate();
    let read = |&(row, system)| {
        Cell::read(folder, published, &published.rows[row], &published.systems[system], resolver)
    };
    let cells = runs.iter().map(read).collect::<Result<Vec<Cell>, Error>>()?;
    check_inferred_values(published, &cells)?;

    let job = |index: usize| cells[index].run(published.starts_warm, draws);
    // The draws of a cell use all processors.
    let threads = if draws > 0 { 1 } else { thread_count(None) };
    let done = run_jobs(cells.len(), threads, progress, job, |_| Ok(()))?;
    if done.len() < cells.len() {
        return Err(Error::failed("interrupted before all cells were simulated"));
    }
    let (mut results, mut failed_cells) = (CellResults::new(), Vec::new());
    let mut without_inferred_values = vec![CellResults::new(); published.inferred_values.len()];
    for (key, (_, (result, without))) in runs.iter().copied().zip(done) {
        for (results, without) in without_inferred_values.iter_mut().zip(without) {
            results.insert(key, without.unwrap_or_else(|error| failed(&error)));
        }
        results.insert(
            key,
            result.unwrap_or_else(|error| {
                let result = failed(&error);
                let (row, system) = (&published.rows[key.0], &published.systems[key.1]);
                failed_cells.push((row.label.clone(), system.name.clone(), error));
                result
            }),
        );
    }
    Ok(Reproduction { results, without_inferred_values, failed_cells })
}

/// A table cell before its simulation.
enum Cell {
    Scenario(Box<ScenarioCell>),
    /// Predicted without a scenario.
    Predicted(CellResult),
}

/// The inputs of a simulated cell.
struct ScenarioCell {
    loaded: LoadedScenario,
    /// An error if there is no cluster, for example because the devices cannot run the model.
    clusters: Result<Clusters, Error>,
}

struct Clusters {
    cluster: Cluster,
    /// The scenario and the cluster without each of the document's inferred values.
    without_inferred_values: Vec<(LoadedScenario, Cluster)>,
}

impl Cell {
    fn read(
        folder: &Path,
        published: &PublishedResults,
        row: &ResultRow,
        system: &System,
        resolver: &'static dyn ReferenceResolver,
    ) -> Result<Self, Error> {
        let scenario = match (&row.scenario, &row.gpu_run, &system.gpu) {
            (Some(scenario), ..) => scenario,
            (None, Some(gpu_run), Some(gpu)) => {
                return predict_by_roofline(folder, gpu_run, gpu).map(Self::Predicted);
            }
            // The validation of the document rejects such a row.
            _ => return Err(Error::failed(format!("row `{}` has neither a scenario nor a GPU", row.label))),
        };
        let loaded = load(&folder.join(scenario), published, row, system, resolver)?;
        let clusters = match resolve(&loaded) {
            Ok((devices, cluster)) => {
                let replace = |value: &InferredValue| {
                    sweep::replace_values(&loaded, &devices, &cluster, &value.values_without)
                };
                let without = published.inferred_values.iter().map(replace);
                let without_inferred_values = without.collect::<Result<_, Error>>()?;
                Ok(Clusters { cluster, without_inferred_values })
            }
            Err(error) => Err(error),
        };
        Ok(Self::Scenario(Box::new(ScenarioCell { loaded, clusters })))
    }

    /// Returns the result of the cell, and its results without each inferred value.
    fn run(&self, warm: bool, draws: usize) -> (CellOutcome, Vec<CellOutcome>) {
        let cell = match self {
            Self::Scenario(cell) => cell,
            Self::Predicted(result) => return (Ok(result.clone()), Vec::new()),
        };
        match &cell.clusters {
            Ok(Clusters { cluster, without_inferred_values }) => {
                let without = without_inferred_values
                    .iter()
                    .map(|(loaded, cluster)| simulate_cell(loaded, cluster.clone(), warm, 0));
                (simulate_cell(&cell.loaded, cluster.clone(), warm, draws), without.collect())
            }
            Err(error) => (Err(error.clone()), Vec::new()),
        }
    }
}

/// The result of a cell, or the reason why it has none.
type CellOutcome = Result<CellResult, Error>;

/// Checks that each field of an inferred value is one of a scenario of the document.
fn check_inferred_values(published: &PublishedResults, cells: &[Cell]) -> Result<(), Error> {
    let can_have = |cell: &Cell, path: &str| match cell {
        Cell::Scenario(cell) => sweep::can_have_field(&cell.loaded.scenario, path),
        Cell::Predicted(_) => false,
    };
    let mut paths = published.inferred_values.iter().flat_map(|value| value.values_without.keys());
    match paths.find(|path| !cells.iter().any(|cell| can_have(cell, path))) {
        Some(path) => Err(Error::invalid(format!("`inferred`: no scenario has the device of `{path}`"))
            .with_hint("use the name of a device of a scenario in `rows`")),
        None => Ok(()),
    }
}

/// Returns the device profiles of a scenario, and the cluster of [`LoadedScenario::resolve_cluster`].
fn resolve(loaded: &LoadedScenario) -> Result<(Vec<DeviceProfile>, Cluster), Error> {
    let devices = loaded.resolve_devices(|_, entry| loaded.resolve_device(entry))?;
    let mut cluster = loaded.cluster_from_measured_devices(devices.clone(), None)?;
    limits::apply_absolute_memory_limits(&loaded.scenario, &mut cluster);
    Ok((devices, cluster))
}

fn failed(error: &Error) -> CellResult {
    CellResult::Failed { reason: error.one_line_message() }
}

/// Reads the scenario of a row at `path`, and replaces what the document, the row and the system replace.
fn load(
    path: &Path,
    published: &PublishedResults,
    row: &ResultRow,
    system: &System,
    resolver: &'static dyn ReferenceResolver,
) -> Result<LoadedScenario, Error> {
    let mut loaded = LoadedScenario::read(path, resolver)?;
    if let Some(workload) = &published.workload {
        loaded.scenario.workload = workload.clone();
    }
    if let Some(context_length) = published.context_length {
        loaded.scenario.context_length = context_length;
    }
    if let Some(model) = &row.model {
        loaded.scenario.model = model.clone();
    }
    if let Some(head) = &system.head {
        let devices = &mut loaded.scenario.devices;
        if devices.iter().all(|device| device.name != *head) {
            let what = format!(
                "system `{}`: `head` names `{head}`, which is no device of the scenario",
                system.name
            );
            return Err(Error::failed(what).with_location(path.display()));
        }
        for device in devices.iter_mut() {
            device.is_head = device.name == *head;
        }
    }
    loaded.scenario.validate().map_err(|error| Error::from_document_error(path, &error))?;
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

fn simulate_cell(
    loaded: &LoadedScenario,
    mut cluster: Cluster,
    warm: bool,
    draws: usize,
) -> Result<CellResult, Error> {
    let plan = planning::make_plan(loaded, &cluster, &loaded.scenario.planner, BUDGET)?;
    limits::apply_memory_limits(&loaded.scenario, &mut cluster, &plan, Bytes::ZERO);
    let trace = simulation::simulate(&cluster, &plan, &loaded.scenario, warm)?;
    let memory = MemoryOptions { warm_start: warm, ignore_memory: false };
    let (scenario, none) = (&loaded.scenario, ScenarioEvents::default());
    let estimate = uncertainty::estimate_prediction_interval;
    let prediction_interval = if draws > 0 && trace.outcome == Outcome::Ok {
        estimate(&plan, &cluster, scenario, memory, &none, draws, &NoProgress)?
    } else {
        None
    };
    let metrics = metrics::compute_metrics(&trace);
    let soc = simulation::soc_metrics(&cluster, &plan, &trace);
    let pressure = metrics.devices.iter().map(|device| (device.name.clone(), device.memory_pressure));
    let traced = trace.header.devices.iter();
    let unvalidated =
        traced.filter_map(|device| Some(format!("{}: {}", device.name, device.unvalidated_parts.as_ref()?)));
    Ok(CellResult::Ran(SimulatedRun {
        outcome: trace.outcome,
        tpot_ms: metrics.tpot_ms.map(|tpot| tpot.mean_ms),
        ttft_ms: metrics.ttft_ms,
        energy_j: soc.and_then(|metrics| metrics.prefill_energy_j),
        memory_pressure: pressure.collect(),
        memory_footprints: footprint(&plan, &cluster),
        plan_summary: summary(&plan),
        unvalidated_parts: unvalidated.collect(),
        prediction_interval,
    }))
}

/// Predicts the times of a run on a GPU from the compute rate and the memory bandwidth of the GPU. The time of every
/// generated token is that of a token at the mean position. The path of the model document is relative to `folder`.
fn predict_by_roofline(folder: &Path, gpu_run: &GpuRun, gpu: &GpuPeakRates) -> Result<CellResult, Error> {
    let document: ModelDocument = read_document(&folder.join(&gpu_run.model))?;
    let shape = document.to_shape();
    let (rate, bandwidth, prompt) = (gpu.compute_rate.value, gpu.bandwidth.value, gpu_run.prompt_tokens);
    let gpu = MobileGpu { arithmetic_rate: rate, bandwidth };
    let (weights, stored) = match gpu_run.quantisation {
        ChannelQuantisation::Q8 => (WeightFormat::Q8, "q8"),
        ChannelQuantisation::Mixed => (WeightFormat::Mixed, "8/4/4"),
    };
    let position = prompt + gpu_run.generated_tokens / 2;
    Ok(CellResult::Ran(SimulatedRun {
        outcome: Outcome::Ok,
        tpot_ms: Some(1e3 / gpu.decode_tokens_per_second(&shape, weights, position)),
        ttft_ms: Some(1e3 * f64::from(prompt) / gpu.prefill_tokens_per_second(&shape, weights, prompt)),
        energy_j: None,
        memory_pressure: BTreeMap::new(),
        memory_footprints: Vec::new(),
        plan_summary: format!("{} in {stored}, all on a GPU of {rate} and {bandwidth}", document.name),
        unvalidated_parts: Vec::new(),
        prediction_interval: None,
    }))
}

/// Returns for each device in a plan the needed and the available memory of its CPU, and of its GPU if it has one.
fn footprint(plan: &Plan, cluster: &Cluster) -> Vec<MemoryFootprint> {
    let mut footprint = Vec::new();
    for (index, planned) in plan.devices.iter().enumerate() {
        let Some(member) = cluster.member(&planned.name) else { continue };
        let memory = DeviceMemory::new(plan, index, &cluster.model, &member.device, false);
        let mut push = |kind: &str, Bytes(required_bytes): Bytes, Bytes(available_bytes): Bytes| {
            let processor = format!("{}-{kind}", planned.name);
            footprint.push(MemoryFootprint { processor, required_bytes, available_bytes });
        };
        push("cpu", memory.needed_memory(), memory.available_memory);
        if member.device.gpu.is_some() {
            push("gpu", memory.needed_gpu_memory, memory.available_gpu_memory);
        }
    }
    footprint
}

/// Returns a plan as text: the number of layers of each device, with its GPU layers in brackets, and the number of
/// rounds.
fn summary(plan: &Plan) -> String {
    let layers = |index: usize| plan.windows(index).iter().map(|window| window.len() as u32).sum::<u32>();
    let on_gpu =
        |index: usize| (0..plan.rounds).map(|round| plan.gpu_window(index, round).len() as u32).sum::<u32>();
    let device = |(index, device): (usize, &PlannedDevice)| match (layers(index), on_gpu(index)) {
        (layers, 0) => format!("{} {layers}", device.name),
        (layers, gpu) => format!("{} {layers} ({gpu})", device.name),
    };
    let devices: Vec<String> = plan.devices.iter().enumerate().map(device).collect();
    let rounds = if plan.rounds > 1 { format!(", {} rounds", plan.rounds) } else { String::new() };
    format!("{}{rounds}", devices.join(" + "))
}
