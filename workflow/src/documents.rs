//! Reads plans, traces, tables and other documents, and writes the files of a run.
//!
//! Not here: scenarios, whose references must be resolved ([`crate::LoadedScenario`]), and file access
//! ([`crate::files`]).

use std::fs;
use std::io::{BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_core::expert_routes::RecordedRoutes;
use hearth_profiles::Document;
use hearth_profiles::document::MAX_DOCUMENT_BYTES;
use hearth_profiles::model::ModelProfile;
use hearth_schema::request_trace::{Arrival, parse_requests};
use hearth_schema::route_trace::RouteTrace;
use hearth_schema::{Plan, Scenario, Trace};

use crate::Error;
use crate::files::{canonical_path, check_outputs, read_text_at_most, write, write_with};

/// Maximum size in bytes of the table of a sweep.
/// source: computed, about a kilobyte for each row, rounded up
const MAX_TABLE_BYTES: u64 = 128 << 20;

/// Maximum number of plan files that a run writes for plans after the first one. The paths of all these files are
/// compared with the inputs. source: assumed, more than the number of devices in a home
const MAX_LATER_PLANS: usize = 64;

/// Reads a text file within the size limit of documents.
pub(crate) fn read_text(path: &Path) -> Result<String, Error> {
    read_text_at_most(path, MAX_DOCUMENT_BYTES as u64)
}

pub fn read_document<D: Document>(path: &Path) -> Result<D, Error> {
    D::from_yaml(&read_text(path)?).map_err(|error| Error::from_document_error(path, &error))
}

pub fn read_sweep_table(path: &Path) -> Result<String, Error> {
    read_text_at_most(path, MAX_TABLE_BYTES)
}

/// Reads a recording of expert routing.
pub fn read_route_trace(path: &Path) -> Result<RouteTrace, Error> {
    let text = read_text_at_most(path, MAX_TABLE_BYTES)?;
    RouteTrace::parse(&text).map_err(|error| Error::invalid(error).with_location(path.display()))
}

/// Reads the first `limit` requests of a recording.
pub fn read_requests(path: &Path, limit: Option<u32>) -> Result<Vec<Arrival>, Error> {
    let text = read_text_at_most(path, MAX_TABLE_BYTES)?;
    parse_requests(&text, limit).map_err(|error| Error::invalid(error).with_location(path.display()))
}

/// Reads a recording of routes for a model.
pub fn read_routes(path: &Path, model: &ModelProfile) -> Result<Arc<RecordedRoutes>, Error> {
    let routes = RecordedRoutes::new(&read_route_trace(path)?, model);
    routes.map(Arc::new).map_err(|what| Error::invalid(what).with_location(path.display()))
}

pub fn read_trace(path: &Path) -> Result<Trace, Error> {
    let file = fs::File::open(path).map_err(|error| Error::from_io_error(path, "open", &error))?;
    Trace::read(&mut BufReader::new(file))
        .map_err(|error| Error::invalid(error).with_location(path.display()))
}

/// Reads a plan. If the file is a scenario instead, the hint of the error says how to make a plan.
pub fn read_plan(path: &Path) -> Result<Plan, Error> {
    let text = read_text(path)?;
    Plan::from_yaml(&text).map_err(|error| {
        let described = Error::from_document_error(path, &error);
        match Scenario::from_yaml(&text) {
            Ok(_) => described.with_hint(format!(
                "this is a scenario; make a plan from it: `hearth plan {} -o plan.yaml`",
                path.display()
            )),
            Err(_) => described,
        }
    })
}

/// Checks that the trace of a run and the plan files that are written with the trace would not overwrite an input.
pub fn check_run_outputs<'p>(
    trace: Option<&'p PathBuf>,
    inputs: impl IntoIterator<Item = &'p PathBuf>,
) -> Result<(), Error> {
    let Some(trace) = trace else { return Ok(()) };
    let inputs: Vec<&PathBuf> = inputs.into_iter().collect();
    check_outputs([trace], inputs.iter().copied())?;
    let later: Vec<PathBuf> =
        (1..=MAX_LATER_PLANS).map(|number| canonical_path(&later_plan(trace, number))).collect();
    let input = inputs.into_iter().find(|input| later.contains(&canonical_path(input)));
    let Some(input) = input else { return Ok(()) };
    Err(Error::invalid("a plan made during the run would overwrite this file")
        .with_location(input.display())
        .with_hint("give the trace a different name: this file belongs to an earlier run with that name"))
}

/// Writes the trace of a run to `path`, and the plans after the first one (`plans`) into the same folder.
pub fn write_run_outputs(path: &Path, trace: &Trace, plans: &[Plan]) -> Result<(), Error> {
    write_with(path, |file| {
        let mut out = BufWriter::new(file);
        trace.write(&mut out).and_then(|()| out.flush())
    })?;
    for (number, plan) in (1..).zip(plans) {
        write(&later_plan(path, number), plan.to_yaml().as_bytes())?;
    }
    Ok(())
}

/// Returns the path of a plan made during a run: `run.plan-1.yaml` for number 1 and the trace `run.trace`.
fn later_plan(trace: &Path, number: usize) -> PathBuf {
    let is_named_trace = trace.extension().is_some_and(|kind| kind == "trace");
    let stem = if is_named_trace { trace.with_extension("") } else { trace.into() };
    let mut path = stem.into_os_string();
    path.push(format!(".plan-{number}.yaml"));
    path.into()
}
