//! `hearth device`: the catalogue of parts, and profiles of devices that consist of them.

use std::fmt::Write;

use hearth_profiles::DeviceProfile;
use hearth_profiles::device::{Gpu, shipped_names, shipped_profile, shipped_yaml};
use hearth_profiles::document::Document;
use hearth_profiles::parts::{Catalogue, DeviceParts, PartSummary, PartsError};
use hearth_workflow::Error;
use hearth_workflow::device_comparison::{ValuePair, compare_devices, device_from_text};
use hearth_workflow::files::{check_parent_folder, write};
use serde::Serialize;

use super::{print_json, print_result};
use crate::cli::{CatalogueArgs, CatalogueCommand, NewArgs};
use crate::diagnostics::{ExitCode, Failure};
use crate::output::say;

/// A part and a shipped device of the same name as `--json` prints them.
#[derive(Serialize)]
struct Shown {
    part: Option<PartSummary>,
    device: Option<DeviceProfile>,
}

/// The written profile as `--json` prints it.
#[derive(Serialize)]
struct Written {
    path: String,
}

pub fn run(args: &CatalogueArgs, json: bool) -> Result<ExitCode, Failure> {
    let catalogue = Catalogue::shipped();
    match &args.command {
        CatalogueCommand::List => print_parts(&catalogue.summaries(), json),
        CatalogueCommand::Search(args) => {
            let found = catalogue.search(&args.words);
            if found.is_empty() {
                let what = format!("no part has all of these words: {}", args.words.join(", "));
                let similar = catalogue.part(&args.words.join(" ")).err().map(|unknown| unknown.hint());
                let hint = similar.unwrap_or_else(|| "list all parts with `hearth device list`".to_owned());
                return Err(Failure::invalid(what).with_hint(hint));
            }
            print_parts(&found, json)
        }
        CatalogueCommand::Show(args) => show(&args.id, json),
        CatalogueCommand::Compare(args) => {
            let [first, second] = [&args.first, &args.second].map(|text| device_from_text(text));
            let pairs = compare_devices(&first?, &second?)?;
            print_result(json, &pairs, |pairs| comparison(pairs))
        }
        CatalogueCommand::New(args) => new_profile(args, json),
    }
}

fn print_parts(parts: &[PartSummary], json: bool) -> Result<ExitCode, Failure> {
    print_result(json, &parts, |parts| {
        let width =
            |text: fn(&PartSummary) -> &str| parts.iter().map(|part| text(part).len()).max().unwrap_or(0);
        let (ids, names) = (width(|part| &part.id), width(|part| &part.name));
        let mut text = String::new();
        for PartSummary { kind, id, name, numbers, .. } in *parts {
            let _ = writeln!(text, "{:<4}  {id:<ids$}  {name:<names$}  {numbers}", kind.to_string());
        }
        text
    })
}

/// Shows a part, and the device with this name that ships with hearth. Some phones are both.
fn show(id: &str, json: bool) -> Result<ExitCode, Failure> {
    let (part, device) = (Catalogue::shipped().part(id), shipped_yaml(id).ok());
    let part = match (part, device) {
        (Err(unknown), None) => {
            let devices = shipped_names().collect::<Vec<_>>().join(", ");
            let hint = format!("{}; devices that ship with hearth are {devices}", unknown.hint());
            return Err(Failure::invalid(&unknown).with_hint(hint));
        }
        (part, _) => part.ok(),
    };
    let shown = Shown { part, device: device.and_then(|_| shipped_profile(id).ok()) };
    print_result(json, &shown, |shown| {
        let part = shown.part.as_ref().map_or_else(String::new, |part| {
            let PartSummary { kind, id, name, numbers, source } = part;
            format!("{name} ({kind} `{id}`): {numbers}\n  source: {source}\n")
        });
        part + device.unwrap_or_default()
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
    let wrong = |error: PartsError| {
        let location = match &error {
            PartsError::Unknown(unknown) => format!("--{}", unknown.kind),
            _ => "hearth device new".to_owned(),
        };
        Error::invalid(&error).with_location(location).with_hint(error.hint())
    };
    let profile = parts.to_profile(name).map_err(wrong)?;
    match output {
        Some(path) => {
            write(path, profile.to_yaml().as_bytes())?;
            if json {
                print_json(&Written { path: path.display().to_string() })?;
            } else {
                say!("{}wrote {}\n", summary(&profile), path.display());
            }
        }
        None if json => print_json(&profile)?,
        None => say!("{}", profile.to_yaml()),
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the values of two profiles as a table, with the second as a multiple of the first.
fn comparison(pairs: &[ValuePair]) -> String {
    let mut text = format!("{:<28} {:>16} {:>16} {:>7}\n", "value", "first", "second", "ratio");
    for ValuePair { name, values, ratio, .. } in pairs {
        let [first, second] = values.each_ref().map(|value| value.as_deref().unwrap_or("-"));
        let ratio = ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"));
        let _ = writeln!(text, "{name:<28} {first:>16} {second:>16} {ratio:>7}");
    }
    text
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
