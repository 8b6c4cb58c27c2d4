//! `hearth init`: write a first scenario.
//!
//! Flags answer; what they leave open is asked for at a terminal, and is usual elsewhere. Not here: the document, which
//! is [`crate::first_scenario`].

use std::io::{IsTerminal, stdin};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use hearth_ring::{Medium, discovery};
use serde::Serialize;

use super::print_json;
use crate::cli::{InitArgs, Network};
use crate::diagnostics::Failure;
use crate::documents::LoadedScenario;
use crate::files::{can_write, in_a_folder, write};
use crate::first_scenario::questions::Questions;
use crate::first_scenario::{Answered, Answers};
use crate::output::{say, tell};
use crate::progress;

/// Where nobody says and nobody is asked. source: assumed, a model that a laptop holds, and room for a conversation
const USUAL_MODEL: &str = "llama-8b";
const USUAL_CONTEXT: u32 = 1024;
/// The head of discovered workers, unless a device is named: this machine.
const HEAD: &str = "this";

/// What `--json` gives.
#[derive(Serialize)]
struct Output {
    path: String,
    name: String,
    model: String,
    devices: Vec<String>,
    /// Devices whose profile only stands in for them.
    stand_ins: Vec<String>,
}

/// Runs the verb.
pub fn run(args: &InitArgs, json: bool) -> Result<ExitCode, Failure> {
    let path = &args.output;
    in_a_folder(path)?;
    if path.exists() && !args.force {
        return Err(Failure::unusable("there is a file of that name already")
            .at(path.display())
            .hint("name another file, or replace this one with --force"));
    }
    let answers = answers(args)?;
    let text = answers.yaml();
    let loaded = check(&text, path)?;
    // Behind its own file come those that it names.
    can_write([path], loaded.files().iter().skip(1))?;
    write(path, text.as_bytes())?;
    let of = |devices: &mut dyn Iterator<Item = &Answered>| devices.map(|it| it.name.clone()).collect();
    let stand_ins: Vec<String> = of(&mut answers.devices.iter().filter(|device| device.stands_in));
    if json {
        let (name, model) = (answers.name.clone(), answers.model.clone());
        let devices = of(&mut answers.devices.iter());
        print_json(&Output { path: path.display().to_string(), name, model, devices, stand_ins })?;
        return Ok(ExitCode::SUCCESS);
    }
    let shown = path.display();
    say!("wrote {shown}\nnext: hearth lint {shown}\n      hearth simulate {shown}\n");
    if !stand_ins.is_empty() {
        say!(
            "{}: taken to be like `{}` until it is measured, see the comments in the file\n",
            stand_ins.join(", "),
            args.like
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// What the flags say, then what is heard, then what is asked.
fn answers(args: &InitArgs) -> Result<Answers, Failure> {
    let mut devices: Vec<Answered> =
        args.device.iter().map(|text| Answered::parse(text)).collect::<Result<_, _>>()?;
    if let Some(seconds) = args.discover {
        discovered(&mut devices, seconds, &args.like)?;
    }
    let asks = args.ask || (stdin().is_terminal() && std::io::stderr().is_terminal());
    let mut questions = asks.then(|| Questions::to(stdin().lock()));
    let model = match (&args.model, &mut questions) {
        (Some(model), _) => model.clone(),
        (None, Some(questions)) => questions.model()?,
        (None, None) => USUAL_MODEL.to_owned(),
    };
    if devices.is_empty() {
        devices = match &mut questions {
            Some(questions) => questions.devices()?,
            None => {
                return Err(Failure::unusable("no device is named, and nobody is there to be asked")
                    .hint("add `--device NAME=PROFILE`, as `--device laptop=d2`, or `--discover`"));
            }
        };
    }
    let network = match (args.network, &mut questions) {
        (Some(network), _) => network,
        (None, Some(questions)) if devices.len() > 1 => questions.network()?,
        (None, _) => Network::Wifi,
    };
    let stem = args.output.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    let name = args.name.clone().or(stem).unwrap_or_else(|| "first".to_owned());
    Ok(Answers { name, model, devices, network, context: args.context.unwrap_or(USUAL_CONTEXT) })
}

/// Adds workers that announce themselves, behind this machine.
fn discovered(devices: &mut Vec<Answered>, seconds: u64, like: &str) -> Result<(), Failure> {
    let line = progress::line();
    line.set_message(format!("listening for workers, {seconds} s"));
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::running)?;
    let heard = runtime.block_on(discovery::listen(Duration::from_secs(seconds), Medium::default()));
    line.finish_and_clear();
    let heard = heard.map_err(Failure::running)?;
    if heard.is_empty() {
        tell!(
            "no worker announces itself; start them with `hearth worker --listen 0.0.0.0:9001 --key FILE ..`"
        );
    }
    if devices.is_empty() && !heard.is_empty() {
        let profile = "measured".to_owned();
        devices.push(Answered { name: HEAD.into(), profile, address: None, stands_in: false });
    }
    for (name, address) in heard {
        tell!("heard of `{}` at {address}", name.escape_debug());
        match devices.iter_mut().find(|device| device.name == name) {
            Some(device) => device.address = device.address.take().or(Some(address.to_string())),
            None => devices.push(Answered {
                name,
                profile: like.to_owned(),
                address: Some(address.to_string()),
                stands_in: true,
            }),
        }
    }
    Ok(())
}

/// What is to be written can be read, with every device and model that it names.
fn check(text: &str, path: &Path) -> Result<LoadedScenario, Failure> {
    let loaded = LoadedScenario::parse(text, path)?;
    for entry in loaded.scenario.devices.iter().filter(|entry| entry.profile != "measured") {
        loaded.device(entry)?;
    }
    loaded.model_profile(None)?;
    Ok(loaded)
}
