//! `hearth whatif`: say what would be gained by another device, disk, network or model.
//!
//! Not here: what is tried, which is [`crate::variants`].

use std::fmt::Write;
use std::process::ExitCode;

use hearth_profiles::Device;
use hearth_profiles::model::ModelProfile;
use serde::Serialize;

use super::{plan, print_json};
use crate::attempt::Attempt;
use crate::cli::WhatifArgs;
use crate::diagnostics::{ENDED_BADLY, Failure};
use crate::documents::LoadedScenario;
use crate::output::{say, tell};
use crate::refinement::{self, Effort};
use crate::sweep::workers;
use crate::variants::{self, Kind, Variant};

/// What `--json` gives.
#[derive(Serialize)]
struct Output<'o> {
    scenario: &'o str,
    seed: u64,
    /// The scenario as it is.
    base: &'o Attempt,
    /// Those that save most first, then those without a time.
    variants: &'o [Ranked],
    /// Ctrl-C ended it before all were tried.
    stopped: bool,
}

/// A variant and what came of it.
#[derive(Serialize)]
struct Ranked {
    what: String,
    kind: Kind,
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<String>,
    /// What a token takes less than in the scenario as it is; below zero it takes more.
    saved_ms: Option<f64>,
    #[serde(flatten)]
    tried: Attempt,
}

/// Runs the verb.
pub fn run(args: &WhatifArgs, json: bool) -> Result<ExitCode, Failure> {
    let mut loaded = LoadedScenario::read(&args.scenario)?;
    loaded.keep_weights(&args.planning)?;
    loaded.scenario.planner = plan::merged(&loaded.scenario.planner, &args.planning);
    if let Some(tokens) = args.tokens {
        loaded.generate(tokens)?;
    }
    if loaded.scenario.planner.strategy.as_deref() == Some(refinement::NAME) {
        let what =
            format!("strategy `{}` ends by the clock: variants could not be compared", refinement::NAME);
        return Err(Failure::unusable(what).hint("choose another with `--strategy`"));
    }
    let devices = loaded.devices(|_, entry| loaded.device(entry))?;
    let model = loaded.model_profile(args.model.as_deref())?;
    let effort = Effort::of(&args.planning);
    let variants = variants::of(&loaded.scenario, &devices, &model);
    let try_out = |index: usize| match index.checked_sub(1) {
        None => attempt(&loaded, devices.clone(), model.clone(), effort),
        Some(index) => variant(&loaded, &variants[index], effort),
    };
    let threads = workers::threads(args.jobs);
    let mut tried = workers::each("simulating", variants.len() + 1, threads, try_out).into_iter();
    let Some((0, base)) = tried.next() else {
        tell!("stopped before the scenario as it is was simulated");
        return Ok(ExitCode::from(ENDED_BADLY));
    };
    let ranked = rank(&variants, tried, base.tpot_ms);
    let stopped = ranked.len() < variants.len();
    if json {
        let (scenario, seed) = (loaded.scenario.name.as_str(), loaded.scenario.seed);
        print_json(&Output { scenario, seed, base: &base, variants: &ranked, stopped })?;
    } else {
        say!("{}", table(&base, &ranked));
    }
    if stopped {
        tell!("stopped: {} of {} variants were tried", ranked.len(), variants.len());
    }
    let any = base.is_ok() || ranked.iter().any(|it| it.tried.is_ok());
    Ok(if any && !stopped { ExitCode::SUCCESS } else { ExitCode::from(ENDED_BADLY) })
}

/// Plans and simulates a variant.
fn variant(loaded: &LoadedScenario, variant: &Variant, effort: Effort) -> Attempt {
    match (variant.contradiction(), &variant.model) {
        (Some(why), _) => Attempt::refused(&why),
        (None, Err(why)) => Attempt::refused(why),
        (None, Ok(model)) => {
            let loaded = loaded.with(variant.scenario.clone());
            attempt(&loaded, variant.devices.clone(), model.clone(), effort)
        }
    }
}

/// Plans and simulates a scenario with these devices, in its order, and this model.
fn attempt(loaded: &LoadedScenario, devices: Vec<Device>, model: ModelProfile, effort: Effort) -> Attempt {
    let cluster = loaded.draft_profile().and_then(|draft| loaded.assemble(devices, model, draft));
    match cluster {
        Ok(cluster) => Attempt::of(loaded, cluster, None, effort),
        Err(failure) => Attempt::refused(&failure.reason()),
    }
}

/// Those that save most first; where the scenario itself has no time, those that take least; then the rest, in their
/// order.
fn rank(
    variants: &[Variant],
    tried: impl Iterator<Item = (usize, Attempt)>,
    base: Option<f64>,
) -> Vec<Ranked> {
    let mut ranked: Vec<Ranked> = tried
        .map(|(index, tried)| {
            let Variant { kind, device, what, .. } = &variants[index - 1];
            let saved_ms = base.zip(tried.tpot_ms).map(|(base, time)| base - time);
            Ranked { what: what.clone(), kind: *kind, device: device.clone(), saved_ms, tried }
        })
        .collect();
    let key = |it: &Ranked| it.tried.tpot_ms.unwrap_or(f64::INFINITY);
    ranked.sort_by(|one, other| key(one).total_cmp(&key(other)));
    ranked
}

fn table(base: &Attempt, ranked: &[Ranked]) -> String {
    let mut text = String::new();
    let plan = |tried: &Attempt| {
        let rounds = tried.rounds.filter(|rounds| *rounds > 1);
        let rounds = rounds.map_or_else(String::new, |rounds| format!(", {rounds} rounds"));
        format!("{}{rounds}", tried.windows.as_deref().unwrap_or_default())
    };
    let _ = match base.tpot_ms {
        Some(time) => writeln!(text, "as it is: {time:.1} ms a token with {}", plan(base)),
        None => writeln!(text, "as it is: {}", base.outcome),
    };
    let width = ranked.iter().map(|it| it.what.chars().count()).max().unwrap_or(0);
    let _ = writeln!(text, "  {:>10} {:>11}  {:<width$}  plan", "saves, ms", "ms a token", "what if");
    for Ranked { what, saved_ms, tried, .. } in ranked {
        let saved = saved_ms.map_or("-".to_owned(), |saved| format!("{saved:+.1}"));
        let _ = match tried.tpot_ms {
            Some(time) => {
                writeln!(text, "  {saved:>10} {time:>11.1}  {what:<width$}  {}", plan(tried))
            }
            None => writeln!(text, "  {saved:>10} {:>11}  {what:<width$}  {}", "-", tried.outcome),
        };
    }
    text
}
