//! `hearth reproduce`: simulate what others have published, and put both side by side.
//!
//! Each document names scenarios and systems; every cell with a published number is planned and simulated as the
//! document says, or predicted by two numbers of a GPU. A cell that cannot be planned or run is a result too.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use hearth_core::Cluster;
use hearth_core::holdings::Holdings;
use hearth_core::metrics;
use hearth_core::room::Room;
use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Bytes, Device};
use hearth_reports::published::results::{Footprint, Result as Cell, Results, Simulated};
use hearth_reports::published::scores::Scores;
use hearth_reports::published::{Published, System, page};
use hearth_schema::Plan;
use hearth_schema::Trace;
use hearth_schema::trace::Outcome;
use hearth_sim::Disturbances;
use serde::Serialize;

use super::simulate::Memory;
use super::{plan, print_json, simulate};
use crate::cli::ReproduceArgs;
use crate::diagnostics::Failure;
use crate::documents::{LoadedScenario, read};
use crate::files::{in_a_folder, write_in};
use crate::output::{say, tell};
use crate::refinement::Effort;
use crate::{limits, progress, roofline, soc, uncertainty};

/// For a system that is planned with `refine`: by count, so that the same comes out on every machine.
const EFFORT: Effort = Effort { seconds: u64::MAX, evaluations: Some(500) };

/// Where the documents of a clone lie.
const SHIPPED: &str = "reports/published";

/// What `--json` gives of a document.
#[derive(Serialize)]
struct Output {
    name: String,
    scores: Scores,
}

/// Runs the verb.
pub fn run(args: &ReproduceArgs, json: bool) -> Result<ExitCode, Failure> {
    let documents = if args.documents.is_empty() { shipped()? } else { args.documents.clone() };
    args.output.as_deref().map_or(Ok(()), in_a_folder)?;
    let mut outputs = Vec::new();
    for path in &documents {
        let published: Published = read(path)?;
        let results = results(&published, path.parent().unwrap_or(Path::new("")), args)?;
        if let Some(folder) = &args.output {
            for (name, bytes) in page::files(&published, &results) {
                write_in(folder, Path::new(&published.name).join(name), &bytes)?;
            }
        }
        let scores = Scores::of(&published, &results);
        if !json {
            say!("{}", page::summary_text(&published, &results));
        }
        outputs.push(Output { name: published.name, scores });
    }
    if json {
        print_json(&outputs)?;
    } else if let Some(folder) = &args.output {
        say!("wrote {}\n", folder.display());
    } else {
        say!("Every cell with its plan, its error and what is known of it: add `-o FOLDER`.\n");
    }
    Ok(ExitCode::SUCCESS)
}

fn shipped() -> Result<Vec<PathBuf>, Failure> {
    let folder = Path::new(SHIPPED);
    let entries = std::fs::read_dir(folder).map_err(|error| {
        Failure::file(folder, "list", &error).hint("run it in a clone, or name the documents to reproduce")
    })?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|kind| kind == "yaml"));
    paths.sort();
    Ok(paths)
}

fn results(published: &Published, folder: &Path, args: &ReproduceArgs) -> Result<Results, Failure> {
    let (line, runs) = (progress::line(), published.runs());
    let mut results = Results::new();
    for (done, (row, system)) in runs.iter().copied().enumerate() {
        let (entry, system_entry) = (&published.rows[row], &published.systems[system]);
        line.set_message(format!(
            "{}: {} of {} ({}, {})",
            published.name,
            done + 1,
            runs.len(),
            entry.label,
            system_entry.name
        ));
        let cell = match (&entry.scenario, &entry.roofline, &system_entry.gpu) {
            (Some(scenario), ..) => {
                cell(&loaded(&folder.join(scenario), system_entry)?, published.warm, args)
            }
            (None, Some(pass), Some(gpu)) => Ok(roofline::predicted(folder, pass, gpu)?),
            // The document's own check has refused such a row.
            _ => Err(Failure::running(format!("`{}` says nothing of how it is run", entry.label))),
        };
        if let Err(failure) = &cell {
            tell!("{}, {}, {}: {}", published.name, entry.label, system_entry.name, failure.reason());
        }
        results.insert(
            (row, system),
            cell.unwrap_or_else(|failure| Cell::Refused { refused: failure.reason() }),
        );
    }
    line.finish_and_clear();
    Ok(results)
}

/// The scenario as a system runs it.
fn loaded(path: &Path, system: &System) -> Result<LoadedScenario, Failure> {
    let mut loaded = LoadedScenario::read(path)?;
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

fn cell(loaded: &LoadedScenario, warm: bool, args: &ReproduceArgs) -> Result<Cell, Failure> {
    let mut cluster = loaded.cluster(None)?;
    let plan = plan::make(loaded, &cluster, &loaded.scenario.planner, EFFORT)?;
    limits::restrict_memory(&loaded.scenario, &mut cluster, &plan, Bytes::ZERO);
    let trace = simulate::simulate(&cluster, &plan, &loaded.scenario, warm)?;
    let memory = Memory { warm, ignored: false };
    let spread = match args.draws {
        draws if draws == 0 || trace.outcome != Outcome::Ok => None,
        draws => {
            let (quiet, draws) = (Disturbances::default(), draws as usize);
            Some(uncertainty::spread(&plan, &cluster, &loaded.scenario, memory, &quiet, draws)?)
        }
    };
    Ok(Cell::Ran(Simulated { spread, ..simulated(&plan, &cluster, &trace) }))
}

fn simulated(plan: &Plan, cluster: &Cluster, trace: &Trace) -> Simulated {
    let metrics = metrics::compute(trace);
    let pressure: BTreeMap<String, f64> =
        metrics.devices.iter().map(|device| (device.name.clone(), device.memory_pressure)).collect();
    Simulated {
        outcome: trace.outcome,
        tpot_ms: metrics.tpot_ms.map(|tpot| tpot.mean),
        ttft_ms: metrics.ttft_ms,
        energy_j: soc::numbers(cluster, plan, trace).and_then(|numbers| numbers.prefill_energy_j),
        pressure,
        footprint: footprint(plan, cluster),
        plan: in_short(plan),
        unvalidated: trace
            .header
            .devices
            .iter()
            .filter_map(|device| Some(format!("{}: {}", device.name, device.unvalidated.as_ref()?)))
            .collect(),
        spread: None,
    }
}

/// What each processor of the plan's devices holds.
fn footprint(plan: &Plan, cluster: &Cluster) -> Vec<Footprint> {
    let mut footprint = Vec::new();
    for (place, planned) in plan.devices.iter().enumerate() {
        let Some(member) = cluster.member(&planned.name) else { continue };
        let (main, gpu) = held(plan, place, &cluster.model, &member.device);
        for (processor, [needed, available]) in [("cpu", main), ("gpu", gpu)] {
            if processor == "cpu" || member.device.gpu.is_some() {
                let (place, bytes, available) =
                    (format!("{}-{processor}", planned.name), needed.0, available.0);
                footprint.push(Footprint { place, bytes, available });
            }
        }
    }
    footprint
}

/// What a device needs of main and of GPU memory, each with what a run can have there.
fn held(plan: &Plan, place: usize, model: &ModelProfile, device: &Device) -> ([Bytes; 2], [Bytes; 2]) {
    if let Some(held) = Holdings::new(plan, place, model, device, false) {
        return ([held.main(), held.available], [held.gpu, held.gpu_available]);
    }
    let room = Room::new(plan, place, model, device);
    let gpu = device.gpu.as_ref().map_or(Bytes::ZERO, |gpu| gpu.memory_available.value);
    ([room.share + room.cache + room.buffers, room.available], [room.gpu_needed, gpu])
}

/// Layers by device, those on the GPU in brackets.
fn in_short(plan: &Plan) -> String {
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
