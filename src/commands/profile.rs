//! `hearth profile`: measures this machine, or corrects a profile with the trace of a run.

use hearth_halda::lint;
use hearth_profiles::parts::{Catalogue, RecognisedParts};
use hearth_profiles::{DeviceProfile, Document};
use hearth_ring::Key;
use hearth_ring::probe::{self, ProbeOptions};
use hearth_runtime::profile::{ProfileOptions, profile};
use hearth_workflow::device_comparison::compare_devices;
use hearth_workflow::documents::{read_document, read_trace};
use hearth_workflow::files::{check_outputs, write};
use hearth_workflow::recalibration::{is_prediction_of, recalibrate};

use super::print_json;
use crate::cli::ProfileArgs;
use crate::diagnostics::{ExitCode, Failure};
use crate::gpu;
use crate::machine::measurement_options;
use crate::output::say;
use crate::progress;

/// The values that are compared with the catalogue.
const COMPARED: [&str; 6] = [
    "cpu.read_bandwidth",
    "cpu.matmul.q4_k",
    "disk.sequential",
    "gpu.read_bandwidth",
    "gpu.matmul.q4_k",
    "memory.available",
];

/// Number of uncertain values that a warning names.
const MAX_UNCERTAIN: usize = 5;

pub fn run(args: &ProfileArgs, json: bool) -> Result<ExitCode, Failure> {
    let inputs = [&args.model, &args.from_trace, &args.predicted, &args.profile, &args.key];
    check_outputs(&args.output, inputs.into_iter().flatten())?;
    let device = match (&args.from_trace, &args.predicted, &args.profile) {
        (Some(measured), Some(predicted), Some(profile)) => {
            let mut device: DeviceProfile = read_document(profile)?;
            device.name.clone_from(&args.name);
            let predicted = read_trace(predicted)?;
            if !is_prediction_of(&device, &predicted) {
                tracing::warn!(
                    "the predicted trace was made with a different profile, or with resource limits of the scenario; \
                     simulate again with this profile, otherwise the correction is applied twice"
                );
            }
            let (device, factor) = recalibrate(device, &predicted, &read_trace(measured)?)?;
            tracing::info!("the computing time of `{}` was {factor:.3} times the prediction", device.name);
            device
        }
        _ => measure(args)?,
    };
    if let Some(path) = &args.output {
        write(path, device.to_yaml().as_bytes())?;
        tracing::info!("wrote {}", path.display());
    }
    if args.from_trace.is_none() {
        report_parts(&device)?;
    }
    if json {
        print_json(&device)?;
    } else if args.output.is_none() {
        say!("{}", device.to_yaml());
    }
    Ok(ExitCode::SUCCESS)
}

/// Logs the parts of the catalogue that describe the measured device best, and the values in which they differ.
fn report_parts(device: &DeviceProfile) -> Result<(), Failure> {
    let RecognisedParts { parts, is_cpu_named } = Catalogue::shipped().recognise(device);
    let by = if is_cpu_named { "" } else { ", the CPU by its speed" };
    let Ok(catalogued) = parts.to_profile(&device.name) else { return Ok(()) };
    let pairs = compare_devices(device, &catalogued)?;
    let value = |name: &&str| {
        let pair = pairs.iter().find(|pair| pair.name == **name)?;
        let [Some(measured), Some(catalogued)] = &pair.values else { return None };
        Some(format!("{name} {measured} measured, {catalogued} catalogued"))
    };
    let values: Vec<String> = COMPARED.iter().filter_map(value).collect();
    tracing::info!("parts of the catalogue: `{parts}`{by}; {}", values.join("; "));
    Ok(())
}

fn measure(args: &ProfileArgs) -> Result<DeviceProfile, Failure> {
    let options = ProfileOptions {
        name: args.name.clone(),
        model: args.model.clone(),
        threads: args.threads.unwrap_or(0) as usize,
        measurement: measurement_options(args.quick),
        max_pass_tokens: args.pass_tokens,
    };
    if args.exit_with_stdin {
        crate::ring::exit_on_stdin_eof();
    }
    let key = Key::from_file_or_env(args.key.as_deref())?;
    let links = || Ok(probe::measure_links(&args.peer, key.as_ref(), ProbeOptions::new(args.quick))?);
    if !args.quick {
        tracing::info!("measuring this machine takes minutes; `--quick` is faster and less exact");
    }
    let spinner = progress::spinner();
    let mut device = profile(&options, links, &mut |what| spinner.set_message(what.to_string()))
        .map_err(Failure::failed)?;
    spinner.set_message("GPU");
    device.gpu = gpu::measure(args, &device, &options.measurement)?;
    device.validate().map_err(Failure::failed)?;
    spinner.finish_and_clear();
    let uncertain = lint::uncertain_rates(&device, |_| true);
    if !uncertain.is_empty() {
        let shown = uncertain.iter().take(MAX_UNCERTAIN).map(String::as_str).collect::<Vec<_>>().join(", ");
        let more = match uncertain.len().saturating_sub(MAX_UNCERTAIN) {
            0 => String::new(),
            more => format!(", and {more} more"),
        };
        tracing::warn!(
            "repeated measurements differ widely ({shown}{more}); measure again with no other programs running"
        );
    }
    Ok(device)
}
