//! `hearth advise`: which models run well on some devices.

use std::fmt::Write;
use std::path::Path;

use hearth_core::metrics::READING_SPEED;
use hearth_profiles::Seconds;
use hearth_profiles::model::Quant;
use hearth_workflow::LoadedScenario;
use hearth_workflow::advice::{Advice, AdviceList, PROMPT_TOKENS, QualityClass, advise};
use hearth_workflow::init::{Network, NewDevice, NewScenario};
use hearth_workflow::parallel_jobs;

use super::print_result;
use crate::cli::AdviseArgs;
use crate::diagnostics::{ExitCode, Failure};
use crate::machine::{LocalMachineResolver, read_scenario};
use crate::output::{escape_line, format_parameter_count, short_speed};
use crate::progress::TerminalProgress;

/// Context length in tokens without `--context`. source: assumed, a conversation of some pages
const DEFAULT_CONTEXT: u32 = 4096;
/// Number of models of a class that are shown without `--all`. source: assumed, so that a screen has all classes
const MAX_OF_CLASS: usize = 4;
/// What the model that is called the best reaches: the speed as a multiple of reading speed, and the milliseconds to
/// the first token. source: assumed
const MIN_BEST_SPEED: f64 = 1.5;
const MAX_BEST_FIRST_TOKEN: f64 = 30e3;

/// The marks of models, their meanings, and which models have them.
type Mark = (char, &'static str, fn(&Advice) -> bool);
const MARKS: [Mark; 2] = [
    ('*', "can be planned and simulated, but not yet run by hearth", |advice| !advice.is_runnable),
    ('+', "runs on CPUs only: hearth has no GPU kernels for it yet", |advice| advice.leaves_gpu_idle),
];

pub fn run(args: &AdviseArgs, json: bool) -> Result<ExitCode, Failure> {
    let loaded = scenario(args)?;
    let progress = TerminalProgress::new();
    let advice = advise(&loaded, parallel_jobs::thread_count(args.jobs), &progress)?;
    drop(progress);
    print_result(json, &advice, |advice| text(&loaded, advice, args.all))
}

/// Reads the scenario, or creates one with the devices.
fn scenario(args: &AdviseArgs) -> Result<LoadedScenario, Failure> {
    if let [path] = &args.devices[..]
        && !path.contains('=')
        && Path::new(path).extension().is_some_and(|kind| kind == "yaml" || kind == "yml")
    {
        if args.network.is_some() {
            let what =
                "`--network` is for devices that are named on the command line; a scenario has its own links";
            return Err(Failure::invalid(what).with_hint("omit `--network`"));
        }
        let mut loaded = read_scenario(Path::new(path))?;
        loaded.scenario.context_length = args.context.unwrap_or(loaded.scenario.context_length);
        return Ok(loaded);
    }
    let device = |(index, text): (usize, &String)| {
        if text.contains('=') {
            NewDevice::parse(text)
        } else {
            NewDevice::new(format!("device-{}", index + 1), text.clone(), None)
        }
    };
    let scenario = NewScenario {
        name: "advice".into(),
        model: "llama-8b".into(),
        devices: args.devices.iter().enumerate().map(device).collect::<Result<_, _>>()?,
        network: args.network.unwrap_or(Network::Wifi),
        context: args.context.unwrap_or(DEFAULT_CONTEXT),
    };
    // What errors name as the place.
    let place = Path::new("command line");
    Ok(LoadedScenario::parse(&scenario.to_yaml(), place, &LocalMachineResolver)?)
}

fn text(loaded: &LoadedScenario, list: &AdviceList, shows_all: bool) -> String {
    let all = &list.models;
    let well = all.iter().filter(|advice| advice.runs_well()).count();
    let mut text = format!(
        "{well} of {} models answer faster than people read ({} tokens/s) on {}, with a context of {} tokens\n\n",
        all.len(),
        READING_SPEED.0,
        loaded.scenario.devices.iter().map(|device| escape_line(&device.name)).collect::<Vec<_>>().join(", "),
        loaded.scenario.context_length
    );
    let _ = writeln!(
        text,
        "{:<10} {:<29} {:>7} {:>7} {:<9} {:>8} {:>11} {:>9}  layers (GPU)",
        "quality", "model", "size", "active", "format", "tokens/s", "first token", "memory"
    );
    let shown = all.iter().filter(|advice| shows_all || advice.runs_well());
    let (mut class, mut of_class, mut hidden) = (None, 0, 0);
    for advice in shown {
        of_class = if class == Some(advice.quality) { of_class + 1 } else { 1 };
        class = Some(advice.quality);
        if shows_all || of_class <= MAX_OF_CLASS {
            text.push_str(&row(advice));
        } else {
            hidden += 1;
        }
    }
    if hidden > 0 || well < all.len() && !shows_all {
        let _ = writeln!(
            text,
            "\n{hidden} more models run well, {} are slower or do not run: `--all`",
            all.len() - well
        );
    }
    let best = all.iter().find(|advice| {
        advice.tokens_per_s.is_some_and(|speed| speed >= MIN_BEST_SPEED * READING_SPEED.0)
            && advice.ttft_ms.is_some_and(|time| time <= MAX_BEST_FIRST_TOKEN)
            && advice.download().is_some()
    });
    let _ = match best.and_then(|best| Some((best, best.download()?, best.tokens_per_s?))) {
        Some((best, command, speed)) => writeln!(
            text,
            "best that hearth can run: {}, {} tokens/s ({}, {})\n  `{command}` downloads it",
            best.model,
            short_speed(speed),
            best.license,
            best.released
        ),
        None if well > 0 => writeln!(
            text,
            "none of them runs in hearth at {MIN_BEST_SPEED} times reading speed, with a first token within 30 s"
        ),
        None => writeln!(text, "no model of the catalogue runs well on these devices"),
    };
    if let Some(sentence) = &list.unsupported_systems {
        let _ = writeln!(text, "cannot run yet: {sentence}");
    }
    let _ = writeln!(
        text,
        "quality: by size, of a mixture by the geometric mean of all and of active parameters; first token: after \
         {PROMPT_TOKENS} tokens; memory: with the KV cache"
    );
    for (mark, what, is_marked) in MARKS {
        if all.iter().any(is_marked) {
            let _ = writeln!(text, "{mark} {what}");
        }
    }
    let smaller = Quant::Q3KM;
    let has_smaller = |advice: &Advice| advice.quant == smaller.name();
    if let Some(increase) = smaller.perplexity_increase().filter(|_| all.iter().any(has_smaller)) {
        let _ = writeln!(
            text,
            "{smaller} costs quality: it raises the perplexity by {:.0} % (of Llama 3 8B)",
            increase * 100.0
        );
    }
    let context = loaded.scenario.context_length;
    if all.iter().any(|advice| advice.context < context) {
        let _ = writeln!(
            text,
            "models with a shorter context than {context} tokens are shown with theirs (`--json`)"
        );
    }
    text
}

fn row(advice: &Advice) -> String {
    let quality = match advice.quality {
        QualityClass::Tiny => "tiny",
        QualityClass::Small => "small",
        QualityClass::Medium => "medium",
        QualityClass::Large => "large",
        QualityClass::VeryLarge => "very large",
        QualityClass::Huge => "huge",
    };
    let unknown = || "-".to_owned();
    let marks = MARKS.iter().filter(|(_, _, is_marked)| is_marked(advice)).map(|(mark, ..)| *mark);
    let name = format!("{}{}", advice.model, marks.collect::<String>());
    let plan = advice.plan.as_ref().or(advice.reason.as_ref()).map_or_else(unknown, Clone::clone);
    format!(
        "{quality:<10} {name:<29} {:>7} {:>7} {:<9} {:>8} {:>11} {:>9}  {}\n",
        format_parameter_count(advice.parameters),
        format_parameter_count(advice.active_parameters),
        advice.quant,
        advice.tokens_per_s.map_or_else(unknown, short_speed),
        advice.ttft_ms.map_or_else(unknown, |time| Seconds(time / 1e3).in_words()),
        advice.memory.to_string(),
        escape_line(&plan)
    )
}
