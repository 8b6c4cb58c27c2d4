//! Reads plans, traces, tables and other documents, and writes the files of a run.
//!
//! Not here: scenarios, whose references are resolved too ([`crate::LoadedScenario`]), and how a file is written
//! ([`crate::files`]).

use std::fs;
use std::io::{BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use hearth_profiles::document::MAX_DOCUMENT_BYTES;
use hearth_profiles::{Document, DocumentError};
use hearth_schema::{Plan, Trace};

use crate::Error;
use crate::files::{can_write, read_at_most, real, write, write_by};

/// The largest table of a sweep that is read.
/// source: computed, a kilobyte for each of the most rows, rounded up
const MAX_TABLE_BYTES: u64 = 128 << 20;

/// The number of later plans that are checked not to overwrite an input.
/// source: assumed, more than a home has devices
const MAX_LATER_PLANS: usize = 64;

/// Reads a text file within the size limit of documents.
pub(crate) fn read_text(path: &Path) -> Result<String, Error> {
    read_at_most(path, MAX_DOCUMENT_BYTES as u64)
}

pub fn read<D: Document>(path: &Path) -> Result<D, Error> {
    D::from_yaml(&read_text(path)?).map_err(|error| Error::document(path, &error))
}

pub fn read_table(path: &Path) -> Result<String, Error> {
    read_at_most(path, MAX_TABLE_BYTES)
}

pub fn read_trace(path: &Path) -> Result<Trace, Error> {
    let file = fs::File::open(path).map_err(|error| Error::file(path, "open", &error))?;
    Trace::read(&mut BufReader::new(file)).map_err(|error| Error::invalid(error).at(path.display()))
}

pub fn read_plan(path: &Path) -> Result<Plan, Error> {
    read(path)
}

/// Reads a plan that may contradict itself. A plan of the right form with wrong content is the inner error: a finding
/// of `lint`, not a failure to read.
pub fn read_unchecked_plan(path: &Path) -> Result<Result<Plan, DocumentError>, Error> {
    match Plan::from_yaml(&read_text(path)?) {
        Err(error @ DocumentError::Invalid { .. }) => Ok(Err(error)),
        read => read.map(Ok).map_err(|error| Error::document(path, &error)),
    }
}

/// Fails if a run's trace, or a plan written with it, would overwrite an input.
pub fn can_write_run<'p>(
    trace: Option<&'p PathBuf>,
    inputs: impl IntoIterator<Item = &'p PathBuf>,
) -> Result<(), Error> {
    let Some(trace) = trace else { return Ok(()) };
    let inputs: Vec<&PathBuf> = inputs.into_iter().collect();
    can_write([trace], inputs.iter().copied())?;
    let later: Vec<PathBuf> = (1..=MAX_LATER_PLANS).map(|number| real(&later_plan(trace, number))).collect();
    match inputs.into_iter().find(|input| later.contains(&real(input))) {
        Some(input) => Err(Error::invalid("a plan made during the run would overwrite this file")
            .at(input.display())
            .hint("give the trace another name than that of the run which this plan is from")),
        None => Ok(()),
    }
}

/// Writes a run's trace, and beside it the plans that followed the first.
pub fn write_run(path: &Path, trace: &Trace, plans: &[Plan]) -> Result<(), Error> {
    write_by(path, |path| {
        let mut out = BufWriter::new(fs::File::create(path)?);
        trace.write(&mut out).and_then(|()| out.flush())
    })?;
    for (number, plan) in (1..).zip(plans) {
        write(&later_plan(path, number), plan.to_yaml().as_bytes())?;
    }
    Ok(())
}

/// The path of the `number`th plan after a run's first: `run.plan-1.yaml` beside `run.trace`.
fn later_plan(trace: &Path, number: usize) -> PathBuf {
    let stem = if trace.extension().is_some_and(|kind| kind == "trace") {
        trace.with_extension("")
    } else {
        trace.into()
    };
    let mut path = stem.into_os_string();
    path.push(format!(".plan-{number}.yaml"));
    path.into()
}
