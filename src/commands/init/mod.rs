//! `hearth init`: writes a new scenario.
//!
//! The values come from flags. At a terminal, questions ask for missing values; otherwise these values have defaults.

mod questionnaire;

use std::io::{IsTerminal, stdin};
use std::path::Path;
use std::time::Duration;

use hearth_ring::{MdnsScope, discovery};
use hearth_workflow::LoadedScenario;
use hearth_workflow::files::{check_outputs, check_parent_folder, write};
use hearth_workflow::init::{Network, NewDevice, NewScenario};
use serde::Serialize;

use self::questionnaire::Questionnaire;
use super::print_json;
use crate::cli::InitArgs;
use crate::diagnostics::{ExitCode, Failure};
use crate::machine::LocalMachineResolver;
use crate::output::say;
use crate::progress;

/// Name of the default model. source: assumed, fits into the memory of a laptop
const DEFAULT_MODEL: &str = "llama-8b";
/// Default context length in tokens. source: assumed, enough for a conversation
const DEFAULT_CONTEXT: u32 = 1024;
/// Device name of this machine, which becomes the head device if workers are discovered and no flag names a device.
const HEAD_NAME: &str = "this";

/// A summary of the written scenario, as `--json` prints it.
#[derive(Serialize)]
struct Output {
    path: String,
    name: String,
    model: String,
    devices: Vec<String>,
    /// Names of the devices whose profile is a placeholder until they are measured.
    stand_ins: Vec<String>,
}

pub fn run(args: &InitArgs, json: bool) -> Result<ExitCode, Failure> {
    let path = &args.output;
    check_parent_folder(path)?;
    if path.exists() && !args.force {
        return Err(Failure::invalid("the file exists already")
            .with_location(path.display())
            .with_hint("write to a different file, or overwrite this file with `--force`"));
    }
    let scenario = new_scenario(args)?;
    let text = scenario.to_yaml();
    let loaded = check(&text, path)?;
    // Skips the first file, which is the scenario itself.
    check_outputs([path], loaded.input_paths().iter().skip(1))?;
    write(path, text.as_bytes())?;
    let names = |devices: &mut dyn Iterator<Item = &NewDevice>| devices.map(|it| it.name.clone()).collect();
    let stand_ins: Vec<String> = names(&mut scenario.devices.iter().filter(|device| device.is_placeholder));
    if json {
        let (name, model) = (scenario.name.clone(), scenario.model.clone());
        let devices = names(&mut scenario.devices.iter());
        print_json(&Output { path: path.display().to_string(), name, model, devices, stand_ins })?;
        return Ok(ExitCode::SUCCESS);
    }
    let file = path.display();
    say!("wrote {file}\nnext: hearth lint {file}\n      hearth simulate {file}\n");
    if !stand_ins.is_empty() {
        say!(
            "{}: uses the profile `{}` until it is measured; see the comments in the file\n",
            stand_ins.join(", "),
            args.profile_for_discovered
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn new_scenario(args: &InitArgs) -> Result<NewScenario, Failure> {
    let mut devices: Vec<NewDevice> =
        args.device.iter().map(|text| NewDevice::parse(text)).collect::<Result<_, _>>()?;
    if let Some(seconds) = args.discovery_seconds {
        add_discovered(&mut devices, seconds, &args.profile_for_discovered)?;
    }
    let is_interactive = args.ask || (stdin().is_terminal() && std::io::stderr().is_terminal());
    let mut questionnaire = is_interactive.then(|| Questionnaire::new(stdin().lock()));
    let model = match (&args.model, &mut questionnaire) {
        (Some(model), _) => model.clone(),
        (None, Some(questionnaire)) => questionnaire.ask_model()?,
        (None, None) => DEFAULT_MODEL.to_owned(),
    };
    if devices.is_empty() {
        let Some(questionnaire) = &mut questionnaire else {
            let discover = if args.discovery_seconds.is_none() { ", or `--discover`" } else { "" };
            let hint = format!("add `--device NAME=PROFILE`, such as `--device laptop=d2`{discover}");
            let what = "no device is given, and standard input is not a terminal";
            return Err(Failure::invalid(what).with_hint(hint));
        };
        devices = questionnaire.ask_devices()?;
    }
    let network = match (args.network, &mut questionnaire) {
        (Some(network), _) => network,
        (None, Some(questionnaire)) if devices.len() > 1 => questionnaire.ask_network()?,
        (None, _) => Network::Wifi,
    };
    let stem = args.output.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    let name = args.name.clone().or(stem).unwrap_or_else(|| "first".to_owned());
    Ok(NewScenario { name, model, devices, network, context: args.context.unwrap_or(DEFAULT_CONTEXT) })
}

/// Adds the workers that multicast DNS finds to `devices`, after this machine as the head if `devices` is empty.
fn add_discovered(devices: &mut Vec<NewDevice>, seconds: u64, like: &str) -> Result<(), Failure> {
    let spinner = progress::spinner();
    spinner.set_message(format!("listening for workers for {seconds} s"));
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::failed)?;
    let found = runtime.block_on(discovery::browse(Duration::from_secs(seconds), MdnsScope::default()));
    spinner.finish_and_clear();
    let found = found.map_err(Failure::failed)?;
    if found.is_empty() {
        tracing::info!(
            "no worker was found; start workers with `hearth worker --listen 0.0.0.0:9001 --key FILE ..`"
        );
    }
    if devices.is_empty() && !found.is_empty() {
        let profile = "measured".to_owned();
        devices.push(NewDevice::new(HEAD_NAME.into(), profile, None)?);
    }
    for (name, address) in found {
        tracing::info!("found `{}` at {address}", name.escape_debug());
        if let Some(device) = devices.iter_mut().find(|device| device.name == name) {
            device.address = device.address.take().or(Some(address.to_string()));
        } else {
            let placeholder = NewDevice::new(name, like.to_owned(), Some(address.to_string()))?;
            devices.push(NewDevice { is_placeholder: true, ..placeholder });
        }
    }
    Ok(())
}

/// Checks that the new scenario, its device profiles and its model can be read.
fn check(text: &str, path: &Path) -> Result<LoadedScenario, Failure> {
    let loaded = LoadedScenario::parse(text, path, &LocalMachineResolver)?;
    for entry in loaded.scenario.devices.iter().filter(|entry| entry.profile != "measured") {
        loaded.resolve_device(entry)?;
    }
    loaded.resolve_model_profile(None)?;
    Ok(loaded)
}
