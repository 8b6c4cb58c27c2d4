//! `hearth profile`: measures this machine, or corrects a profile with the trace of a run.

use hearth_halda::lint;
use hearth_profiles::{DeviceProfile, Document};
use hearth_ring::Key;
use hearth_ring::probe::{self, ProbeOptions};
use hearth_runtime::profile::{ProfileOptions, profile};
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
    if json {
        print_json(&device)?;
    } else if args.output.is_none() {
        say!("{}", device.to_yaml());
    }
    Ok(ExitCode::SUCCESS)
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
    let spinner = progress::spinner();
    let mut device = profile(&options, links, &mut |what| spinner.set_message(what.to_string()))
        .map_err(Failure::failed)?;
    spinner.set_message("GPU");
    device.gpu = gpu::measure(args, &device, &options.measurement)?;
    device.validate().map_err(Failure::failed)?;
    spinner.finish_and_clear();
    let uncertain = lint::uncertain_rates(&device, |_| true);
    if !uncertain.is_empty() {
        tracing::warn!(
            "repeated measurements differ widely ({}); measure again with no other programs running",
            uncertain.join(", ")
        );
    }
    Ok(device)
}
