//! `hearth device`: the catalogue of parts, and profiles of devices that consist of them.

use std::fmt::Write;

use hearth_profiles::DeviceProfile;
use hearth_profiles::device::{Gpu, shipped_names, shipped_profile, shipped_yaml};
use hearth_profiles::document::Document;
use hearth_profiles::parts::{Catalogue, DeviceParts, PartSummary, UnknownPart};
use hearth_workflow::Error;
use hearth_workflow::files::{check_parent_folder, write};
use serde::Serialize;

use super::{print_json, print_result};
use crate::cli::{CatalogueArgs, CatalogueCommand, NewArgs};
use crate::diagnostics::{ExitCode, Failure};
use crate::output::say;

/// A part as `--json` prints it.
#[derive(Serialize)]
struct Part {
    kind: String,
    id: String,
    name: String,
    numbers: String,
    source: String,
}

pub fn run(args: &CatalogueArgs, json: bool) -> Result<ExitCode, Failure> {
    let catalogue = Catalogue::shipped();
    match &args.command {
        CatalogueCommand::List => print_parts(catalogue.summaries(), json),
        CatalogueCommand::Search(args) => {
            let found = catalogue.search(&args.words);
            if found.is_empty() {
                let what = format!("no part has all of these words: {}", args.words.join(", "));
                let hint = "use fewer words, or list all parts with `hearth device list`";
                return Err(Failure::invalid(what).with_hint(hint));
            }
            print_parts(found, json)
        }
        CatalogueCommand::Show(args) => show(&args.id, json),
        CatalogueCommand::New(args) => new_profile(args, json),
    }
}

fn print_parts(parts: Vec<PartSummary>, json: bool) -> Result<ExitCode, Failure> {
    let parts: Vec<Part> = parts.into_iter().map(Part::from).collect();
    print_result(json, &parts, |parts| {
        let width = |text: fn(&Part) -> &str| parts.iter().map(|part| text(part).len()).max().unwrap_or(0);
        let (kinds, ids, names) =
            (width(|part| &part.kind), width(|part| &part.id), width(|part| &part.name));
        let mut text = String::new();
        for Part { kind, id, name, numbers, .. } in parts {
            let _ = writeln!(text, "{kind:<kinds$}  {id:<ids$}  {name:<names$}  {numbers}");
        }
        text
    })
}

fn show(id: &str, json: bool) -> Result<ExitCode, Failure> {
    let catalogue = Catalogue::shipped();
    if let Ok(profile) = shipped_profile(id) {
        if json {
            print_json(&profile)?;
        } else {
            say!("{}", shipped_yaml(id).unwrap_or_default());
        }
        return Ok(ExitCode::SUCCESS);
    }
    let part = catalogue.part(id).map_err(|unknown| {
        let devices = shipped_names().collect::<Vec<_>>().join(", ");
        let hint = format!("{}; devices that ship with hearth are {devices}", unknown.hint());
        Failure::invalid(&unknown).with_hint(hint)
    })?;
    let part = Part::from(part);
    print_result(json, &part, |part| {
        let Part { kind, id, name, numbers, source } = part;
        format!("{name} ({kind} `{id}`): {numbers}\n  source: {source}\n")
    })
}

fn new_profile(args: &NewArgs, json: bool) -> Result<ExitCode, Failure> {
    let NewArgs { cpu, memory, disk, os, gpu, name, output } = args;
    output.as_deref().map_or(Ok(()), check_parent_folder)?;
    let parts = DeviceParts {
        cpu: cpu.clone(),
        memory: *memory,
        disk: disk.clone(),
        os: os.clone(),
        gpu: gpu.clone(),
    };
    let unknown = |unknown: UnknownPart| {
        let hint = unknown.hint();
        Error::invalid(&unknown).with_location(format!("--{}", unknown.kind)).with_hint(hint)
    };
    let profile = parts.to_profile(name).map_err(unknown)?;
    match output {
        Some(path) => {
            write(path, profile.to_yaml().as_bytes())?;
            if !json {
                say!("{}wrote {}\n", summary(&profile), path.display());
            }
        }
        None if json => print_json(&profile)?,
        None => say!("{}", profile.to_yaml()),
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the values of a profile on which speed depends most, as text.
fn summary(profile: &DeviceProfile) -> String {
    let DeviceProfile { cpu, memory, disk, gpu, .. } = profile;
    let mut text = format!(
        "{}\n  memory    {} of {} available\n  CPU       reads weights at {}\n  disk      {}\n",
        profile.description,
        memory.available_memory.value,
        memory.total_memory.value,
        cpu.read_bandwidth.value,
        disk.sequential_bandwidth.value
    );
    if let Some(Gpu { memory_available, read_bandwidth, .. }) = gpu {
        let _ = writeln!(
            text,
            "  GPU       {} available, reads weights at {}",
            memory_available.value, read_bandwidth.value
        );
    }
    text
}

impl From<PartSummary> for Part {
    fn from(part: PartSummary) -> Self {
        let PartSummary { kind, id, name, numbers, source } = part;
        Self { kind: kind.to_string(), id, name, numbers, source }
    }
}
